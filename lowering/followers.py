"""Finds the leaves of a state that follow a parameter: whose new value is made from its arrays and from no other's.

Moments and moving averages do, copies that are taken now and then, and what follows such a leaf in its turn. Scalars do not
count, for a norm or a rate may be made from all parameters; but for a leaf that is a scalar itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ratrain_jax.lowering.graph import Atom, Eqn, Graph, Var, is_var, needed
from ratrain_jax.lowering.labels import is_small
from ratrain_jax.lowering.opening import open_calls
from ratrain_jax.lowering.trace import Trace

Path = tuple[str, ...]

_NONE: frozenset[Path] = frozenset()

_SCALING = frozenset({"mul", "div", "select_n"})
"""What takes a scalar of one parameter and gives one, whatever scalar of all (a norm, a finite check) it takes beside it."""


@dataclasses.dataclass(frozen=True, slots=True)
class AfterLoss:
    """What a step does after its loss.

    Attributes:
        states: the leaves of the state.
        eqns: the equations, opened.
        new: the new value of each leaf that has one.
        read: the leaves that an equation reads, or that are handed out as they are in another one's place.
    """

    states: tuple[Var, ...]
    eqns: Sequence[Eqn]
    new: Mapping[int, Atom]
    read: frozenset[int]

    @classmethod
    def of(cls, trace: Trace, step: Graph, region: Eqn) -> AfterLoss:
        """What `step`, the equations of `trace`, does after `region`, its loss."""
        states = step.invars[: trace.states]
        opened = open_calls(needed(step.eqns, step.outvars, [*step.invars, *region.outvars])[0])
        outs = {leaf: out for leaf, out in enumerate(trace.state_out) if out is not None}
        new = {leaf: opened.read(step.outvars[out]) for leaf, out in outs.items()}
        taken = {atom for eqn in opened.eqns for atom in eqn.invars if is_var(atom)}
        taken |= {atom for leaf, atom in new.items() if is_var(atom) and atom is not states[leaf]}
        read = frozenset(leaf for leaf, var in enumerate(states) if var in taken)
        return cls(states, opened.eqns, new, read)

    def is_fixed(self, leaf: int) -> bool:
        """Whether a leaf stays as it is."""
        return self.new.get(leaf, self.states[leaf]) is self.states[leaf]

    def followers(self, sources: Mapping[Var, Path]) -> dict[int, Path]:
        """The leaves that follow a parameter, with its path.

        Args:
            sources: what stands for a parameter: its leaf or its gradient, with its path.
        """
        found: dict[int, Path] = {}
        while True:
            behind = {var: frozenset({path}) for var, path in sources.items()}
            behind |= {self.states[leaf]: frozenset({path}) for leaf, path in found.items()}
            for eqn in self.eqns:
                if made := _behind(eqn, behind):
                    behind.update((var, made) for var in eqn.outvars)
            more = {
                leaf: min(behind[atom])
                for leaf, atom in self.new.items()
                if leaf not in found and self.states[leaf] not in sources and is_var(atom)
                if len(behind.get(atom, _NONE)) == 1
            }
            if not more:
                return found
            found |= more


def _behind(eqn: Eqn, behind: Mapping[Var, frozenset[Path]]) -> frozenset[Path]:
    """The parameters that an equation's results are made from."""
    small = all(map(is_small, eqn.outvars))
    read = [
        behind[atom]
        for atom in eqn.invars
        if is_var(atom) and atom in behind and (small or not is_small(atom))
    ]
    if small and eqn.primitive.name in _SCALING and any(len(paths) == 1 for paths in read):
        read = [paths for paths in read if len(paths) == 1]
    return _NONE.union(*read)
