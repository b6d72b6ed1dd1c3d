"""Shape rules: closed forms of the shapes and strides of results, for the ops that most programs consist of.

A rule computes with the geometries of a call's tensors in some microseconds, where torch's shape function takes some
hundred. It gives exactly torch's result, or None for calls that it does not cover: shapes that do not fit, empty
tensors and, in most rules, operands that are not row-major. `rule_inference.py` decides when a rule is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gt.client.kernel_strides import has_own_strides
from gt.client.shape_rules.factories import FACTORIES
from gt.client.shape_rules.indexing import INDEXING
from gt.client.shape_rules.pointwise import POINTWISE, iterate_operands
from gt.client.shape_rules.products import PRODUCTS
from gt.client.shape_rules.reductions import REDUCTIONS
from gt.client.shape_rules.shape_rule import ShapeRule
from gt.client.shape_rules.views import VIEWS
from gt.client.torch_patches.dispatch import OpOverload, schema_of

RULES: Mapping[str, ShapeRule] = {**POINTWISE, **PRODUCTS, **REDUCTIONS, **INDEXING, **FACTORIES, **VIEWS}
_VALUE_DECIDES_STRIDES = ("aten.pow.Scalar",)


def rule_of(func: OpOverload) -> ShapeRule | None:
    """The rule of an op: its own, or that of all pointwise ops with one result; None if it has none."""
    rule = RULES.get(str(func))
    if rule is not None or torch.Tag.pointwise not in func.tags:
        return rule
    schema = schema_of(func)
    has_one_result = not schema.is_mutable and len(schema.returns) == 1
    iterates = str(func) not in _VALUE_DECIDES_STRIDES and not has_own_strides(func)
    return ShapeRule(iterate_operands) if has_one_result and iterates else None
