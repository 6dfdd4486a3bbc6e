"""A `StackedLeaf` reads as the stacked array that it stands for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt

WHOLE = np.arange(24, dtype=np.float32).reshape(3, 2, 4)


@pytest.fixture
def leaf():
    return rt.StackedLeaf([jnp.asarray(part) for part in WHOLE])


def test_looks_like_the_stacked_array(leaf):
    assert leaf.shape == WHOLE.shape and leaf.dtype == WHOLE.dtype
    assert (leaf.ndim, leaf.size, leaf.nbytes, len(leaf)) == (3, 24, 96, 3)
    assert "3 ×" in repr(leaf)


@pytest.mark.parametrize(
    "index",
    [0, -1, np.int64(1), (1, 0), (2, slice(1), 3), slice(1, None), (slice(None), 1), ...],
    ids=str,
)
def test_indexing(leaf, index):
    np.testing.assert_array_equal(np.asarray(leaf[index]), WHOLE[index])


def test_a_layer_is_the_very_array_and_some_layers_are_a_stacked_leaf(leaf):
    assert leaf[1] is leaf.slices[1]
    assert isinstance(leaf[1:], rt.StackedLeaf) and leaf[1:].slices[0] is leaf[1]
    assert [part is own for part, own in zip(leaf, leaf.slices, strict=True)] == [True] * 3
    with pytest.raises(IndexError):
        leaf[3]


def test_as_a_numpy_array(leaf):
    np.testing.assert_array_equal(np.asarray(leaf), WHOLE)
    assert np.asarray(leaf, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="only by a copy"):
        np.array(leaf, copy=False)


def test_nested_scans(leaf):
    nested = rt.StackedLeaf([leaf, leaf])
    assert nested.shape == (2, 3, 2, 4)
    np.testing.assert_array_equal(np.asarray(nested), np.stack([WHOLE, WHOLE]))
    np.testing.assert_array_equal(np.asarray(nested[1, 2]), WHOLE[2])


def test_is_a_node_of_the_tree(leaf):
    tree = {"kernel": leaf}
    doubled = jax.tree.map(lambda x: 2 * x, tree)["kernel"]
    assert isinstance(doubled, rt.StackedLeaf)
    np.testing.assert_array_equal(np.asarray(doubled), 2 * WHOLE)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert paths == ["['kernel'][0]", "['kernel'][1]", "['kernel'][2]"]


def test_is_no_operand_of_jax_numpy(leaf):
    with pytest.raises(TypeError):
        jnp.sin(leaf)


def test_says_when_a_layer_was_used_up(leaf):
    assert not leaf.is_deleted() and not rt.StackedLeaf(list(WHOLE)).is_deleted()
    leaf[2].delete()
    assert leaf.is_deleted()
