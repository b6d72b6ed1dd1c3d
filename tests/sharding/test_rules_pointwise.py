"""Pointwise ops, shard by shard."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from gt.client.transfers import REDUCTIONS
from gt.core.signatures import Input, Scalar
from gt.sharding.factors import PartialPassthrough
from gt.sharding.op_calls import OpCall
from gt.sharding.rules import rule_of
from gt.sharding.rules.pointwise import POINTWISE
from tests.sharding.simulate import MESHES, check, encode, flat, meta_of, resolve


def tags(packet: str) -> list[torch.Tag]:
    found = getattr(torch.ops.aten, packet.removeprefix("aten."), None)
    return [] if found is None else [tag for overload in found.overloads() for tag in getattr(found, overload).tags]


NAN, INF = float("nan"), float("inf")
OTHERWISE = {"aten.pow", "aten.rrelu_with_noise_functional"}
OTHERWISE |= {op for op in POINTWISE if torch.Tag.nondeterministic_seeded in tags(op)}
OTHERWISE |= {op for op in POINTWISE if any(part in op for part in ("_loss", "binary_cross", "fake_quantize", ".glu"))}
INTEGERS = {"gcd", "lcm", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift"}
INTEGERS |= {"bitwise_right_shift", "__lshift__", "__rshift__", "__ilshift__", "__irshift__"}
MASKS = {"where": 0, "masked_fill": 1, "native_dropout_backward": 1}
SAMPLES: dict[str, Any] = {"int": 1, "bool": False, "number": 0.5, "float": 0.5}
SAMPLES |= {"Optional[float]": 0.5, "Optional[number]": 0.5}


def functional_overloads(packet: str) -> list[str]:
    """Those of an op that read tensors, give tensors and write to nothing."""
    found = getattr(torch.ops.aten, packet.removeprefix("aten."), None)
    if found is None:
        return []
    schemas = [(f"{packet}.{overload}", getattr(found, overload)._schema) for overload in found.overloads()]
    return [
        name
        for name, schema in schemas
        if any(str(a.type) == "Tensor" for a in schema.arguments)
        and all(str(r.type) == "Tensor" for r in schema.returns)
        and not any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    ]


def samples(op: str, *shapes: tuple[int, ...]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments that suit the schema of an op, with tensors of the given shapes in turn."""
    name, overload = op.split(".")[1:]
    remaining = itertools.cycle(shapes)
    args: list[Any] = []
    for argument in resolve(op)._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only:
            continue
        if kind == "Tensor" and len(args) == MASKS.get(name):
            args.append(torch.rand(next(remaining)) > 0.5)
        elif kind == "Tensor" and name in ("fill", "masked_fill") and args:
            args.append(torch.tensor(3.0))
        elif "Tensor" in kind:
            shape = next(remaining)
            args.append(torch.randint(1, 5, shape) if name in INTEGERS else torch.rand(shape) * 0.8 + 0.1)
        else:
            args.append(2 if name in INTEGERS else SAMPLES.get(kind))
    special: dict[str, dict[str, Any]] = {"Tensor_mode": {"rounding_mode": "floor"}, "decimals": {"decimals": 1}}
    special["Scalar_mode"] = special["Tensor_mode"]
    return args, special.get(overload, {})


def passes_of(op: str, *args: Any, **kwargs: Any) -> set[PartialPassthrough]:
    """The partial values that pass through a call."""
    tensors: list[torch.Tensor] = []
    encoded = tuple([encode(value, tensors) for value in args])
    named = {name: encode(value, tensors) for name, value in kwargs.items()}
    outputs = flat(resolve(op)(*args, **kwargs))
    rule = rule_of(OpCall(op, encoded, named, tuple(map(meta_of, tensors)), tuple(map(meta_of, outputs))))
    assert rule is not None
    return set(rule.passthroughs)


def through(kind: str, *operands: int, gives: str = "") -> PartialPassthrough:
    return PartialPassthrough(frozenset(operands), kind, gives or kind)


OPS = [op for packet in sorted(POINTWISE.keys() - OTHERWISE) for op in functional_overloads(packet)]


@pytest.mark.parametrize("part", range(6))
def test_every_op_by_its_schema(part: int) -> None:
    for op in OPS[part::6]:
        args, kwargs = samples(op, (5, 3))
        check(op, *args, meshes=MESHES[2:], **kwargs)


