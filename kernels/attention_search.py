"""Choosing and costing attention's passes."""

import functools

from ratrain_jax.errors import MachineError
from ratrain_jax.kernels.attention_cost import cost_attention_plan, cost_staged
from ratrain_jax.kernels.attention_plan import (
    HALF,
    Attention,
    AttentionPlan,
    attention_plans,
    check_attention_plan,
)
from ratrain_jax.kernels.cost import KernelCost
from ratrain_jax.kernels.machine import Machine
from ratrain_jax.kernels.tiles import accelerator_of


@functools.lru_cache(maxsize=1024)
def plan_attention(shape: Attention, machine: Machine, which: str) -> AttentionPlan:
    """Returns the fastest plan of one pass, by costing every plan that fits.

    Args:
      shape: The attention.
      machine: A machine with an accelerator.
      which: "forward" or "backward" (the memory-resident form).

    Returns:
      The plan; of equally fast ones that with the fewest DDR bytes.

    Raises:
      MachineError: If not even the smallest tiles fit.

    Example:
      >>> from ratrain_jax.kernels import load_machine
      >>> shape = Attention(1, 32, 32, 2048, 2048, 128, causal=True)
      >>> plan_attention(shape, load_machine("mt3000"), "forward").which
      'forward'
    """
    plans = attention_plans(shape, machine, which)
    if not plans:
        lanes = accelerator_of(machine).lanes(HALF)
        check_attention_plan(AttentionPlan(which, 1, 1, lanes), shape, machine)
        raise MachineError(f"no searched plan of attention {which} fits {machine.name!r}.")
    costs = [cost_attention_plan(shape, machine, plan) for plan in plans]
    return min(
        zip(costs, plans, strict=True), key=lambda pair: (pair[0].seconds, pair[0].ddr_bytes)
    )[1]


@functools.lru_cache(maxsize=1024)
def cost_attention(
    shape: Attention, machine: Machine, which: str = "forward", plan: AttentionPlan | None = None
) -> KernelCost:
    """Returns the cost of one pass of attention.

    Args:
      shape: The attention.
      machine: A machine with an accelerator.
      which: "forward", "backward" (memory-resident) or "staged" (DDR-staged backward).
      plan: The plan of a forward or memory-resident pass; the best one unless given.

    Returns:
      The cost.

    Raises:
      MachineError: If the plan does not fit the machine.

    Example:
      >>> from ratrain_jax.kernels import load_machine
      >>> machine, shape = load_machine("mt3000"), Attention(1, 32, 32, 2048, 2048, 128, True)
      >>> resident, staged = (cost_attention(shape, machine, w) for w in ("backward", "staged"))
      >>> staged.ddr_bytes > 5 * resident.ddr_bytes
      True
    """
    if which == "staged":
        return cost_staged(shape, machine)
    return cost_attention_plan(shape, machine, plan or plan_attention(shape, machine, which))
