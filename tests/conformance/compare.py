"""Results observed on one side, and their comparison with those of the other."""

from __future__ import annotations

import os
import re
import traceback
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

import gt
from gt.client.tensor import Tensor

_GT_ROOT = os.path.dirname(os.path.abspath(gt.__file__))
_REASON_LENGTH = 300


class Exactness(Enum):
    """How much of a result is determined."""

    VALUES = "values"
    SUMS = "sums"  # values, but sums may be made in another order, so that small ones next to large ones differ
    FORMULAS = "formulas"  # values; torch may choose another formula, so that 16-bit floats are rounded elsewhere
    METADATA = "metadata"  # random numbers, uninitialised memory: dtype, shape, strides


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """A tensor as a result or an input after the call."""

    value: torch.Tensor
    stride: tuple[int, ...]
    requires_grad: bool
    on_gt: bool


@dataclass(frozen=True, slots=True)
class Returned:
    tree: Any


@dataclass(frozen=True, slots=True)
class Raised:
    reason: str


Outcome: TypeAlias = Returned | Raised


def observe(tree: Any) -> Returned:
    """Reads every tensor, so what failed on a worker raises here at the latest."""
    return Returned(tree_map_only(torch.Tensor, _look, tree))


def _look(tensor: torch.Tensor) -> Seen:
    on_gt = isinstance(tensor, Tensor)
    value = tensor.detach()
    stride = tensor.stride() if tensor.layout is torch.strided else ()
    return Seen(value.cpu() if on_gt else value, stride, tensor.requires_grad, on_gt)


def describe_exception(error: BaseException) -> str:
    """Its type and first line, the failing op if a worker names one, and the last line of GT's code that it passed."""
    lines = str(error).splitlines() or [""]
    op = next((line.strip() for line in lines if line.startswith("  issued ")), "")
    notes = "; ".join(filter(None, (op[:_REASON_LENGTH], _place_in_gt(error))))
    return f"{type(error).__name__}: {lines[0][:_REASON_LENGTH]}" + (f" [{notes}]" if notes else "")


def _place_in_gt(error: BaseException) -> str:
    """The worker's side of it, where the error tells that."""
    frames = [(frame.filename, str(frame.lineno)) for frame in traceback.extract_tb(error.__traceback__)]
    frames += re.findall(r'File "(.+?)", line (\d+)', str(error).partition("Traceback of the worker")[2])
    inside = [(file.removeprefix(_GT_ROOT), line) for file, line in frames if file.startswith(_GT_ROOT + os.sep)]
    return f"at gt{inside[-1][0]}:{inside[-1][1]}" if inside else ""


def difference(expected: Returned, actual: Returned, exactness: Exactness) -> str:
    """The first difference, or an empty string."""
    wanted, _ = tree_flatten_with_path(expected.tree)
    got, _ = tree_flatten_with_path(actual.tree)
    if [path for path, _ in wanted] != [path for path, _ in got]:
        return f"structure: torch gives {_paths(wanted)}, GT {_paths(got)}"
    for (path, left), (_, right) in zip(wanted, got, strict=True):
        found = _leaf_difference(left, right, exactness)
        if found:
            return f"{keystr(path)}: {found}"
    return ""


def find_stray(actual: Returned) -> str:
    """A tensor that should be on GT and is not. Zeros, and tensors without elements, may be plain: torch makes them
    itself, inside a composite kernel or for a gradient that is zero, and none of our tensors goes into them."""
    leaves, _ = tree_flatten_with_path(actual.tree)
    plain = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Seen) and not leaf.on_gt]
    strays = [keystr(path) for path, leaf in plain if torch.count_nonzero(leaf.value)]
    return f"{strays[0]}: a plain tensor, not one on GT" if strays else ""


def _paths(leaves: list[tuple[Any, Any]]) -> str:
    return " ".join(keystr(path) for path, _ in leaves) or "nothing"


def _leaf_difference(expected: Any, actual: Any, exactness: Exactness) -> str:
    if isinstance(expected, Seen) and isinstance(actual, Seen):
        return _metadata_difference(expected, actual, exactness) or _value_difference(
            expected.value, actual.value, exactness
        )
    if type(expected) is not type(actual):
        return f"torch gives a {type(expected).__name__}, GT a {type(actual).__name__}"
    same = exactness is Exactness.METADATA or expected == actual
    return "" if same or _close_numbers(expected, actual) else f"torch gives {expected!r}, GT {actual!r}"


def _close_numbers(expected: Any, actual: Any) -> bool:
    if not isinstance(expected, float | complex):
        return False
    return _value_difference(torch.tensor(expected), torch.tensor(actual), Exactness.VALUES) == ""


def _metadata_difference(expected: Seen, actual: Seen, exactness: Exactness) -> str:
    left, right = expected.value, actual.value
    for name in ("dtype", "shape", "layout"):
        if getattr(left, name) != getattr(right, name):
            return f"{name}: torch gives {_short(getattr(left, name))}, GT {_short(getattr(right, name))}"
    if expected.requires_grad != actual.requires_grad:
        return f"requires_grad: torch gives {expected.requires_grad}, GT {actual.requires_grad}"
    if expected.stride != actual.stride and left.numel():
        return f"stride: torch gives {expected.stride}, GT {actual.stride} for {list(left.shape)}"
    return ""


def _value_difference(expected: torch.Tensor, actual: torch.Tensor, exactness: Exactness) -> str:
    if exactness is Exactness.METADATA:
        return ""
    is_rounded = exactness is Exactness.SUMS or (exactness is Exactness.FORMULAS and expected.dtype.itemsize == 2)
    options = _tolerance(expected) if is_rounded else {}
    try:
        torch.testing.assert_close(actual, expected, equal_nan=True, **options)
    except AssertionError as error:
        return "values: " + " ".join(line for line in str(error).splitlines()[:6] if line)
    return ""


def _tolerance(expected: torch.Tensor) -> dict[str, float]:
    """Some roundings of the largest value, and of a few that are one: what cancels has those of what it was made of."""
    floats = expected.is_floating_point() or expected.is_complex()
    if not floats or not expected.numel() or expected.dtype.itemsize == 1:
        return {}
    size = torch.nan_to_num(expected.abs().double(), posinf=0.0).max().item()
    rounding = (16 if expected.dtype.itemsize == 2 else 256) * torch.finfo(expected.dtype).eps
    return {"rtol": rounding, "atol": max(512 * torch.finfo(torch.float32).eps, rounding * size)}


def _short(value: Any) -> str:
    return str(list(value)) if isinstance(value, torch.Size) else str(value)
