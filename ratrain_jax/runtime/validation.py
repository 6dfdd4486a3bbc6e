"""What early updates run, and what validates them.

An early update runs the program of its layer's last phase with expected values in place of scalars that are not there yet.
Whether these were right is a number on the device, and nobody waits for it: a `Validate` is a loop that runs once if they were
not, and else not at all. It makes new what the loop carries, so that whatever was made early stays in its buffers if nothing is
wrong. A `cond` alone would copy it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ratrain_jax import compat
from ratrain_jax.lowering.program import UpdateShard, Validate
from ratrain_jax.lowering.speculation import Speculation
from ratrain_jax.runtime.recipes import Bundle, Recipe, Recipes, flat, shapes


def early_update(recipes: Recipes, op: UpdateShard, layer: int) -> tuple[Recipe, Bundle]:
    """An early update's code, and the values that it takes in place of scalars, its last argument.

    They are an argument so that the compiler cannot know them: what it makes is then what it makes of an update that waits.
    """
    shards = recipes.shard_program(layer, op.phase)
    taken = _speculation(recipes, layer).taken
    avals = _scalar_types(recipes, op.phase)
    known = len(_scalar_types(recipes, _speculation(recipes, layer).early))
    given = tuple(np.array(np.broadcast_to(v, avals[place].shape)) for place, v in taken)
    places = tuple(place for place, _ in taken)

    def function(*bundles: Bundle) -> tuple[Bundle, ...]:
        scalars = [_unread(aval) for aval in avals[known:]]
        for place, value in zip(places, bundles[-1], strict=True):
            scalars[place - known] = value
        return recipes.written(layer, op.phase, shards.run(*flat(bundles[:-1]), *scalars))

    last = tuple(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in given)
    types = (*recipes.types(op.reads), last)
    key = ("early", *recipes.update_key(layer, op.phase), places, shapes(types))
    return Recipe(key, function, types, collective=recipes.talks(function, types)), given


def _scalar_types(recipes: Recipes, phase: int) -> list[Any]:
    reductions = recipes.code.update.reductions[:phase]
    return [aval for reduction in reductions for aval in reduction.scalars]


def _unread(aval: Any) -> Any:
    """What stands for a scalar that a program does not read."""
    return None if compat.is_extended(aval.dtype) else jnp.zeros(aval.shape, aval.dtype)


def _speculation(recipes: Recipes, layer: int) -> Speculation:
    found = recipes.code.speculations[layer]
    if found is None or not found.deferrable:
        raise ValueError(f"the update of layer {layer} cannot be made early")
    return found


def validate(recipes: Recipes, op: Validate) -> tuple[Recipe, tuple[bool, ...]]:
    """A validation's code, and which arrays of the view are those of the parameters.

    The code takes and returns, of the view, only the other arrays.
    """
    layer, code = op.layer, recipes.code
    update = code.update.layers[layer]
    shards = recipes.shard_program(layer, op.phase)
    assumed = _speculation(recipes, layer).assumed
    gathering, in_place = recipes.gather(layer, op.stage)
    owned = code.bundles[op.stage, layer]
    moved = [update.params.index(p) for p, seen in zip(owned, in_place, strict=True) if not seen]
    made = len(op.writes) - 1
    count = len(op.reads) - made - 1
    scalars = len(_scalar_types(recipes, op.phase))

    def function(*bundles: Bundle) -> tuple[Bundle, ...]:
        inputs = flat(bundles[:count])
        results = inputs[len(inputs) - scalars :]
        early = bundles[count:]
        good = jnp.bool_(True)
        for place, value in assumed:
            good &= jnp.all(results[place] == value)

        def anew() -> tuple[Bundle, ...]:
            written = recipes.written(layer, op.phase, shards.run(*inputs))
            parameters = written[1 if update.partials[op.phase] else 0]
            wanted = tuple(parameters[place] for place in moved)
            view = gathering.function(wanted) if gathering is not None else ()
            return jax.tree.map(_like, (*written, view), early)

        def body(carried: tuple[Any, ...]) -> tuple[Any, ...]:
            # A branch, because XLA makes of it what it makes of a program, but of a loop's body something else.
            over, kept = carried
            return jnp.bool_(True), jax.lax.cond(over, lambda: kept, anew)

        _, kept = jax.lax.while_loop(lambda carried: ~carried[0], body, (good, early))
        return kept

    types = recipes.types(op.reads)
    types = (*types[:-1], tuple(t for t, s in zip(types[-1], in_place, strict=True) if not s))
    key = (
        "validate",
        *recipes.update_key(layer, op.phase),
        tuple((place, np.asarray(value).tobytes()) for place, value in assumed),
        None if gathering is None else gathering.key,
        shapes(types),
    )
    donated = tuple(range(count, len(op.reads)))
    return Recipe(key, function, types, donated, recipes.talks(function, types)), in_place


def _like(new: Any, old: Any) -> Any:
    """A value of exactly the type that the loop carries."""
    weak = jax.typeof(new).weak_type if not compat.is_extended(new.dtype) else False
    return jax.lax.convert_element_type(new, old.dtype) if weak else new


def use_up(bundles: Sequence[Bundle]) -> None:
    """Ends the life of the state that an update started from, as donating it does.

    The compiler could not reuse its buffers: what is validated stays in others.
    """
    for array in flat(bundles):
        array.delete()
