"""`ratrain train`.

The run is written as JSON lines while it goes. The first has `format` (`ratrain-run`) and `version` (1), the model, what
tokens are, and the settings; each of the others a step: `step`, `loss` (null if it is not finite), `seconds` and
`tokens_per_second` (over the last ten steps, for steps overlap), and `memory`, the most bytes so far of a device, or of
the process where devices do not tell (`memory_of` of the first line says which).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

import click

from ratrain_jax.cli.devices import ask_for
from ratrain_jax.cli.options import (
    complete_models,
    microbatch_size_option,
    output_option,
    quiet_option,
    settings_options,
)
from ratrain_jax.cli.output import is_quiet, note, progress, working
from ratrain_jax.errors import OptionError

_LINES, _EVERY = 20, 100
"""Where there is no terminal, about so many steps are told of, and at least each of so many."""


_WINDOW = 10
"""Steps over which speed is measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A step that has run.

    Attributes:
        step: its number, from 1.
        loss: of its batch.
        seconds: of a step, over the last ten.
        tokens_per_second: likewise.
        memory: the most bytes so far.
    """

    step: int
    loss: float
    seconds: float
    tokens_per_second: float
    memory: int

    def line(self) -> str:
        """The step as a line of the run's file."""
        loss = self.loss if math.isfinite(self.loss) else None
        return json.dumps({**dataclasses.asdict(self), "loss": loss})

    def __str__(self) -> str:
        from ratrain_jax.lowering.text import readable_bytes

        return (
            f"step {self.step:6}  loss {self.loss:8.4f}  {self.tokens_per_second:9,.0f} tokens/s"
            f"  {readable_bytes(self.memory)}"
        )


@click.command(
    epilog="Example: ratrain train book.txt --model config.json --stages 2 --microbatches 4 --steps 500"
)
@click.argument("text", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--model",
    required=True,
    shell_complete=complete_models,
    help="A built-in model's name, or a Hugging Face config.json.",
)
@click.option(
    "--sequence",
    default=128,
    show_default=True,
    type=click.IntRange(1),
    help="Tokens of a passage.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32"]),
    default="float32",
    show_default=True,
    help="Compute dtype.",
)
@microbatch_size_option
@settings_options
@click.option(
    "--steps", default=100, show_default=True, type=click.IntRange(1), help="Train steps."
)
@click.option(
    "--learning-rate",
    default=3e-4,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Of AdamW.",
)
@click.option("--seed", default=0, show_default=True, type=int, help="Of parameters and passages.")
@output_option("Write the run here, as JSON lines; run.jsonl unless given.")
@click.option("--overwrite", is_flag=True, help="Replace the run's file if it is there.")
@quiet_option
def train(
    text: str,
    model: str,
    sequence: int,
    dtype: str,
    microbatch_size: int,
    settings: Mapping[str, Any],
    steps: int,
    learning_rate: float,
    seed: int,
    output: str | None,
    overwrite: bool,
) -> None:
    """Train a language model on a text file.

    Tokens are the bytes of TEXT, whatever the model's own tokenizer; where the vocabulary has less than 256 tokens, the
    text's distinct bytes are numbered.
    """
    import optax

    from ratrain_jax.cli.text import passages, read_tokens
    from ratrain_jax.distributed.initialize import initialize, is_one_of_several
    from ratrain_jax.models import language_model, load_config
    from ratrain_jax.train import train_step

    if is_one_of_several(os.environ):
        initialize()
    path = _free(output or "run.jsonl", overwrite)
    config = load_config(model)
    tokens, words = read_tokens(text, config.vocab)
    optimizer = optax.adamw(learning_rate, b2=0.95, weight_decay=0.1)
    lm = language_model(config, sequence=sequence, optimizer=optimizer, dtype=dtype)
    step = train_step(**settings)(lm.step)
    rows = step.options.data_parallel * step.options.microbatches * microbatch_size
    batches = passages(tokens, rows, sequence, seed)
    compiled = _compiled(step, lm, rows)
    state = _initial(lm, seed)
    note(words)
    chosen = {"text": text, "dtype": dtype, "learning_rate": learning_rate, "seed": seed}
    meant = {"tokens": words, "tokens_a_step": rows * sequence}
    head = {"model": dataclasses.asdict(config), **chosen, **meant, **_layout(compiled)}
    with open(path, "w", encoding="utf-8") as file, _shown(steps) as tell:
        _write(file, json.dumps({"format": "ratrain-run", "version": 1, **head}))
        for done in run(compiled, state, batches, steps, rows * sequence):
            _write(file, done.line())
            tell(done)
    note(f"wrote {path}")


