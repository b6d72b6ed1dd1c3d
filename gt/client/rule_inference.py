"""Infers the results of calls by shape rules (`shape_rules`), which is faster than by torch's shape functions.

Calls of an op that differ only in sizes are a family: they have the same constants and dtypes, tensors of the same
ranks, and empty dims and dims of one element in the same places. Torch infers the first call of a family. If the rule
of the op gives the same result, the rule infers the other calls; their dtypes are those of the first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from gt.client.op_schema import OpSchema
from gt.client.shape_rules import rule_of
from gt.client.shape_rules.shape_rule import Results, ShapeRule, Strided
from gt.client.storage import Geometry, TensorRef, ViewPath, intern_geometry, is_lazy
from gt.client.torch_patches.dispatch import schema_of

MAX_FAMILIES = 1 << 14

FamilyKey: TypeAlias = tuple[Any, ...]


class InferredResults(NamedTuple):
    """The geometries of a call's results. `container` is the type of a list or tuple of results, None for one
    tensor."""

    container: type | None
    geometries: tuple[Geometry | None, ...]


class RuledCall(NamedTuple):
    """A call to which the rule of its op applies: its family, and its results by the rule."""

    family: FamilyKey
    results: Results


class _Family(NamedTuple):
    """The container and the dtypes of the results, which all calls of a family share."""

    container: type | None
    dtypes: tuple[torch.dtype | None, ...]


class RuleInference:
    """Infers calls by rules that have given torch's result for the first call of their family."""

    def __init__(self) -> None:
        self._families: dict[FamilyKey, _Family | None] = {}  # None: the rule gave another result than torch
        self._rules: dict[OpSchema, _OpRule | None] = {}

    def __len__(self) -> int:
        return len(self._families)

    def apply_rule(
        self, op: OpSchema, args: Sequence[Any], kwargs: dict[str, Any], key: tuple[Any, ...], refs: Sequence[TensorRef]
    ) -> RuledCall | None:
        """The results of a call by the rule of its op; None if the op has no rule, or the rule does not cover it."""
        if op not in self._rules:
            rule = rule_of(op.func)
            self._rules[op] = None if rule is None else _OpRule(op, rule)
        found = self._rules[op]
        return None if found is None else found.apply(args, kwargs, key, refs)

    def infer(self, call: RuledCall) -> InferredResults | None:
        """The results of a call, if torch has confirmed the rule for its family; None otherwise."""
        family = self._families.get(call.family)
        if family is None or call.results is None:
            return None
        dtypes = family.dtypes
        if len(dtypes) != len(call.results):
            if family.container is None or len(set(dtypes)) != 1:
                return None
            dtypes = dtypes[:1] * len(call.results)  # the number of parts of a split depends on the size
        pairs = list(zip(call.results, dtypes, strict=True))
        if any((result is None) != (dtype is None) for result, dtype in pairs):
            return None
        return InferredResults(family.container, tuple([_geometry(result, dtype) for result, dtype in pairs]))

    def compare(self, call: RuledCall, inferred: InferredResults) -> None:
        """Compare the rule's results of a family's first call with those that torch has inferred."""
        if call.family in self._families or call.results is None:
            return
        if len(self._families) >= MAX_FAMILIES:
            self._families.clear()
        dtypes = tuple(None if found is None else found.dtype for found in inferred.geometries)
        agrees = [None if g is None else (tuple(g.shape), g.stride, g.offset) for g in inferred.geometries] == [
            None if result is None else tuple(result) for result in call.results
        ]
        self._families[call.family] = _Family(inferred.container, dtypes) if agrees else None


def _geometry(result: Strided | None, dtype: torch.dtype | None) -> Geometry | None:
    if result is None or dtype is None:
        return None
    return intern_geometry(torch.Size(result.shape), result.stride, result.offset, dtype)


class _OpRule:
    """The rule of an op, applied to the arguments of a call."""

    def __init__(self, op: OpSchema, rule: ShapeRule) -> None:
        self._rule = rule
        self._names = frozenset([a.name for a in schema_of(op.func).arguments if a.kwarg_only])

    def apply(
        self, args: Sequence[Any], kwargs: dict[str, Any], key: tuple[Any, ...], refs: Sequence[TensorRef]
    ) -> RuledCall | None:
        """The call by this rule; None for lazy operands, for unusual keywords and if the rule does not cover it."""
        if not self._names.issuperset(kwargs) or any(ref.path is not None and is_lazy(ref) for ref in refs):
            return None
        remaining = iter(refs)
        given = [_with_geometries(value, remaining) for value in args]
        named = {name: _with_geometries(value, remaining) for name, value in kwargs.items()}
        results = self._rule.apply(*given, **named)
        return None if results is None else RuledCall(self._family(key, refs), results)

    def _family(self, key: tuple[Any, ...], refs: Sequence[TensorRef]) -> FamilyKey:
        """The cache key of a call, with the families of its tensors in place of their geometries."""
        family = [None if type(part) is Geometry or type(part) is ViewPath else part for part in key]
        constants = map(_without_sizes, family) if self._rule.takes_sizes else family
        return (*constants, *[ref.geometry.family for ref in refs])


def _with_geometries(value: Any, refs: Any) -> Any:
    """An argument with geometries in place of tensors; `refs` are the remaining tensors of the call."""
    if isinstance(value, torch.Tensor):
        return next(refs).geometry
    if type(value) in (list, tuple) and value and isinstance(value[0], torch.Tensor):
        return [_with_geometries(item, refs) for item in value]
    return value


def _without_sizes(part: Any) -> Any:
    """A constant of a cache key for any sizes: lists keep whether a size is -1, 0, 1 or larger."""
    if type(part) is int:
        return int
    if isinstance(part, tuple) and all(type(size) is int for size in part):
        return tuple([max(-1, min(size, 2)) for size in part])
    return part
