"""What the planner says where nothing fits, devices must stay idle, or an option is mistaken."""

import pytest

import ratrain_jax as rt
from ratrain_jax.errors import InfeasibleError, OptionError
from ratrain_jax.planning.fewest import fewest_devices
from ratrain_jax.planning.plan import Plan
from tests.planning import A100, plain_plan, planned, space, work


def test_where_nothing_fits_the_error_says_what_lacks_and_how_many_devices_do():
    limit = 50_000_000
    with pytest.raises(InfeasibleError, match=r"lacks .* on stage \d+, most of it \w+") as caught:
        planned(memory_limit=limit, margin=0.0, devices=1)
    told = int(str(caught.value).rsplit("; ", 1)[1].split(" ")[0])
    assert planned(memory_limit=limit, margin=0.0, devices=told).configuration.devices == told
    fewer = fewest_devices(space(devices=1), work().table, A100, limit, range(1, told))
    assert fewer is None


def test_devices_stay_idle_only_where_they_must_or_may():
    assert plain_plan().idle == 0
    assert "idle" not in str(plain_plan())
    # Of 41 devices no equal groups can be made, and 41 do not divide 48 examples.
    plan = planned(devices=41)
    assert plan.idle == 41 - plan.configuration.devices > 0
    assert f"{plan.configuration.devices} × a100 ({plan.idle} more stay idle)" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(InfeasibleError, match="no way to lay 48 examples over 41 devices"):
        planned(devices=41, idle=0.0)
    assert planned(devices=10, idle=0.5).step_seconds <= planned(devices=10).step_seconds
    with pytest.raises(OptionError, match=r"idle is 1\.5; give the share"):
        planned(idle=1.5)


def test_groups_that_shard_next_to_nothing_are_said():
    # No axis of any array is a multiple of 7.
    with pytest.raises(InfeasibleError, match="Groups of 7 divide no axis of most arrays"):
        planned(devices=7, stages=(1,), global_batch=49, memory_limit=10**7)
    with pytest.raises(InfeasibleError) as told:
        planned(devices=8, stages=(1,), memory_limit=10**7)
    assert "Groups" not in str(told.value)


def test_mistakes_are_named():
    with pytest.raises(OptionError, match="how many devices"):
        planned(devices=None)
    with pytest.raises(OptionError, match="no choice 'depth'"):
        planned(depth=(1, 2))
    with pytest.raises(OptionError, match=r"no choice 'tensor_parallel'.*tensors"):
        planned(tensor_parallel=(1, 2))
    with pytest.raises(InfeasibleError, match="divides both"):
        planned(devices=7, stages=(1,))
    with pytest.raises(InfeasibleError, match="has 8 layers, and 16 stages need one each"):
        planned(stages=(16, 32), devices=32)
    with pytest.raises(InfeasibleError, match="8 devices make no equal groups for 3 stages"):
        planned(stages=(3,), devices=8)
    machine = rt.machines.load("a100", clusters=8)
    assert planned(machine=machine, devices=None).configuration.devices == 8
