"""Partial values, and scalars with which ops are not linear."""

import math

import pytest
import torch

import gt

INF, NAN = math.inf, math.nan
OPS = {
    "z / 0": lambda z: z / 0,
    "z / -0.0": lambda z: z / -0.0,
    "z / inf": lambda z: z / INF,
    "z * inf": lambda z: z * INF,
    "z * nan": lambda z: z * NAN,
    "-inf * z": lambda z: -INF * z,
    "z + inf": lambda z: z + INF,
    "add by alpha": lambda z: torch.add(z, z, alpha=INF),
    "sub by alpha": lambda z: torch.sub(z, z + 1, alpha=INF),
    "lerp": lambda z: torch.lerp(z, z + 1, INF),
    "addcmul": lambda z: torch.addcmul(z, z, z.abs() + 1, value=INF),
    "addmm": lambda z: torch.addmm(z, z.abs(), torch.ones(4, 4), alpha=INF),
    "addmm by beta": lambda z: torch.addmm(z, torch.ones(4, 4), torch.ones(4, 4), beta=INF),
    "masked_fill": lambda z: z.masked_fill(torch.eye(4) > 0, -INF),
    "where": lambda z: torch.where(torch.eye(4) > 0, z, NAN),
    "a complex divisor": lambda z: torch.view_as_real(z / 0j).isfinite().any(-1),
    "foreach": lambda z: torch._foreach_mul([z], INF)[0],
    "a tensor of divisors": lambda z: z / torch.tensor([0.0, 1.0, -0.0, INF]),
    "addcdiv": lambda z: torch.addcdiv(z, z, torch.tensor([0.0, 1.0, -0.0, INF])),
}


@pytest.fixture(autouse=True)
def mesh(eight_workers):
    return gt.mesh((2, 2), ("a", "b"))


@pytest.mark.parametrize("layout", ["-, - + a b", "a, - + b", "-, b + a"])
@pytest.mark.parametrize("op", OPS)
def test_scalars_that_are_not_finite_give_what_torch_gives(op, layout, mesh):
    z = torch.tensor([[1.0, -1.0, 2.0, 0.5]] * 4)
    expected = OPS[op](z)
    for _ in range(2):  # planned, and found again
        torch.testing.assert_close(OPS[op](gt.distribute(z, mesh, layout)).cpu(), expected, equal_nan=True)


def test_linear_and_nonlinear_scalars_of_one_op_have_separate_plans(mesh):
    z = gt.distribute(torch.tensor([1.0, -1.0]), mesh, "- + a b")
    specs, values = [], []
    for number in (2.0, INF, 3.0):
        z = gt.distribute(torch.tensor([1.0, -1.0]), mesh, "- + a b")
        product = z * number
        specs.append(str(product.spec))
        values.append(product.tolist())
    assert specs == ["- + a b", "-", "- + a b"]
    assert values == [[2.0, -2.0], [INF, -INF], [3.0, -3.0]]


def test_a_tensor_factor_gives_nonfinite_values_where_torch_does(mesh):
    z, factor = torch.tensor([1.0, -1.0, 0.0, 3.0]), torch.tensor([INF, -INF, NAN, 2.0])
    product = gt.distribute(z, mesh, "- + a b") * factor
    assert torch.equal(product.cpu().isfinite(), (z * factor).isfinite())
    assert product[3].item() == 6.0
