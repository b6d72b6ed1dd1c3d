"""Creation ops, shard by shard."""

from typing import Any

import pytest
import torch

from gt.core.signatures import Scalar
from gt.sharding.op_calls import OpCall
from gt.sharding.rules import rule_of
from tests.sharding.simulate import check, meta_of

CPU = torch.device("cpu")
SIZES = [[5, 3], [1], [2, 0, 3]]


@pytest.fixture
def any_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare shapes and dtypes only: what random and empty tensors hold is not the rule's affair."""

    def assert_alike(found: torch.Tensor, expected: torch.Tensor, **_: Any) -> None:
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)

    monkeypatch.setattr(torch.testing, "assert_close", assert_alike)


@pytest.mark.parametrize("size", SIZES)
def test_constants(size: list[int]) -> None:
    check("aten.zeros.default", size, device=CPU)
    check("aten.ones.default", size, dtype=torch.int32, device=CPU)
    check("aten.full.default", size, 2.5, device=CPU)
    check("aten.full.default", size, 2, dtype=torch.bfloat16, device=CPU)


def test_no_dims_to_cut() -> None:
    meta = meta_of(torch.tensor(1.0))
    rule = rule_of(OpCall("aten.scalar_tensor.default", (Scalar(0),), {}, (), (meta,)))
    assert rule is not None and not rule.factors


@pytest.mark.parametrize("size", [[5, 3], [4], [2, 1, 3]])
def test_constants_by_example(size: list[int]) -> None:
    example = torch.randn(5, 3, dtype=torch.float64)
    check("aten.new_zeros.default", example, size)
    check("aten.new_ones.default", example, size, dtype=torch.int64)
    check("aten.new_full.default", example, size, 7)


def test_constants_like_another() -> None:
    example = torch.randn(5, 3)
    check("aten.zeros_like.default", example)
    check("aten.ones_like.default", example, dtype=torch.int64)
    check("aten.full_like.default", example, 7)
    check("aten.zeros_like.default", torch.randn(2, 3, 4, 4), memory_format=torch.channels_last)


@pytest.mark.usefixtures("any_values")
def test_memory_without_values() -> None:
    example = torch.randn(5, 3)
    check("aten.empty.memory_format", [5, 3], dtype=torch.int64, device=CPU)
    check("aten.empty_permuted.default", [5, 3], [1, 0], device=CPU)
    check("aten.empty_strided.default", [5, 3], [1, 5], device=CPU)
    check("aten.new_empty.default", example, [4, 2])
    check("aten.new_empty_strided.default", example, [4, 2], [1, 4])
    check("aten.empty_like.default", example)


@pytest.mark.usefixtures("any_values")
def test_random_numbers() -> None:
    example = torch.randn(5, 3)
    check("aten.rand.default", [5, 3], device=CPU)
    check("aten.randn.default", [5, 3], dtype=torch.float64, device=CPU)
    check("aten.randint.default", 9, [5, 3], device=CPU)
    check("aten.randint.low", 3, 9, [5, 3], device=CPU)
    check("aten.normal.float_float", 0.0, 1.0, [5, 3], device=CPU)
    check("aten.rand_like.default", example)
    check("aten.randn_like.default", example)
    check("aten.randint_like.default", example, 9)
    check("aten.randint_like.low_dtype", example, 3, 9)
    check("aten.randint_like.Tensor", example.long(), torch.tensor(9))


@pytest.mark.parametrize("bounds", [(5,), (2, 7), (1, 10, 3), (9, -4, -4), (1,), (2**60, 2**60 + 3)])
def test_ranges_of_whole_numbers(bounds: tuple[int, ...]) -> None:
    op = f"aten.arange.{('default', 'start', 'start_step')[len(bounds) - 1]}"
    check(op, *bounds, device=CPU, tolerance=0)
    if max(bounds) < 100:
        for dtype in (torch.int32, torch.float32, torch.float64, torch.bfloat16):
            check(op, *bounds, dtype=dtype, device=CPU, tolerance=0)


def test_ranges_of_other_numbers_are_exact() -> None:
    check("aten.arange.default", 4.5, device=CPU, tolerance=0)
    check("aten.arange.start_step", 0.1, 3.3, 0.1, device=CPU, tolerance=0)
    check("aten.arange.start_step", 1.7, -20, -0.3, dtype=torch.bfloat16, device=CPU, tolerance=0)
    check("aten.arange.start_step", 0.5, 9, 2.5, dtype=torch.int64, device=CPU, tolerance=0)
    check("aten.range.step", 0.1, 3.3, 0.1, device=CPU, tolerance=0)


@pytest.mark.parametrize("steps", [1, 2, 7, 37])
def test_spaced_numbers_are_exact(steps: int) -> None:
    check("aten.linspace.default", 0.1, 0.9, steps, device=CPU, tolerance=0)
    check("aten.linspace.default", 0, 10, steps, dtype=torch.int64, device=CPU, tolerance=0)
    check("aten.linspace.Tensor_Scalar", torch.tensor(0.1), 0.9, steps, tolerance=0)
    check("aten.logspace.default", 0.1, 0.9, steps, 2.0, device=CPU, tolerance=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_identity_matrices(dtype: torch.dtype) -> None:
    check("aten.eye.default", 5, dtype=dtype, device=CPU)
    check("aten.eye.m", 2, 5, dtype=dtype, device=CPU)
    check("aten.eye.m", 5, 1, dtype=dtype, device=CPU)


def test_indices_of_triangles() -> None:
    check("aten.tril_indices.default", 4, 3, -1, device=CPU)
    check("aten.triu_indices.default", 4, 3, 1, device=CPU)


def test_windows_and_frequencies() -> None:
    for name in ("bartlett", "blackman", "hamming", "hann", "kaiser"):
        check(f"aten.{name}_window.default", 7, device=CPU, tolerance=0)
        check(f"aten.{name}_window.periodic", 7, False, device=CPU, tolerance=0)
    check("aten.fft_fftfreq.default", 7, 0.5, device=CPU, tolerance=0)
    check("aten.fft_rfftfreq.default", 7, 0.5, device=CPU, tolerance=0)


def test_a_permutation_is_not_cut() -> None:
    rule = rule_of(OpCall("aten.randperm.default", (5,), {}, (), (meta_of(torch.arange(5)),)))
    assert str(rule) == " -> d0 | whole: d0"