def _free(path: str, overwrite: bool) -> str:
    """The path of the run, if it may be written."""
    if os.path.exists(path) and not overwrite:
        raise OptionError(
            f"{path} is there already; name another file with -o, or give --overwrite."
        )
    return path


def _compiled(step: Any, lm: Any, rows: int) -> Any:
    """The step for batches of so many rows."""
    ask_for(step.options.stages * step.options.data_parallel)
    with working("lowering"):
        lowered = step.lower(lm.abstract_state(), lm.abstract_batch(rows))
    return lowered.compile(progress=progress())


def _layout(compiled: Any) -> dict[str, Any]:
    """What the head of a run says of the compiled step."""
    lowered = compiled.lowered
    return {
        "settings": dataclasses.asdict(lowered.program.settings),
        "predicted_memory": max(lowered.memory_analysis().peaks),
        "memory_of": memory(compiled.devices)[0],
    }


def run(
    compiled: Any, state: Any, batches: Iterator[Any], steps: int, tokens: int
) -> Iterator[Step]:
    """Takes steps. The loss of each is read when the next is under way, so that no device waits for it.

    Args:
        compiled: the compiled step.
        state: the state, which is used up.
        batches: at least as many as steps.
        steps: how many.
        tokens: tokens of a step.

    Yields:
        Each step, once it has ended.
    """
    ends = collections.deque([time.perf_counter()], maxlen=_WINDOW + 1)
    waiting: Any = None
    for number in range(1, steps + 2):
        ended = waiting
        if number <= steps:
            state, waiting = compiled(state, next(batches))
        if ended is None:
            continue
        loss = float(ended["loss"])
        ends.append(time.perf_counter())
        taken = (ends[-1] - ends[0]) / (len(ends) - 1)
        yield Step(number - 1, loss, taken, tokens / taken, memory(compiled.devices)[1])


def memory(devices: Any) -> tuple[str, int]:
    """Whose bytes can be told, `device` or `process`, and the most of them so far."""
    told = [device.memory_stats() or {} for device in devices]
    peaks = [stats["peak_bytes_in_use"] for stats in told if "peak_bytes_in_use" in stats]
    if peaks:
        return "device", max(peaks)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return "process", most if sys.platform == "darwin" else most * 1024


def _initial(lm: Any, seed: int) -> Any:
    import jax

    with working("initial parameters"):
        return jax.block_until_ready(lm.init(jax.random.key(seed)))


def _write(file: TextIO, line: str) -> None:
    file.write(f"{line}\n")
    file.flush()


@contextlib.contextmanager
def _shown(steps: int) -> Iterator[Callable[[Step], None]]:
    """What is told of each step: a bar where standard error is a terminal, else a line now and then."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from ratrain_jax.lowering.text import readable_bytes

    console = Console(stderr=True)
    if is_quiet() or not console.is_terminal:
        every = min(max(steps // _LINES, 1), _EVERY)

        def line(done: Step) -> None:
            told = done.step == 1 or done.step % every == 0
            if done.step == steps or (told and not is_quiet()):
                click.echo(str(done))

        yield line
        return
    columns = (
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TextColumn("{task.fields[memory]}"),
        TimeRemainingColumn(),
    )
    last: list[Step] = []
    with Progress(*columns, console=console, expand=True, transient=True) as bar:
        task = bar.add_task("training", total=steps, loss=math.nan, speed=0.0, memory="")

        def advance(done: Step) -> None:
            last[:] = [done]
            speed, held = done.tokens_per_second, readable_bytes(done.memory)
            bar.update(task, completed=done.step, loss=done.loss, speed=speed, memory=held)

        yield advance
    click.echo(str(last[0]))
