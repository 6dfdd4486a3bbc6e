"""Balances layers into pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence

from ratrain_jax.kernels import Machine
from ratrain_jax.lowering.layers import LayeredLoss


def split_stages(
    layered: LayeredLoss,
    stages: int,
    *,
    machine: Machine,
    boundaries: Sequence[str] | None = None,
) -> tuple[int, ...]:
    """Gives each layer a stage.

    Args:
        layered: the layers of a loss.
        stages: how many stages.
        machine: what they run on.
        boundaries: the name of the first layer of each stage but stage 0; chosen unless given.

    Returns:
        The stage of each layer.
    """
    raise NotImplementedError
