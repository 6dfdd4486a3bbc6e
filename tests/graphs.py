"""Graphs for the tests of passes."""

from ratrain_jax.lowering.graph import cut


def closed_of(graph):
    """A graph as a closed jaxpr."""
    return cut(graph, graph.invars, graph.outvars)
