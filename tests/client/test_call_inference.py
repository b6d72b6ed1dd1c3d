"""Calls that are inferred: the kind of call, its signature and the geometries of its results."""

import pytest
import torch
from torch.nn import functional

import gt
from gt.client import active_session
from gt.client.cached_calls import MultiResultCall, QueryCall, SingleResultCall, ViewCall, WriteCall
from gt.client.call_inference import UnknownResult, infer_call, infer_result
from gt.client.op_schema import OpSchema
from gt.client.storage import geometry_of
from gt.core.errors import SessionError
from gt.core.signatures import Input, Scalar

aten = torch.ops.aten


def refs_of(args):
    leaves = [leaf for arg in args for leaf in (arg if isinstance(arg, list) else [arg])]
    return [leaf._ref for leaf in leaves if isinstance(leaf, torch.Tensor)]


def infer(func, *args, **kwargs):
    refs = refs_of(args)
    return infer_call(active_session.current(), OpSchema(func, False), args, kwargs, (func, "test"), refs)


CALLS = [
    (aten.mm.default, lambda x: (x, x), SingleResultCall),
    (aten.sort.default, lambda x: (x,), MultiResultCall),
    (aten.transpose.int, lambda x: (x, 0, 1), ViewCall),
    (aten.add_.Tensor, lambda x: (x, 1), WriteCall),
    (aten.nonzero.default, lambda x: (x,), QueryCall),
    (aten.equal.default, lambda x: (x, x), QueryCall),
    (aten.mm.default, lambda x: (x, x[0]), QueryCall),  # torch refuses it: a worker raises torch's error
]


@pytest.mark.parametrize(("func", "args", "kind"), CALLS, ids=[f"{func} {kind.__name__}" for func, _, kind in CALLS])
def test_the_kind_of_a_call(embedded, func, args, kind):
    assert type(infer(func, *args(gt.ones(3, 3)))) is kind


def test_a_call_is_cached_and_its_op_defined(embedded):
    session = active_session.current()
    call = infer(aten.add.Tensor, gt.ones(3), 2.5)
    signature = session.signatures[call.op_id]
    assert session.cached_calls[aten.add.Tensor, "test"] is call
    assert (signature.op, signature.args) == ("aten.add.Tensor", (Input(0), Scalar(0)))
    assert [tuple(output.shape) for output in signature.outputs] == [(3,)]


def test_a_tensor_of_another_session_is_refused(embedded):
    other = gt.ones(2)
    gt.shutdown()
    gt.init()
    with pytest.raises(SessionError, match="shut down"):
        infer(aten.neg.default, other)


def test_the_result_has_the_strides_of_torchs_kernel(embedded):
    x = gt.ones(2, 3).t()
    result, resized = infer_result(OpSchema(aten.neg.default, False), (x,), {}, [x._ref], on_cpu=True)
    assert (result.stride(), resized) == ((1, 3), {})


def test_a_target_that_the_op_resizes_is_noticed(embedded):
    x, out = gt.ones(3), gt.empty(0)
    op = OpSchema(aten.neg.out, False)
    _, resized = infer_result(op, (x,), {"out": out}, [x._ref, out._ref], on_cpu=True)
    assert {position: geometry.shape for position, geometry in resized.items()} == {1: (3,)}


def test_a_wrong_dtype_is_unknown(embedded):
    x = gt.ones(3)
    with pytest.raises(UnknownResult):
        infer_result(OpSchema(aten.bitwise_not.default, False), (x,), {}, [x._ref], on_cpu=True)


def test_geometries_of_equal_tensors_are_one():
    assert geometry_of(torch.empty(2, 3)) is geometry_of(torch.empty(2, 3))


LOSSES = {
    "mse": functional.mse_loss,
    "smooth l1": functional.smooth_l1_loss,
    "soft margin": functional.soft_margin_loss,
    "huber": functional.huber_loss,
    "l1": functional.l1_loss,
}
FLOATS = (torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("of_target", FLOATS, ids=str)
@pytest.mark.parametrize("of_input", FLOATS, ids=str)
@pytest.mark.usefixtures("four_workers")
def test_a_loss_of_two_dtypes_has_torchs(loss, of_input, of_target):
    """Torch's shape functions promote the dtypes, and its kernels do not."""
    x, y = torch.rand(8, 3).to(of_input), torch.rand(8, 3).to(of_target)
    mesh = gt.mesh((4,), ("dp",))
    theirs = outcome(lambda a: loss(a, y), x)
    for put in (gt.to, lambda plain: gt.distribute(plain, mesh, [gt.Shard(0)])):
        target = put(y)
        ours = outcome(lambda a: loss(a, target), put(x))
        assert ours[0] == theirs[0]
        for mine, other in zip(ours[1:], theirs[1:], strict=True):
            torch.testing.assert_close(mine, other)


def outcome(loss, x):
    """The dtypes, the value and the gradient of a loss; or that it raises."""
    leaf = x.detach().requires_grad_()
    try:
        value = loss(leaf)
        value.backward()
        found = [value.detach().cpu(), leaf.grad.cpu()]
    except (RuntimeError, gt.OpError):
        return ["raises"]
    return [[each.dtype for each in found], *found]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    ("loss", "x", "y"),
    [
        (functional.multilabel_margin_loss, [0.1, 0.2, 0.4, 0.8], [3, 0, -1, 1]),
        (functional.multilabel_margin_loss, 0.3, 0),
        (functional.multilabel_margin_loss, [0.3], 0),
        (functional.multilabel_margin_loss, [[0.1, 0.2], [0.4, 0.8]], [[1, -1], [0, 1]]),
        (functional.multi_margin_loss, [0.1, 0.2, 0.4], 2),
        (functional.multi_margin_loss, [[0.1, 0.2, 0.4]], 2),
        (functional.multi_margin_loss, [[0.1, 0.2, 0.4]], [2]),
    ],
)
def test_a_margin_loss_without_a_batch_has_torchs_shape(embedded, loss, x, y, reduction):
    """Torch's shape functions give it a dim of one element."""

    def run(put):
        leaf = put(torch.tensor(x)).requires_grad_()
        value = loss(leaf, put(torch.tensor(y)), reduction=reduction)
        value.sum().backward()
        return value.detach().cpu(), leaf.grad.cpu()

    torch.testing.assert_close(run(gt.to), run(lambda plain: plain))


def test_a_soft_margin_loss_that_torch_refuses_raises_on_its_line(embedded):
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        functional.soft_margin_loss(gt.ones(4), gt.ones(2, 4), reduction="sum")
