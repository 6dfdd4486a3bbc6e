"""Speed of the emulation against XLA and NumPy: ratios measured side by side in one run.

Run: python benchmarks/kernels_speed.py
"""

import functools
import itertools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ratrain_jax.kernels import load_machine, vmac_attention, vmac_dot_general
from ratrain_jax.kernels.gemm_plan import plan_for
from ratrain_jax.kernels.tiles import Gemm

MATMUL = (((1,), (0,)), ((), ()))
ACCUMULATORS = ("fp32", "promote", "fp16")


def best(functions: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Returns the least seconds of each function; they take turns, after one warm-up each."""
    for function in functions.values():
        jax.block_until_ready(function())
    seconds = dict.fromkeys(functions, float("inf"))
    for _ in range(turns):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def halves(count: int, shape: tuple[int, ...]) -> list[jax.Array]:
    """Returns random float16 arrays."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float16) for _ in range(count)]


def fast_products() -> None:
    """`fast` products at 1024³ against XLA's own."""
    a, b = halves(2, (1024, 1024))
    wide = functools.partial(
        jax.lax.dot_general, dimension_numbers=MATMUL, preferred_element_type=jnp.float32
    )
    functions = {"xla": functools.partial(jax.jit(wide), a, b)}
    for accumulator in ACCUMULATORS:
        ours = functools.partial(
            vmac_dot_general,
            dimension_numbers=MATMUL,
            preferred_element_type=jnp.float32,
            accumulator=accumulator,
        )
        functions[accumulator] = functools.partial(jax.jit(ours), a, b)
    seconds = best(functions, 7)
    for accumulator in ACCUMULATORS:
        ratio = seconds["xla"] / seconds[accumulator]
        print(f"fast GEMM 1024³, {accumulator:8}: {ratio:5.2f} of XLA's speed (goal for fp32: 0.6)")


def rank_one(a: np.ndarray, b: np.ndarray, accumulator: str) -> np.ndarray:
    """The straightforward emulation: one rank-1 update a step, rounded as specified."""
    wide, kind = (np.float32, np.float32) if accumulator == "fp32" else (np.float64, np.float16)
    left, right = a.astype(wide), b.astype(wide)
    total = np.zeros((a.shape[0], b.shape[1]), kind)
    for k in range(a.shape[1]):
        total = (total + np.outer(left[:, k], right[k])).astype(kind, copy=False)
    return total


def exact_products() -> None:
    """`exact` products at 512³ against NumPy, and their bits."""
    a, b = halves(2, (512, 512))
    for accumulator in ("fp32", "fp16"):
        ours = jax.jit(
            functools.partial(
                vmac_dot_general,
                dimension_numbers=MATMUL,
                preferred_element_type=jnp.float32,
                accumulator=accumulator,
                mode="exact",
            )
        )
        host = (np.asarray(a), np.asarray(b), accumulator)
        seconds = best(
            {"ours": functools.partial(ours, a, b), "numpy": lambda host=host: rank_one(*host)}, 3
        )
        same = np.array_equal(np.asarray(ours(a, b)), rank_one(*host).astype(np.float32))
        ratio = seconds["numpy"] / seconds["ours"]
        print(
            f"exact GEMM 512³, {accumulator:8}: {ratio:5.1f} × a NumPy loop of rank-1 updates "
            f"(goal: 5), same bits: {same}"
        )


def attention() -> None:
    """Forward and backward at sequence 1024 against XLA's attention with autodiff."""
    q, k, v, grad = halves(4, (1, 1024, 8, 64))

    def both(attend: Callable[..., jax.Array]) -> Callable[[], object]:
        def run(q, k, v, grad):
            out, pullback = jax.vjp(attend, q, k, v)
            return out, pullback(grad)

        return functools.partial(jax.jit(run), q, k, v, grad)

    def xla(*inputs: jax.Array) -> jax.Array:
        # JAX 0.10 cannot differentiate its float16 attention on CPU: float32 inside.
        wide = (x.astype(jnp.float32) for x in inputs)
        return jax.nn.dot_product_attention(*wide, is_causal=True).astype(jnp.float16)

    functions = {"xla": both(xla)}
    for backward in ("resident", "staged"):
        for accumulator in ("fp32", "promote"):
            functions[f"{backward}, {accumulator}"] = both(
                functools.partial(
                    vmac_attention, is_causal=True, accumulator=accumulator, backward=backward
                )
            )
    seconds = best(functions, 4)
    for name, taken in seconds.items():
        if name != "xla":
            print(
                f"attention forward and backward, 1024 tokens, {name:17}: "
                f"{taken / seconds['xla']:5.2f} × XLA's time (goal: 2)"
            )


# What bounds the search well or badly: many like blocks, or few columns, rows or steps of K.
PLANNED = {
    "large": [(2048, 4096, 4096), (2048, 11008, 4096), (333, 777, 999), (32768, 32768, 32768)],
    "narrow": [
        (7547, 1, 3078),
        (31549, 1, 4028),
        (48343, 3, 129613),
        (72058, 7, 9381),
        (12, 6, 65418),
        (81886, 838, 7),
        (14666, 12279, 1),
    ],
}


def planning() -> None:
    """Processor time of planning shapes for the first time."""
    machine = load_machine("mt3000")
    for (kind, shapes), form in itertools.product(PLANNED.items(), ("nn", "nt", "tn")):
        taken = []
        for shape, dtype in itertools.product(shapes, ("float16", "float32")):
            gemm = Gemm(*shape, dtype, form, "promote")
            turns = []
            for _ in range(3):
                plan_for.cache_clear()
                start = time.process_time()
                plan_for(gemm, machine)
                turns.append(time.process_time() - start)
            taken.append(min(turns))
        print(
            f"plan of one product, {kind:6}, {form}: {1e3 * max(taken):5.1f} ms at most (goal: 50)"
        )


if __name__ == "__main__":
    planning()
    fast_products()
    exact_products()
    attention()
