"""Every schedule, switch, window and recovery of one step gives the same bits.

For each split, data parallelism, microbatch count and `zero`, all programs train 50 steps from the
same state; losses, metrics and states must be equal to the last bit to those of `gpipe`.
"""

import pytest

import ratrain_jax as rt
from ratrain_jax.lowering.program import Recover
from tests.models.case import OPTIMIZERS, linen_case
from tests.models.gpt import GPT, loss, make_batch
from tests.training import differing, train

STEPS = 50
GPT_CASE = linen_case(
    "small_gpt", GPT(layers=2, width=8), inputs=("inputs",), loss=loss, make_batch=make_batch
)

LAYOUTS = {
    "2 stages x 2": {"stages": 2, "data_parallel": 2, "microbatches": 3, "zero": 1},
    "2 stages x 2, zero 2": {"stages": 2, "data_parallel": 2, "microbatches": 3, "zero": 2},
    "4 stages, 3 microbatches": {"stages": 4, "microbatches": 3},
}
# With clipping every update waits for all gradients; here each waits for its own layer alone.
OPTIMIZER = {"4 stages, 3 microbatches": "sgd"}

HALF = "a limit that makes some stages recover"
"""Stands for a memory limit, since it depends on the layout."""

VARIANTS = {
    "gpipe, backward": {"schedule": "gpipe", "recovery": "backward"},
    "gpipe, forward": {"schedule": "gpipe", "recovery": "forward"},
    "gpipe, limit": {"schedule": "gpipe", "memory_limit": HALF},
    "1f1b": {"schedule": "1f1b"},
    "1f1b, backward": {"schedule": "1f1b", "recovery": "backward"},
    "1f1b, forward": {"schedule": "1f1b", "recovery": "forward"},
    "ratrain": {},
    "late sync": {"layerwise_state": False},
    "no prefetch": {"update_prefetch": False},
    "late sync, no prefetch": {"layerwise_state": False, "update_prefetch": False},
    "backward": {"recovery": "backward"},
    "forward": {"recovery": "forward"},
    "forward, no prefetch": {"recovery": "forward", "update_prefetch": False},
    "forward, far ahead": {"recovery": "forward", "window": rt.Window(microbatches=3)},
    "window of one layer": {"window": rt.Window(layers=1)},
    "window of bytes": {"window": rt.Window(layers=9, bytes=3000), "layerwise_state": False},
    "limit": {"memory_limit": HALF},
}


class Family:
    """One layout: its state, its batches and the programs of its step."""

    def __init__(self, name):
        self.layout = layout = LAYOUTS[name]
        optimizer = OPTIMIZERS[OPTIMIZER.get(name, "adamw")]()
        self.state = GPT_CASE.make_state(optimizer)
        rows = layout.get("data_parallel", 1) * layout["microbatches"]
        self.batches = [GPT_CASE.make_batch(seed, rows) for seed in range(STEPS)]
        self.step = GPT_CASE.make_step(optimizer, rt.value_and_grad)
        self.first = self.lower(schedule="gpipe", recovery="none").compile()
        self.expected = train(self.first, self.state, self.batches)
        self.variants = {}

    def lower(self, **options):
        return rt.train_step(**self.layout, **options)(self.step).lower(self.state, self.batches[0])

    def variant(self, name):
        if name not in self.variants:
            options = dict(VARIANTS[name])
            if options.get("memory_limit") is HALF:
                del options["memory_limit"]
                options["memory_limit"] = self.limit(**options)
            self.variants[name] = self.lower(**options)
        return self.variants[name]

    def limit(self, **options):
        """Just too little for the first stage that recovery helps, and enough for all others."""
        saved = self.lower(**options, recovery="none").memory_analysis().peaks
        recovered = self.lower(**options, recovery="forward").memory_analysis().peaks
        pairs = list(zip(saved, recovered, strict=True))
        helped = next(stage for stage, (most, least) in enumerate(pairs) if least < most)
        return [max(pair) - (stage == helped) for stage, pair in enumerate(pairs)]


@pytest.fixture(scope="module", params=LAYOUTS)
def family(request):
    return Family(request.param)


def test_the_first_program_trains(family):
    losses = family.expected.losses()
    assert sum(losses[-5:]) < sum(losses[:5])
    assert not any(isinstance(op, Recover) for op in family.first.lowered.program.ops())


def test_another_schedule_runs_the_same_executables(family):
    """The library counts all that living steps of this code have compiled."""
    compiled = family.lower(recovery="none").compile()
    assert compiled.executables == family.first.executables


@pytest.mark.parametrize("name", VARIANTS)
def test_same_bits(family, name):
    lowered = family.variant(name)
    recovering = {op.stage for op in lowered.program.ops() if isinstance(op, Recover)}
    if name.endswith("limit"):
        assert 0 < len(recovering) < lowered.program.settings.stages
    elif "backward" in name or "forward" in name:
        assert len(recovering) == lowered.program.settings.stages
    else:
        assert not recovering
    found = train(lowered.compile(), family.state, family.batches)
    assert differing(found.metrics, family.expected.metrics) == []
    assert differing(found.state, family.expected.state) == []


def test_the_programs_differ(family):
    """Else all of the above would say nothing."""
    texts = {family.variant(name).as_text() for name in VARIANTS}
    assert len(texts | {family.first.lowered.as_text()}) == len(VARIANTS) + 1
