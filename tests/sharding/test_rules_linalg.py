"""Linear algebra, shard by shard."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.simulate import check, resolve

BATCHES = [(5,), (2, 3)]


def regular(*batch, size=3, dtype=torch.float32):
    """Matrices that are positive and far from singular."""
    a = torch.randn(*batch, size, size, dtype=dtype)
    return a @ a.mH + 2 * torch.eye(size, dtype=dtype)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "op",
    [
        "linalg_inv_ex", "linalg_cholesky_ex", "cholesky_inverse", "linalg_matrix_exp", "_linalg_det",
        "_linalg_slogdet", "_linalg_eigh", "linalg_eig", "_linalg_eigvals", "_linalg_svd", "linalg_qr", "geqrf",
        "linalg_lu", "linalg_lu_factor_ex", "linalg_ldl_factor_ex",
    ],
)  # fmt: skip
def test_batches_of_square_matrices_are_cut(op, batch):
    check(f"aten.{op}.default", regular(*batch), tolerance=1e-3)


def test_results_that_are_not_asked_for():
    a = torch.randn(5, 4, 3)
    check("aten._linalg_svd.default", a, True, True)
    check("aten._linalg_svd.default", a, False, False)
    check("aten._linalg_eigh.default", regular(5), "U", False)
    check("aten.linalg_qr.default", a, "r")
    check("aten.linalg_qr.default", a, "complete")
    factors, pivots, _ = resolve("aten.linalg_lu_factor_ex.default")(a)
    check("aten.lu_unpack.default", factors, pivots)
    check("aten.lu_unpack.default", factors, pivots, False, True)


def test_right_hand_sides_are_cut_by_batch_and_column():
    a, b = regular(5), torch.randn(5, 3, 2)
    factors, pivots, _ = resolve("aten.linalg_lu_factor_ex.default")(a)
    check("aten._linalg_solve_ex.default", a, b)
    check("aten.linalg_lu_solve.default", factors, pivots, b, adjoint=True)
    check("aten.linalg_solve_triangular.default", a, b, upper=True)
    check("aten.cholesky_solve.default", b, a)
    data, swaps, _ = resolve("aten.linalg_ldl_factor_ex.default")(a)
    check("aten.linalg_ldl_solve.default", data, swaps, b)


def test_the_unknown_may_be_on_the_left():
    a, b = regular(5), torch.randn(5, 2, 3)
    factors, pivots, _ = resolve("aten.linalg_lu_factor_ex.default")(a)
    check("aten._linalg_solve_ex.default", a, b, left=False)
    check("aten.linalg_lu_solve.default", factors, pivots, b, left=False)
    check("aten.linalg_solve_triangular.default", a, b, upper=False, left=False)


def test_batches_are_broadcast():
    a, b = regular(3), torch.randn(2, 1, 3, 2)
    factors, pivots, _ = resolve("aten.linalg_lu_factor_ex.default")(a)
    check("aten._linalg_solve_ex.default", a, b)
    check("aten.linalg_lu_solve.default", factors, pivots, b)
    check("aten.linalg_solve_triangular.default", a, b, upper=True)
    check("aten.cholesky_solve.default", b, a)
    check("aten.linalg_lu_solve.default", factors[0], pivots[0], b[:, 0])


@pytest.mark.parametrize("b", [torch.randn(3), torch.randn(5, 3)])
def test_right_hand_sides_may_be_vectors(b):
    check("aten._linalg_solve_ex.default", regular(5), b)


def test_least_squares():
    a = torch.randn(5, 4, 3)
    check("aten.linalg_lstsq.default", a, torch.randn(5, 4, 2), tolerance=1e-3)
    check("aten.linalg_lstsq.default", a, torch.randn(5, 4), tolerance=1e-3)
    check("aten.linalg_pinv.atol_rtol_tensor", a, tolerance=1e-3)
    check("aten.linalg_pinv.atol_rtol_tensor", a, atol=torch.full((5,), 1e-3), tolerance=1e-3)
    with pytest.raises(AssertionError, match="no rule"):
        check("aten.linalg_lstsq.default", a, torch.randn(5, 4, 2), driver="gelsd")


def test_reflections():
    a, tau = torch.randn(5, 4, 3), torch.randn(5, 2)
    check("aten.linalg_householder_product.default", a, tau)
    check("aten.ormqr.default", a, torch.randn(5, 3), torch.randn(5, 4, 2))


def test_cross_product():
    check("aten.linalg_cross.default", torch.randn(5, 3), torch.randn(5, 3))
    check("aten.linalg_cross.default", torch.randn(3, 1, 2), torch.randn(3, 5, 1), dim=0)
