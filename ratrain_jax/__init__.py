"""RATrain for JAX: a train step in, an inspectable pipeline program out.

The public names are loaded when they are first used (PEP 562). Importing this package, or a folder
below it such as `ratrain_jax.kernels`, therefore loads nothing from the layers above that folder.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratrain_jax import errors as errors
    from ratrain_jax import machines as machines
    from ratrain_jax import models as models
    from ratrain_jax.checkpoints.checkpoints import Checkpoints as Checkpoints
    from ratrain_jax.distributed.initialize import initialize as initialize
    from ratrain_jax.evaluation import eval_step as eval_step
    from ratrain_jax.gathering import gather as gather
    from ratrain_jax.loss_scale import DynamicLossScale as DynamicLossScale
    from ratrain_jax.loss_scale import all_finite as all_finite
    from ratrain_jax.loss_scale import select_tree as select_tree
    from ratrain_jax.losses import grad as grad
    from ratrain_jax.losses import value_and_grad as value_and_grad
    from ratrain_jax.lowering.keys import microbatch_key as microbatch_key
    from ratrain_jax.lowering.marks import layer as layer
    from ratrain_jax.options import Window as Window
    from ratrain_jax.planning.plan import Plan as Plan
    from ratrain_jax.planning.planner import plan as plan
    from ratrain_jax.profiling.measure import profile as profile
    from ratrain_jax.profiling.profile import Profile as Profile
    from ratrain_jax.runtime.watchdog import watchdog as watchdog
    from ratrain_jax.simulation.reliability import Failures as Failures
    from ratrain_jax.simulation.simulate import simulate as simulate
    from ratrain_jax.stacked_leaf import StackedLeaf as StackedLeaf
    from ratrain_jax.train import train_step as train_step

__version__ = "0.1.0"

# Public name -> the module that defines it; a new name is a line here and one above. A submodule is
# its own home. Any other name must differ from every submodule of this package: importing such a
# submodule would put the module in the name's place.
_HOMES = {
    "Checkpoints": "ratrain_jax.checkpoints.checkpoints",
    "DynamicLossScale": "ratrain_jax.loss_scale",
    "Failures": "ratrain_jax.simulation.reliability",
    "Plan": "ratrain_jax.planning.plan",
    "Profile": "ratrain_jax.profiling.profile",
    "StackedLeaf": "ratrain_jax.stacked_leaf",
    "Window": "ratrain_jax.options",
    "all_finite": "ratrain_jax.loss_scale",
    "errors": "ratrain_jax.errors",
    "eval_step": "ratrain_jax.evaluation",
    "gather": "ratrain_jax.gathering",
    "grad": "ratrain_jax.losses",
    "initialize": "ratrain_jax.distributed.initialize",
    "layer": "ratrain_jax.lowering.marks",
    "machines": "ratrain_jax.machines",
    "select_tree": "ratrain_jax.loss_scale",
    "simulate": "ratrain_jax.simulation.simulate",
    "plan": "ratrain_jax.planning.planner",
    "microbatch_key": "ratrain_jax.lowering.keys",
    "models": "ratrain_jax.models",
    "profile": "ratrain_jax.profiling.measure",
    "train_step": "ratrain_jax.train",
    "value_and_grad": "ratrain_jax.losses",
    "watchdog": "ratrain_jax.runtime.watchdog",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(_HOMES[name])
    value = home if home.__name__ == f"{__name__}.{name}" else getattr(home, name)
    globals()[name] = value  # the next access finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
