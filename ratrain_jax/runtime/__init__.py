"""Runs programs on devices: groups, executables, threads, and state in and out."""
