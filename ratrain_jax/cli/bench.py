"""`ratrain bench`: a step's time against plain `jax.jit` of the very function.

Each runs in a process of its own, because the number of CPU devices decides how many threads an op gets; plain `jax.jit` has
one device. The two take steps in turn, so that what the host does meanwhile falls on both alike.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.progress import Progress

from ratrain_jax.cli.devices import ask_for, environment
from ratrain_jax.cli.options import Asked, json_option, quiet_option, target_options
from ratrain_jax.cli.output import is_quiet, show, working
from ratrain_jax.cli.profile import devices_option
from ratrain_jax.cli.target import find
from ratrain_jax.errors import OptionError

KINDS = ("jax.jit", "ratrain")
_WARM_UP = 2
_MARK = "ratrain-bench "
"""Before what a measured process reports: the user's module may print too."""


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """What steps of one kind took.

    Attributes:
        first: seconds of the first, compiling included.
        step: seconds of each other.
        cpu: seconds of all cores, likewise.
    """

    first: float
    step: tuple[float, ...]
    cpu: tuple[float, ...]


@click.command(
    epilog="Example: ratrain bench examples/demo_step.py:train_step --stages 2 --microbatches 4"
)
@target_options
@devices_option
@click.option(
    "--steps", default=15, show_default=True, type=click.IntRange(1), help="Steps of each."
)
@click.option("--child", type=click.Choice(KINDS), hidden=True)
@json_option
@quiet_option
@click.pass_context
def bench(
    context: click.Context,
    asked: Asked,
    devices: int | None,
    steps: int,
    child: str | None,
    as_json: bool,
) -> None:
    """Time a step beside plain jax.jit of the same function.

    TARGET is module:step or path/to/file.py:step. Both take the whole batch; steps are taken in turn, each kind in a
    process of its own.
    """
    if child is not None:
        _measured(asked, child, devices)
        return
    arguments = context.find_root().obj
    children: dict[str, Child] = {}
    try:
        for kind in KINDS:
            with working(f"compiling for {kind}"):
                children[kind] = Child(kind, arguments)
        times = _in_turn(children, steps)
    finally:
        for one in children.values():
            one.close()
    if as_json:
        table = {kind: dataclasses.asdict(found) for kind, found in times.items()}
        head = {"format": "ratrain-bench", "version": 1, "ratio": ratio(times)}
        click.echo(json.dumps({**head, "kinds": table}, indent=1))
    else:
        show(_view(times, steps))


def ratio(times: Mapping[str, Times]) -> float:
    """The median of what a step takes over what the plain step beside it took."""
    plain, ours = (times[kind].step for kind in KINDS)
    return statistics.median(a / b for a, b in zip(ours, plain, strict=True))


class Child:
    """One kind of step in a process of its own.

    Args:
        kind: one of `KINDS`.
        arguments: of the command line.

    Raises:
        OptionError: the process ended early; the message is the last line of its errors.
    """

    def __init__(self, kind: str, arguments: Sequence[str]) -> None:
        # A pipe that nobody reads could fill up; closed by `close`.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ratrain_jax.cli", *arguments, "--child", kind],
            env=environment(1) if kind == KINDS[0] else None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.first = self._read()["first"]

    def step(self) -> Mapping[str, float]:
        """Takes one step."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()

    def _read(self) -> Mapping[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines() or ["nothing"]
        raise OptionError(said[-1].removeprefix("ratrain: "))


def _in_turn(children: Mapping[str, Child], steps: int) -> dict[str, Times]:
    taken: dict[str, list[Mapping[str, float]]] = {kind: [] for kind in children}
    console = Console(stderr=True)
    hidden = is_quiet() or not console.is_terminal
    with Progress(console=console, transient=True, disable=hidden) as bar:
        for number in bar.track(range(_WARM_UP + steps), description="measuring"):
            for kind, child in children.items():
                found = child.step()
                if number >= _WARM_UP:
                    taken[kind].append(found)
    return {
        kind: Times(
            children[kind].first,
            tuple(one["step"] for one in each),
            tuple(one["cpu"] for one in each),
        )
        for kind, each in taken.items()
    }


def _view(times: Mapping[str, Times], steps: int) -> list[RenderableType]:
    from ratrain_jax.views.terminal import table

    made = table("step of", "ms", "ratio", "CPU ms", "first s", left=("step of",))
    for kind, found in times.items():
        made.add_row(
            kind,
            f"{statistics.median(found.step) * 1e3:.1f}",
            "" if kind == KINDS[0] else f"{ratio(times):.3f}",
            f"{statistics.median(found.cpu) * 1e3:.1f}",
            f"{found.first:.2f}",
        )
    return [made, f"medians of {steps} steps in turn; ratio: the median of the steps' ratios"]


# In the measured process.


def _measured(asked: Asked, kind: str, devices: int | None) -> None:
    """Compiles one kind of step, then takes one for each line of standard input."""
    import jax

    if devices is not None and kind != KINDS[0]:
        ask_for(devices)
    source = find(asked).need_source()
    step: Any = source.step
    state, *batch = source.values()
    tree = jax.tree.structure(state)
    if kind == KINDS[0]:
        step = jax.jit(step.__wrapped__, donate_argnums=0)
    start, busy = time.perf_counter(), time.process_time()
    state = _next(step(state, *batch), tree)
    click.echo(f"{_MARK}{json.dumps({'first': time.perf_counter() - start})}")
    for _ in sys.stdin:
        start, busy = time.perf_counter(), time.process_time()
        state = _next(step(state, *batch), tree)
        taken = {"step": time.perf_counter() - start, "cpu": time.process_time() - busy}
        click.echo(f"{_MARK}{json.dumps(taken)}")


def _next(result: Any, tree: Any) -> Any:
    """The state that a step returns, alone or first, once all of its results are there."""
    import jax

    jax.block_until_ready(jax.tree.leaves(result))
    return result if jax.tree.structure(result) == tree else result[0]
