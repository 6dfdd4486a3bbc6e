"""Stacked leaves in and out of a step that keeps their layers apart.

A step runs with one array a layer. Where the user has a stacked leaf, it is taken apart on the way in, and on the way out
put together on stage 0's devices, or handed out as a `StackedLeaf`. A stacked array that comes back as it was handed out
is not taken apart again: the layers' arrays that it was made of are still here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ratrain_jax.lowering.stacks import Part, StackMap
from ratrain_jax.runtime.crossings import relocated
from ratrain_jax.runtime.groups import Group
from ratrain_jax.runtime.placing import agree_on_globals, whole
from ratrain_jax.runtime.processes import elsewhere, is_global, make_global
from ratrain_jax.runtime.turns import in_turn
from ratrain_jax.stacked_leaf import StackedLeaf


class Stacks:
    """Turns leaves of the user's step into leaves of the opened step, and back.

    Args:
        stacks: what became of each leaf; None where each is still one.
        home: where stacked arrays are put together.
        layers: whether to hand out a `StackedLeaf` instead.
        states: how many outputs of the user's step are new state.
        donate: whether stacked arrays that were handed out are used up when they come back.
    """

    def __init__(
        self, stacks: StackMap | None, home: Group, *, layers: bool, states: int, donate: bool
    ) -> None:
        self._stacks, self._home, self._layers = stacks, home, layers
        self._states, self._donate = states, donate
        self._known: dict[int, tuple[int, weakref.ref[Any], Any]] = {}
        self._entered: list[Any] = []

    def enter(self, state: Sequence[Any]) -> list[Any]:
        """The leaves of the opened step's state."""
        if self._stacks is None:
            return [_as_array(leaf) for leaf in state]
        self._entered.clear()  # what a call that failed has left
        pairs = list(zip(state, self._stacks.states, strict=True))
        known = [self._layers_of(n, leaf) for n, (leaf, _) in enumerate(pairs)]
        agree_on_globals(
            [
                leaf
                for (leaf, part), layers in zip(pairs, known, strict=True)
                if layers is None and isinstance(part, tuple) and isinstance(leaf, jax.Array)
            ]
        )
        flat: list[Any] = []
        for (leaf, part), layers in zip(pairs, known, strict=True):
            if not isinstance(part, tuple):
                flat.append(_as_array(leaf))
            elif layers is not None:
                self._entered.append(leaf)
                flat.extend(jax.tree.leaves(layers))
            else:
                flat.extend(jax.tree.leaves(_taken_apart(leaf, part)))
        return flat

    def _layers_of(self, number: int, leaf: Any) -> Any:
        """What a stacked array that was handed out was made of; None if it was not, or that is used up."""
        known, ref, layers = self._known.get(id(leaf), (None, None, None))
        same = known == number and ref is not None and ref() is leaf
        return layers if same and _alive(layers) else None

    def use_up(self) -> None:
        """Gives up the stacked arrays that came back: the step that has begun uses up what they are made of."""
        for leaf in self._entered if self._donate else ():
            leaf.delete()
        self._entered.clear()

    def leave(self, results: Mapping[int, Any]) -> list[Any]:
        """The flat results of the user's step."""
        if self._stacks is None:
            return [results[n] for n in range(len(results))]
        made = [_chosen(part, results) for part in self._stacks.outputs]
        apart = {n: layers for n, layers in enumerate(made) if isinstance(layers, tuple)}
        handed = {n for n in apart if self._layers and n < self._states}
        together = {n: layers for n, layers in apart.items() if n not in handed}
        stacked = dict(zip(together, self._put_together(list(together.values())), strict=True))
        for n, array in stacked.items():
            if n < self._states:
                self._remember(n, array, apart[n])
        stacked.update((n, _as_leaf(apart[n])) for n in handed)
        return [stacked.get(n, layers) for n, layers in enumerate(made)]

    def _remember(self, number: int, array: Any, layers: Any) -> None:
        ref = weakref.ref(array, functools.partial(self._forget, id(array)))
        self._known[id(array)] = (number, ref, layers)

    def _forget(self, address: int, _: Any) -> None:
        self._known.pop(address, None)

    def _put_together(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Stacks layers' arrays on the home group, all leaves in one program."""
        if not leaves:
            return ()
        arrays, tree = jax.tree.flatten(tuple(leaves))
        targets = [self._sharding(self._spec(array)) for array in arrays]
        moved = in_turn(lambda: relocated(arrays, targets))
        shardings = [
            self._sharding(
                PartitionSpec(*[None] * _depth(layers), *self._spec(jax.tree.leaves(layers)[0]))
            )
            for layers in leaves
        ]
        if self._home.is_here:
            made = _stacking(tuple(shardings))(tree.unflatten(moved))
            return [make_global(array) for array in made]
        types = jax.eval_shape(_stacked_all, tree.unflatten(map(_type, arrays)))
        return [elsewhere(*pair) for pair in zip(types, shardings, strict=True)]

    def _spec(self, array: Any) -> Any:
        return array.sharding.spec if self._home.size > 1 else PartitionSpec()

    def _sharding(self, spec: Any) -> Any:
        one = self._home.size == 1
        return self._home.sharding if one else NamedSharding(self._home.mesh, spec)


@functools.lru_cache(maxsize=64)
def _stacking(shardings: tuple[Any, ...]) -> Any:
    return jax.jit(_stacked_all, out_shardings=shardings)


def _stacked_all(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(_stacked, leaves))


def _type(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _stacked(layers: Any) -> Any:
    return jnp.stack([_stacked(part) for part in layers]) if isinstance(layers, tuple) else layers


def _depth(layers: Any) -> int:
    return 1 + _depth(layers[0]) if isinstance(layers, tuple) else 0


def _chosen(part: Part, results: Mapping[int, Any]) -> Any:
    if isinstance(part, tuple):
        return tuple(_chosen(inner, results) for inner in part)
    return results[part]


def _as_leaf(layers: Any) -> Any:
    return StackedLeaf([_as_leaf(part) for part in layers]) if isinstance(layers, tuple) else layers


def _as_array(leaf: Any) -> Any:
    """A leaf that is not opened: a stacked one comes from a step with another split."""
    return np.asarray(leaf) if isinstance(leaf, StackedLeaf) else leaf


def _taken_apart(leaf: Any, part: Part) -> Any:
    """The layers' arrays of a leaf that the user made."""
    if not isinstance(part, tuple):
        return _as_array(leaf)
    if isinstance(leaf, StackedLeaf):
        return tuple(_taken_apart(*pair) for pair in zip(leaf.slices, part, strict=True))
    if is_global(leaf):
        leaf = whole(leaf)
    if isinstance(leaf, jax.Array):
        return _taking_apart(_shape(part))(leaf)
    return _indexed(np.asarray(leaf), _shape(part))


def _alive(layers: Any) -> bool:
    """Whether no layer is used up: a call that failed at its start may have left the stacked array alone."""
    return not any(array.is_deleted() for array in jax.tree.leaves(layers))


Shape = Any  # None for an array, else a tuple with one shape a slice


def _shape(part: Part) -> Shape:
    return tuple(_shape(inner) for inner in part) if isinstance(part, tuple) else None


@functools.lru_cache(maxsize=64)
def _taking_apart(shape: Shape) -> Any:
    return jax.jit(lambda array: _indexed(array, shape))


def _indexed(array: Any, shape: Shape) -> Any:
    if shape is None:
        return array
    return tuple(_indexed(array[n], inner) for n, inner in enumerate(shape))
