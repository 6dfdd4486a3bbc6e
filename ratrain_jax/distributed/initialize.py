"""Connects a process with the others of its run.

Terms.
    The **coordinator** is the service of JAX through which processes find each other. Process 0 holds it.
    A process has a **place**: the coordinator's address, the number of processes, and its own id among them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Final

from ratrain_jax.distributed import departures, failures, peers
from ratrain_jax.errors import DistributedError

COORDINATOR: Final = "JAX_COORDINATOR_ADDRESS"
PROCESSES: Final = "RATRAIN_PROCESSES"
PROCESS_ID: Final = "RATRAIN_PROCESS_ID"
"""What `ratrain launch` says to its processes; the first is JAX's own."""

_CLUSTERS: Final = ("SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_SIZE")
"""What Slurm and Open MPI say to the processes that they start."""
_CPU_DEVICES: Final = "xla_force_host_platform_device_count"
_NOTHING_SET: Final = "coordinator_address should be defined"
"""What JAX says where neither arguments nor a cluster name a coordinator."""
_LONGER: Final = 3600
"""Seconds that JAX waits longer than this module: at the end of its own time it aborts the process."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A process among the others; None stands for what JAX finds out from a cluster's launcher.

    Attributes:
        coordinator: `host:port`.
        processes: how many there are.
        process_id: which one this is.
        launched: whether `ratrain launch` said it.
    """

    coordinator: str | None = None
    processes: int | None = None
    process_id: int | None = None
    launched: bool = False


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: int = 60,
    heartbeat: int = 15,
) -> None:
    """Connects this process with the others of its run, before anything else is done with JAX.

    Arguments that are not given are taken from `ratrain launch`, or from Slurm, Open MPI or whatever else JAX knows. Where
    nobody started several processes nothing happens, so that the same script runs alone. Afterwards `jax.devices()` are
    the devices of all processes, and `jax.process_index()` says which process this is. On few cores it enlarges the pool of
    threads of XLA's CPU client, unless `NPROC` says its size, so that what waits for another process does not keep others
    waiting; the pool's size decides the last bits of some sums. On glibc it lets all threads that start later use one heap,
    so that large blocks are used again (see [Several processes](../howto/several-processes.md)).

    A process that ends with an exception no longer waits for the others. The others stop too: see
    [Several processes](../howto/several-processes.md).

    Args:
        coordinator: `host:port` of process 0; all must be able to reach it.
        processes: how many there are.
        process_id: which one this is, from 0.
        timeout: seconds to wait until all processes have come.
        heartbeat: seconds after which a process that gives no sign of life counts as dead, and the others stop.

    Raises:
        DistributedError: not all processes came in time, the coordinator cannot be reached or its port is taken, the
            arguments contradict each other, JAX was used before, or this function was.

    Examples:
        Nothing happens in a process that was started alone:

        >>> import ratrain_jax as rt
        >>> rt.initialize()  # doctest: +SKIP

        Two processes, on two machines:

        >>> rt.initialize("node1:7890", processes=2, process_id=0)  # doctest: +SKIP
    """
    import jax

    from ratrain_jax.runtime.host import use_one_heap

    place = place_of(coordinator, processes, process_id, os.environ)
    _check(place, timeout, heartbeat)
    if jax.distributed.is_initialized():
        raise DistributedError(
            "this process is connected with the others already; call rt.initialize once."
        )
    if place.process_id == 0 and place.coordinator is not None:
        _check_port(place.coordinator)

    def connect() -> None:
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.process_id,
            cluster_detection_method="deactivate" if place.launched else None,
            initialization_timeout=timeout + _LONGER,
            heartbeat_timeout_seconds=heartbeat,
        )

    if place != Place() or is_one_of_several(os.environ):
        use_one_heap()  # before there are threads that have one of their own
    found = _within(timeout, connect)
    if isinstance(found, ValueError) and _NOTHING_SET in str(found) and place == Place():
        return
    if isinstance(found, TimeoutError):
        departures.watch()
        departures.fail()  # JAX's own end would wait once more, and log what it misses
        raise DistributedError(_missing(place, timeout))
    if found is not None:
        raise _explained(found, place) from found
    departures.watch()
    failures.expect(heartbeat)
    peers.expect(place.processes)
    _enlarge_pool()


