"""`jax_debug_nans` and `jax_debug_infs` for what ops make.

What is compiled ahead of time, as all that ops run is, JAX checks in its first call alone. Residuals are not checked: what a
`where` masks may be no number in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ratrain_jax.lowering.program import Kind, Program
from ratrain_jax.runtime.instructions import Bundle, Instruction, place_of


def nan_check(program: Program) -> Callable[[Instruction, Sequence[Bundle]], None] | None:
    """A hook for the launching threads that waits for what an op made and checks it; None where no check is asked for.

    Raises:
        FloatingPointError: (by the hook) an op made a NaN, or an infinity where those are looked for; it names the op.
    """
    tests = [
        (name, test)
        for name, test, wanted in (
            ("nan", np.isnan, jax.config.jax_debug_nans),  # pyright: ignore[reportAttributeAccessIssue]
            ("inf", np.isinf, jax.config.jax_debug_infs),  # pyright: ignore[reportAttributeAccessIssue]
        )
        if wanted
    ]
    if not tests:
        return None

    def check(instruction: Instruction, made: Sequence[Bundle]) -> None:
        for value, bundle in zip(instruction.writes, made, strict=True):
            if program.values[value].kind is Kind.RESIDUALS:
                continue
            for name, test in tests:
                if any(_any(test, array) for array in bundle):
                    raise FloatingPointError(
                        f"invalid value ({name}) in the {program.values[value].kind} made by {place_of(instruction.op)}."
                    )

    return check


def _any(test: Callable[[Any], Any], array: Any) -> bool:
    if not jnp.issubdtype(array.dtype, np.inexact):
        return False
    return any(test(np.asarray(shard.data)).any() for shard in array.addressable_shards)
