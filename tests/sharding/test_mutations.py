"""Mutation tests of the oracles in this folder: each mutation breaks one rule or step as a bug would. Its check passes
without the mutation and fails with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import gt
from gt.core.signatures import Arg, Input
from gt.sharding import factors, op_calls, reshard, rules, strategies
from gt.sharding.boxes import Box, Shape, balanced_cuts, box_shape
from gt.sharding.factors import OpShardingRule, Window, bind
from gt.sharding.lowering import forget_choices
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules import attention, cat_split, embedding, matmul, pointwise, reduction, slicing, softmax
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support import indices
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder
from gt.sharding.rules.support.local_programs import same_op, zeros
from gt.sharding.spec import ShardingSpec, shard_index
from gt.worker.bound_op_programs import BoundOpProgram
from gt.worker.engines.counter_rng import Region
from gt.worker.exchange.local_steps import LocalStep
from tests.sharding.expansions import check_expansion
from tests.sharding.simulate import check

ATTEND = "aten._scaled_dot_product_flash_attention_for_cpu.default"


class Mutation(NamedTuple):
    """`breaks` patches the code; `check` is an oracle that raises AssertionError on the broken code."""

    breaks: Callable[[pytest.MonkeyPatch], object]
    check: Callable[[], object]


MUTATIONS: dict[str, Mutation] = {}


def caught_by(check: Callable[[], object]) -> Callable[[Callable[[pytest.MonkeyPatch], object]], Callable[..., object]]:
    def add(breaks: Callable[[pytest.MonkeyPatch], object]) -> Callable[..., object]:
        MUTATIONS[breaks.__name__] = Mutation(breaks, check)
        return breaks

    return add


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_caught(name):
    mutation = MUTATIONS[name]
    mutation.check()
    with pytest.MonkeyPatch.context() as patch:
        mutation.breaks(patch)
        forget()
        with pytest.raises(AssertionError):
            mutation.check()
    forget()


def forget() -> None:
    """Clear the caches, which may hold results of the broken or of the sound code."""
    for cached in (rules.entry_of, reshard.plan_reshard, reshard.pulls, reshard.pushes, reshard.contributions):
        cached.cache_clear()
    forget_choices()


# --- How to break things ----------------------------------------------------------------------------------------------


def ruled(patch: pytest.MonkeyPatch, op: str, text: str) -> None:
    """Replace the rule of an op, keeping its passthroughs and lowering."""
    sound = rules.TABLE[op]

    def rule(call: OpCall) -> OpShardingRule | None:
        own = sound.rule(call)
        assert own is not None
        return bind(text, call.shapes, call.result_shapes, passthroughs=own.passthroughs, lowering=own.lowering)

    patch.setitem(rules.TABLE, op, OpEntry(rule, sound.expand))


def lowered(patch: pytest.MonkeyPatch, op: str, change: Callable[[LocalContext, LocalProgram], LocalProgram]) -> None:
    """Replace the local programs of an op by changed ones."""
    sound = rules.TABLE[op]

    def rule(call: OpCall) -> OpShardingRule | None:
        own = sound.rule(call)
        assert own is not None and own.lowering is not None
        lowering = own.lowering
        return dataclasses.replace(own, lowering=lambda shard: change(shard, lowering(shard)))

    patch.setitem(rules.TABLE, op, OpEntry(rule, sound.expand))


def with_args(program: LocalProgram, op: str, change: Callable[[tuple[Arg, ...]], tuple[Arg, ...]]) -> LocalProgram:
    changed = [part._replace(args=change(part.args)) if part.op == op else part for part in program.calls]
    return program._replace(calls=tuple(changed))


# --- Virtual runs -----------------------------------------------------------------------------------------------------


def on_workers(work: Callable[[gt.DeviceMesh], Sequence[tuple[Any, Any]]]) -> Callable[[], None]:
    """Compare pairs of tensors that are made on four virtual workers."""

    def run() -> None:
        gt.init(workers=4, mode="virtual")
        try:
            for found, expected in work(gt.mesh((4,), ["x"])):
                torch.testing.assert_close(found.cpu(), expected.cpu())
        finally:
            gt.shutdown()

    return run


def placed(mesh: gt.DeviceMesh, spec: str, *shape: int) -> tuple[torch.Tensor, Any]:
    plain = torch.randn(shape)
    return plain, gt.distribute(plain, mesh, spec)


def product(mesh: gt.DeviceMesh) -> list[tuple[Any, Any]]:
    (a, ours_a), (b, ours_b) = placed(mesh, "-, x", 3, 8), placed(mesh, "x, -", 8, 5)
    return [((ours_a @ ours_b).redistribute(mesh, "-, -"), a @ b)]


def scattered_product(mesh: gt.DeviceMesh) -> list[tuple[Any, Any]]:
    (a, ours_a), (b, ours_b) = placed(mesh, "-, x", 3, 8), placed(mesh, "x, -", 8, 5)
    return [((ours_a @ ours_b).redistribute(mesh, "-, x"), a @ b)]


def gathered(mesh: gt.DeviceMesh) -> list[tuple[Any, Any]]:
    plain, ours = placed(mesh, "x, -", 8, 3)
    return [(ours.redistribute(mesh, "-, -"), plain)]


def made_partial(mesh: gt.DeviceMesh) -> list[tuple[Any, Any]]:
    plain, ours = placed(mesh, "-, -", 6, 3)
    return [(ours.redistribute(mesh, "-, - + x"), plain)]


def random_numbers(mesh: gt.DeviceMesh) -> list[tuple[Any, Any]]:
    def draw(*layout: Any) -> list[Any]:
        gt.manual_seed(3)
        made = gt.rand(6, 5) if not layout else gt.rand(6, 5, mesh=layout[0], placements=layout[1])
        return [made, torch.nn.functional.dropout(made, 0.5)]

    return list(zip(draw(mesh, "x, -"), draw(), strict=True))


def negated_largest(mesh: gt.DeviceMesh) -> list[tuple[Any, Any]]:
    plain, ours = placed(mesh, "-, x", 3, 8)
    return [(-ours.amax(1), -plain.amax(1))]


# --- Partial values ---------------------------------------------------------------------------------------------------


@caught_by(lambda: check("aten.mm.default", torch.randn(4, 6), torch.randn(6, 5)))
def a_product_drops_a_partial(patch):
    ruled(patch, "aten.mm", "i k, k j -> i j")


@caught_by(lambda: check("aten.sum.dim_IntList", torch.randn(4, 6), [1]))
def a_sum_is_reduced_by_the_largest(patch):
    patch.setitem(rules.TABLE, "aten.sum", reduction.fold("max"))


@caught_by(lambda: check("aten.relu.default", torch.randn(4, 6)))
def relu_passes_sums(patch):
    patch.setitem(rules.TABLE, "aten.relu", pointwise.elementwise(*pointwise.LINEAR))


@caught_by(on_workers(negated_largest))
def neg_keeps_the_largest(patch):
    patch.setitem(rules.TABLE, "aten.neg", pointwise.elementwise(*pointwise.INCREASING))


@caught_by(lambda: check("aten.mul.Tensor", torch.randn(4, 6), torch.randn(4, 6)))
def a_product_of_two_partial_sums_passes(patch):
    patch.setitem(rules.TABLE, "aten.mul", pointwise.elementwise(pointwise.linear(0, 1)))


@caught_by(lambda: check("aten.addmm.default", torch.randn(5), torch.randn(4, 6), torch.randn(6, 5)))
def every_worker_adds_the_bias(patch):
    patch.setattr(matmul, "adds_once", lambda shard: True)


@caught_by(lambda: check("aten.add.Tensor", torch.randn(4, 6), 3.0))
def every_worker_adds_the_number(patch):
    patch.setattr(pointwise, "_add_numbers_once", lambda positions, shard: same_op(shard))


@caught_by(lambda: check("aten.constant_pad_nd.default", torch.randn(4, 6), [1, 2], 7.0))
def every_worker_adds_the_padding(patch):
    patch.setattr(slicing, "_pad_value", lambda shard: shard.call.arg(2, "value", 0))


@caught_by(lambda: check("aten.index_add.default", torch.randn(5, 3), 0, torch.tensor([4, 0, 4]), torch.randn(3, 3)))
def every_worker_adds_the_existing_elements(patch):
    patch.setattr(indices, "adds_once", lambda shard: True)


# --- Factors ----------------------------------------------------------------------------------------------------------


@caught_by(lambda: check("aten.mm.default", torch.randn(4, 6), torch.randn(6, 4)))
def a_product_swaps_rows_and_columns(patch):
    ruled(patch, "aten.mm", "i k, k j -> j i | reduce(sum): k")


@caught_by(lambda: check("aten._softmax.default", torch.randn(4, 6), 1, False))
def softmax_cuts_its_dim(patch):
    ruled(patch, "aten._softmax", "a b -> a b")


@caught_by(lambda: check("aten.view.default", torch.randn(4, 6), [24]))
def a_joined_dim_is_cut_minor_first(patch):
    sound = strategies._layout_of_compound
    patch.setattr(strategies, "_layout_of_compound", lambda dim, *rest: sound(dim[::-1], *rest))


# --- Local programs ---------------------------------------------------------------------------------------------------


@caught_by(lambda: check("aten.embedding.default", torch.randn(7, 3), torch.randint(7, (4, 2))))
def an_embedding_forgets_its_mask(patch):
    def unmasked(*args: Any, **kwargs: Any) -> LocalProgram:
        program = indices.lower_gather(*args, **kwargs)
        last = program.calls[-1] if program.calls else None
        if last is None or last.op != "aten.masked_fill.Scalar":
            return program
        (result, *_) = last.args
        assert isinstance(result, Input)
        return program._replace(results=(result.index,))

    patch.setattr(embedding, "lower_gather", unmasked)


@caught_by(lambda: check("aten.mean.dim", torch.randn(4, 6), [1]))
def a_mean_divides_by_the_local_count(patch):
    def rule(call: OpCall) -> OpShardingRule:
        return reduction.reduction_rule(call, reduction.reduced_dims(call), "reduce(sum)")

    patch.setitem(rules.TABLE, "aten.mean", OpEntry(rule))


@caught_by(lambda: check_expansion("aten.argmax.default", torch.arange(24.0).view(3, 8), 1, cut=["-, x"]))
def argmax_gives_local_indices(patch):
    def without_offset(shard: LocalContext, program: LocalProgram) -> LocalProgram:
        return with_args(program, "aten.add.Scalar", lambda args: (args[0], 0))

    lowered(patch, "gt.index_of_max", without_offset)


@caught_by(lambda: check("aten.slice.Tensor", torch.randn(9, 3), 0, 1, 8))
def a_slice_starts_at_its_position_in_the_whole(patch):
    sound = slicing._Slice.local
    patch.setattr(
        slicing._Slice, "local", lambda self, whole, part: sound(self, tuple([(0, b) for _, b in whole]), part)
    )


@caught_by(lambda: check("aten.cat.default", [torch.randn(4, 3), torch.randn(5, 3)]))
def cat_has_all_windows_at_the_start(patch):
    patch.setattr(cat_split, "Window", lambda offset, size: Window(0, size))


@caught_by(lambda: check("aten.tril.default", torch.randn(5, 6)))
def a_triangle_starts_at_every_shard(patch):
    patch.setitem(rules.TABLE, "aten.tril", pointwise.elementwise())


@caught_by(lambda: check(ATTEND, *[torch.randn(2, 2, 5, 4) for _ in range(3)], 0.0, True))
def causal_attention_starts_at_every_shard(patch):
    sound = attention._causal_mask

    def without_offset(builder: LocalBuilder, call: OpCall, rows: Any, columns: Any, mask: object) -> Input:
        return sound(builder, call, (0, rows[1] - rows[0]), (0, columns[1] - columns[0]), mask)

    patch.setattr(attention, "_causal_mask", without_offset)


@caught_by(lambda: check("aten.slice.Tensor", torch.randn(7, 3), 0, 1, 6))
def a_worker_thinks_that_the_last_shards_are_the_larger(patch):
    def swapped(spec: ShardingSpec, shape: Shape, worker: int) -> Box:
        found = []
        for dim, size in enumerate(shape):
            cuts = spec.cuts[dim] or balanced_cuts(size, spec.counts(dim))
            mirrored = [(size - stop, size - start) for start, stop in reversed(cuts)]
            found.append(mirrored[shard_index(spec, dim, worker)])
        return tuple(found)

    patch.setattr(op_calls, "local_box", swapped)


@caught_by(
    lambda: check(
        "aten.convolution.default", torch.randn(2, 3, 8), torch.randn(4, 3, 3), None, [1], [1], [1], False, [0], 1
    )
)
def a_convolution_has_no_halo(patch):
    def alone(self: factors.HaloWindow, start: int, stop: int) -> tuple[int, int]:
        return min(start * self.stride, self.size), min(stop * self.stride, self.size)

    patch.setattr(factors.HaloWindow, "_needed", alone)


# --- Expansions -------------------------------------------------------------------------------------------------------


@caught_by(lambda: check_expansion("aten._softmax.default", torch.randn(3, 8) + 200, 1, False, cut=["-, x"]))
def softmax_does_not_subtract_the_largest(patch):
    def powers(expansion: ExpansionBuilder, dims: Sequence[int]) -> tuple[Input, Input, Input]:
        return Input(0), Input(0), expansion.pointwise("aten.exp.default", Input(0))

    patch.setattr(softmax, "_powers", powers)


@caught_by(lambda: check_expansion("aten.cumsum.default", torch.randn(3, 8), 1, cut=["-, x"]))
def cumsum_starts_at_every_shard(patch):
    def nothing(shard: LocalContext, _: LocalProgram) -> LocalProgram:
        builder = LocalBuilder(1)
        return builder.finish(zeros(builder, shard.result_shape(), shard.call.outputs[0].dtype))

    lowered(patch, "gt.before_blocks", nothing)


@caught_by(lambda: check_expansion("aten.var.correction", torch.randn(3, 8), [1], correction=1, cut=["-, x"]))
def a_variance_has_a_mean_of_its_own_on_every_worker(patch):
    a_mean_divides_by_the_local_count(patch)


# --- Moves ------------------------------------------------------------------------------------------------------------


@caught_by(on_workers(product))
def an_all_reduce_leaves_out_a_part(patch):
    sound = LocalStep.reduce
    patch.setattr(LocalStep, "reduce", lambda self, engine, parts: sound(self, engine, parts[:-1]))


@caught_by(on_workers(scattered_product))
def a_reduce_scatter_takes_one_part_twice(patch):
    sound = LocalStep.reduce
    patch.setattr(LocalStep, "reduce", lambda self, engine, parts: sound(self, engine, [parts[0], *parts[:-1]]))


@caught_by(on_workers(gathered))
def an_all_gather_mixes_up_its_parts(patch):
    sound = LocalStep._assemble

    def mixed(self: LocalStep, engine: Any, pieces: Any, boxes: Any, whole: Any, *, owned: bool) -> Any:
        swapped = dict(zip(boxes, reversed(boxes.values()), strict=True))
        return sound(self, engine, pieces, swapped, whole, owned=owned)

    patch.setattr(LocalStep, "_assemble", mixed)


@caught_by(on_workers(made_partial))
def every_replica_becomes_an_addend(patch):
    patch.setattr(reshard, "_keeps", lambda step, worker: True)


@caught_by(on_workers(random_numbers))
def random_numbers_are_counted_from_the_start_of_every_shard(patch):
    def local(self: BoundOpProgram, step: Any, shard: LocalContext) -> Region:
        size = box_shape(shard.result_box())
        return Region(size, tuple([(0, length) for length in size]))

    patch.setattr(BoundOpProgram, "_region", local)
