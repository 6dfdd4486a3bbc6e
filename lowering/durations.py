"""How long each op takes on a described machine: enough to put ops in order."""

from __future__ import annotations

import dataclasses

from ratrain_jax.kernels import Machine


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

    def send(self, count: int) -> float:
        """Moving bytes from one device to another."""
        return self.machine.link_latency + count / self.machine.link_bandwidth

    def collective(self, count: int) -> float:
        """A ring reduce-scatter or all-gather of `count` bytes over the group."""
        steps = self.data_parallel - 1
        return steps * self.send(count // self.data_parallel) if steps else 0.0

    def sweep(self, count: int) -> float:
        """Reading or writing bytes of main memory."""
        return count / self.machine.ddr_bandwidth
