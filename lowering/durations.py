"""How long each op takes on a described machine: enough to put ops in order.

Device groups stand side by side: stage s has the devices from s · D on, D the devices of a group, so that a group's
devices are neighbours and two stages lie as many groups apart as there are stages between them.
"""

from __future__ import annotations

import dataclasses

from ratrain_jax.kernels import Machine
from ratrain_jax.kernels.collectives import all_gather_seconds, transfer_seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of ops.

    Attributes:
        machine: the machine.
        layer_seconds: forward and backward of each layer for one microbatch.
        data_parallel: devices of a group.
    """

    machine: Machine
    layer_seconds: tuple[float, ...]
    data_parallel: int

    def forward(self, layers: tuple[int, int]) -> float:
        """A forward, a third of a layer's work."""
        return sum(self.layer_seconds[slice(*layers)]) / 3

    def backward(self, layers: tuple[int, int]) -> float:
        """A backward, two thirds of a layer's work."""
        return 2 * self.forward(layers)

    def send(self, count: int, stages: int = 1) -> float:
        """Moving bytes from each device of a group to its like, so many stages away, all of them at once."""
        devices = self.data_parallel
        distance = devices * max(1, abs(stages))
        return transfer_seconds(self.machine, count, distance=distance, sharing=devices)

    def collective(self, count: int) -> float:
        """A reduce-scatter or all-gather of `count` bytes over the group."""
        return all_gather_seconds(self.machine, count, self.data_parallel) if count else 0.0

    def sweep(self, count: int) -> float:
        """Reading or writing bytes of main memory."""
        return count / self.machine.streaming_bandwidth
