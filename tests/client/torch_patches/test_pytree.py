"""Torch's functions on nested containers, with which GT walks the arguments and results of ops."""

import gc
import weakref

import pytest

from gt.client.torch_patches.pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten


def test_nested_containers_are_taken_apart_and_put_together():
    nested = (1, [2, None], {"a": 3})
    leaves, spec = tree_flatten(nested)
    assert leaves == tree_leaves(nested) == [1, 2, None, 3], "None must be a leaf: it stands for a missing gradient"
    assert tree_unflatten(leaves, spec) == nested, "ops would return their results in another structure"
    assert tree_map(str, (1, [2])) == ("1", ["2"])
    assert tree_map_only(int, lambda n: -n, (1, "x")) == (-1, "x"), "NumPy functions would not see arrays"


WALKS = {"flatten": lambda test: tree_flatten([1], test), "map": lambda test: tree_map(str, [1], is_leaf=test)}


@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
def test_nothing_is_kept_of_a_test_of_leaves(walk):
    class Held:
        pass

    held = Held()
    alive = weakref.ref(held)
    gc.disable()  # what is in a cycle stays
    try:
        walk(lambda value, held=held: value is held)
        del held
        assert alive() is None, "arguments of compiled calls would stay on workers until a garbage collection"
    finally:
        gc.enable()
