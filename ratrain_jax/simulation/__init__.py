"""Discrete-event simulation of programs on described machines."""
