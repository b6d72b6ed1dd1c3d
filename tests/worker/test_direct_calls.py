"""Direct calls give what the same op gives by its list of arguments, and a failing write is not run twice."""

import pytest
import torch

import gt
from gt.core.messages import ByteRange, DefineOp, Failed, OpFailed, RunOp, WorkerCreateTensor, WorkerFetchTensor
from gt.core.signatures import Input, ListArg, Scalar, Signature
from gt.worker.bound_ops import BoundOp
from gt.worker.direct_calls import bind_arguments, is_in_order
from gt.worker.engines import PyTorchEngine
from gt.worker.exchange import InProcessExchange
from gt.worker.executor import Executor
from tests.records import own

X, Y = Input(0), Input(1)
A, B = Scalar(0), Scalar(1)


def record(*args, **kwargs):
    return args, kwargs


BINDINGS = {
    "tensors": ((X, Y), {}, ("x", "y"), {}),
    "tensors and scalars": ((X, Y, A), {}, ("x", "y", 2), {}),
    "trailing constants": ((X, Y, 7, None), {}, ("x", "y", 7, None), {}),
    "constants by name": ((X, Y), {"alpha": 7}, ("x", "y"), {"alpha": 7}),
    "a scalar by name": ((X, Y), {"alpha": A}, ("x", "y"), {"alpha": 2}),
    "another order": ((Y, 7, X, B, A), {}, ("y", 7, "x", 3, 2), {}),
    "a tensor twice": ((X, X, Y), {}, ("x", "x", "y"), {}),
    "a list of constants": ((X, ListArg((1, 2))), {}, ("x", [1, 2]), {}),
    "a tensor by name": ((X,), {"weight": Y}, ("x",), {"weight": "y"}),
}


@pytest.mark.parametrize("binding", BINDINGS)
def test_arguments_are_bound_in_the_order_of_the_op(binding):
    args, kwargs, expected, expected_kwargs = BINDINGS[binding]
    for scalars in ((2, 3), (2,), ()):
        if len(scalars) > max([arg.index for arg in (*args, *kwargs.values()) if isinstance(arg, Scalar)], default=-1):
            bound = bind_arguments(record, args, kwargs, 2, len(scalars), PyTorchEngine().literal)
            for _ in range(2):  # constants survive a call
                assert bound("x", "y", *scalars) == (expected, expected_kwargs)


def test_a_list_with_a_tensor_or_a_scalar_cannot_be_bound():
    for item in (X, A, ListArg((A,))):
        assert bind_arguments(record, (ListArg((item, 1)),), {}, 1, 1, lambda arg: arg) is None


def test_the_order_of_arguments():
    assert is_in_order((X, Y, A, B), {}, 2, 2) and is_in_order((), {}, 0, 0)
    assert not is_in_order((X, Y, A), {}, 2, 2)
    assert not is_in_order((X, A, Y), {}, 2, 1)
    assert not is_in_order((X,), {"alpha": A}, 1, 1)
    assert not is_in_order((X, 1), {}, 1, 0)


def kernel_of(op, *args, writes=(), **kwargs):
    """The kernel of an op after its first call on small tensors, for which `direct` is set or not."""
    tensors = 1 + max([arg.index for arg in (*args, *kwargs.values()) if isinstance(arg, Input)])
    scalars = (0.5, 2.0)[: sum(isinstance(arg, Scalar) for arg in (*args, *kwargs.values()))]
    values = [torch.rand(3, 4) for _ in range(tensors)]
    engine = PyTorchEngine("cpu")
    with engine.isolated():
        outputs = () if writes else (engine.meta(run(engine, op, args, kwargs, values, scalars)),)
        bound = BoundOp(engine, Signature(op, args, kwargs, ((),) * tensors, writes, outputs, (0,) * len(outputs)))
        bound.call(values, scalars)
    return engine, bound, values, scalars


def run(engine, op, args, kwargs, values, scalars):
    def fill(arg):
        return values[arg.index] if isinstance(arg, Input) else scalars[arg.index] if isinstance(arg, Scalar) else arg

    filled = {name: fill(arg) for name, arg in kwargs.items()}
    return engine.resolve(op)(*map(fill, args), **filled)


