"""Inferred strides against torch: the results of its CPU kernels for the samples of its op database, dims of one
element included."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gt.client.kernel_strides import run_shape_function
from gt.client.op_schema import OpSchema
from gt.client.shape_function_overrides import SHAPE_FUNCTIONS
from gt.client.torch_patches.dispatch import OpOverload
from tests.conformance.formats import FORMATS, FormattedSide, applies_to, can_have, shrink
from tests.conformance.opdb import ops_by_name
from tests.conformance.sides import PlainSide
from tests.conformance.variants import forward_variant

OPS_A_TEST = 80
_NAMES = sorted(ops_by_name(), key=str.lower)
_CHUNKS = [_NAMES[start : start + OPS_A_TEST] for start in range(0, len(_NAMES), OPS_A_TEST)]


class StrideChecker(TorchDispatchMode):
    """Compares the strides of every new tensor that an op makes with the inferred ones."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: dict[str, str] = {}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        op = OpSchema(func, special=False)
        is_checked = tensors and not (op.writes or op.is_special) and all(map(_is_plain, tensors))
        inferred = inferred_results(func, args, kwargs) if is_checked else None
        result = func(*args, **kwargs)
        if inferred is not None:
            self._compare(func, f"{_describe(args)} {_describe(kwargs)}", tree_leaves(inferred), tree_leaves(result))
        return result

    def _compare(self, func: OpOverload, call: str, inferred: list[Any], results: list[Any]) -> None:
        for ours, theirs in zip(inferred, results, strict=False):
            if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor) and theirs.numel():
                self.count += 1
                if ours.shape == theirs.shape and ours.stride() != theirs.stride():
                    self.wrong[str(func)] = f"{call}: {ours.stride()} where torch gave {theirs.stride()}"


def inferred_results(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """The results of an op by its shape function; None if that refuses the call."""
    given, named = tree_map_only(torch.Tensor, _without_bytes, (list(args), dict(kwargs)))
    own = SHAPE_FUNCTIONS.get(str(func))
    with contextlib.suppress(Exception):
        return run_shape_function(func, given, named) if own is None else own(*given, **named)
    return None


def _without_bytes(tensor: torch.Tensor) -> torch.Tensor:
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    memory = torch.empty(count, dtype=tensor.dtype, device="meta")
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _describe(values: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: (tuple(tensor.shape), tensor.stride()), values)


def _check(names: list[str], formats: list[str], dtypes: list[torch.dtype], count: int) -> StrideChecker:
    checker = StrideChecker()
    for name, dtype, format_name in itertools.product(names, dtypes, formats):
        op, format_ = ops_by_name()[name], FORMATS[format_name]
        if dtype not in op.dtypes or not can_have(format_, name):
            continue
        grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu") and dtype.is_floating_point
        samples = op.sample_inputs("cpu", dtype, requires_grad=grad)
        fitting = (shrink(format_, sample) for sample in samples if applies_to(format_, sample))
        for sample in itertools.islice(fitting, count):
            with checker, contextlib.suppress(Exception):  # torch refuses some samples in some formats
                list(forward_variant(grad).steps(op, sample, FormattedSide(PlainSide(), format_)))
    return checker


COMMON = ["abs", "clone", "empty_like", "flip", "isinf", "masked_fill", "native_layer_norm", "nn.functional.batch_norm",
          "nn.functional.group_norm", "roll", "stack", "where"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_strides_of_common_ops_are_torchs_in_dims_of_one_element() -> None:
    formats = [name for name, format_ in FORMATS.items() if format_.shrunk is not None]
    checker = _check(COMMON, formats, [torch.float32, torch.complex64], 2)
    assert not checker.wrong and checker.count > 200, checker.wrong


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", _CHUNKS, ids=lambda names: f"{names[0]}..{names[-1]}")
def test_strides_of_dims_of_one_element_are_torchs(names: list[str]) -> None:
    formats = [name for name, format_ in FORMATS.items() if format_.shrunk is not None]
    checker = _check(names, formats, [torch.float32, torch.complex64], 2)
    assert not checker.wrong, "\n".join(f"{op} of {text}" for op, text in checker.wrong.items())


ATTENTIONS = [(3, 4, 5, 7, 1), (2, 2, 2, 1, 1), (3, 4, 1, 5, 8), (1, 4, 5, 5, 8), (3, 1, 5, 1, 8), (2, 3, 4, 5, 8)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
@pytest.mark.parametrize("sizes", ATTENTIONS, ids=str)
def test_strides_of_attention_are_torchs_in_every_order_of_dims(sizes: Sequence[int], order: Sequence[int]) -> None:
    batch, heads, rows, columns, width = sizes
    places = [order.index(dim) for dim in range(4)]
    operands = [
        torch.randn([(batch, heads, length, width)[dim] for dim in order]).permute(places)
        for length in (rows, columns, columns)
    ]
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    checker = StrideChecker()
    with checker:
        out, logsumexp = attend(*operands)
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            torch.randn_like(out), *operands, out, logsumexp, 0.0, False
        )
    assert not checker.wrong and checker.count >= 5, checker.wrong
