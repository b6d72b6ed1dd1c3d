"""Matrix products, shard by shard."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.simulate import MESHES, check

DTYPES = [torch.float32, torch.int64, torch.complex64]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(-5, 5, shape, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(5, 7, 3), (1, 2, 5), (4, 1, 1), (3, 0, 2)])
def test_products_of_matrices(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    i, k, j = sizes
    check("aten.mm.default", numbers(i, k, dtype=dtype), numbers(k, j, dtype=dtype))
    check("aten.mv.default", numbers(i, k, dtype=dtype), numbers(k, dtype=dtype))
    check("aten.bmm.default", numbers(3, i, k, dtype=dtype), numbers(3, k, j, dtype=dtype), meshes=MESHES[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [(3,), (5, 3), (1, 3), (5, 1), (), (1,)])
def test_bias_is_added_once(bias: tuple[int, ...], dtype: torch.dtype) -> None:
    scales = {"beta": 2, "alpha": 3}
    c, a, b = numbers(*bias, dtype=dtype), numbers(5, 7, dtype=dtype), numbers(7, 3, dtype=dtype)
    check("aten.addmm.default", c, a, b, meshes=MESHES[1:], **scales)
    check("aten.addr.default", c, a[:, 0].clone(), b[0].clone(), meshes=MESHES[1:], **scales)
    batch_a, batch_b = numbers(3, 5, 2, dtype=dtype), numbers(3, 2, 3, dtype=dtype)
    check("aten.addbmm.default", c, batch_a, batch_b, meshes=MESHES[2:], **scales)
    check("aten.baddbmm.default", c, batch_a, batch_b, meshes=MESHES[2:], **scales)


def test_bias_of_a_product_with_a_vector() -> None:
    for bias in ((5,), (1,), ()):
        check("aten.addmv.default", torch.randn(bias), torch.randn(5, 3), torch.randn(3), beta=0.5, alpha=2)
    check("aten.addmv.default", torch.randn(5), torch.randn(5, 1), torch.randn(1))


def test_bias_that_is_ignored_may_be_nan() -> None:
    check("aten.addmm.default", torch.full((3,), torch.nan), torch.randn(5, 4), torch.randn(4, 3), beta=0)


def test_bias_without_a_product() -> None:
    check("aten.addmm.default", torch.randn(3), torch.randn(5, 0), torch.randn(0, 3))


def test_wide_sums_of_narrow_numbers() -> None:
    a, b = torch.randint(-9, 9, (5, 16), dtype=torch.int8), torch.randint(-9, 9, (16, 8), dtype=torch.int8)
    check("aten._int_mm.default", a, b)
    check("aten.mm.default", torch.randn(5, 4).bfloat16(), torch.randn(4, 3).bfloat16(), tolerance=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5, 2, 1])
def test_products_of_vectors(size: int, dtype: torch.dtype) -> None:
    check("aten.dot.default", numbers(size, dtype=dtype), numbers(size, dtype=dtype))
    check("aten.vdot.default", numbers(size, dtype=dtype), numbers(size, dtype=dtype))
    check("aten.ger.default", numbers(size, dtype=dtype), numbers(3, dtype=dtype))


@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
def test_linear(batch: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(*batch, 4), torch.randn(3, 4), torch.randn(3)
    check("aten.linear.default", x, weight, bias, meshes=MESHES[1:])
    check("aten.linear.default", x, weight, meshes=MESHES[1:])


def test_bilinear() -> None:
    x, weight, y = torch.randn(5, 3), torch.randn(2, 3, 4), torch.randn(5, 4)
    check("aten._trilinear.default", x, weight, y, [1, 3], [0], [1, 2], [2, 3])
    check("aten._trilinear.default", torch.randn(5, 2), weight, y, [2, 3], [0], [1, 2], [1, 3], meshes=MESHES[2:])
