"""What the planner counts of a model: its layers, at each size of a microbatch and on each tensor-parallel rank."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import ratrain_jax as rt
from ratrain_jax.kernels import Gemm, load_machine
from ratrain_jax.lowering.lower import lower_step
from ratrain_jax.lowering.op_costs import code_work
from ratrain_jax.lowering.tensor_parallel import layer_on_rank
from ratrain_jax.models import language_model
from ratrain_jax.planning.code_cost import between, code_cost
from ratrain_jax.planning.configuration import Configuration
from ratrain_jax.planning.planner import workload
from ratrain_jax.planning.stage_costs import StageCosts
from ratrain_jax.tracing import trace_step
from tests.planning import A100, BATCH, CONFIG, model, scanned, work


def test_a_scan_is_counted_by_three_of_its_layers():
    rows = work().table(2).rows
    names = [row.name for row in rows if row.name.startswith("blocks/")]
    assert names == [f"blocks/{n}" for n in range(6)][-len(names) :]
    assert work().table(2).parameters == CONFIG.parameters
    deeper = language_model(dataclasses.replace(CONFIG, layers=9), sequence=256, dtype="bfloat16")
    args = (deeper.abstract_state(), deeper.abstract_batch(1))
    nine = workload(deeper.step, args, A100, BATCH).table(2)
    assert len(nine.rows) == len(rows) + 3


def test_rows_are_those_of_the_whole_model():
    lm = model()
    args = (lm.abstract_state(), lm.abstract_batch(BATCH))
    trace, _ = trace_step(lm.step, args, rt.train_step(microbatches=BATCH // 2)(lm.step).options)
    settings_ = rt.train_step(microbatches=BATCH // 2)(lm.step).options.settings()
    code, _ = lower_step(trace, settings_, A100)
    table = work().table(2)
    assert [layer.name for layer in code.layered.layers] == [row.name for row in table.rows]
    for layer, row in zip(code.codes, table.rows, strict=True):
        assert code_work(layer.forward, A100).seconds == pytest.approx(row.forward.seconds)
        assert code_work(layer.backward, A100).seconds == pytest.approx(row.backward.seconds)


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("machine", ["a100", "mt3000"])
def test_sizes_of_microbatch_follow_from_one_below_and_one_above(tensor, machine):
    args = (model().abstract_state(), model().abstract_batch(1))
    known = workload(model().step, args, load_machine(machine), BATCH)
    known.trace_few({1, 8, 12, 24})
    found = known.table(12, tensor)
    assert sorted(known._codes) == [8, 24]
    own = known._count(12, tensor)
    assert any(row.forward.calls for row in own.rows) == (machine == "mt3000")
    for one, other in zip(found.rows, own.rows, strict=True):
        assert one.forward.seconds == pytest.approx(other.forward.seconds, rel=1e-12)
        assert one.backward.seconds == pytest.approx(other.backward.seconds, rel=1e-12)
        same = ("name", "residuals", "inputs", "view", "parameters")
        assert all(getattr(one, name) == getattr(other, name) for name in same)
        # A rank's share is rounded to bytes at each size.
        assert abs(one.scratch - other.scratch) <= (0 if tensor == 1 else tensor)
    assert (found.cuts, found.operands) == (own.cuts, own.operands)


def test_sizes_that_have_other_layers_are_traced():
    # The embedding is a layer of its own for few examples, and a trifle beside the one block for many.
    alone = language_model(dataclasses.replace(CONFIG, layers=1), sequence=256, dtype="bfloat16")
    args = (alone.abstract_state(), alone.abstract_batch(1))
    known = workload(alone.step, args, A100, BATCH)
    known.trace_few({1, 2, 3, 24})
    assert len(known.table(2).rows) != len(known.table(24).rows)
    assert known.table(3).rows[0].name == known.table(2).rows[0].name
    assert sorted(known._codes) == [2, 3, 24]


def test_only_equal_trees_have_something_between_them():
    assert between((2, Gemm(4, 8, 16)), (4, Gemm(8, 8, 16)), 3) == (8, Gemm(16, 8, 16))
    assert between((2, "a"), (4, "b"), 3) is None
    assert between((2, 3), (4,), 3) is None
    assert between(2, 2.5, 3) is None
    assert between(2, 3, 0.5) is None


@pytest.mark.parametrize("machine", ["a100", "mt3000"])
@pytest.mark.parametrize("tensor", [2, 4])
def test_a_rank_has_its_share_of_a_layer_and_what_the_ranks_exchange(machine, tensor):
    known = work(load_machine(machine))
    whole, part = known.table(2), known.table(2, tensor)
    code, _ = known._codes[2]
    by_name = {layer.name: n for n, layer in enumerate(code.layered.layers)}
    layer, one, mine = "blocks/1", whole.rows[2], part.rows[2]
    n = by_name[layer]
    rank = layer_on_rank(code.layered.layers[n], code.codes[n], known.machine, tensor)
    exchanged = rank.communication(known.machine)
    assert mine.forward.seconds == pytest.approx(rank.forward.seconds + exchanged[0])
    assert mine.backward.seconds == pytest.approx(rank.backward.seconds + exchanged[1])
    assert min(exchanged) > 0
    assert mine.forward.seconds - exchanged[0] < one.forward.seconds
    # Matrices are split, norms are not.
    for before, after in zip(one.parameters, mine.parameters, strict=True):
        assert after.bytes == before.bytes // (tensor if len(before.shape) > 1 else 1)
    assert sum(leaf.bytes for leaf in mine.gradients) < sum(leaf.bytes for leaf in one.gradients)
    assert mine.view < 1.1 * one.view / tensor
    assert one.residuals / tensor < mine.residuals < one.residuals
    assert (part.cuts, part.operands) == (whole.cuts, whole.operands)


def test_data_parallel_groups_of_tensor_parallel_ranks_share_their_links():
    c = Configuration(stages=2, data_parallel=4, rows=2, microbatches=4)
    near = StageCosts(work().table(2), c, A100)
    far = StageCosts(work().table(2), dataclasses.replace(c, tensor=8), A100)
    assert far.state[2].sync > near.state[2].sync  # from node to node, eight at once
    assert (c.devices, dataclasses.replace(c, tensor=8).devices) == (8, 64)


def test_the_cost_of_code_is_that_of_the_cost_analysis():
    closed = jax.make_jaxpr(lambda x, w: jax.nn.softmax(jnp.tanh(x @ w), axis=-1))(
        jnp.ones((64, 128)), jnp.ones((128, 256))
    )
    for name in ("a100", "generic", "cpu"):
        machine = load_machine(name)
        assert code_cost(closed, machine).seconds == pytest.approx(
            code_work(closed, machine).seconds
        )


def test_layers_too_small_to_stand_alone_are_counted_whole():
    step, params, batch = scanned(width=4, depth=9, vocabulary=5000)
    table = workload(step, (params, batch), A100, 8).table(2)
    assert table.parameters == sum(leaf.size for leaf in jax.tree.leaves(params))
