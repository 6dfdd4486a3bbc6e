"""What decorated steps have in common: they are compiled for the shapes that they are called with."""

from __future__ import annotations

import abc
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from ratrain_jax import compat
from ratrain_jax.errors import StepError
from ratrain_jax.lowered import Lowered
from ratrain_jax.options import Options
from ratrain_jax.tracing import abstract
from ratrain_jax.words import counted

if TYPE_CHECKING:
    from ratrain_jax.runtime.compiled import Compiled

CACHE_SIZE = 8


class Step(abc.ABC):
    """A decorated step.

    Attributes:
        options: what it was decorated with.
        __wrapped__: the undecorated step.
    """

    def __init__(self, step: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, step)
        self.__wrapped__ = step
        self.options = options
        self._compiled: dict[Any, Compiled] = {}

    @abc.abstractmethod
    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces and lowers the step."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step, compiling it for these shapes first if it must.

        Raises:
            StepError: it is called inside `jax.jit` or another transformation, or while jits are disabled.
        """
        args = self._positional(args, kwargs)
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            raise StepError(
                f"{self!r} is called while jax.disable_jit is on, and runs compiled only. To look into the step, call the"
                " undecorated one: `step.__wrapped__(...)`."
            )
        if any(map(compat.is_tracer, jax.tree.leaves(args))):
            raise StepError(
                f"{self!r} is called inside jax.jit or another transformation. It compiles itself: call it directly."
            )
        key = self._key(args)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self.lower(*args).compile()
            while len(self._compiled) >= CACHE_SIZE:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[key] = compiled
        return compiled(*args)

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments by their places; raises a StepError where one has none."""
        if not kwargs:
            return args
        bound = inspect.signature(self.__wrapped__).bind(*args, **kwargs)
        if bound.kwargs:
            raise StepError(
                f"{self!r} is given {', '.join(bound.kwargs)} by name only; the arguments of a step are known by their"
                " places. Give those before as well, and make none keyword-only."
            )
        return bound.args

    def _key(self, args: Sequence[Any]) -> Any:
        """What a compiled step is kept under."""
        leaves, tree = jax.tree.flatten(abstract(args))
        return (tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))

    def __repr__(self) -> str:
        name = getattr(self.__wrapped__, "__name__", "step")
        o = self.options
        size = f"{counted(o.stages, 'stage')} × {o.data_parallel}, {counted(o.microbatches, 'microbatch')}"
        return f"<{type(self).__name__} {name}: {size}>"