@pytest.mark.parametrize("op", ["add.Tensor", "mul.Tensor", "where.self", "lerp.Tensor", "addcmul.default"])
@pytest.mark.parametrize("shapes", [((5, 1, 3), (4, 1)), ((2, 0), (1,)), ((), (3,)), ((1, 1), (1,)), ((7,), (7,))])
def test_broadcasting(op: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    args, kwargs = samples(f"aten.{op}", *shapes)
    if any(0 not in shape for shape in shapes):
        check(f"aten.{op}", *args, meshes=MESHES[1:], **kwargs)


def test_alpha_scales_what_is_added() -> None:
    a, b = torch.randn(5, 6), torch.randn(6)
    for op in ("add", "sub", "rsub"):
        check(f"aten.{op}.Tensor", a, b, alpha=3)
        check(f"aten.{op}.Scalar", a, 2.5, 3)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bfloat16, torch.complex64, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    a, b = (torch.randint(-9, 9, (5, 2)).to(dtype) for _ in range(2))
    tolerance = 0.2 if dtype is torch.bfloat16 else 1e-4
    for op in ("add.Tensor", "mul.Tensor"):
        check(f"aten.{op}", a, b, tolerance=tolerance)
    for op in ("neg.default", "clone.default"):
        check(f"aten.{op}", a, tolerance=tolerance)
    check("aten.add.Tensor", a, 3, tolerance=tolerance)
    check("aten._to_copy.default", a, dtype=torch.complex128 if dtype.is_complex else torch.float64)


def test_complex_parts() -> None:
    a, b = torch.randn(5, 2), torch.randn(5, 2)
    check("aten.complex.default", a, b)
    check("aten._conj_physical.default", torch.complex(a, b))
    check("aten.mul.Scalar", torch.complex(a, b), 2)


def test_copies() -> None:
    check("aten.copy.default", torch.zeros(5, 3), torch.randn(3))
    check("aten.copy.default", torch.zeros(5, 3, dtype=torch.float64), torch.randn(5, 1))
    check("aten.clone.default", torch.randn(2, 5, 3, 3), memory_format=torch.channels_last)
    check("aten.zero.default", torch.randn(5))


def test_powers() -> None:
    check("aten.pow.Tensor_Scalar", torch.randn(5, 3), 2)
    check("aten.pow.Tensor_Scalar", torch.rand(5, 3), 0.5)
    check("aten.pow.Scalar", 2, torch.rand(5, 3))
    check("aten.pow.Tensor_Tensor", torch.rand(5, 3), torch.rand(3))
    assert through("prod", 0) in passes_of("aten.pow.Tensor_Scalar", torch.rand(2), 3.0)
    assert not passes_of("aten.pow.Tensor_Scalar", torch.rand(2), 0.5)


def test_casts_that_round_or_wrap_do_not_pass_sums() -> None:
    cast = "aten._to_copy.default"
    floats, halves, ints = torch.rand(2), torch.rand(2).bfloat16(), torch.ones(2, dtype=torch.int32)
    assert through("sum", 0) in passes_of(cast, halves, dtype=torch.float32)
    assert through("sum", 0) not in passes_of(cast, floats, dtype=torch.bfloat16)
    assert through("max", 0) in passes_of(cast, floats, dtype=torch.bfloat16)
    for target in (torch.int64, torch.bool, torch.float32):
        assert through("sum", 0) not in passes_of(cast, ints, dtype=target)
    assert not passes_of(cast, floats, dtype=torch.int64)
    assert not passes_of("aten.div.Tensor", ints, 2)


def test_nonlinear_ops_do_not_pass_sums() -> None:
    x = torch.rand(2)
    for op in ("relu", "exp", "abs", "sqrt", "tanh", "nan_to_num", "sign", "gelu"):
        assert "sum" not in {passing.kind for passing in passes_of(f"aten.{op}.default", x)}, op
    assert not passes_of("aten.div.Tensor_mode", x, x, rounding_mode="floor")
    assert passes_of("aten.div.Tensor", x, 2.0) == {through("sum", 0)}
    assert not passes_of("aten.div.Tensor", x, x), "a divisor may be zero"


def test_square_by_mul_passes_products_only() -> None:
    meta = meta_of(torch.rand(2))
    rule = rule_of(OpCall("aten.mul.Tensor", (Input(0), Input(0)), {}, (meta,), (meta,)))
    assert rule is not None
    assert set(rule.passthroughs) == {through("prod", 0)}
    doubled = rule_of(OpCall("aten.add.Tensor", (Input(0), Input(0)), {}, (meta,), (meta,)))
    assert doubled is not None
    assert set(doubled.passthroughs) == {through("sum", 0)}


def test_scalars_unknown_to_the_rule_are_added_once() -> None:
    meta = meta_of(torch.rand(2))
    rule = rule_of(OpCall("aten.add.Tensor", (Input(0), Scalar(0)), {}, (meta,), (meta,)))
    assert rule is not None
    assert set(rule.passthroughs) == {through("sum", 0)}
    check("aten.masked_fill.Scalar", torch.randn(5, 3), torch.rand(3) > 0.5, -INF)
    check("aten.fill.Scalar", torch.randn(5, 3), 7)
    check("aten.add.Tensor", torch.randn(5, 3), INF)


SPECIAL = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.5, -3.5, 80.0, -80.0])


