"""The rules of shape_rules against torch: the results of its CPU kernels for the samples of its op database."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gt.client.shape_rules import RULES, rule_of
from gt.client.storage import geometry_of
from tests.conformance.formats import FORMATS, FormattedSide, applies_to, can_have, shrink
from tests.conformance.opdb import ops_by_name
from tests.conformance.sides import PlainSide
from tests.conformance.variants import forward_variant
from tests.slow_parameters import some_of

OPS_A_TEST = 80
_NAMES = sorted(ops_by_name(), key=str.lower)
_CHUNKS = [_NAMES[start : start + OPS_A_TEST] for start in range(0, len(_NAMES), OPS_A_TEST)]


class RuleChecker(TorchDispatchMode):
    """Compares the results of every op that has a rule with those of the rule. `known` are the ops whose rule knew the
    results of some call."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[str] = set()
        self.wrong: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = rule_of(func) if all(map(_is_plain, tree_leaves((args, kwargs)))) else None
        given, named = tree_map_only(torch.Tensor, geometry_of, (args, kwargs or {})) if rule is not None else ((), {})
        found = None if rule is None else rule.apply(*given, **named)
        result = func(*args, **(kwargs or {}))
        if found is not None:
            self.known.add(str(func))
            is_view = any(returned.alias_info is not None for returned in func._schema.returns)
            self._compare(f"{func} of {given}, {named}", found, result, is_view)
        return result

    def _compare(self, call: str, found: Any, result: Any, is_view: bool) -> None:
        results = list(result) if isinstance(result, list | tuple) else [result]
        if len(found) != len(results):
            self.wrong.append(f"{call}: {len(found)} results where torch gave {len(results)}")
        for ours, tensor in zip(found, results, strict=False):
            if ours is None or tensor is None:  # gradients that a mask excludes
                continue
            offset = int(tensor.storage_offset()) if is_view else 0
            fits = (tuple(tensor.shape), offset) == (ours.shape, ours.offset)
            if not fits or (tensor.numel() and tensor.stride() != ours.stride):
                self.wrong.append(f"{call}: {ours} where torch gave {tuple(tensor.shape)} {tensor.stride()} {offset}")


def _is_plain(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor):
        return True
    return leaf.layout is torch.strided and not (leaf.is_conj() or leaf.is_neg() or leaf.is_quantized)


def _check(names: list[str], formats: list[str], dtypes: list[torch.dtype], count: int) -> RuleChecker:
    checker = RuleChecker()
    for name, dtype in itertools.product(names, dtypes):
        op = ops_by_name()[name]
        if dtype not in op.dtypes:
            continue
        grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu") and dtype.is_floating_point
        for format_ in (FORMATS.get(name) for name in formats):
            if format_ is not None and not can_have(format_, name):
                continue
            samples = op.sample_inputs("cpu", dtype, requires_grad=grad)
            if format_ is not None:
                samples = (shrink(format_, sample) for sample in samples if applies_to(format_, sample))
            for sample in itertools.islice(samples, count):
                with checker, contextlib.suppress(Exception):  # torch refuses some samples in some formats
                    list(forward_variant(grad).steps(op, sample, FormattedSide(PlainSide(), format_)))
    return checker


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", some_of(_CHUNKS, 4), ids=lambda names: f"{names[0]}..{names[-1]}")
def test_rules_give_what_torch_gives(names):
    """Of permuted inputs. The conformance run checks every result of contiguous ones (GT_CHECK_GEOMETRY)."""
    checker = _check(names, ["permuted"], [torch.float32], 1)
    assert not checker.wrong, "\n".join(checker.wrong[:20])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_rules_give_what_torch_gives_in_all_formats_and_dtypes():
    dtypes = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64]
    checker = _check(_NAMES, ["", *FORMATS], dtypes, 12)
    assert not checker.wrong, "\n".join(checker.wrong[:20])
    assert not set(RULES) - checker.known
