"""What must hold of the arguments of some ops before torch is called.

Most of torch's kernels compare their arguments with each other, and raise. Those in `CHECKS` do not, or not all of
them: with an index out of range, or with tensors whose sizes do not belong together, they read and write memory that
is not theirs, and end the process. Torch has the checks elsewhere (in the function that the user calls, in autograd),
where a client need not pass. `make crash-detector` finds such ops.

A check of sizes costs microseconds. A check of values reads an index tensor once more; on CUDA it also waits for the
device, where the alternative is an assertion of a kernel that makes the whole context unusable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import floor, prod
from typing import Any, NamedTuple, TypeAlias

import torch

Arguments: TypeAlias = Mapping[str, Any]
Check: TypeAlias = Callable[[Arguments], "dict[str, Any] | None"]  # raises, or gives arguments to use instead


def has_checks(op: str) -> bool:
    name, overload = op.split(".")[1:]
    plain = name.removesuffix("_")
    return plain in CHECKS or f"{plain}.{overload}" in CHECKS


def checked(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of an op, with the checks of its arguments before it; the function itself where there are none."""
    namespace, name, overload = op.split(".")
    schema = torch._C._get_schema(f"{namespace}::{name}", "" if overload == "default" else overload)
    written = [argument.name for argument in schema.arguments if argument.is_out]
    plain = name.removesuffix("_")
    checks = (
        *CHECKS.get(plain, ()),
        *CHECKS.get(f"{plain}.{overload}", ()),
        *([no_overlap(*written)] if written else ()),
    )
    if not checks:
        return function
    names = [argument.name for argument in schema.arguments]
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}

    def run(*args: Any, **kwargs: Any) -> Any:
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        try:
            for check in checks:
                given |= check(given) or {}
        except (IndexError, ValueError) as error:
            raise type(error)(f"{op}: {error}") from None
        return function(*[given[name] for name in names[: len(args)]], **{name: given[name] for name in kwargs})

    return run


# Checks


def no_overlap(*written: str) -> Check:
    """Kernels that fill a given tensor count on an element of memory for each element of it."""

    def check(given: Arguments) -> None:
        for name in written:
            for tensor in _listed(given.get(name)):
                if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
                    raise ValueError(
                        f"argument {name} of strides {tensor.stride()} has several elements at one place of memory, "
                        f"so it cannot be written to; clone() it first"
                    )

    return check


def shapes(pattern: str) -> Check:
    """Sizes of arguments as a pattern such as "input: N C ...; weight: C": the same letter is the same size, `_` any
    size, `...` any number of dims at the end or at the start. Absent tensors fit."""
    wanted = [(name.strip(), dims.split()) for name, _, dims in (part.partition(":") for part in pattern.split(";"))]

    def check(given: Arguments) -> None:
        sizes: dict[str, int] = {}
        for name, dims in wanted:
            tensor = given.get(name)
            if tensor is not None and not _fits(tuple(tensor.shape), dims, sizes):
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}, which does not fit ({', '.join(dims)}) "
                    f"where {', '.join([f'{letter} is {size}' for letter, size in sizes.items()])}"
                )

    return check


def _fits(shape: tuple[int, ...], dims: Sequence[str], sizes: dict[str, int]) -> bool:
    if "..." in dims:
        named = [dim for dim in dims if dim != "..."]
        if len(shape) < len(named):
            return False
        shape = shape[: len(named)] if dims[-1] == "..." else shape[len(shape) - len(named) :]
        dims = named
    if len(shape) != len(dims):
        return False
    return all(dim == "_" or sizes.setdefault(dim, size) == size for dim, size in zip(dims, shape, strict=True))


def same_shape(*names: str) -> Check:
    """Tensors of one shape; in lists, those at the same place of each. Absent ones and empty lists fit."""

    def check(given: Arguments) -> None:
        present = [(name, _listed(given[name])) for name in names if given.get(name) is not None]
        present = [(name, tensors) for name, tensors in present if tensors]
        for name, tensors in present[1:]:
            first, others = present[0]
            if [tuple(t.shape) for t in tensors] != [tuple(t.shape) for t in others]:
                raise ValueError(
                    f"{name} has {_describe(tensors)}, but {first} has {_describe(others)}; they must be the same"
                )

    return check


