"""Facts about ops that are read from their schemas."""

import pytest
import torch

from gt.client.op_schema import ArgumentKind, OpSchema

aten = torch.ops.aten


def schema(func):
    return OpSchema(func, special=False)


@pytest.mark.parametrize(
    ("func", "kinds"),
    [
        (aten.add.Tensor, "TENSOR TENSOR SCALAR"),
        (aten.add_.Tensor, "TARGET TENSOR SCALAR"),
        (aten.cat.default, "TENSORS CONSTANT"),
        (aten.pow.Tensor_Scalar, "TENSOR CONSTANT"),  # an exponent of 0.5 or 2 is another op on integers
        (aten._foreach_add_.ScalarList, "TARGETS SCALARS"),
        (aten.native_batch_norm.default, "TENSOR TENSOR TENSOR TARGET TARGET CONSTANT SCALAR SCALAR"),
        (aten.rand.default, "CONSTANT CONSTANT CONSTANT DEVICE IGNORED"),
        (aten.bernoulli.default, "TENSOR GENERATOR"),
        (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            "TENSOR TENSOR TENSOR CONSTANT CONSTANT TENSOR SCALAR",
        ),
    ],
    ids=str,
)
def test_kinds_of_arguments(func, kinds):
    assert [kind.name for kind in schema(func).kinds] == kinds.split()


@pytest.mark.parametrize(
    ("func", "attribute", "value"),
    [
        (aten.t.default, "aliases", True),
        (aten.add_.Tensor, "aliases", False),
        (aten.add_.Tensor, "writes", True),
        (aten.t_.default, "reshapes", True),
        (aten.equal.default, "returns_python", True),
        (aten._assert_async.default, "returns_python", True),  # it must raise on the user's line
        (aten.split.Tensor, "returns_list", True),
        (aten.bernoulli.default, "random", True),
        (aten._conj.default, "reinterprets", True),
        (aten.native_layer_norm.default, "needs_worker_shape", True),
        (aten.native_layer_norm.default, "differs_only_in_half", True),
        (aten.native_batch_norm.default, "differs_in_evaluation", True),
        (aten.add.Tensor, "leading", 2),
        (aten.convolution_backward.default, "mask", 10),
        (aten.add.Tensor, "mask", -1),
        (aten.add_.Tensor, "functional", "aten.add.Tensor"),
        (aten.add.out, "functional", "aten.add.Tensor"),
        (aten.add_.Tensor, "returned", ("self",)),
        (aten.native_batch_norm.default, "returned", (None, None, None)),
    ],
    ids=str,
)
def test_attributes_of_a_schema(func, attribute, value):
    assert getattr(schema(func), attribute) == value


def test_composite_ops_and_ops_on_lists_are_special():
    assert schema(aten.linear.default).decomposition is not None
    assert schema(aten._foreach_add.Scalar).split is not None
    assert schema(aten.linear.default).is_special and not schema(aten.mm.default).is_special
    assert OpSchema(aten.mm.default, special=True).is_special


def test_every_kind_is_used():
    names = torch._C._dispatch_get_all_op_names()
    found = set()
    for name in [*[name for name in names if name.startswith("aten::")][::3], "aten::_fused_adagrad_"]:
        packet, _, overload = name.removeprefix("aten::").partition(".")
        func = getattr(getattr(aten, packet, None), overload or "default", None)
        found |= set() if func is None else set(schema(func).kinds)
    assert found == set(ArgumentKind)
