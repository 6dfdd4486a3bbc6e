"""The cost analysis of a step: sums, kernels by their plans, rooflines, links, and the table."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import ratrain_jax as rt
from ratrain_jax.kernels import Gemm, Link, cost_gemm, load_machine
from ratrain_jax.lowering.op_costs import code_work

MT3000, GENERIC = load_machine("mt3000"), load_machine("generic")
ROWS, WIDTH, HIDDEN = 16, 32, 64


def step(state, batch):
    def loss(params):
        hidden = jnp.tanh(batch["x"] @ params["a"])
        return ((hidden @ params["b"]) ** 2).mean()

    value, grads = rt.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def deep(state, batch):
    """Three equal layers, for a stage that runs several in one program."""

    def loss(params):
        x = batch["x"]
        for name in ("a", "b", "c"):
            x = jnp.tanh(rt.layer(x, name) @ params[name])
        return (x**2).mean()

    value, grads = rt.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


STATE = {"a": jnp.ones((WIDTH, HIDDEN)), "b": jnp.ones((HIDDEN, WIDTH))}
DEEP = {name: jnp.ones((WIDTH, WIDTH)) for name in ("a", "b", "c")}
BATCH = {"x": jnp.ones((ROWS, WIDTH))}


def lowered(**options):
    return rt.train_step(stages=2, microbatches=2, **options)(step).lower(STATE, BATCH)


def kinds(analysis):
    return {op.kind: op for op in analysis.by_kind}


def test_products_are_costed_by_their_plans_on_the_accelerator():
    found = kinds(lowered(backend="mt3000").cost_analysis())
    rows = ROWS // 2
    first = Gemm(rows, HIDDEN, WIDTH, accumulator="promote", out_dtype="float32")
    second = Gemm(rows, WIDTH, HIDDEN, accumulator="promote", out_dtype="float32")
    plans = [cost_gemm(gemm, MT3000) for gemm in (first, second)]
    work = found["Forward"].work
    assert work.product_flops == 2 * sum(plan.flops for plan in plans)
    assert work.product_seconds == pytest.approx(2 * sum(plan.seconds for plan in plans))
    assert work.ideal_seconds == pytest.approx(work.product_flops / MT3000.peak("float16"))
    # dx is not wanted of the first product: three products go backward.
    assert found["Backward"].work.product_flops == pytest.approx(1.5 * work.product_flops)
    assert work.ddr_bytes > 2 * sum(plan.ddr_bytes for plan in plans)  # and the elementwise work


def test_elsewhere_it_is_a_roofline():
    dot = jax.make_jaxpr(jnp.dot)(jnp.ones((64, 64)), jnp.ones((64, 64)))
    work = code_work(dot, GENERIC)
    moved, flops = 3 * 64 * 64 * 4, 2 * 64**3
    assert (work.flops, work.ddr_bytes) == (flops, moved)
    assert work.seconds == pytest.approx(
        max(flops / GENERIC.peak("float32"), moved / GENERIC.ddr_bandwidth)
    )
    assert work.limit == "ddr"
    assert (
        work.mac_utilization
        == work.utilization
        == pytest.approx(flops / GENERIC.peak("float32") / work.seconds)
    )


EFFICIENT = dataclasses.replace(
    GENERIC, product_efficiency=0.5, product_half_flops=1e6, memory_efficiency=0.25
)


def test_products_and_memory_reach_the_machines_efficiencies():
    dot = jax.make_jaxpr(jnp.dot)(jnp.ones((512, 512)), jnp.ones((512, 512)))
    work, flops = code_work(dot, EFFICIENT), 2 * 512**3
    assert work.seconds == work.product_seconds == work.compute_seconds
    assert work.seconds == pytest.approx((flops + 1e6) / (0.5 * EFFICIENT.peak("float32")))
    assert work.ideal_seconds == flops / EFFICIENT.peak("float32")
    assert work.mac_utilization == pytest.approx(0.5 * flops / (flops + 1e6))

    wave = code_work(jax.make_jaxpr(jnp.sin)(jnp.ones((512, 512))), EFFICIENT)
    assert wave.seconds == wave.ddr_seconds == 2 * 512 * 512 * 4 / (0.25 * GENERIC.ddr_bandwidth)
    assert wave.compute_seconds == 512 * 512 / EFFICIENT.peak("float32")
    assert not wave.product_seconds


def test_a_batch_is_one_product_and_a_loop_runs_many():
    def looped(x, ys):
        return jax.lax.scan(lambda x, y: (x @ y, None), x, ys)[0]

    half = dataclasses.replace(EFFICIENT, memory_efficiency=1.0, product_half_flops=1e12)
    stack = jnp.ones((3, 64, 64))
    batched = code_work(jax.make_jaxpr(jnp.matmul)(stack, stack), half)
    loop = code_work(jax.make_jaxpr(looped)(jnp.ones((64, 64)), stack), half)
    assert batched.flops == loop.flops == 3 * 2 * 64**3
    rate = 0.5 * half.peak("float32")
    assert batched.seconds == pytest.approx((batched.flops + 1e12) / rate)
    assert loop.seconds == pytest.approx((loop.flops + 3e12) / rate)


def test_starting_a_program_is_paid_once_an_op():
    start = 1e-3
    late = dataclasses.replace(GENERIC, launch_seconds=start)
    never = dataclasses.replace(GENERIC, launch_seconds=0.0)
    found = lowered(recovery="forward", data_parallel=2)
    programs = {"Prologue", "Forward", "Recover", "Backward", "ZeroGradient", "UpdateShard"}
    programs.add("Metrics")
    costs, free = kinds(found.cost_analysis(late)), kinds(found.cost_analysis(never))
    for kind, op in costs.items():
        ops = [one for one in found.program.ops() if type(one).__name__ == kind]
        started = start * len(ops) if kind in programs else 0.0
        assert op.work.launch_seconds == pytest.approx(started)
        assert op.work.seconds == pytest.approx(free[kind].work.seconds + started)
        assert free[kind].work.launch_seconds == 0
    assert costs["Forward"].work.limit == "launch"
    assert {"Forward", "Recover", "Backward", "UpdateShard"} <= programs & costs.keys()


def test_the_first_layer_of_a_program_bears_its_start():
    late = dataclasses.replace(GENERIC, launch_seconds=1e-3)
    found = rt.train_step(stages=1, microbatches=2)(deep).lower(DEEP, BATCH)
    blocks = [op.layers for op in found.program.ops() if type(op).__name__ == "Forward"]
    assert blocks == [(0, 3), (0, 3)]
    launched = [
        next(op.work.launch_seconds for op in layer.ops if op.kind == "Forward")
        for layer in found.cost_analysis(late).layers[:3]
    ]
    assert launched == [2e-3, 0, 0]


def test_what_crosses_nodes_takes_the_link_between_them():
    near = Link("near", 1e9, 1e-6, devices=2)
    far = Link("far", 1e8, 1e-3, shared_by=2)
    nodes = dataclasses.replace(GENERIC, links=(near, far))
    costs = kinds(lowered(data_parallel=2).cost_analysis(nodes))
    # A stage's group is a node: what it gathers stays inside, what stages send goes over `far`.
    gathered = costs["PrefetchView"]
    inside = gathered.count * 1e-6 + gathered.work.link_bytes / 1e9
    assert gathered.work.seconds == pytest.approx(inside)
    sent = costs["SendActivation"]
    assert sent.work.seconds == pytest.approx(sent.count * 1e-3 + sent.work.link_bytes / 5e7)


def test_any_machine_can_be_asked_of_any_backend():
    xla, ours = lowered(), lowered(backend="mt3000")
    assert xla.cost_analysis().machine.name == "generic"
    assert ours.cost_analysis().machine.name == "mt3000"
    for analysis in (ours.cost_analysis("generic"), xla.cost_analysis(MT3000)):
        work = kinds(analysis)["Forward"].work
        assert work.product_flops == 2 * 2 * 2 * (ROWS // 2) * WIDTH * HIDDEN
        assert 0 < work.utilization <= work.mac_utilization <= 1


def test_the_layers_add_up_and_counts_are_those_of_the_program():
    found = lowered(recovery="forward", backend="mt3000")
    analysis = found.cost_analysis()
    total = sum((layer.work.seconds for layer in analysis.layers), 0.0)
    assert total == pytest.approx(sum(op.work.seconds for op in analysis.by_kind))
    # Two layers, two microbatches.
    assert {kinds(analysis)[kind].count for kind in ("Forward", "Recover", "Backward")} == {4}
    assert kinds(analysis)["Recover"].work == kinds(analysis)["Forward"].work


def test_links_carry_views_gradients_and_activations():
    work = {kind: op.work for kind, op in kinds(lowered(data_parallel=2).cost_analysis()).items()}
    parameters = WIDTH * HIDDEN * 2
    assert work["GradSync"].link_bytes == work["PrefetchView"].link_bytes == parameters * 4 / 2
    assert work["SendActivation"].link_bytes == 2 * (ROWS // 4) * HIDDEN * 4
    assert work["SendActivation"].limit == "link"
    half = kinds(lowered(data_parallel=2, backend="mt3000").cost_analysis())
    assert half["PrefetchView"].work.link_bytes == parameters * 2 / 2


def test_the_table_fits_the_terminal_and_says_what_xla_keeps():
    text = str(lowered(backend="mt3000").cost_analysis())
    assert max(map(len, text.splitlines())) <= 80
    for word in (
        "Forward",
        "UpdateShard",
        "MAC",
        "XLA keeps",
        "no product",
        "assumed",
        "DDR.bytes",
    ):
        assert word in text
    assert "XLA keeps" not in str(lowered().cost_analysis())