def same_dtype(*names: str) -> Check:
    def check(given: Arguments) -> None:
        present = [(name, tensor) for name in names for tensor in _listed(given.get(name))]
        for name, tensor in present[1:]:
            first, expected = present[0][0], present[0][1].dtype
            if tensor.dtype is not expected:
                raise ValueError(f"{name} is of {tensor.dtype}, but {first} is of {expected}; they must be the same")

    return check


def in_range(name: str, size: Callable[[Arguments], int], lowest: int = 0) -> Check:
    """Indices from `lowest` up to a size that depends on other arguments."""

    def check(given: Arguments) -> None:
        indices = given.get(name)
        if indices is None:
            return
        if isinstance(indices, torch.Tensor):
            if not indices.numel():
                return
            low, high = [int(value) for value in torch.stack(indices.aminmax()).tolist()]
        else:
            low, high = min(indices, default=lowest), max(indices, default=lowest)
        bound = size(given)
        if low < lowest or high >= bound:
            raise IndexError(
                f"{name} has values from {low} to {high}, out of range: they must be from {lowest} to {bound - 1}"
            )

    return check


def as_forward_gives(forward: str, arguments: str, *names: str) -> Check:
    """Tensors of the shape that the forward op makes of the given arguments, which torch's shape function tells."""
    used = arguments.split()

    def check(given: Arguments) -> None:
        values = tuple([_hashable(given.get(name)) for name in used])
        _require_shape(given, names, _forward_shape(forward, values), f"{forward} gives that of {used[0]}")

    return check


@lru_cache(maxsize=4096)
def _forward_shape(forward: str, values: tuple[Any, ...]) -> tuple[int, ...]:
    namespace, op, overload = forward.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), op), overload)
    made = function(*[_without_bytes(value) for value in values])
    return tuple((made if isinstance(made, torch.Tensor) else made[0]).shape)


def _hashable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Tensor(tuple(value.shape), value.dtype)
    return tuple(value) if isinstance(value, list) else value


