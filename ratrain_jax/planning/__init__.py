"""Chooses how a step runs on a machine: depth, devices, microbatches, split, recovery."""