def _enlarge_pool() -> None:
    """Gives XLA's CPU client, which has not started yet, threads enough for transfers beside compute."""
    import jax

    from ratrain_jax.runtime.host import cores, threads_needed

    flags = re.search(rf"{_CPU_DEVICES}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    devices = int(flags[1]) if flags else max(1, jax.config.jax_num_cpu_devices)  # pyright: ignore[reportAttributeAccessIssue]
    if "NPROC" not in os.environ and cores() <= threads_needed(devices):
        os.environ["NPROC"] = str(threads_needed(devices) + 1)


def place_of(
    coordinator: str | None,
    processes: int | None,
    process_id: int | None,
    environment: Mapping[str, str],
) -> Place:
    """The place of a process: arguments first, then what `ratrain launch` set.

    Args:
        coordinator: argument of `initialize`.
        processes: likewise.
        process_id: likewise.
        environment: of the process.

    Raises:
        DistributedError: a variable is no number.
    """
    launched = PROCESSES in environment and PROCESS_ID in environment
    if not launched:
        return Place(coordinator, processes, process_id)
    return Place(
        environment.get(COORDINATOR) if coordinator is None else coordinator,
        _number(PROCESSES, environment) if processes is None else processes,
        _number(PROCESS_ID, environment) if process_id is None else process_id,
        launched=True,
    )


def is_one_of_several(environment: Mapping[str, str]) -> bool:
    """Whether `ratrain launch`, Slurm or Open MPI started this process, perhaps among others.

    Args:
        environment: of the process.
    """
    return any(name in environment for name in (PROCESSES, *_CLUSTERS))


def _number(name: str, environment: Mapping[str, str]) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise DistributedError(
            f"the environment variable {name} is {environment[name]!r}; it must be a whole number."
        ) from None


def _check(place: Place, timeout: int, heartbeat: int) -> None:
    """Finds what contradicts itself; JAX would wait for it, or abort."""
    for name, value in (("timeout", timeout), ("heartbeat", heartbeat)):
        if value < 1:
            raise DistributedError(f"{name} is {value}; give at least one second.")
    if place.coordinator is not None:
        split_address(place.coordinator)
    if place.processes is not None and place.processes < 1:
        raise DistributedError(f"processes is {place.processes}; there must be at least one.")
    if place.process_id is None:
        return
    if place.process_id < 0 or (
        place.processes is not None and place.process_id >= place.processes
    ):
        known = "" if place.processes is None else f" of {place.processes} processes"
        raise DistributedError(
            f"process_id is {place.process_id}{known}; ids count from 0"
            + ("." if place.processes is None else f" to {place.processes - 1}.")
        )


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`.

    Args:
        address: the whole.

    Raises:
        DistributedError: it is not of this form.

    Examples:
        >>> split_address("node1:7890")
        ('node1', 7890)
        >>> split_address("[::1]:7890")
        ('::1', 7890)
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise DistributedError(
            f"the coordinator is given as {address!r}; write host:port, such as node1:7890."
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def _check_port(coordinator: str) -> None:
    """Finds a port that is taken; JAX may share it with what is there, and then waits in vain."""
    if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:
        return
    port = split_address(coordinator)[1]
    family, everywhere = (
        (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")
    )
    with socket.socket(family) as probe:
        # Connections of a run that has just ended hold a port for a minute, and do no harm.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind((everywhere, port))
        except OSError as error:
            raise DistributedError(_taken(port, error.strerror or str(error))) from error


def _taken(port: int, why: str) -> str:
    return (
        f"process 0 cannot open the coordinator's port {port} ({why.lower()}): another run, or a second process 0, has"
        " it; take another port, the same for all processes."
    )


def _within(seconds: float, work: Callable[[], None]) -> Exception | None:
    """Does something in a thread of its own, and gives up waiting for it after some time.

    JAX waits where Python cannot interrupt it, and aborts the process at the end of its time.

    Returns:
        What was raised, a `TimeoutError` if the time is over, or None.
    """
    raised: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="ratrain-initialize", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return TimeoutError()
    return raised[0] if raised else None


def _explained(error: Exception, place: Place) -> DistributedError:
    """What JAX refused, and why."""
    said = str(error)
    if "before any JAX calls" in said or "called once" in said:
        return DistributedError(
            "JAX was used before rt.initialize was called; call it first, before anything makes an array or asks for"
            " devices."
        )
    if "Failed to start RPC server" in said and place.coordinator is not None:
        return DistributedError(_taken(split_address(place.coordinator)[1], "in use"))
    if "must be defined" in said or _NOTHING_SET in said:
        missing = [
            name
            for name in ("coordinator", "processes", "process_id")
            if getattr(place, name) is None
        ]
        return DistributedError(
            f"{' and '.join(missing)} must be given too: no cluster's launcher that JAX knows started this process."
        )
    return DistributedError(f"the processes cannot be connected: {said.rstrip('.')}.")


def _missing(place: Place, timeout: int) -> str:
    """Why nothing came of waiting."""
    count = "all processes" if place.processes is None else f"all {place.processes} processes"
    others = (
        f"see whether the others were started, with process ids of their own, and whether each was told"
        f" {place.processes or 'the same number of'} processes; raise timeout if they are only late."
    )
    if place.coordinator is None or place.process_id == 0:
        return f"not {count} came within {timeout} s: {others}"
    try:
        socket.create_connection(split_address(place.coordinator), timeout=2).close()
    except OSError as error:
        return (
            f"process {place.process_id} found no coordinator at {place.coordinator} within {timeout} s"
            f" ({error.strerror or error}): process 0 was not started, has given up or ended, or cannot be reached from"
            f" {socket.gethostname()}; start all processes together, with the same coordinator."
        )
    return (
        f"process {place.process_id} reached the coordinator at {place.coordinator}, but not {count} came within"
        f" {timeout} s: {others}"
    )