def _without_bytes(value: Any) -> Any:
    if isinstance(value, _Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return list(value) if isinstance(value, tuple) else value


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


def _require_shape(given: Arguments, names: Sequence[str], expected: Sequence[int], why: str) -> None:
    for name in names:
        if given.get(name) is not None and tuple(given[name].shape) != tuple(expected):
            raise ValueError(f"{name} has shape {list(given[name].shape)}, but must have {list(expected)}: {why}")


def compact(*names: str) -> Check:
    """Kernels that count on tensors without gaps or repetitions get such copies. Formats without gaps stay."""

    def check(given: Arguments) -> dict[str, Any]:
        return {
            name: value.contiguous() for name in names if (value := given.get(name)) is not None and _has_gaps(value)
        }

    return check


def _has_gaps(tensor: torch.Tensor) -> bool:
    return not torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def dense(*names: str) -> Check:
    """Tensors that are written to, by kernels that count on memory without gaps or repetitions."""

    def check(given: Arguments) -> None:
        for name in names:
            if not given[name].is_contiguous():
                raise ValueError(f"{name} has strides {given[name].stride()}; it must be contiguous to be written to")

    return check


def length(name: str, number: int) -> Check:
    def check(given: Arguments) -> None:
        if len(given[name]) != number:
            raise ValueError(f"{name} has {len(given[name])} numbers, but must have {number}")

    return check


def _listed(value: Any) -> list[torch.Tensor]:
    if value is None:
        return []
    return [value] if isinstance(value, torch.Tensor) else [item for item in value if item is not None]


def _describe(tensors: Sequence[torch.Tensor]) -> str:
    return f"shapes {', '.join([str(list(tensor.shape)) for tensor in tensors])}"


# Checks of single families


def _dims_exist(given: Arguments) -> None:
    rank = given["self"].dim()
    wrong = [dim for dim in given["dim"] if not -max(rank, 1) <= dim < max(rank, 1)]
    if wrong:
        raise IndexError(f"dim {wrong[0]} is out of range for a tensor of {rank} dims")


def _has_statistics(given: Arguments) -> None:
    training = given.get("training", given.get("train", True))
    if not training and (given.get("running_mean") is None or given.get("running_var") is None):
        raise ValueError("running_mean and running_var are needed where training is False")


def _saved_statistics(given: Arguments) -> None:
    """In training, statistics of the batch were saved; otherwise the running ones are used, and none are saved."""
    channels = given["input"].shape[1]
    for name in {"save_mean", "save_invstd", "save_var"} & set(given):
        saved = given[name]
        if given.get("train", given.get("update")) and (saved is None or tuple(saved.shape) != (channels,)):
            raise ValueError(f"{name} must have the {channels} numbers that the forward op saved")


def _valid_ctc(given: Arguments) -> None:
    """Targets are class numbers as far as `target_lengths` says; what is behind that is padding, and never read."""
    steps, batch, classes = given["log_probs"].shape
    targets, lengths = given["targets"], _numbers(given["target_lengths"])
    if len(lengths) != batch or len(_numbers(given["input_lengths"])) != batch:
        raise ValueError(f"input_lengths and target_lengths must have a number for each of the {batch} rows")
    in_range("input_lengths", lambda _: steps + 1)(given)
    longest = targets.shape[1] if targets.dim() == 2 else targets.numel()
    in_range("target_lengths", lambda _: longest + 1)(given)
    if targets.dim() == 2:
        _require_shape(given, ("targets",), (batch, longest), "it has a row for each one of log_probs")
        places = torch.arange(longest, device=targets.device)
        used = targets[places < torch.tensor(lengths, device=targets.device).unsqueeze(1)]
    elif targets.dim() == 1 and sum(lengths) == longest:
        used = targets
    else:
        raise ValueError(f"targets has shape {list(targets.shape)}, but target_lengths sum to {sum(lengths)}")
    in_range("targets", lambda _: classes)({"targets": used})


def _valid_ctc_backward(given: Arguments) -> None:
    steps, batch, _ = given["log_probs"].shape
    lengths = _numbers(given["target_lengths"])
    places = 2 * max(lengths, default=0) + 1
    _require_shape(given, ("log_alpha",), (batch, steps, places), "the forward op gives that")
    _require_shape(given, ("grad", "neg_log_likelihood"), (batch,), "one number for each row")


def _numbers(value: Any) -> list[int]:
    return [int(number) for number in value.reshape(-1).tolist()] if isinstance(value, torch.Tensor) else list(value)


def _valid_fused_step(given: Arguments) -> None:
    """Lists that belong together have as many tensors; empty ones are those that the settings make unnecessary."""
    number = len(given["self"])
    needed = {"grads", "exp_avgs", "exp_avg_sqs", "state_sums", "state_steps"} & set(given)
    needed |= {"max_exp_avg_sqs"} if given.get("amsgrad") else set()
    needed |= {"momentum_buffer_list"} if given.get("momentum") else set()
    for name in sorted(needed):
        if len(given[name]) != number:
            raise ValueError(f"{name} has {len(given[name])} tensors where self has {number}")
    for name in ("state_steps", "lr", "grad_scale", "found_inf"):
        for tensor in _listed(given[name]) if not isinstance(given.get(name), float | int) and name in given else ():
            if tensor.numel() != 1:
                raise ValueError(f"{name} must have tensors of one number, but has shape {list(tensor.shape)}")


def _same_strides(given: Arguments) -> dict[str, Any]:
    """Fused steps walk through the memory of all tensors of a parameter at once. A gradient that lies otherwise is
    copied; the state of the optimizer is written to, so it cannot be."""
    for name in ("self", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_sums", "momentum_buffer_list"):
        for tensor, parameter in zip(_listed(given.get(name)), given["self"], strict=False):
            if tensor.stride() != parameter.stride() or _has_gaps(tensor):
                raise ValueError(f"{name} has strides {tensor.stride()} where those of self are {parameter.stride()}")
    pairs = list(zip(given["grads"], given["self"], strict=True))
    if all(gradient.stride() == parameter.stride() for gradient, parameter in pairs):
        return {}
    if given.get("grad_scale") is not None:
        raise ValueError("grads, which are scaled in place, must have the strides of self")
    return {"grads": [torch.empty_like(parameter).copy_(gradient) for gradient, parameter in pairs]}


def _valid_attention(given: Arguments) -> None:
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


def _valid_attention_backward(given: Arguments) -> None:
    query = given["query"]
    _require_shape(given, ("grad_out", "out"), tuple(query.shape), "the forward op gives the shape of query")
    _require_shape(given, ("logsumexp",), tuple(query.shape[:-1]), "one number for each row of query")


def _valid_segments(given: Arguments) -> None:
    """Segments that are in `data`: no negative lengths, offsets that ascend, an end that is not behind the last row."""
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


def _valid_segments_backward(given: Arguments) -> None:
    data, axis = given["data"], given["axis"]
    by_length = given.get("lengths") is not None
    segments = given["lengths"] if by_length else given["offsets"]
    number = segments.shape[-1] - (0 if by_length else 1)
    expected = (*data.shape[:axis], number, *data.shape[axis + 1 :])
    _require_shape(given, ("grad", "output"), expected, "the forward op gives that")


def _pooled(spatial: int) -> Check:
    """The gradient of pooling `spatial` dims: indices into each plane of `self`, one for each number of the result."""

    def check(given: Arguments) -> None:
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


def _valid_unfold_gradient(given: Arguments) -> None:
    source = torch.empty(given["input_sizes"], device="meta").unfold(given["dim"], given["size"], given["step"])
    _require_shape(given, ("grad_in",), tuple(source.shape), f"unfold gives that of {list(given['input_sizes'])}")


def _valid_norm_gradient(given: Arguments) -> None:
    input, inner = given["input"], tuple(given["normalized_shape"])
    outer = input.dim() - len(inner)
    if not inner or outer < 0 or tuple(input.shape[outer:]) != inner:
        raise ValueError(f"input has shape {list(input.shape)}, which does not end with {list(inner)}")
    _require_shape(given, ("weight", "bias"), inner, "that of normalized_shape")
    for name in ("mean", "rstd"):
        if given[name].numel() != prod(input.shape[:outer]):
            raise ValueError(f"{name} has shape {list(given[name].shape)}, but must have a number for each row")


def _valid_group_norm(given: Arguments) -> None:
    batch, channels, size, groups = given["N"], given["C"], given["HxW"], given["group"]
    input = given["input"]
    if min(batch, channels, size) < 0 or groups < 1 or channels % groups or input.numel() != batch * channels * size:
        raise ValueError(f"input of shape {list(input.shape)} is not {batch} x {channels} x {size} in {groups} groups")
    if input.dim() < 2 or tuple(input.shape[:2]) != (batch, channels):
        raise ValueError(f"input of shape {list(input.shape)} does not start with {batch} x {channels}")
    _require_shape(given, ("weight", "bias"), (channels,), "one number for each channel")
    _require_shape(given, ("mean", "rstd"), (batch, groups), "one number for each group")


def _valid_class_numbers(given: Arguments) -> None:
    """Targets are class numbers or `ignore_index`."""
    target, ignored = given["target"], given["ignore_index"]
    in_range("target", lambda _: given["self"].shape[-1])({"target": target[target != ignored]})


def _valid_pivots(given: Arguments) -> None:
    """Rows are counted from 1. Negative numbers are of 2 x 2 blocks, so they come in pairs."""
    factors, pivots = given["LD"], given["pivots"]
    size = factors.shape[-1] if factors.dim() >= 2 else 0
    if factors.dim() < 2 or factors.shape[-2] != size or pivots.shape != factors.shape[:-1]:
        raise ValueError(f"pivots of shape {list(pivots.shape)} do not fit LD of shape {list(factors.shape)}")
    in_range("pivots", lambda _: size + 1, lowest=1)({"pivots": pivots.abs()})
    for row in pivots.reshape(-1, size).tolist() if size else ():
        runs = "".join(["-" if pivot < 0 else " " for pivot in row]).split()
        if any(len(run) % 2 for run in runs):
            raise IndexError(f"pivots {row} have a block of one row; negative ones come in pairs")


def _valid_lu_pivots(given: Arguments) -> None:
    factors, pivots = given["LU_data"], given["LU_pivots"]
    if factors.dim() < 2 or tuple(pivots.shape) != (*factors.shape[:-2], min(factors.shape[-2:])):
        raise ValueError(f"LU_pivots of shape {list(pivots.shape)} do not fit LU_data of shape {list(factors.shape)}")
    in_range("LU_pivots", lambda _: factors.shape[-2] + 1, lowest=1)(given)


def _is_finite(given: Arguments) -> None:
    if not bool(given["self"].isfinite().all()):
        raise ValueError("self must not contain infs or nans")


def _has_exponential(given: Arguments) -> None:
    if given["self"].dtype not in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        raise ValueError(f"there is no matrix exponential of {given['self'].dtype}; use float32 or float64")


def _quotient_exists(given: Arguments) -> None:
    """The processor traps where the lowest integer is divided by -1: the quotient is not in the dtype's range."""
    dividend, divisor = given["self"], given["other"]
    if given["rounding_mode"] != "trunc" or dividend.dtype.is_floating_point or dividend.dtype not in _LOWEST:
        return
    if bool((torch.as_tensor(divisor) == -1).any()) and _has_lowest(dividend):
        raise ValueError(f"{_LOWEST[dividend.dtype]} divided by -1 is not in the range of {dividend.dtype}")


def _multiple_exists(given: Arguments) -> None:
    for name in ("self", "other"):
        if given[name].dtype in _LOWEST and _has_lowest(given[name]):
            raise ValueError(f"{name} contains {_LOWEST[given[name].dtype]}, whose absolute value is not in its range")


_LOWEST = {dtype: torch.iinfo(dtype).min for dtype in (torch.int64, torch.int32)}


def _has_lowest(tensor: torch.Tensor) -> bool:
    return bool((tensor == _LOWEST[tensor.dtype]).any())


def _power_exists(given: Arguments) -> None:
    if given["n"] <= _LOWEST[torch.int64]:
        raise ValueError(f"the power {given['n']} has no positive counterpart in 64 bits")


def _steps_advance(given: Arguments) -> None:
    out = given.get("out")
    dtype = out.dtype if out is not None else given.get("dtype")
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex) and int(given["step"]) == 0:
        raise ValueError(f"step {given['step']} is 0 as {dtype}")


def _result_has_strides(given: Arguments) -> None:
    if 0 in given["out"].stride():
        raise ValueError(f"out has strides {given['out'].stride()}; those of 0 cannot be written to")


def _scales_fit(given: Arguments) -> None:
    """Antialiasing looks at as many rows of the input as the scale says, wherever the input ends."""
    sizes = given["self"].shape[-2:]
    for name, before, after in zip(("scales_h", "scales_w"), sizes, given["output_size"], strict=True):
        scale = given.get(name)
        if scale is not None and (scale <= 0 or floor(before * scale) != after):
            raise ValueError(f"{name} {scale} of {before} does not give the {after} of output_size")


def _valid_weight_norm(given: Arguments) -> None:
    vector, dim = given["v"], given["dim"]
    if not vector.numel() or dim not in (0, vector.dim() - 1):
        raise ValueError(f"v of shape {list(vector.shape)} has no norms over all dims but {dim}")
    expected = [size if place == dim else 1 for place, size in enumerate(vector.shape)]
    _require_shape(given, ("g",), expected, "one number for each norm of v")


def _valid_weight_norm_gradient(given: Arguments) -> None:
    _valid_weight_norm({"v": given["saved_v"], "g": given["saved_g"], "dim": given["dim"]})
    same_shape("saved_v", "grad_w")(given)
    same_shape("saved_g", "saved_norms")(given)


def _valid_rnn(given: Arguments) -> None:
    """One layer and direction of an LSTM."""
    hidden = given["hidden_size"]
    input = given["input"]
    if given["mode"] != 2 or hidden < 1 or given["batch_sizes"]:
        raise ValueError("only a layer of an LSTM (mode 2) over padded sequences (no batch_sizes) can be run")
    shapes("input: T N I; weight0: G I; weight1: G H; weight2: G; weight3: G; hx_: N H; cx_: N H")(given)
    if not input.numel() or tuple(given["weight1"].shape) != (4 * hidden, hidden):
        raise ValueError(f"weight1 has shape {list(given['weight1'].shape)}, but must have {[4 * hidden, hidden]}")
    if any(given[name].dtype is not input.dtype for name in ("weight0", "weight1", "weight2", "weight3", "hx_", "cx_")):
        raise ValueError(f"all tensors must be of the dtype of input, {input.dtype}")


# Ops and their checks. The name of an op stands for its overloads and its in-place variant; with the overload's name
# it stands for that one.
_BATCH_NORM = (
    shapes("input: N C ...; weight: C; bias: C; running_mean: C; running_var: C"),
    _has_statistics,
    compact("weight", "bias"),
)
_BATCH_NORM_GRADIENT = (
    *_BATCH_NORM,
    same_shape("input", "grad_out"),
    _saved_statistics,
)
_SOFTMAX_GRADIENT = (same_shape("output", "grad_output"),)
_FUSED_STEP = (
    _valid_fused_step,
    same_shape("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_sums", "momentum_buffer_list"),
    same_dtype("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_sums", "momentum_buffer_list"),
    _same_strides,
)
_CTC = (shapes("log_probs: T N C"), _valid_ctc)


def _pool_gradient(forward: str, arguments: str, spatial: int) -> tuple[Check, ...]:
    lists = [name for name in ("kernel_size", "padding", "dilation") if name in arguments.split()]
    return (*[length(name, spatial) for name in lists], as_forward_gives(forward, arguments, "grad_output"))


def _pad_gradient(kind: str, spatial: int) -> tuple[Check, ...]:
    forward = as_forward_gives(f"aten.{kind}_pad{spatial}d.default", "self padding", "grad_output")
    return (length("padding", 2 * spatial), forward)


_MAX_POOL = "self kernel_size stride padding dilation ceil_mode"
_AVG_POOL = "self kernel_size stride padding ceil_mode count_include_pad divisor_override"
_GRID = "input grid interpolation_mode padding_mode align_corners"

CHECKS: dict[str, tuple[Check, ...]] = {
    "_batch_norm_with_update": _BATCH_NORM,
    "_batch_norm_with_update_functional": _BATCH_NORM,
    "_batch_norm_no_update": (*_BATCH_NORM, lambda given: _has_statistics({**given, "training": False})),
    "_native_batch_norm_legit": _BATCH_NORM,
    "_native_batch_norm_legit_functional": _BATCH_NORM,
    "_native_batch_norm_legit_no_training": (*_BATCH_NORM, lambda given: _has_statistics({**given, "training": False})),
    "native_batch_norm": _BATCH_NORM,
    "native_batch_norm_backward": _BATCH_NORM_GRADIENT,
    "batch_norm_backward": _BATCH_NORM_GRADIENT,
    "batch_norm_update_stats": _BATCH_NORM,
    "native_group_norm": (_valid_group_norm, compact("input", "weight", "bias")),
    "native_group_norm_backward": (
        _valid_group_norm,
        same_shape("input", "grad_out"),
        compact("grad_out", "input", "mean", "rstd", "weight"),
    ),
    "native_layer_norm_backward": (same_shape("input", "grad_out"), _valid_norm_gradient, compact("mean", "rstd")),
    "_cdist_backward": (as_forward_gives("aten._cdist_forward.default", "x1 x2 p compute_mode", "grad", "cdist"),),
    "_ctc_loss": _CTC,
    "_ctc_loss_backward": (*_CTC, _valid_ctc_backward),
    "_embedding_bag": (compact("indices", "offsets", "per_sample_weights"),),
    "_embedding_bag_forward_only": (compact("indices", "offsets", "per_sample_weights"),),
    "_fft_c2c": (_dims_exist,),
    "_fft_c2r": (_dims_exist,),
    "_fft_r2c": (_dims_exist,),
    "_fused_adam": _FUSED_STEP,
    "_fused_adamw": _FUSED_STEP,
    "_fused_sgd": _FUSED_STEP,
    "_fused_adagrad": _FUSED_STEP,
    "_log_softmax_backward_data": _SOFTMAX_GRADIENT,
    "_softmax_backward_data": _SOFTMAX_GRADIENT,
    "_scaled_dot_product_flash_attention_for_cpu": (_valid_attention,),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (_valid_attention, _valid_attention_backward),
    "segment_reduce": (_valid_segments,),
    "_segment_reduce_backward": (_valid_segments, _valid_segments_backward),
    "_upsample_bilinear2d_aa.default": (length("output_size", 2), _scales_fit),
    "_upsample_bilinear2d_aa.out": (length("output_size", 2), _scales_fit),
    "_weight_norm_interface": (_valid_weight_norm, same_dtype("v", "g")),
    "_weight_norm_interface_backward": (_valid_weight_norm_gradient, same_dtype("saved_v", "saved_g", "grad_w")),
    "adaptive_max_pool2d_backward": (_pooled(2), compact("indices")),
    "adaptive_max_pool3d_backward": (_pooled(3), compact("indices")),
    "fractional_max_pool2d_backward": (_pooled(2), compact("indices")),
    "fractional_max_pool3d_backward": (_pooled(3), compact("indices")),
    "max_pool2d_with_indices_backward": (
        *_pool_gradient("aten.max_pool2d_with_indices.default", _MAX_POOL, 2),
        _pooled(2),
        compact("indices"),
    ),
    "max_pool3d_with_indices_backward": (
        *_pool_gradient("aten.max_pool3d_with_indices.default", _MAX_POOL, 3),
        _pooled(3),
        compact("indices"),
    ),
    "avg_pool2d_backward": _pool_gradient("aten.avg_pool2d.default", _AVG_POOL, 2),
    "avg_pool3d_backward": _pool_gradient("aten.avg_pool3d.default", _AVG_POOL, 3),
    "grid_sampler_2d_backward": (as_forward_gives("aten.grid_sampler_2d.default", _GRID, "grad_output"),),
    "grid_sampler_3d_backward": (as_forward_gives("aten.grid_sampler_3d.default", _GRID, "grad_output"),),
    **{
        f"{kind}_pad{spatial}d_backward": _pad_gradient(kind, spatial)
        for kind in ("reflection", "replication")
        for spatial in (1, 2, 3)
    },
    "unfold_backward": (_valid_unfold_gradient,),
    "multi_margin_loss_backward": (
        as_forward_gives("aten.multi_margin_loss.default", "self target p margin weight reduction", "grad_output"),
    ),
    "multilabel_margin_loss_backward": (
        as_forward_gives("aten.multilabel_margin_loss_forward.default", "self target reduction", "grad_output"),
    ),
    "nll_loss_backward": (_valid_class_numbers,),
    "rrelu_with_noise": (same_shape("self", "noise", "out"), dense("noise")),
    "mkldnn_rnn_layer": (_valid_rnn,),
    "linalg_ldl_solve": (_valid_pivots,),
    "lu_unpack": (_valid_lu_pivots,),
    "linalg_eigvals": (_is_finite,),
    "linalg_matrix_exp": (_has_exponential,),
    "linalg_matrix_power": (_power_exists,),
    "lcm": (_multiple_exists,),
    "div.Tensor_mode": (_quotient_exists,),
    "div.Scalar_mode": (_quotient_exists,),
    "div.out_mode": (_quotient_exists,),
    "divide.Tensor_mode": (_quotient_exists,),
    "divide.Scalar_mode": (_quotient_exists,),
    "divide.out_mode": (_quotient_exists,),
    "range.out": (_steps_advance,),
    "range.step": (_steps_advance,),
    "stack.out": (_result_has_strides,),
    "_foreach_copy": (same_shape("self", "src"),),
}