CALLS = {
    "two tensors": ("aten.mul.Tensor", X, Y),
    "a number": ("aten.mul.Tensor", X, A),
    "a number by name": ("aten.add.Tensor", X, Y, "alpha"),
    "two numbers": ("aten.clamp.default", X, A, B),
    "constants": ("aten._softmax.default", X, -1, False),
    "a comparison": ("aten.gt.Scalar", X, A),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_direct_call_gives_the_bits_of_the_op(call):
    op, *args = CALLS[call]
    kwargs = {"alpha": A} if args[-1] == "alpha" else {}
    args = [arg for arg in args if arg != "alpha"]
    engine, bound, values, scalars = kernel_of(op, *args, **kwargs)
    with engine.isolated():
        assert torch.equal(bound.direct(*values, *scalars), run(engine, op, args, kwargs, values, scalars))


def test_a_direct_write_returns_the_tensor_that_it_wrote():
    engine, bound, (x, y), _ = kernel_of("aten.add_.Tensor", X, Y, writes=(0,))
    expected = x + y
    with engine.isolated():
        assert bound.direct(x, y) is x
    assert torch.equal(x, expected)


def test_ops_that_are_not_one_function_have_no_direct_call():
    engine = PyTorchEngine("cpu")
    x = torch.rand(2, 3)
    meta = engine.meta(x)
    random = Signature("aten.bernoulli.p", (X, 0.5), {}, ((),), (), (meta,), (0,), True)
    out = Signature("aten.neg.out", (X,), {"out": Y}, ((), ()), (1,), (), ())
    with engine.isolated():
        for signature, values, scalars in ((random, [x], (7,)), (out, [x, x.clone()], ())):
            bound = BoundOp(engine, signature)
            bound.call(values, scalars)
            assert bound.direct is None


# Failures

OP, LEFT, RIGHT, FIRST, SECOND, REQUEST = own(100), *map(own, range(1, 5)), own(50)


def test_a_direct_write_gives_its_tensor_a_new_id():
    engine = PyTorchEngine("cpu")
    executor = Executor(0, engine, InProcessExchange(), None, owns_buffers=False)
    meta = engine.meta(torch.zeros(2))
    creates = [WorkerCreateTensor(ident, meta, ByteRange("", 0), 1) for ident in (LEFT, RIGHT)]
    signature = Signature("aten.add_.Tensor", (X, Y), {}, ((), ()), (0,), (), ())
    writes = [RunOp(OP, (old, RIGHT), (new,), (), 0, 1) for old, new in ((LEFT, FIRST), (FIRST, SECOND))]
    with engine.isolated():
        assert executor.run([DefineOp(OP, signature), *creates, *writes], [bytearray(meta.nbytes)] * 2) == []
    assert executor.ops[OP].direct is not None
    assert executor.tensors.keys() == {RIGHT, SECOND}


def test_a_write_that_fails_is_not_run_again():
    """The first call makes the op direct; the second one writes half of its target and raises."""
    engine = PyTorchEngine("cpu")
    calls = []
    executor = Executor(0, engine, InProcessExchange(), None, owns_buffers=False)
    meta = engine.meta(torch.zeros(2))
    creates = [WorkerCreateTensor(ident, meta, ByteRange("", 0), 1) for ident in (LEFT, RIGHT)]
    signature = Signature("aten.add_.Tensor", (X, Y), {}, ((), ()), (0,), (), ())
    with engine.isolated():
        executor.run([DefineOp(OP, signature), *creates], [bytearray(meta.nbytes)] * 2)
        assert executor.run([RunOp(OP, (LEFT, RIGHT), (FIRST,), (), 0, 1)], ()) == []

        def fail(target, other):
            calls.append(target[:1].add_(1))
            raise MemoryError("no memory for the second half")

        executor.ops[OP].direct = fail
        (report, _), *_ = executor.run([RunOp(OP, (FIRST, RIGHT), (SECOND,), (), 0, 1)], ())
        (answer, _), *_ = executor.run([WorkerFetchTensor(REQUEST, SECOND, False)], ())
    assert len(calls) == 1 and FIRST not in executor.tensors
    assert isinstance(report, OpFailed) and isinstance(answer, Failed)
    assert "no memory for the second half" in answer.failure.message


@pytest.mark.parametrize("mode", [{}, {"workers": 3, "mode": "virtual"}], ids=["embedded", "virtual"])
def test_repeated_ops_on_shards_and_whole_tensors(mode):
    """Each op runs several times, so all but the first run are direct calls; among them one on a failed tensor."""
    gt.init(**mode)
    try:
        plain = torch.rand(6, 4)
        ours = gt.to(plain) if not mode else gt.distribute(plain, gt.mesh((3,), ("a",)), [gt.Shard(0)])
        bad = torch.nn.functional.embedding(gt.tensor([9]), gt.ones(6, 4)).expand(6, 4)
        for step in range(4):
            with torch.no_grad():
                for x in (plain, ours):
                    x.mul_(0.5 + step).add_(x * 2, alpha=0.25).sub_((x > 0.1) * 0.125)
            worse = bad * 0.5 + ours
        assert torch.equal(ours.cpu(), plain)
        with pytest.raises(gt.OpError, match="embedding"):
            worse.tolist()
        assert torch.equal((ours + 1).cpu(), plain + 1)
    finally:
        gt.shutdown()


def test_an_op_that_gives_one_of_several_results_on_shards():
    """The gradient of a convolution by its weight alone: torch returns None in place of the others."""
    gt.init(workers=2, mode="virtual")
    try:
        x, weight = torch.rand(4, 3, 6, 6), torch.rand(2, 3, 3, 3)
        batch = gt.distribute(x, gt.mesh((2,), ("a",)), [gt.Shard(0)])
        for _ in range(3):
            theirs, ours = weight.clone().requires_grad_(), gt.to(weight).requires_grad_()
            torch.nn.functional.conv2d(x, theirs).square().sum().backward()
            torch.nn.functional.conv2d(batch, ours).square().sum().backward()
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
    finally:
        gt.shutdown()
