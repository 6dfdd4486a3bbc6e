"""The verifier: every check on a program, in the order in which they rely on each other."""

from __future__ import annotations

from ratrain_jax.lowering.program import Program

from .complete import check_complete
from .deadlock import check_progress
from .flow import check_flow
from .form import check_form
from .life import check_life
from .limit import check_limit
from .shape import shape_of
from .window import check_window


def verify(program: Program) -> None:
    """Checks that a program computes a whole step, on values that are there, within its bounds.

    Args:
        program: any program, also one parsed from text that was written by hand.

    Raises:
        VerificationError: if it does not; the message shows the ops around the spot, the schedule
            as a grid with the bad step in brackets, and what to do.
    """
    check_form(program)
    shape = shape_of(program)
    check_complete(shape)
    check_flow(shape)
    check_life(program)
    check_progress(program)
    check_window(shape)
    check_limit(program)
