"""Groups the layers of a stage into blocks: the runs of layers that one executable covers in each direction.

Few large blocks launch less and let the compiler fuse across layers; small equal blocks compile once and let recovery
choose finely. `LAYERS_PER_BLOCK` is where the benchmarks put the balance (see `benchmarks/bench_step_time.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

LAYERS_PER_BLOCK = 4


def group_blocks(
    stage_of: Sequence[int], fingerprints: Sequence[str], limit: int = LAYERS_PER_BLOCK
) -> tuple[int, ...]:
    """The number of each layer's block within its stage.

    A stage of up to `limit` layers is one block. A longer one is cut into runs of equal layers and what lies between;
    runs are cut into blocks of one size, so that equal blocks are as many as can be.

    Args:
        stage_of: stage of each layer, ascending.
        fingerprints: of each layer's code.
        limit: the most layers in a block.

    Example:
        >>> group_blocks([0, 0, 0, 1, 1], ["e", "a", "a", "a", "h"], limit=4)
        (0, 0, 0, 0, 0)
        >>> group_blocks([0] * 6, ["e", "a", "a", "a", "a", "h"], limit=2)
        (0, 1, 1, 2, 2, 3)
    """
    blocks: list[int] = []
    for stage in range(max(stage_of, default=-1) + 1):
        prints = [f for f, s in zip(fingerprints, stage_of, strict=True) if s == stage]
        blocks.extend(_one_stage(prints, limit))
    return tuple(blocks)


def _one_stage(prints: Sequence[str], limit: int) -> list[int]:
    if len(prints) <= limit:
        return [0] * len(prints)
    blocks: list[int] = []
    start = 0
    while start < len(prints):
        stop = start + 1
        while stop < len(prints) and prints[stop] == prints[start]:
            stop += 1
        size = _block_size(stop - start, limit)
        first = blocks[-1] + 1 if blocks else 0
        blocks.extend(first + i // size for i in range(stop - start))
        start = stop
    return blocks


def _block_size(run: int, limit: int) -> int:
    """The largest size that divides the run, if one over half the limit does; else the limit."""
    for size in range(min(run, limit), 0, -1):
        if run % size == 0:
            return size if 2 * size > limit or size == run else limit
    return limit
