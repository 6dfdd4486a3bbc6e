"""`ratrain train`, in one process or in each of several."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from ratrain_jax.cli import runs
from ratrain_jax.cli.devices import connect, place_options
from ratrain_jax.cli.options import (
    complete_models,
    microbatch_size_option,
    output_option,
    quiet_option,
    settings_options,
)
from ratrain_jax.cli.output import hush, is_quiet, note, progress, working
from ratrain_jax.cli.runs import Step
from ratrain_jax.cli.saves import Saves, saves
from ratrain_jax.distributed.initialize import Place

_LINES, _EVERY = 20, 100
"""Where there is no terminal, about so many steps are told of, and at least each of so many."""


_WINDOW = 10
"""Steps over which speed is measured."""


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
@click.option(
    "--checkpoints",
    "folder",
    type=click.Path(file_okay=False),
    help="Save the state in this folder, and go on from the newest that is there.",
)
@click.option(
    "--save-every",
    default=100,
    show_default=True,
    type=click.IntRange(1),
    help="Steps from one checkpoint to the next; the last step is saved too.",
)
@place_options
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
    folder: str | None,
    save_every: int,
    place: Place,
) -> None:
    """Train a language model on a text file.

    Tokens are the bytes of TEXT, whatever the model's own tokenizer; where the vocabulary has less than 256 tokens, the
    text's distinct bytes are numbered.

    Under ratrain launch, mpirun or srun, or with --coordinator, --processes and
    --process-id, this is one process of several. Each reads TEXT; process 0
    prints and writes.
    """
    import optax

    from ratrain_jax.cli.text import passages, read_tokens
    from ratrain_jax.models import language_model, load_config
    from ratrain_jax.train import train_step

    config = load_config(model)
    optimizer = optax.adamw(learning_rate, b2=0.95, weight_decay=0.1)
    lm = language_model(config, sequence=sequence, optimizer=optimizer, dtype=dtype)
    step = train_step(**settings)(lm.step)
    connect(place, step.options.stages * step.options.data_parallel)
    if not _is_first():
        hush()
    tokens, words = read_tokens(text, config.vocab)
    rows = step.options.data_parallel * step.options.microbatches * microbatch_size
    data = {"seed": seed, "rows": rows, "sequence": sequence, "text": _digest(tokens)}
    path = output or "run.jsonl"
    with saves(folder, save_every, steps, data) as saved:
        _check(path, overwrite, saved, data)
        passages(tokens, rows, sequence, seed)  # told before the work if the text is too short
        compiled = _compiled(step, lm, rows)
        state, start = saved.restore(compiled) if saved.is_begun else (_initial(lm, seed), 0)
        note(f"{words}; goes on from step {start}" if start else words)
        batches = passages(tokens, rows, sequence, seed, start)
        chosen = {"text": text, "dtype": dtype, "learning_rate": learning_rate, "seed": seed}
        meant = {"tokens": words, "tokens_a_step": rows * sequence}
        head = {"model": dataclasses.asdict(config), **chosen, **meant, **_layout(compiled)}
        numbers = range(start + 1, steps + 1)
        with _told(path, head, 0 if overwrite else start, numbers) as tell:
            for done in run(compiled, state, batches, numbers, rows * sequence, saved):
                tell(done)
    note(f"wrote {path}" if numbers else f"nothing is left of {steps} steps")


def _is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    import jax

    return jax.process_index() == 0


def _digest(tokens: Any) -> str:
    return hashlib.sha256(tokens.tobytes()).hexdigest()


def _check(path: str, overwrite: bool, saved: Saves, data: Mapping[str, Any]) -> None:
    """Whether the run may be written, and all processes take the same batches."""
    from ratrain_jax.runtime.outcomes import together

    def call() -> None:
        if _is_first():
            runs.check(path, overwrite, saved.is_begun)

    together(call, lambda: {"the text, or what is drawn from it,": data})


def _compiled(step: Any, lm: Any, rows: int) -> Any:
    """The step for batches of so many rows."""
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
    compiled: Any, state: Any, batches: Iterator[Any], numbers: range, tokens: int, saved: Saves
) -> Iterator[Step]:
    """Takes steps. The loss of each is read when the next is under way, so that no device waits for it.

    Args:
        compiled: the compiled step.
        state: the state, which is used up.
        batches: at least as many as steps.
        numbers: of the steps.
        tokens: tokens of a step.
        saved: where states are saved.

    Yields:
        Each step, once it has ended, and before the state behind it is saved.
    """
    ends = collections.deque([time.perf_counter()], maxlen=_WINDOW + 1)
    waiting: list[tuple[int, Any]] = []

    def ended() -> Iterator[Step]:
        while waiting:
            number, metrics = waiting.pop()
            loss = float(metrics["loss"])
            ends.append(time.perf_counter())
            taken = (ends[-1] - ends[0]) / (len(ends) - 1)
            yield Step(number, loss, taken, tokens / taken, memory(compiled.devices)[1])

    for number in numbers:
        state, metrics = compiled(state, next(batches))
        yield from ended()
        waiting.append((number, metrics))
        if saved.is_due(number):
            yield from ended()
            saved.save(number, state)
    yield from ended()


def memory(devices: Any) -> tuple[str, int]:
    """Whose bytes can be told here, `device` or `process`, and the most of them so far."""
    import jax

    here = [device for device in devices if device.process_index == jax.process_index()]
    told = [device.memory_stats() or {} for device in here]
    peaks = [stats["peak_bytes_in_use"] for stats in told if "peak_bytes_in_use" in stats]
    if peaks:
        return "device", max(peaks)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return "process", most if sys.platform == "darwin" else most * 1024


def _initial(lm: Any, seed: int) -> Any:
    import jax

    with working("initial parameters"):
        return jax.block_until_ready(lm.init(jax.random.key(seed)))


@contextlib.contextmanager
def _told(
    path: str, head: Mapping[str, Any], kept: int, numbers: range
) -> Iterator[Callable[[Step], None]]:
    """Where each step is told of: in the run's file and on the terminal, in the process that does so.

    Args:
        path: the run's file.
        head: its first line.
        kept: the last step in it that stays.
        numbers: of the steps to come.
    """
    if not _is_first() or not numbers:
        yield lambda done: None
        return
    with runs.opened(path, head, kept) as file, _shown(numbers) as show:

        def tell(done: Step) -> None:
            runs.write(file, done)
            show(done)

        yield tell


@contextlib.contextmanager
def _shown(numbers: range) -> Iterator[Callable[[Step], None]]:
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
        every = min(max(len(numbers) // _LINES, 1), _EVERY)

        def line(done: Step) -> None:
            told = done.step == numbers[0] or done.step % every == 0
            if done.step == numbers[-1] or (told and not is_quiet()):
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
        task = bar.add_task("training", total=numbers[-1], loss=math.nan, speed=0.0, memory="")

        def advance(done: Step) -> None:
            last[:] = [done]
            speed, held = done.tokens_per_second, readable_bytes(done.memory)
            bar.update(task, completed=done.step, loss=done.loss, speed=speed, memory=held)

        yield advance
    click.echo(str(last[0]))
