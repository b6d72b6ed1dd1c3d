"""The work of an op on shards, as a roofline sees it: floating-point operations, and bytes read and written, of the
slowest shard. Nothing here names an op: the operations of a call are the size of its rule's factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gt.sharding.boxes import Shape
from gt.sharding.calibration import Calibration
from gt.sharding.cost import memory_bytes
from gt.sharding.factors import MASK, OpShardingRule
from gt.sharding.spec import ShardingSpec
from gt.sharding.strategies import FactorSharding


class LaidOutTensor(NamedTuple):
    """A tensor that an op takes or gives, and its layout."""

    shape: Shape
    itemsize: int
    spec: ShardingSpec

    @property
    def elements(self) -> int:
        """The elements of the largest shard."""
        return memory_bytes(self.spec, self.shape, 1)


class Work(NamedTuple):
    """The work of the slowest shard."""

    flops: float
    nbytes: float

    def seconds(self, machine: Calibration) -> float:
        """The time, apart from that of any op."""
        return max(self.flops / machine.flops, self.nbytes / machine.memory_bandwidth)


def work_of(
    rule: OpShardingRule | None, assignment: Mapping[str, FactorSharding], tensors: Sequence[LaidOutTensor]
) -> Work:
    """The work of an op with an assignment of axes to factors. Without a rule, it is that of its largest tensor."""
    nbytes = sum([tensor.elements * tensor.itemsize for tensor in tensors])
    elements = max([tensor.elements for tensor in tensors], default=0)
    if rule is None or not tensors:
        return Work(elements, nbytes)
    names, mesh = _operand_factors(rule), tensors[0].spec.mesh
    if math.prod([rule.factors[name].size for name in names]) <= max([math.prod(t.shape) for t in tensors]):
        return Work(elements, nbytes)
    points = 1
    for name in names:
        axes = assignment[name].axes if name in assignment else ()
        points *= -(-rule.factors[name].size // math.prod([mesh.axis_size(axis) for axis in axes]))
    return Work(2 * points, nbytes)  # a product multiplies and adds


def _operand_factors(rule: OpShardingRule) -> set[str]:
    """The factors along which an op works: those of its operands, except factors of which each index addresses one
    element. Factors of results alone take their elements from others."""
    found = {ref.factor for dims in rule.operands for dim in dims for ref in dim}
    return {name for name in found if rule.factors[name].role != MASK}