def test_largest_and_smallest_pass_also_for_nan_and_infinity() -> None:
    """For pairs a, b: f(max(a, b)) is max(f(a), f(b))."""
    pair = SPECIAL[:, None].expand(11, 11), SPECIAL[None].expand(11, 11)
    for op in OPS:
        args, kwargs = samples(op, (11, 11))
        for passing in passes_of(op, *args, **kwargs):
            if passing.kind in ("max", "min") and len(passing.operands) == 1:
                tensors = [position for position, value in enumerate(args) if isinstance(value, torch.Tensor)]
                position = tensors[min(passing.operands)]
                reduced, *each = [
                    resolve(op)(*args[:position], value, *args[position + 1 :], **kwargs)
                    for value in (REDUCTIONS[passing.kind](*pair), *pair)
                ]
                torch.testing.assert_close(REDUCTIONS[passing.result_kind](*each), reduced, equal_nan=True, msg=op)


def test_logic_passes() -> None:
    a, b = torch.rand(5, 3) > 0.5, torch.rand(3) > 0.5
    for op in ("logical_and.default", "logical_or.default", "bitwise_and.Tensor", "bitwise_or.Tensor"):
        check(f"aten.{op}", a, b)
        assert len(passes_of(f"aten.{op}", a, b)) == 5
    assert passes_of("aten.logical_not.default", a) == {through("and", 0, gives="or"), through("or", 0, gives="and")}
    assert not passes_of("aten.bitwise_and.Tensor", a.int(), b.int())
    assert not passes_of("aten.logical_and.default", a.int(), b.int())


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gated_units(dim: int) -> None:
    x = torch.randn(4, 6, 6)
    half = [size // 2 if position == dim % 3 else size for position, size in enumerate(x.shape)]
    g = torch.randn(half)
    check("aten.glu.default", x, dim)
    check("aten.glu_backward.default", g, x, dim, meshes=MESHES[2:])
    check("aten.glu_jvp.default", g, x, torch.randn_like(x), dim, meshes=MESHES[2:])
    check(
        "aten.glu_backward_jvp.default", torch.randn_like(x), g, x, torch.randn_like(g), torch.randn_like(x), dim,
        meshes=MESHES[2:],
    )  # fmt: skip


def test_fake_quantization() -> None:
    x = torch.randn(5, 3)
    check("aten.fake_quantize_per_tensor_affine_cachemask.default", x, 0.1, 2, -8, 7)
    scale, zero, on = torch.tensor([0.1]), torch.tensor([2], dtype=torch.int32), torch.ones(1, dtype=torch.int64)
    check("aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default", x, scale, zero, on, -8, 7)


def test_random_ops_with_certain_results() -> None:
    x, certain = torch.randn(5, 3), torch.ones(3)
    check("aten.bernoulli.p", x, 1.0)
    check("aten.bernoulli.default", (x > 0).float())
    check("aten.bernoulli.Tensor", x, certain)
    check("aten.native_dropout.default", x, 0.0, True)
    check("aten.uniform.default", x, 2.0, 2.0)
    check("aten.normal_functional.default", x, 2.0, 0.0)
    check("aten.normal.Tensor_float", x, 0.0)
    check("aten.normal.float_Tensor", 1.0, torch.zeros(5, 3))
    check("aten.random.from", x, 4, 5)
