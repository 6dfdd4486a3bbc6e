"""`train_step`: the decorator that turns an ordinary train step into a pipelined one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ratrain_jax.kernels import Arithmetic, Machine, builtin_machines, load_machine
from ratrain_jax.lowered import Lowered
from ratrain_jax.lowering.lower import lower_step
from ratrain_jax.options import Options, Window, planned_options
from ratrain_jax.step import Step
from ratrain_jax.tracing import trace_step

if TYPE_CHECKING:
    from ratrain_jax.planning.plan import Plan


class TrainStep(Step):
    """A decorated train step. Call it like the step, or `lower` it to look first.

    Attributes:
        options: what the step was decorated with.
        plan: the plan that the options come from; None without one.
        lowered: what the last `lower` gave, also within a call; None before.
        __wrapped__: the undecorated step.
    """

    def __init__(
        self, step: Callable[..., Any], options: Options, plan: Plan | None = None
    ) -> None:
        super().__init__(step, options)
        self.plan = plan
        self.lowered: Lowered | None = None

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces and lowers the step.

        Args:
            *args: the step's arguments, or their types (`jax.ShapeDtypeStruct`); the first is the state.
            **kwargs: arguments by name.

        Returns:
            The lowered step: its program, text, memory; `compile()` makes it callable. Needs no devices.

        Raises:
            StepError, BatchError, LayoutError, MemoryLimitError: what to change is in the message.
            PlanError: the step was decorated with a plan for another state or batch.
        """
        args = self._positional(args, kwargs)
        if self.plan is not None:
            self.plan.check(args)
        trace, signature = trace_step(self.__wrapped__, args, self.options)
        kernels = self.options.kernels()
        code, program = lower_step(
            trace,
            self.options.settings(),
            self._machine(),
            self.options.boundaries,
            kernels,
            layering=self.options.layering,
        )
        self.lowered = Lowered(code, program, signature, self.options, trace)
        return self.lowered

    def _machine(self) -> Machine:
        """What layers are cut, and ops put in order, for."""
        kernels = self.options.kernels()
        if kernels is not None:
            return kernels.machine
        planned = self.plan.machine if self.plan is not None else ""
        return load_machine(planned if planned in builtin_machines() else "generic")


def train_step(
    *,
    stages: int = 1,
    data_parallel: int = 1,
    microbatches: int = 1,
    schedule: str = "ratrain",
    zero: int = 1,
    recovery: str = "auto",
    layerwise_state: bool = True,
    update_prefetch: bool = True,
    validation: str = "immediate",
    window: Window = Window(),
    memory_limit: int | Sequence[int] | None = None,
    boundaries: Sequence[str] | None = None,
    batch_argnums: Sequence[int] | None = None,
    devices: Sequence[Any] | None = None,
    donate_state: bool = True,
    state_layout: str = "stacked",
    backend: str | Arithmetic = "xla",
    plan: Plan | None = None,
) -> Callable[[Callable[..., Any]], TrainStep]:
    """Decorates a train step so that it runs as a pipeline over `stages * data_parallel` devices.

    The step takes the state first and the batch after it, calls `ratrain_jax.value_and_grad` once, and returns
    the new state, or the new state and anything else. The state is a tree of arrays in any form.

    Args:
        stages: pipeline stages.
        data_parallel: devices of each stage; each takes a part of the batch and a shard of the state.
        microbatches: parts that each device's batch is cut into.
        schedule: `"gpipe"`, `"1f1b"` or `"ratrain"`. The first two do all state work at the end of the step.
        zero: 1 to synchronise gradients once a step, 2 after every microbatch into sharded accumulators.
        recovery: `"none"` keeps all residuals; `"backward"` recomputes when the gradient has come, `"forward"` before;
            `"auto"` keeps what the memory limit allows.
        layerwise_state: with `"ratrain"`, synchronise each layer's gradient as soon as it is final.
        update_prefetch: with `"ratrain"`, update each layer and gather its next view behind its synchronisation.
        validation: with `"deferred"`, and where `update_prefetch` is on, layers are updated and their next views gathered
            before the global reduction of a clipped norm or a finite check, as if it had found nothing to change; if it
            has, their state is restored, and updated as it says, before the next step's first forward. Results are those
            of `"immediate"`. Old and new shards, and the gradients, then live until the reduction.
        window: how far state work may run ahead.
        memory_limit: bytes a device; one number, or one a stage.
        boundaries: names of the layers that begin each stage but the first; balanced unless given.
        batch_argnums: which arguments are cut along axis 0; all but the first unless given.
        devices: the devices, stage by stage; `jax.devices()` unless given.
        donate_state: whether arrays of a state that this step handed out are used up when they come back.
        state_layout: how stacked leaves (of `nn.scan` or `lax.scan` over layers) are handed back: `"stacked"` as one
            `jax.Array` each, gathered onto stage 0's devices after every step, or `"layers"` as a
            `ratrain_jax.StackedLeaf`, without a copy. Either form is taken in.
        backend: `"xla"`, or `"mt3000"` to send matrix products and attention through that machine's float16 kernels,
            emulated on the CPU. A `ratrain_jax.kernels.Arithmetic` chooses another machine, accumulator or exact bits.
        plan: a plan of `ratrain_jax.plan`, which says all that shapes the program; only `devices`, `donate_state`,
            `state_layout`, `batch_argnums` and `validation` may be given beside it. Plans reckon with immediate validation;
            what deferring takes more is in `lowered.memory_analysis()`.

    Returns:
        A decorator that gives a `TrainStep`.

    Raises:
        OptionError: an option out of range, or one that contradicts the plan.
        PlanError: the plan is for what the runtime does not run.

    Example:
        >>> import jax.numpy as jnp, ratrain_jax as rt
        >>> @rt.train_step(microbatches=2)
        ... def step(state, batch):
        ...     loss, grads = rt.value_and_grad(lambda w: ((batch["x"] @ w - batch["y"]) ** 2).mean())(state["w"])
        ...     return {"w": state["w"] - 0.1 * grads}, {"loss": loss}
        >>> batch = {"x": jnp.ones((4, 3)), "y": jnp.zeros((4,))}
        >>> state, metrics = step({"w": jnp.ones(3)}, batch)
        >>> float(metrics["loss"])
        9.0
    """
    options = Options(
        stages=stages,
        data_parallel=data_parallel,
        microbatches=microbatches,
        schedule=schedule,
        zero=zero,
        recovery=recovery,
        layerwise_state=layerwise_state,
        update_prefetch=update_prefetch,
        validation=validation,
        window=window,
        memory_limit=memory_limit,
        boundaries=boundaries,
        batch_argnums=batch_argnums,
        devices=devices,
        donate_state=donate_state,
        state_layout=state_layout,
        backend=backend,
    )
    if plan is not None:
        options = planned_options(plan, options)
    return lambda step: TrainStep(step, options, plan)
