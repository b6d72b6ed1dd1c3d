"""Resampling and rearranging of images: padding, upsampling, grid sampling, pixel shuffle, im2col."""

from __future__ import annotations

from gt.core.signatures import ListArg
from gt.sharding.factors import LINEAR, OpShardingRule, bind
from gt.sharding.op_calls import LocalContext, LocalProgram, Lowering, OpCall
from gt.sharding.rules.entry import OpEntry, for_ops
from gt.sharding.rules.support.local_programs import same_op, zeros_if_empty
from gt.sharding.rules.support.whole_spatial import exact_passthroughs, spatial_rule, whole_spatial_dims


def _of_size(position: int) -> Lowering:
    """The op with the local size of the result as the argument at `position`."""
    return lambda shard: same_op(shard, {position: ListArg(shard.result_shape())})


def _grid_of_batch(shard: LocalContext) -> LocalProgram:
    batch = shard.operand_shape(0)[0]
    return same_op(shard, {1: ListArg((batch, *shard.call.arg(1, "size")[1:]))})


def _pixels(text: str) -> OpEntry:
    def rule(call: OpCall) -> OpShardingRule:
        factor = call.arg(1, "upscale_factor")
        sizes = {"a": factor, "b": factor}
        return bind(text, call.shapes, call.result_shapes, sizes, LINEAR, zeros_if_empty())

    return OpEntry(rule)


def _sampler_backward(spatial: int) -> OpEntry:
    """Each point of the grid contributes to the gradient of the input, and each channel to that of the grid."""
    plane, grid = " ".join(["1"] * spatial), " ".join("pqr"[:spatial])

    def rule(call: OpCall) -> OpShardingRule | None:
        gives = [f"n c {plane}"] * call.arg(6, "output_mask")[0]
        gives += [f"n {grid} 1"] * (len(call.outputs) - len(gives))
        text = f"n c {grid}, n c {plane}, n {grid} 1 -> {', '.join(gives)} | reduce(sum): c {grid}"
        return bind(
            text,
            call.shapes,
            call.result_shapes,
            passthroughs=exact_passthroughs(call, LINEAR),
            lowering=zeros_if_empty(),
        )

    return OpEntry(rule)


_RESIZED = {rank: whole_spatial_dims(rank, *LINEAR) for rank in (1, 2, 3)}
_UPSAMPLE_BACKWARD = {rank: whole_spatial_dims(rank, *LINEAR, lowering=_of_size(2)) for rank in (1, 2, 3)}

VISION: dict[str, OpEntry] = {
    **for_ops(
        _RESIZED[1],
        """
        reflection_pad1d reflection_pad1d_backward replication_pad1d replication_pad1d_backward
        upsample_linear1d upsample_nearest1d _upsample_nearest_exact1d
        """,
    ),
    **for_ops(
        _RESIZED[2],
        """
        reflection_pad2d reflection_pad2d_backward replication_pad2d replication_pad2d_backward
        upsample_bicubic2d upsample_bilinear2d upsample_nearest2d _upsample_nearest_exact2d
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa
        """,
    ),
    **for_ops(
        _RESIZED[3],
        """
        reflection_pad3d reflection_pad3d_backward replication_pad3d replication_pad3d_backward
        upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d
        """,
    ),
    **for_ops(
        _UPSAMPLE_BACKWARD[1],
        "upsample_linear1d_backward upsample_nearest1d_backward _upsample_nearest_exact1d_backward",
    ),
    **for_ops(
        _UPSAMPLE_BACKWARD[2],
        """
        upsample_bicubic2d_backward upsample_bilinear2d_backward upsample_nearest2d_backward
        _upsample_nearest_exact2d_backward _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa_backward
        _upsample_lanczos2d_aa_backward
        """,
    ),
    **for_ops(
        _UPSAMPLE_BACKWARD[3],
        "upsample_nearest3d_backward upsample_trilinear3d_backward _upsample_nearest_exact3d_backward",
    ),
    "aten.affine_grid_generator": OpEntry(
        lambda call: bind(
            f"n 1 1 -> n {'1 ' * (len(call.result_shapes[0]) - 1)}",
            call.shapes,
            call.result_shapes,
            passthroughs=LINEAR,
            lowering=zeros_if_empty(_grid_of_batch),
        )
    ),
    "aten.grid_sampler_2d": spatial_rule("n c 1 1, n p q 1 -> n c p q", *LINEAR),
    "aten._grid_sampler_2d_cpu_fallback": spatial_rule("n c 1 1, n p q 1 -> n c p q", *LINEAR),
    "aten.grid_sampler_3d": spatial_rule("n c 1 1 1, n p q r 1 -> n c p q r", *LINEAR),
    "aten.grid_sampler_2d_backward": _sampler_backward(2),
    "aten.grid_sampler_3d_backward": _sampler_backward(3),
    "aten.pixel_shuffle": _pixels("... (c a b) h w -> ... c (h a) (w b) | whole: a b"),
    "aten.pixel_unshuffle": _pixels("... c (h a) (w b) -> ... (c a b) h w | whole: a b"),
    **for_ops(spatial_rule("n 1 ... -> n 1 ...", *LINEAR), "channel_shuffle native_channel_shuffle"),
    "aten.im2col": spatial_rule("... c 1 1 -> ... (c k) 1 | whole: k", *LINEAR),
    "aten.col2im": spatial_rule("... (c k) 1 -> ... c 1 1 | whole: k", *LINEAR),
}
