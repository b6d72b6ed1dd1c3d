"""Diagonals and triangles of matrices: diagonal, diag_embed, trace, tril, triu."""

from __future__ import annotations

from typing import NamedTuple

from gt.core.signatures import Input, ListArg
from gt.sharding.boxes import Box, Interval, Shape
from gt.sharding.factors import MASK, Dim, FactorRef, OpShardingRule, PartialPassthrough, RuleBuilder, Window, bind
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.dims import dim_factors, wrap_dim
from gt.sharding.rules.support.element_moves import absent_value, all_partial_kinds, merge_kind
from gt.sharding.rules.support.local_programs import pad_tensor, single_call


class Diagonal(NamedTuple):
    """The elements (row, row + offset) of matrices whose rows and columns are two dims of a tensor."""

    offset: int
    rows: int
    columns: int
    length: int

    def local_offset(self, box: Box) -> int:
        """The offset of the diagonal relative to the first element of a box."""
        return self.offset + box[self.rows][0] - box[self.columns][0]

    def span(self, box: Box) -> Interval:
        """The interval of diagonal elements in a box."""
        before_row, before_column = max(-self.offset, 0), max(self.offset, 0)
        start = max(box[self.rows][0] - before_row, box[self.columns][0] - before_column, 0)
        stop = min(box[self.rows][1] - before_row, box[self.columns][1] - before_column, self.length)
        return start, max(start, stop)

    def dims(self, matrix: list[Dim]) -> tuple[Dim, ...]:
        """The dims of the diagonal of a matrix of the given dims. The diagonal is cut with the rows."""
        (row,) = matrix[self.rows]
        line = (FactorRef(row.factor, Window(max(-self.offset, 0), self.length)),)
        return (*[dim for position, dim in enumerate(matrix) if position not in (self.rows, self.columns)], line)


def _diagonal_of(call: OpCall, shape: Shape, first: int, defaults: tuple[int, int] = (0, 1)) -> Diagonal:
    """The diagonal named by the arguments that start at position `first`, of a tensor of the given shape."""
    offset = call.arg(first, "offset", 0)
    rows = wrap_dim(call.arg(first + 1, "dim1", defaults[0]), len(shape))
    columns = wrap_dim(call.arg(first + 2, "dim2", defaults[1]), len(shape))
    length = max(min(shape[rows] + min(offset, 0), shape[columns] - max(offset, 0)), 0)
    return Diagonal(offset, rows, columns, length)


def _diagonal(call: OpCall) -> OpShardingRule:
    """A view if the rows are cut. If the columns are cut, each worker gives its elements, and zeros for the others."""
    shape = call.shapes[0]
    diagonal = _diagonal_of(call, shape, 1)
    builder = RuleBuilder()
    matrix = dim_factors(builder, shape)
    builder.factor(f"d{diagonal.columns}", shape[diagonal.columns], MASK, merge_kind(call.inputs[0].dtype))
    builder.operands.append(tuple(matrix))
    builder.results.append(diagonal.dims(matrix))

    def lower(shard: LocalContext) -> LocalProgram:
        program, box = LocalBuilder(1), shard.operand_box(0)
        (start, stop), (first, end) = diagonal.span(box), shard.result_box()[-1]
        offset = diagonal.local_offset(box)
        line = program.call(shard.call.op, Input(0), offset, diagonal.rows, diagonal.columns)
        before = start - first if start < stop else end - first
        pads = {len(shape) - 2: (before, end - first - (stop - start) - before)}
        return program.finish(pad_tensor(program, line, len(shape) - 1, pads, absent_value(call.inputs[0].dtype)))

    return builder.build(all_partial_kinds(call, 0), lower)


def _embed(call: OpCall, diagonal: Diagonal) -> OpShardingRule:
    """A matrix of zeros with the operand as a diagonal."""
    builder = RuleBuilder()
    matrix = dim_factors(builder, call.result_shapes[0])
    builder.operands.append(diagonal.dims(matrix))
    builder.results.append(tuple(matrix))

    def lower(shard: LocalContext) -> LocalProgram:
        program, box = LocalBuilder(1), shard.result_box()
        line = _part(program, Input(0), diagonal.span(box), shard.operand_box(0)[-1])
        sizes, offset = ListArg(shard.result_shape()), diagonal.local_offset(box)
        result = program.call("aten.diagonal_backward.default", line, sizes, offset, diagonal.rows, diagonal.columns)
        return program.finish(result)

    return builder.build(all_partial_kinds(call, 0), lower)


def _part(program: LocalBuilder, line: Input, span: Interval, held: Interval) -> Input:
    """The elements `span` of a diagonal of which a worker holds the elements `held`."""
    (start, stop), (first, end) = span, held
    if stop - start == end - first:
        return line
    return program.call("aten.slice.Tensor", line, -1, *((start - first, stop - first) if start < stop else (0, 0)))


def _diagonal_scatter(call: OpCall) -> OpShardingRule:
    diagonal = _diagonal_of(call, call.shapes[0], 2)
    builder = RuleBuilder()
    matrix = dim_factors(builder, call.shapes[0])
    builder.operands.extend([tuple(matrix), diagonal.dims(matrix)])
    builder.results.append(tuple(matrix))

    def lower(shard: LocalContext) -> LocalProgram:
        program, box = LocalBuilder(2), shard.result_box()
        line = _part(program, Input(1), diagonal.span(box), shard.operand_box(1)[-1])
        offset = diagonal.local_offset(box)
        return program.finish(program.call(shard.call.op, Input(0), line, offset, diagonal.rows, diagonal.columns))

    return builder.build(all_partial_kinds(call, 0, 1), lower)


def _trace(call: OpCall) -> OpShardingRule:
    def lower(shard: LocalContext) -> LocalProgram:
        program, ((row, _), (column, _)) = LocalBuilder(1), shard.operand_box(0)
        line = program.call("aten.diagonal.default", Input(0), row - column)
        return program.finish(program.call("aten.sum.default", line))

    passthroughs = [PartialPassthrough(frozenset({0}))]
    return bind(
        "i j -> ... | reduce(sum): i j", call.shapes, call.result_shapes, passthroughs=passthroughs, lowering=lower
    )


def _triangle(call: OpCall) -> OpShardingRule:
    def lower(shard: LocalContext) -> LocalProgram:
        (row, _), (column, _) = shard.operand_box(0)[-2:]
        return single_call(shard, shard.call.op, Input(0), shard.call.arg(1, "diagonal", 0) + row - column)

    return bind("... -> ...", call.shapes, call.result_shapes, passthroughs=all_partial_kinds(call, 0), lowering=lower)


DIAGONAL: dict[str, OpEntry] = {
    "aten.diagonal": OpEntry(_diagonal),
    "aten.diagonal_copy": OpEntry(_diagonal),
    "aten.diagonal_backward": OpEntry(lambda call: _embed(call, _diagonal_of(call, call.result_shapes[0], 2))),
    "aten.diag_embed": OpEntry(lambda call: _embed(call, _diagonal_of(call, call.result_shapes[0], 1, (-2, -1)))),
    "aten.diagonal_scatter": OpEntry(_diagonal_scatter),
    "aten.trace": OpEntry(_trace),
    "aten.tril": OpEntry(_triangle),
    "aten.triu": OpEntry(_triangle),
}
