"""The verifier's refusals, and programs to spoil for it.

A module that asks for a fixture imports it `as` itself, so that the linter sees that it is wanted.
"""

import pytest

from ratrain_jax.errors import VerificationError
from ratrain_jax.lowering.program import Program
from ratrain_jax.lowering.verify import verify
from tests.programs import make_program


def refused(program: Program, message: str) -> str:
    """Asserts that a program is refused with a message; returns the whole of it."""
    with pytest.raises(VerificationError) as caught:
        verify(program)
    assert message in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def program() -> Program:
    """Two stages, three microbatches, tied, clipped."""
    return make_program(clip=True)


@pytest.fixture(scope="module")
def recovering() -> Program:
    """Both stages recover two blocks."""
    return make_program(schedule="gpipe", recovered=(2, 2), recovery="backward")
