"""Several processes on JAX's multi-controller runtime: how they start, and what happens when one of them fails.

`initialize` connects a process with the others, `launcher` starts processes on one machine, `departures` lets a process
that failed leave without waiting for the others, and `failures` says which process was lost.
"""
