"""Copies of arrays where they are wanted."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ratrain_jax.runtime.placing import copied_to, private_copy

FIRST, SECOND = (SingleDeviceSharding(device) for device in jax.devices()[:2])
MESH = Mesh(np.array(jax.devices()[:2]), ("x",))
WHOLE, CUT = (NamedSharding(MESH, PartitionSpec(*axes)) for axes in ((), ("x",)))
SHARDINGS = {"first": FIRST, "second": SECOND, "whole": WHOLE, "cut": CUT}


def buffers(array):
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


@pytest.mark.parametrize("size", [2, 1 << 16])
@pytest.mark.parametrize("target", SHARDINGS)
@pytest.mark.parametrize("source", [*SHARDINGS, "none"])
def test_a_copy_shares_no_buffer_wherever_it_goes(source, target, size):
    values = np.arange(size, dtype=np.float32)
    array = jax.numpy.asarray(values)  # on no device in particular
    if source != "none":
        array = jax.device_put(values, SHARDINGS[source])
    copy = copied_to(array, SHARDINGS[target])
    assert copy.sharding == SHARDINGS[target]
    assert not buffers(copy) & buffers(array)
    np.testing.assert_array_equal(copy, values)


@pytest.mark.parametrize("target", SHARDINGS)
def test_a_copy_of_a_numpy_array_does_not_change_with_it(target):
    values = np.arange(1 << 16, dtype=np.float32)
    copy = copied_to(values, SHARDINGS[target])
    values[:] = 0
    np.testing.assert_array_equal(copy, np.arange(1 << 16))


def test_one_array_in_two_places_becomes_two():
    array = jax.numpy.ones(4)
    one, two = private_copy([array, array], [FIRST, FIRST])
    assert not buffers(one) & buffers(two)


def test_a_typed_key_is_copied_as_one():
    key = jax.random.key(0)
    copy = copied_to(key, FIRST)
    assert copy.dtype == key.dtype
    copy.delete()
    assert not key.is_deleted()
