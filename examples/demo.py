"""What `make demo` runs: a small GPT trained as 2 stages × 2 devices, beside plain `jax.jit`.

The text is Python's own standard library, byte by byte; the devices are four CPU devices. Shown are
the layers and their stages, the schedule as a grid of slots, the training, and at the end the loss
beside that of the same, undecorated step compiled by `jax.jit` and run on the same batches.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
from flax.training.train_state import TrainState
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from text_data import batches, read_sources
from train_gpt import GPT, Batch, Metrics, make_state, train_step

import ratrain_jax as rt

STAGES, DATA_PARALLEL, MICROBATCHES = 2, 2, 4
BATCH_SIZE, LENGTH, STEPS = 32, 64, 120
SHOW_EVERY = 5

Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def train(console: Console, title: str, step: Step, state: TrainState, data: list[Any]) -> float:
    """Runs the step on every batch and shows the loss and the speed.

    Args:
        console: Where to write. A terminal gets a progress bar, anything else a line now and then.
        title: What stands before the bar; seven characters.
        step: The compiled step.
        state: The initial state.
        data: The batches.

    Returns:
        The loss of the last batch.
    """
    progress = Progress(
        TextColumn("{task.description:7}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:6.4f}"),
        TextColumn("{task.fields[speed]:7,.0f} tokens/s"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        expand=True,
    )
    loss = float("nan")
    with progress:
        task = progress.add_task(title, total=len(data), loss=loss, speed=0.0)
        start = time.perf_counter()
        for done, batch in enumerate(data, start=1):
            state, metrics = step(state, batch)
            if done % SHOW_EVERY and done not in (1, len(data)):
                continue  # reading the loss waits for the step
            loss = float(metrics["loss"])
            speed = done * BATCH_SIZE * LENGTH / (time.perf_counter() - start)
            progress.update(task, completed=done, loss=loss, speed=speed)
            if progress.disable and (done % (8 * SHOW_EVERY) == 0 or done == len(data)):
                count = f"{done:4}/{len(data)}"
                console.print(f"{title:7} {count}  loss {loss:.4f}  {speed:7,.0f} tokens/s")
    return loss


def main() -> None:
    """Lowers, shows, trains and compares."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES * DATA_PARALLEL)
    console = Console(highlight=False, markup=False)
    text = batches(read_sources(), batch_size=BATCH_SIZE, length=LENGTH)
    data = list(itertools.islice(text, STEPS))
    state = make_state(GPT(), LENGTH)

    pipelined = rt.train_step(
        stages=STAGES, data_parallel=DATA_PARALLEL, microbatches=MICROBATCHES
    )(train_step)
    lowered = pipelined.lower(state, data[0])
    console.print(
        f"A GPT on {STAGES} stages × {DATA_PARALLEL} devices, {MICROBATCHES} microbatches\n",
    )
    console.print(lowered.summary(), soft_wrap=True)
    console.print("\nThe schedule in slots; the link's rows hold what is sent meanwhile\n")
    console.print(lowered.grid(), soft_wrap=True)
    console.print()

    with console.status("compiling both steps"):
        compiled = lowered.compile()
        plain = jax.jit(train_step).lower(state, data[0]).compile()
    ours = train(console, "ratrain", compiled, state, data)
    theirs = train(console, "jax.jit", plain, state, data)
    console.print(f"\nloss of step {STEPS}, pipelined      {ours:.6f}")
    console.print(f"loss of step {STEPS}, plain jax.jit  {theirs:.6f}")
    console.print(f"relative difference          {abs(ours - theirs) / theirs:.1e}")


if __name__ == "__main__":
    main()
