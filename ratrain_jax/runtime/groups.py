"""Device groups: the D devices of one stage, and how arrays lie on them.

Inside a step every array has a leading axis of D, one slice a device, as `jax.pmap` takes them; a group of one device
has no such axis and runs plain `jax.jit`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ratrain_jax import compat
from ratrain_jax.errors import LayoutError
from ratrain_jax.lowering.collectives import between_processes
from ratrain_jax.lowering.unsharded import AXIS as AXIS
from ratrain_jax.runtime.host import compiler_options
from ratrain_jax.runtime.processes import host_mates, is_here, several


@dataclasses.dataclass(frozen=True)
class Group:
    """The devices of one stage.

    Attributes:
        devices: in rank order.
        options: what to tell the compiler.
    """

    devices: tuple[Any, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> int:
        """D, the devices of the group."""
        return len(self.devices)

    @functools.cached_property
    def is_here(self) -> bool:
        """Whether this process drives any of the devices."""
        return any(map(is_here, self.devices))

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether this process drives all of the devices."""
        return all(map(is_here, self.devices))

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices as a mesh of one axis."""
        return Mesh(np.array(self.devices), (AXIS,))

    @functools.cached_property
    def sharding(self) -> Any:
        """How arrays lie inside a step."""
        if self.size == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, PartitionSpec(AXIS))

    def state_sharding(self, axis: int | None) -> Any:
        """How an array of the user's shape lies when it is cut along `axis`."""
        if self.size == 1:
            return SingleDeviceSharding(self.devices[0])
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)
        return NamedSharding(self.mesh, spec)

    def local_type(self, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
        """The type inside a step of an array whose slice on each device has `shape`."""
        lead = () if self.size == 1 else (self.size,)
        return jax.ShapeDtypeStruct((*lead, *shape), dtype, sharding=self.sharding)

    def compile(
        self, function: Callable[..., Any], types: Sequence[Any], donate: Sequence[int]
    ) -> Any:
        """Compiles a function of each device's slices; collectives name the axis `AXIS`.

        Args:
            function: takes and returns trees of local arrays.
            types: trees of `local_type`s, one an argument.
            donate: numbers of the arguments whose buffers may be reused.
        """
        if self.size == 1:
            jitted = jax.jit(function, donate_argnums=tuple(donate), keep_unused=True)
        elif not several():
            jitted = jax.pmap(
                function, axis_name=AXIS, devices=self.devices, donate_argnums=tuple(donate)
            )
        else:
            # Among several processes `pmap` takes arrays by another rule; what it makes of a function is the same.
            jitted = jax.jit(self._mapped(function), donate_argnums=tuple(donate))
        with contextlib.nullcontext() if self.is_whole else between_processes():
            lowered = jitted.lower(*types)
        return lowered.compile(compiler_options=dict(self.options))

    def _mapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What `pmap` makes of a function of each device's slices."""

        def sliced(*args: Any) -> Any:
            made = function(*jax.tree.map(lambda x: x[0], args))
            return jax.tree.map(lambda x: x[None], made)

        spec = PartitionSpec(AXIS)
        return jax.shard_map(sliced, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def put_rows(self, array: Any) -> jax.Array:
        """Puts an array whose axis 0 counts the ranks: each device gets its slice."""
        if self.is_whole:
            return jax.device_put(array[0] if self.size == 1 else array, self.sharding)
        return put_global(array, self.sharding)

    def put_whole(self, array: Any) -> jax.Array:
        """Puts a copy of an array on each device."""
        if self.size == 1:
            return jax.device_put(array, self.sharding)
        if isinstance(array, np.ndarray):
            copies = np.broadcast_to(array, (self.size, *array.shape))
        else:
            copies = jax.numpy.broadcast_to(array, (self.size, *array.shape))
        if self.is_whole:
            return jax.device_put(copies, self.sharding)
        return put_global(copies, self.sharding)


def put_global(array: Any, sharding: Any) -> jax.Array:
    """Puts a host-local array, the same in every process, where a sharding says; nothing is sent.

    Args:
        array: whole.
        sharding: over devices of any process.
    """
    if isinstance(array, jax.Array) and compat.is_extended(array.dtype):
        data = put_global(jax.random.key_data(array), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    whole = np.asarray(array, jax.typeof(array).dtype)
    return jax.make_array_from_callback(
        whole.shape, sharding, lambda index: whole[index], dtype=whole.dtype
    )


def make_groups(
    stages: int,
    data_parallel: int,
    devices: Sequence[Any] | None,
    options: Mapping[str, Any],
) -> tuple[Group, ...]:
    """Devices of each stage, stage by stage.

    Args:
        stages: P.
        data_parallel: D, devices of each stage.
        devices: all devices; `jax.devices()` unless given.
        options: the user's own for the compiler.

    Raises:
        LayoutError: too few devices.
    """
    found = list(jax.devices() if devices is None else devices)
    wanted = stages * data_parallel
    if len(found) < wanted:
        raise LayoutError(
            f"stages={stages} × data_parallel={data_parallel} needs {wanted} devices, but there are {len(found)}."
            f" On CPU set XLA_FLAGS=--xla_force_host_platform_device_count={wanted} before JAX is imported."
        )
    used = found[:wanted]
    # Devices of this host alone compete for its cores; in a run of one process that is all of them.
    here = [device for device in used if device.process_index in host_mates()]
    told = {**compiler_options(here), **options}
    return tuple(
        Group(tuple(used[s * data_parallel : (s + 1) * data_parallel]), told) for s in range(stages)
    )
