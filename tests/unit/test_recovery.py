"""Which layers are recovered: a prefix of the blocks of a stage, and what the user checkpoints behind it."""

from types import SimpleNamespace

import pytest

from ratrain_jax.lowering.recovery import recovered_layers


def code_of(stage_of, block_of, checkpointed=()):
    layers = [SimpleNamespace(checkpointed=n in checkpointed) for n in range(len(stage_of))]
    return SimpleNamespace(
        stage_of=stage_of,
        block_of=block_of,
        layered=SimpleNamespace(layers=layers),
        layers_of=lambda stage: [n for n, s in enumerate(stage_of) if s == stage],
    )


CODE = code_of((0, 0, 0, 1, 1), (0, 0, 1, 0, 1))


@pytest.mark.parametrize(
    ("blocks", "recovered"),
    [
        ((0, 0), ()),
        ((1, 0), (0, 1)),
        ((2, 0), (0, 1, 2)),
        ((0, 1), (3,)),
        ((2, 2), (0, 1, 2, 3, 4)),
    ],
)
def test_the_first_blocks_of_a_stage_are_recovered(blocks, recovered):
    marks = recovered_layers(CODE, blocks)
    assert tuple(n for n, mark in enumerate(marks) if mark) == recovered


def test_what_the_user_checkpoints_is_recovered_in_any_case():
    code = code_of((0, 0, 1, 1), (0, 1, 0, 1), checkpointed={2})
    assert recovered_layers(code, (0, 0)) == (False, False, True, False)
    assert recovered_layers(code, (1, 0)) == (True, False, True, False)


def test_a_late_checkpoint_does_not_recover_what_stands_before_it():
    code = code_of((0,) * 4, (0, 1, 2, 3), checkpointed={2})
    assert recovered_layers(code, (0,)) == (False, False, True, False)
    assert recovered_layers(code, (1,)) == (True, False, True, False)
