"""Edge values on cut tensors: small integers, empty tensors, the sign of zero, dtypes that torch cannot add."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import gt

SMALL = [torch.uint8, torch.int8, torch.int16, torch.int32]
REFUSING = ["max", "min", "amax", "amin", "argmax", "argmin", "aminmax"]
REFUSING_A_DIM = ["median", "nanmedian", "mode", "kthvalue"]
ACCEPTING = ["sum", "prod", "all", "any", "mean", "nansum", "count_nonzero", "std", "norm", "median", "nanmedian"]


@pytest.fixture(autouse=True)
def mesh(eight_workers):
    """Three workers: some shards here are uneven, and some empty."""
    return gt.mesh(3, ("a",))


def agree(run, *tensors):
    """Compare `run` on GT and on torch. Each of the tensors is a pair of value and layout."""
    expected, mesh = run(*[value.clone() for value, _ in tensors]), gt.mesh(3, ("a",))
    found = run(*[gt.distribute(value.clone(), mesh, layout) for value, layout in tensors]).cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    if expected.is_floating_point():
        assert torch.equal(torch.signbit(found), torch.signbit(expected)), f"{found}, not {expected}"


# --- Small integers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("op", ["cumsum", "cumprod"])
def test_running_totals_of_small_integers(op, dtype):
    wide, narrow = torch.arange(40, 47), torch.arange(1, 8).to(dtype)
    for values in (wide, narrow, wide > 42, wide + 0.5):
        agree(lambda x: getattr(x, op)(0, dtype=dtype), (values, "a"))
    agree(lambda x: getattr(x, op)(0), (narrow, "a[0:1 1:1 1:7]"))
    agree(lambda x: getattr(x, f"{op}_")(0), (narrow, "a"))
    agree(lambda x: getattr(torch, op)(x, 0, out=torch.empty_like(x, dtype=dtype)), (wide, "a"))


@pytest.mark.parametrize("layout", ["a", "-", "- + a"])
@pytest.mark.parametrize("op", ["sum", "prod", "cumsum", "cumprod"])
def test_elements_become_the_dtype_of_a_given_tensor_first(op, layout):
    def run(x):
        target = torch.empty_like(x if op.startswith("cum") else x[0], dtype=torch.int64)
        return getattr(torch, op)(x, 0, out=target)

    agree(run, (torch.tensor([1.5, 2.5, 1.5, -3.5, 2.75]), layout))


@pytest.mark.parametrize("op", ["cummax", "cummin"])
def test_running_extremes_of_small_integers(op):
    for dtype in (*SMALL, torch.bool):
        values = torch.tensor([3, 0, 5, 1, 5, 7, 0]).to(dtype)
        agree(lambda x: getattr(x, op)(0).values, (values, "a"))
        agree(lambda x: getattr(x, op)(0).indices, (values, "a"))


# --- Empty tensors ----------------------------------------------------------------------------------------------------


def reduce_by(op, *dims):
    return lambda x: getattr(torch, op)(x, *([1] if op == "kthvalue" else []), *dims)


def refused(run, value, mesh, layout):
    with pytest.raises((RuntimeError, IndexError)) as told:
        run(value)
    with pytest.raises((RuntimeError, IndexError)) as found:
        str(run(gt.distribute(value, mesh, layout)))  # a refusal comes where a value is asked for
    assert str(told.value) in str(found.value)


@pytest.mark.parametrize("layout", ["a, -", "-, a", "-, - + a"])
@pytest.mark.parametrize("op", [*REFUSING, *REFUSING_A_DIM])
def test_reductions_of_empty_tensors_are_refused_as_in_torch(op, layout, mesh):
    for dtype in (torch.float32, torch.int64):
        if op in REFUSING:
            refused(reduce_by(op), torch.zeros(0, 3, dtype=dtype), mesh, layout)
        if op != "aminmax":  # its dim is named
            refused(reduce_by(op, 0), torch.zeros(0, 3, dtype=dtype), mesh, layout)
            refused(reduce_by(op, 1), torch.zeros(3, 0, dtype=dtype), mesh, layout)


@pytest.mark.parametrize("order", [float("inf"), float("-inf")])
def test_a_norm_of_nothing_that_needs_an_element_is_refused(order, mesh):
    refused(lambda x: torch.linalg.vector_norm(x, order), torch.zeros(0, 3), mesh, "a, -")


@pytest.mark.parametrize("op", ["argmax", "argmin"])
def test_argmax_and_argmin_of_bools_are_refused(op, mesh):
    refused(reduce_by(op), torch.ones(8, dtype=torch.bool), mesh, "a")
    refused(reduce_by(op, 0), torch.ones(8, dtype=torch.bool), mesh, "a")


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("layout", ["a, -", "-, a", "-, - + a"])
@pytest.mark.parametrize("op", ACCEPTING)
def test_reductions_of_empty_tensors_equal_torchs(op, layout):
    agree(reduce_by(op), (torch.zeros(0, 3), layout))
    if op not in REFUSING_A_DIM:
        agree(reduce_by(op, None, 0) if op == "norm" else reduce_by(op, 0), (torch.zeros(0, 3), layout))
    agree(lambda x: torch.logsumexp(x, (0, 1)), (torch.zeros(0, 3), layout))
    agree(lambda x: torch.amax(x, 1), (torch.zeros(0, 3), layout))


def test_a_convolution_that_gives_nothing_is_refused_where_torch_refuses_it(mesh):
    weight = torch.ones(3, 2, 1, 1, dtype=torch.bfloat16)
    run = functools.partial(F.conv_transpose2d, weight=weight, stride=5, padding=1, output_padding=1)
    value = torch.zeros(1, 3, 2, 1, dtype=torch.bfloat16)
    try:
        made = run(value)
    except RuntimeError:
        refused(run, value, mesh, "a, -, -, -")
    else:  # some CPUs have a kernel that refuses nothing
        assert run(gt.distribute(value, mesh, "a, -, -, -")).shape == made.shape


# --- The sign of zero -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_negative_zero_stays_one(dtype):
    values = torch.tensor([[-0.0, 1, 0], [-0.0, 0, -0.0], [2, -0.0, 0], [0, -1, -0.0]], dtype=dtype)
    positions, rows = torch.tensor([3, 0, 1]), (values, "a, -")
    agree(torch.clone, (values, "-, - + a"))
    agree(lambda x: x[1], rows)
    agree(lambda x: x.unbind()[2], rows)
    agree(lambda x: x.t().diagonal(), rows)
    agree(lambda x, i: x[i], rows, (positions, "-"))
    agree(lambda x, i: x.index_select(0, i), rows, (positions, "-"))
    agree(lambda x, i: x.take(i), rows, (positions, "-"))
    agree(lambda x, i: F.embedding(i, x), rows, (positions, "-"))
    agree(lambda x, i: torch.zeros_like(x).neg().index_add(0, i, x[1:]), rows, (positions, "a"))


@pytest.mark.parametrize("row", [0, -0.0])
def test_the_real_part_of_a_complex_number_keeps_its_sign(row, mesh):
    value = gt.distribute(torch.tensor([complex(row, 0), 1]), mesh, "- + a").cpu()
    assert torch.signbit(value.real).tolist() == [str(row)[0] == "-", False]


# --- Dtypes that torch does not add -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"])
def test_rows_of_dtypes_that_cannot_be_added(dtype):
    values = torch.arange(8).reshape(4, 2).to(getattr(torch, dtype))
    for run in (lambda x: x[2], lambda x: x.unbind()[1], lambda x: x.t().diagonal(), torch.clone):
        agree(lambda x, run=run: run(x).cpu().to(torch.float64), (values, "a, -"))
