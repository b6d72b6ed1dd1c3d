"""Checks of single families of ops, such as pooling, attention or fused optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch

from gt.worker.engines.argument_checks import (
    Check,
    NamedArguments,
    has_gaps,
    in_range,
    listed,
    require_shape,
    same_shape,
    shapes,
)


def dims_exist(given: NamedArguments) -> None:
    rank = given["self"].dim()
    wrong = [dim for dim in given["dim"] if not -max(rank, 1) <= dim < max(rank, 1)]
    if wrong:
        raise IndexError(f"dim {wrong[0]} is out of range for a tensor of {rank} dims")
    if len({dim % max(rank, 1) for dim in given["dim"]}) < len(given["dim"]):
        raise ValueError(f"dim {list(given['dim'])} has the same dim twice")


def has_running_statistics(given: NamedArguments) -> None:
    training = given.get("training", given.get("train", True))
    if not training and (given.get("running_mean") is None or given.get("running_var") is None):
        raise ValueError("running_mean and running_var are needed if training is False")


def saved_statistics(given: NamedArguments) -> None:
    """Statistics of the batch, which the forward op saves in training only."""
    channels = given["input"].shape[1]
    for name in {"save_mean", "save_invstd", "save_var"} & set(given):
        saved = given[name]
        if given.get("train", given.get("update")) and (saved is None or tuple(saved.shape) != (channels,)):
            raise ValueError(f"{name} must have the {channels} numbers that the forward op saved")


def valid_ctc(given: NamedArguments) -> None:
    """Targets are class indices up to `target_lengths`; the rest is padding, which is never read."""
    steps, batch, classes = given["log_probs"].shape
    targets, lengths = given["targets"], _as_list(given["target_lengths"])
    if len(lengths) != batch or len(_as_list(given["input_lengths"])) != batch:
        raise ValueError(f"input_lengths and target_lengths must have a number for each of the {batch} rows")
    in_range("input_lengths", lambda _: steps + 1)(given)
    longest = targets.shape[1] if targets.dim() == 2 else targets.numel()
    in_range("target_lengths", lambda _: longest + 1)(given)
    if targets.dim() == 2:
        require_shape(given, ("targets",), (batch, longest), "it has a row for each one of log_probs")
        positions = torch.arange(longest, device=targets.device)
        used = targets[positions < torch.tensor(lengths, device=targets.device).unsqueeze(1)]
    elif targets.dim() == 1 and sum(lengths) == longest:
        used = targets
    else:
        raise ValueError(f"targets has shape {list(targets.shape)}, but target_lengths sum to {sum(lengths)}")
    in_range("targets", lambda _: classes)({"targets": used})
    in_range("blank", lambda _: classes)({"blank": [given["blank"]]})


def valid_ctc_backward(given: NamedArguments) -> None:
    steps, batch, _ = given["log_probs"].shape
    lengths = _as_list(given["target_lengths"])
    positions = 2 * max(lengths, default=0) + 1
    require_shape(given, ("log_alpha",), (batch, steps, positions), "the forward op gives that")
    require_shape(given, ("grad", "neg_log_likelihood"), (batch,), "one number for each row")


def _as_list(value: Any) -> list[int]:
    return [int(number) for number in value.reshape(-1).tolist()] if isinstance(value, torch.Tensor) else list(value)


def valid_fused_step(given: NamedArguments) -> None:
    """Lists of equal lengths, except those that the settings make unnecessary, which are empty."""
    number = len(given["self"])
    needed = {"grads", "exp_avgs", "exp_avg_sqs", "state_sums", "state_steps"} & set(given)
    needed |= {"max_exp_avg_sqs"} if given.get("amsgrad") else set()
    needed |= {"momentum_buffer_list"} if given.get("momentum") else set()
    for name in sorted(needed):
        if len(given[name]) != number:
            raise ValueError(f"{name} has {len(given[name])} tensors where self has {number}")
    for name in ("state_steps", "lr", "grad_scale", "found_inf"):
        for tensor in listed(given[name]) if not isinstance(given.get(name), float | int) and name in given else ():
            if tensor.numel() != 1:
                raise ValueError(f"{name} must have tensors of one number, but has shape {list(tensor.shape)}")


def same_strides(given: NamedArguments) -> dict[str, Any]:
    """Fused steps walk through the memory of a parameter, its gradient and its state at once, so these need equal
    strides. A gradient with other strides is copied; the state is written to, so it cannot be."""
    for name in ("self", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_sums", "momentum_buffer_list"):
        for tensor, parameter in zip(listed(given.get(name)), given["self"], strict=False):
            if tensor.stride() != parameter.stride() or has_gaps(tensor):
                raise ValueError(f"{name} has strides {tensor.stride()} where those of self are {parameter.stride()}")
    pairs = list(zip(given["grads"], given["self"], strict=True))
    if all(gradient.stride() == parameter.stride() for gradient, parameter in pairs):
        return {}
    if given.get("grad_scale") is not None:
        raise ValueError("grads, which are scaled in place, must have the strides of self")
    return {"grads": [torch.empty_like(parameter).copy_(gradient) for gradient, parameter in pairs]}


def valid_bags(given: NamedArguments) -> None:
    """Offsets are the starts of bags, in the order of the indices."""
    offsets, number = given["offsets"], given["indices"].numel()
    if offsets.numel() == 0 < number:
        raise ValueError(f"offsets is empty, so {number} indices are in no bag")
    in_range("offsets", lambda _: number + 1)(given)
    if bool((offsets.diff() < 0).any()):
        raise ValueError("offsets must ascend")


def same_length(given: NamedArguments) -> None:
    if len(given["self"]) != len(given["src"]):
        raise ValueError(f"self has {len(given['self'])} tensors, but src has {len(given['src'])}")


def last_dims_contiguous(*names: str) -> Check:
    """For attention, which assumes that the last dim of its inputs has stride 1: contiguous copies of other tensors."""

    def check(given: NamedArguments) -> dict[str, Any]:
        return {name: given[name].contiguous() for name in names if given[name].stride(-1) != 1}

    return check


def valid_attention(given: NamedArguments) -> None:
    shapes("query: B H _ E; key: B G S E; value: B G S E")(given)
    (batch, heads, rows, _), (_, groups, columns, _) = given["query"].shape, given["key"].shape
    if 0 in given["query"].shape or 0 in given["key"].shape or heads % groups:
        raise ValueError(f"query {list(given['query'].shape)} and key {list(given['key'].shape)} do not fit")
    mask = given.get("attn_mask")
    if mask is not None:
        _require_broadcast("attn_mask", mask, (batch, heads, rows, columns))


def _require_broadcast(name: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    fits = tensor.dim() <= len(shape) and all(
        size in (1, wanted) for size, wanted in zip(reversed(tensor.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, which does not broadcast to {list(shape)}")


def valid_attention_backward(given: NamedArguments) -> None:
    query = given["query"]
    require_shape(given, ("grad_out", "out"), tuple(query.shape), "the forward op gives the shape of query")
    require_shape(given, ("logsumexp",), tuple(query.shape[:-1]), "one number for each row of query")


def valid_segments(given: NamedArguments) -> None:
    """Segments inside of `data`: no negative lengths, ascending offsets, no end after the last row."""
    data, axis = given["data"], given["axis"]
    segments = given["lengths"] if given.get("lengths") is not None else given.get("offsets")
    if segments is None or not 0 <= axis < data.dim() or segments.dim() != axis + 1:
        raise ValueError(f"lengths or offsets must have {axis + 1} dims, for axis {axis} of data {list(data.shape)}")
    if segments.shape[:-1] != data.shape[:axis]:
        raise ValueError(f"segments of shape {list(segments.shape)} do not fit data of shape {list(data.shape)}")
    by_length = given.get("lengths") is not None
    steps = segments if by_length else segments.diff(dim=-1)
    ends = segments.sum(-1) if by_length else segments
    in_range("segments", lambda _: data.shape[axis] + 1)({"segments": steps})
    in_range("segments' ends", lambda _: data.shape[axis] + 1)({"segments' ends": ends})


def valid_segments_backward(given: NamedArguments) -> None:
    data, axis = given["data"], given["axis"]
    by_length = given.get("lengths") is not None
    segments = given["lengths"] if by_length else given["offsets"]
    number = segments.shape[-1] - (0 if by_length else 1)
    expected = (*data.shape[:axis], number, *data.shape[axis + 1 :])
    require_shape(given, ("grad", "output"), expected, "the forward op gives that")


def pooled(spatial: int) -> Check:
    """For the gradient of pooling over `spatial` dims: an index into a plane of `self` per element of the result."""

    def check(given: NamedArguments) -> None:
        same_shape("grad_output", "indices")(given)
        input, gradient = given["self"], given["grad_output"]
        if (
            input.dim() != gradient.dim()
            or input.dim() < spatial
            or input.shape[:-spatial] != gradient.shape[:-spatial]
        ):
            raise ValueError(
                f"grad_output has shape {list(gradient.shape)}, which pooling does not make of {list(input.shape)}"
            )
        if "output_size" in given and list(given["output_size"]) != list(gradient.shape[-spatial:]):
            raise ValueError(
                f"grad_output has shape {list(gradient.shape)} where output_size is {given['output_size']}"
            )
        in_range("indices", lambda _: prod(input.shape[-spatial:]))(given)

    return check


def grid_has_no_nan(given: NamedArguments) -> None:
    """Paddings other than zeros clip coordinates to the border, which does not work for nan."""
    if given["padding_mode"] != 0 and bool(given["grid"].isnan().any()):
        raise ValueError("grid contains nan, which is no coordinate of the input")


def valid_unfold_gradient(given: NamedArguments) -> None:
    source = torch.empty(given["input_sizes"], device="meta").unfold(given["dim"], given["size"], given["step"])
    require_shape(given, ("grad_in",), tuple(source.shape), f"unfold gives that of {list(given['input_sizes'])}")


def valid_norm_gradient(given: NamedArguments) -> None:
    input, inner = given["input"], tuple(given["normalized_shape"])
    outer = input.dim() - len(inner)
    if not inner or outer < 0 or tuple(input.shape[outer:]) != inner:
        raise ValueError(f"input has shape {list(input.shape)}, which does not end with {list(inner)}")
    require_shape(given, ("weight", "bias"), inner, "that of normalized_shape")
    for name in ("mean", "rstd"):
        if given[name].numel() != prod(input.shape[:outer]):
            raise ValueError(f"{name} has shape {list(given[name].shape)}, but must have a number for each row")


def valid_group_norm(given: NamedArguments) -> None:
    batch, channels, size, groups = given["N"], given["C"], given["HxW"], given["group"]
    input = given["input"]
    if min(batch, channels, size) < 0 or groups < 1 or channels % groups or input.numel() != batch * channels * size:
        raise ValueError(f"input of shape {list(input.shape)} is not {batch} x {channels} x {size} in {groups} groups")
    if input.dim() < 2 or tuple(input.shape[:2]) != (batch, channels):
        raise ValueError(f"input of shape {list(input.shape)} does not start with {batch} x {channels}")
    require_shape(given, ("weight", "bias"), (channels,), "one number for each channel")
    require_shape(given, ("mean", "rstd"), (batch, groups), "one number for each group")


def group_norm_in_rows(given: NamedArguments) -> dict[str, Any] | None:
    """The kernel for channels-last memory writes the gradient of the input also if it has no memory for that."""
    if given["output_mask"][0]:
        return None
    return {name: given[name].contiguous() for name in ("grad_out", "input")}


def valid_class_indices(given: NamedArguments) -> None:
    """Targets are class indices or `ignore_index`."""
    target, ignored = given["target"], given["ignore_index"]
    in_range("target", lambda _: given["self"].shape[-1])({"target": target[target != ignored]})


def valid_pivots(given: NamedArguments) -> None:
    """Row numbers from 1 on. Negative ones stand for 2 x 2 blocks, so they come in pairs."""
    factors, pivots = given["LD"], given["pivots"]
    size = factors.shape[-1] if factors.dim() >= 2 else 0
    if factors.dim() < 2 or factors.shape[-2] != size or pivots.shape != factors.shape[:-1]:
        raise ValueError(f"pivots of shape {list(pivots.shape)} do not fit LD of shape {list(factors.shape)}")
    in_range("pivots", lambda _: size + 1, lowest=1)({"pivots": pivots.abs()})
    for row in pivots.reshape(-1, size).tolist() if size else ():
        runs = "".join("-" if pivot < 0 else " " for pivot in row).split()
        if any(len(run) % 2 for run in runs):
            raise IndexError(f"pivots {row} have a block of one row; negative ones come in pairs")


def valid_lu_pivots(given: NamedArguments) -> None:
    factors, pivots = given["LU_data"], given["LU_pivots"]
    if factors.dim() < 2 or tuple(pivots.shape) != (*factors.shape[:-2], min(factors.shape[-2:])):
        raise ValueError(f"LU_pivots of shape {list(pivots.shape)} do not fit LU_data of shape {list(factors.shape)}")
    in_range("LU_pivots", lambda _: factors.shape[-2] + 1, lowest=1)(given)


def is_finite(given: NamedArguments) -> None:
    if not bool(given["self"].isfinite().all()):
        raise ValueError("self must not contain infs or nans")


def quotient_exists(given: NamedArguments) -> None:
    """The processor traps if the lowest integer is divided by -1, because the quotient is out of range."""
    dividend, divisor = given["self"], given["other"]
    if given["rounding_mode"] != "trunc" or dividend.dtype.is_floating_point or dividend.dtype not in _LOWEST:
        return
    if bool((torch.as_tensor(divisor) == -1).any()) and _has_lowest(dividend):
        raise ValueError(f"{_LOWEST[dividend.dtype]} divided by -1 is not in the range of {dividend.dtype}")


def multiple_exists(given: NamedArguments) -> None:
    for name in ("self", "other"):
        if given[name].dtype in _LOWEST and _has_lowest(given[name]):
            raise ValueError(f"{name} contains {_LOWEST[given[name].dtype]}, whose absolute value is not in its range")


_LOWEST = {dtype: torch.iinfo(dtype).min for dtype in (torch.int64, torch.int32)}


def _has_lowest(tensor: torch.Tensor) -> bool:
    return bool((tensor == _LOWEST[tensor.dtype]).any())


def power_exists(given: NamedArguments) -> None:
    if given["n"] <= _LOWEST[torch.int64]:
        raise ValueError(f"the power {given['n']} has no positive counterpart in 64 bits")


def steps_advance(given: NamedArguments) -> None:
    out = given.get("out")
    dtype = out.dtype if out is not None else given.get("dtype")
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex) and int(given["step"]) == 0:
        raise ValueError(f"step {given['step']} is 0 as {dtype}")


def result_has_strides(given: NamedArguments) -> None:
    if 0 in given["out"].stride():
        raise ValueError(f"out has strides {given['out'].stride()}; those of 0 cannot be written to")


def scales_fit(given: NamedArguments) -> None:
    """Antialiasing computes from the scale which rows of the input it reads, without comparing them with the size: the
    middle of the last row of the result must be inside of the input."""
    sizes = given["self"].shape[-2:]
    for name, before, after in zip(("scales_h", "scales_w"), sizes, given["output_size"], strict=True):
        scale = given.get(name)
        if scale is not None and not (scale > 0 and (after - 0.5) / scale <= before):
            raise ValueError(f"{name} {scale} of {before} does not reach the {after} of output_size")


def valid_weight_norm(given: NamedArguments) -> None:
    vector, dim = given["v"], given["dim"]
    if not vector.numel() or dim not in (0, vector.dim() - 1):
        raise ValueError(f"v of shape {list(vector.shape)} has no norms over all dims but {dim}")
    expected = [size if dim_index == dim else 1 for dim_index, size in enumerate(vector.shape)]
    require_shape(given, ("g",), expected, "one number for each norm of v")


def valid_weight_norm_gradient(given: NamedArguments) -> None:
    valid_weight_norm({"v": given["saved_v"], "g": given["saved_g"], "dim": given["dim"]})
    same_shape("saved_v", "grad_w")(given)
    same_shape("saved_g", "saved_norms")(given)


def valid_rnn(given: NamedArguments) -> None:
    """One layer and direction of an LSTM."""
    hidden = given["hidden_size"]
    input = given["input"]
    if given["mode"] != 2 or hidden < 1 or given["batch_sizes"]:
        raise ValueError("only a layer of an LSTM (mode 2) over padded sequences (no batch_sizes) can be run")
    biases = "; weight2: G; weight3: G" if given["has_biases"] else ""  # otherwise they are not read
    shapes(f"input: T N I; weight0: G I; weight1: G H; hx_: N H; cx_: N H{biases}")(given)
    if not input.numel() or tuple(given["weight1"].shape) != (4 * hidden, hidden):
        raise ValueError(f"weight1 has shape {list(given['weight1'].shape)}, but must have {[4 * hidden, hidden]}")
    if any(given[name].dtype is not input.dtype for name in ("weight0", "weight1", "weight2", "weight3", "hx_", "cx_")):
        raise ValueError(f"all tensors must be of the dtype of input, {input.dtype}")


def valid_rnn_gradient(given: NamedArguments) -> None:
    """The arguments of the forward op and its results, with a workspace of the size that it gives."""
    names = {"weight0": "weight1", "weight1": "weight2", "weight2": "weight3", "weight3": "weight4", "cx_": "cx_tmp"}
    valid_rnn({**given, **{name: given[here] for name, here in names.items()}})
    gradients = "grad_output: T N H; grad_hy: N H; grad_cy: N H"
    shapes(f"input: T N _; hx_: N H; output: T N H; hy_: N H; cy_: N H; {gradients}")(given)
    results = [given.get(name) for name in ("output", "hy_", "cy_", "grad_output", "grad_hy", "grad_cy")]
    if any(result is not None and result.dtype is not given["input"].dtype for result in results):
        raise ValueError(f"all tensors must be of the dtype of input, {given['input'].dtype}")
    settings = (given["hidden_size"], given["num_layers"], given["reverse"], given["bidirectional"])
    nbytes = _workspace_bytes(tuple(given["input"].shape), given["input"].dtype, *settings)
    if given["workspace"].nbytes != nbytes:
        raise ValueError(f"workspace has {given['workspace'].nbytes} bytes, but the forward op gives {nbytes}")


@lru_cache(maxsize=256)
def _workspace_bytes(
    shape: tuple[int, ...], dtype: torch.dtype, hidden: int, layers: int, reverse: bool, bidirectional: bool
) -> int:
    """The size of the forward op's workspace, found by running it."""
    gates = 4 * hidden
    sizes = (shape, (gates, shape[2]), (gates, hidden), (gates,), (gates,), (shape[1], hidden), (shape[1], hidden))
    with torch.inference_mode(False), torch.enable_grad():
        tensors = [torch.zeros(size, dtype=dtype) for size in sizes]
        forward = torch.ops.aten.mkldnn_rnn_layer.default
        return int(forward(*tensors, reverse, [], 2, hidden, layers, True, bidirectional, False, True)[3].nbytes)
