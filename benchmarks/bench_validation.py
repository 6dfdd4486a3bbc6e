"""What a clipped norm and a finite check cost a step, with immediate and with deferred validation.

Simulated: a decoder of 1.3 billion parameters in half precision with a dynamic loss scale, clipped by its global norm, on two
machines. Measured: a small one on this CPU, one step of each kind in turn.

python benchmarks/bench_validation.py --steps 15
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

STAGES, RANKS = 2, 2
KINDS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "ratrain, immediate": {"validation": "immediate"},
    "ratrain, deferred": {"validation": "deferred"},
}


def make_step(
    config: Any, sequence: int, dtype: str, bound: float
) -> tuple[Callable[..., Any], Any]:
    """A train step as a user writes it, clipped to a norm, and the language model that it trains."""
    import jax
    import jax.numpy as jnp
    import optax

    import ratrain_jax as rt
    from ratrain_jax.models import language_model

    optimizer = optax.chain(optax.clip_by_global_norm(bound), optax.adamw(3e-4))
    lm = language_model(config, sequence=sequence, dtype=dtype, optimizer=optimizer)

    def step(state: Any, batch: Any) -> Any:
        train, scale = state["train"], state["scale"]

        def loss_fn(params: Any) -> jax.Array:
            logits = train.apply_fn({"params": params}, batch["inputs"]).astype(jnp.float32)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return scale.scaled(loss.mean())

        loss, grads = scale.unscale(rt.value_and_grad(loss_fn)(train.params))
        finite = rt.all_finite(grads)
        kept = rt.select_tree(finite, train.apply_gradients(grads=grads), train)
        return {"train": kept, "scale": scale.adjust(finite)}, {"loss": loss}

    return step, lm


def simulated() -> None:
    """Prints the step and the tail of each kind on each machine."""
    import jax

    import ratrain_jax as rt
    from ratrain_jax.models import ModelConfig

    config = ModelConfig(
        "1.3B", layers=24, hidden=2048, ffn=5632, heads=16, kv_heads=16, vocab=32_000
    )
    step, lm = make_step(config, 2048, "float16", 1.0)
    state = {
        "train": lm.abstract_state(),
        "scale": jax.eval_shape(rt.DynamicLossScale.create),
    }
    print("1.3 billion parameters, 4 stages × 8, 8 microbatches of 1 example a rank, simulated")
    print(f"{'machine':<9}{'zero':>5}  {'step':<20}{'seconds':>10}{'tail of stage 0':>17}")
    for zero in (1, 2):
        for name, options in KINDS.items():
            train = rt.train_step(stages=4, data_parallel=8, microbatches=8, zero=zero, **options)
            lowered = train(step).lower(state, lm.abstract_batch(64))
            for machine in ("mt3000", "a100"):
                found = rt.simulate(lowered, machine)
                tail = f"{1e3 * found.tails[0]:.1f} ms"
                print(
                    f"{machine:<9}{zero:>5}  {name:<20}{found.step_seconds:>10.4f}{tail:>17}",
                    flush=True,
                )


def measured(steps: int) -> None:
    """Prints the step times of each kind on this CPU."""
    import jax
    import numpy as np

    import ratrain_jax as rt
    from ratrain_jax.models import ModelConfig

    config = ModelConfig("small", layers=4, hidden=256, ffn=704, heads=4, kv_heads=4, vocab=1024)
    tokens = np.random.default_rng(0).integers(0, 1024, (16, 129), np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    print(f"\n{STAGES} stages × {RANKS} on this CPU, median of {steps} steps in turn")
    for zero in (1, 2):
        runs: dict[str, list[Any]] = {}
        for name, options, bound in (
            *((name, options, 1e3) for name, options in KINDS.items()),
            ("always clipped", KINDS["ratrain, immediate"], 1e-3),
            ("always clipped, deferred", KINDS["ratrain, deferred"], 1e-3),
        ):
            step, lm = make_step(config, 128, "float32", bound)
            how: dict[str, Any] = {"stages": STAGES, "data_parallel": RANKS, **options}
            train = rt.train_step(microbatches=4, zero=zero, **how)(step)
            state = {"train": lm.init(jax.random.key(0)), "scale": rt.DynamicLossScale.create()}
            runs[name] = [train, jax.block_until_ready(train(state, batch)), []]
        for _ in range(steps):
            for run in runs.values():
                train, (state, _), taken = run
                start = time.perf_counter()
                run[1] = jax.block_until_ready(train(state, batch))
                taken.append(time.perf_counter() - start)
        for name, (_, (_, metrics), taken) in runs.items():
            middle, loss = 1e3 * statistics.median(taken), float(metrics["loss"])
            print(f"zero={zero}  {name:<25}{middle:8.1f} ms   loss {loss:.6f}", flush=True)


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--measured", action="store_true", help="only what is measured")
    options = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={STAGES * RANKS}")
    if not options.measured:
        simulated()
    measured(options.steps)


if __name__ == "__main__":
    main()
