"""Makes sure, before anything runs, that all processes mean the same step, and connects them.

A collective in which the processes run different programs hangs, or gives wrong numbers; and one whose first run finds a
process more than half a minute late fails. So all say first what they are about to compile, and once all have, each pair of
devices that will move something moves zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from ratrain_jax.distributed import departures, peers
from ratrain_jax.errors import DistributedError
from ratrain_jax.lowering.jsonform import to_json
from ratrain_jax.runtime.crossings import Crossing
from ratrain_jax.runtime.host import pool_threads, threads_needed
from ratrain_jax.runtime.outcomes import together
from ratrain_jax.runtime.processes import meet, several
from ratrain_jax.runtime.turns import in_turn

if TYPE_CHECKING:
    from ratrain_jax.lowered import Lowered


def agree(lowered: Lowered) -> None:
    """Compares what the processes are about to compile.

    Raises:
        DistributedError: in every process, if they are not all about to compile the same.
    """
    if not several():
        return
    _check_pool()
    in_turn(peers.meet)
    options = lowered.options
    devices = [d.id for d in (options.devices or jax.devices())]
    parts = {
        "the code of the step": lowered.code.fingerprint,
        "the program": to_json(lowered.program),
        "the devices or the options": (devices, options.donate_state, options.state_layout),
    }
    try:
        together(dict, lambda: parts)
    except DistributedError:
        departures.fail()  # however the script goes on, no other process can go on with it
        raise


def _check_pool() -> None:
    """Refuses to begin where XLA's pool would run dry."""
    if jax.default_backend() != "cpu":
        return
    devices = jax.local_device_count()
    # A client has at least a thread for each device, and one device alone was never seen to hang.
    if devices > 1 and max(pool_threads(), devices) < threads_needed(devices):
        departures.fail()
        raise DistributedError(
            f"XLA's pool has {max(pool_threads(), devices)} threads for {devices} CPU devices, and steps over several"
            f" processes need {threads_needed(devices)}: call rt.initialize before JAX is used, or set"
            f" NPROC={threads_needed(devices)} in the environment."
        )


def connect(crossings: Sequence[Crossing]) -> None:
    """Runs every move between processes once, when all processes are there."""
    if not several():
        return

    def rehearse() -> None:
        meet()
        jax.block_until_ready([crossing.rehearse() for crossing in crossings])

    in_turn(rehearse)
