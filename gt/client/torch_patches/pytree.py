"""Torch's functions on nested containers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import _pytree
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map_only, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]

IsLeaf = Callable[[Any], bool] | None


def tree_flatten(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[Any], TreeSpec]:
    with _released(is_leaf) as test:
        return _pytree.tree_flatten(tree, test)


def tree_map(function: Callable[..., Any], tree: Any, is_leaf: IsLeaf = None) -> Any:
    with _released(is_leaf) as test:
        return _pytree.tree_map(function, tree, is_leaf=test)


@contextmanager
def _released(is_leaf: IsLeaf) -> Iterator[IsLeaf]:
    """A test that refers to nothing after the block. Torch's functions leave a cycle that holds the test, and with it
    the tensors that it refers to, until the next garbage collection."""
    held = [is_leaf]
    try:
        yield None if is_leaf is None else lambda value: bool((test := held[0]) and test(value))
    finally:
        held.clear()
