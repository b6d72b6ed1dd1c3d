"""Operators of GT tensors have torch's results, versions, errors and gradients, also where torch does not see them."""

import operator
import sys
import threading
import traceback
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gt
from gt.client import active_session
from gt.client.torch_dispatch import dispatch

TWO = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow]
TWO += [operator.and_, operator.or_, operator.xor, operator.lt, operator.le, operator.gt, operator.ge, operator.eq]
TWO += [operator.ne, torch.Tensor.add, torch.Tensor.sub, torch.Tensor.mul, torch.Tensor.div]
ONE = [operator.neg, operator.abs, operator.invert, torch.Tensor.sqrt, torch.Tensor.reciprocal]
IN_PLACE = [operator.iadd, operator.isub, operator.imul, operator.itruediv]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
NUMBERS = [2, -3, 0.5, 0, True, float("nan"), float("-inf"), 1 << 62, 1 << 70, 2j]


pytestmark = pytest.mark.usefixtures("embedded")


@contextmanager
def counting_dispatches():
    """Counts how often torch calls GT's `__torch_dispatch__`."""
    seen = []

    def profile(frame, event, argument):
        if event == "call" and frame.f_code is dispatch.__code__:
            seen.append(frame)

    sys.setprofile(profile)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def outcome(function, *operands):
    """A result, or the type of the exception."""
    try:
        return function(*operands)
    except Exception as error:
        return type(error)


def check(function, *operands):
    """On GT as in torch, at the first call and at the second, which finds the cached call."""
    expected = outcome(function, *operands)
    ours = [gt.to(x) if isinstance(x, torch.Tensor) else x for x in operands]
    for _ in range(2):
        found = outcome(function, *ours)
        if not isinstance(expected, torch.Tensor):
            assert found is expected or outcome(found.cpu) is gt.OpError  # known on the worker only: 1 // 0
            continue
        assert isinstance(found, gt.Tensor) and found.stride() == expected.stride()
        assert (found.requires_grad, found.is_inference()) == (expected.requires_grad, expected.is_inference())
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def values(dtype, *shape):
    return (torch.arange(24) - 3)[: torch.Size(shape).numel()].reshape(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", TWO)
def test_operators_with_numbers_are_torchs(function, dtype):
    for number in NUMBERS:
        check(function, values(dtype, 2, 3), number)
        check(function, values(dtype), number)
        if function in (operator.add, operator.sub, operator.mul, operator.truediv, operator.lt, operator.pow):
            check(lambda x, function=function, number=number: function(number, x), values(dtype, 2, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", TWO)
def test_operators_with_tensors_are_torchs(function, dtype):
    for other in (torch.float32, torch.int64, torch.bool):
        check(function, values(dtype, 2, 3), values(other, 2, 3))
        check(function, values(dtype, 2, 3).t(), values(other))
        check(function, values(dtype, 2, 1), values(other, 3))
        check(function, values(dtype, 2, 3), values(other, 4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", ONE)
def test_operators_of_one_tensor_are_torchs(function, dtype):
    check(function, values(dtype, 2, 3))
    check(function, values(dtype, 2, 3).t())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", IN_PLACE)
def test_operators_in_place_are_torchs(function, dtype):
    def run(x, other):
        versions = []
        y = x.clone()
        view = y[0]
        for _ in range(3):
            same = function(view, other)
            versions.append((y._version, view._version, same is view))
        return y, versions

    for other in (2, 0.5, True, values(torch.float32, 3), values(torch.int64, 3), values(torch.float32, 3, 3)):
        expected = outcome(run, values(dtype, 2, 3), other)
        ours = gt.to(other) if isinstance(other, torch.Tensor) else other
        found = outcome(run, gt.to(values(dtype, 2, 3)), ours)
        if isinstance(expected, tuple):
            assert found[1] == expected[1]
            torch.testing.assert_close(found[0].cpu(), expected[0], rtol=0, atol=0, equal_nan=True)
        else:
            assert found is expected


def test_a_write_of_a_tensor_to_itself_is_torchs():
    def run(x):
        for _ in range(3):
            x += x
            x[2:] -= x[:2]
        return x

    assert torch.equal(run(gt.to(values(torch.float32, 4))).cpu(), run(values(torch.float32, 4)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from(TWO[:3] + IN_PLACE[:3]), st.sampled_from([2, 0.5, -1, "x", "v"])), max_size=8)
)
def test_programs_of_operators_are_torchs(steps):
    def run(x):
        x = x * 1
        saved, view = x, x[1:]
        for function, other in steps:
            x = function(x, {"x": saved, "v": view[:1].clone()}.get(other, other))
        return [x, saved, view], [x._version, saved._version, view._version]

    found, versions = run(gt.to(values(torch.float32, 3)))
    expected, expected_versions = run(values(torch.float32, 3))
    assert versions == expected_versions
    torch.testing.assert_close([each.cpu() for each in found], expected, rtol=0, atol=0)


def test_known_operators_are_not_dispatched_by_torch():
    x, y = gt.ones(2, 3), gt.ones(3)

    def run():
        z = -x * 1.5 + y - 2
        z += 1
        z *= y
        z.add_(0.5).mul_(2.0)
        return (2 - z) / 3 < 0, z**2, 3 * z.mul(0.5), z == y

    run()
    with counting_dispatches() as dispatched:
        run()
    assert not dispatched


def test_the_default_dtype_is_that_of_the_call():
    x = gt.arange(3)
    assert (x / 2).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert ((x / 2).dtype, (x * 0.5).dtype, (x / 2).dtype) == (torch.float64,) * 3
    finally:
        torch.set_default_dtype(torch.float32)
    assert (x / 2).dtype is torch.float32


def test_gradients_are_recorded_where_torch_records_them():
    for _ in range(2):
        x, y = gt.ones(3, requires_grad=True), gt.ones(3)
        with torch.no_grad():
            assert not (x * 2).requires_grad and not (y * x).requires_grad
        (y * x + y * 2 - x * 3).sum().backward()
        assert x.grad.tolist() == [-2.0] * 3
        assert (y.detach() * 2).requires_grad is False


def test_double_backward_and_hooks():
    def run(x):
        y = x * x * 2.0
        seen = []
        y.register_hook(lambda gradient: seen.append(gradient * 2) or gradient * 3)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return [*seen, first.detach(), second]

    for _ in range(2):
        expected = run(values(torch.float32, 3).requires_grad_())
        found = run(gt.to(values(torch.float32, 3)).requires_grad_())
        torch.testing.assert_close([each.detach().cpu() for each in found], [each.detach() for each in expected])


def test_a_write_to_a_leaf_that_requires_grad_is_torchs_error():
    x = gt.ones(3, requires_grad=True)
    with torch.no_grad():
        for _ in range(2):
            x += 1
    for write in (lambda: x.add_(1), lambda: operator.iadd(x, 1), lambda: x[:1].mul_(2.0)):
        with pytest.raises(RuntimeError, match=r"a (view of a )?leaf Variable that requires grad") as raised:
            write()
        files = {frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)}
        assert files == {__file__}
    assert x.tolist() == [3.0] * 3


def test_a_write_to_a_saved_tensor_is_noticed_by_backward():
    for _ in range(2):
        x, y = gt.ones(3, requires_grad=True), gt.ones(3)
        z = x * y
        y += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_inference_mode():
    with torch.inference_mode():
        for function in (operator.mul, operator.add, operator.lt, operator.and_):
            check(function, values(torch.int64, 3), 2)
        x = gt.ones(3)
        for _ in range(3):
            x += 1
        assert x.is_inference() and x.tolist() == [4.0] * 3
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        x += 1
    normal = gt.ones(3)
    plain = torch.ones(3)
    with torch.inference_mode():
        for _ in range(3):
            normal += 1
            plain += 1
    assert normal._version == plain._version


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_transforms_see_operators_on_captured_tensors():
    w = gt.to(values(torch.float32, 3))
    known = w * 2 + 1, w * w

    def f(x):
        return (x * (w * 2 + 1) * (w * w)).sum()

    x = values(torch.float32, 4, 3)
    plain = w.cpu()
    expected = x * (plain * 2 + 1) * (plain * plain)
    assert torch.equal(torch.vmap(f)(gt.to(x)).cpu(), expected.sum(-1)) and len(known) == 2
    gradient = torch.func.grad(f)(gt.to(x[0]))
    assert torch.equal(gradient.cpu(), (plain * 2 + 1) * (plain * plain))
    _, tangent = torch.func.jvp(f, (gt.to(x[0]),), (gt.ones(3),))
    assert tangent.item() == gradient.sum().item()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w, gt.ones(3))
        assert torch.autograd.forward_ad.unpack_dual(dual * 2).tangent.tolist() == [2.0] * 3


def test_modes_and_profiles_see_operators():
    x = gt.ones(3)
    x, y = x * 2, x * 2

    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    with Seeing():
        y * 2
    assert torch.Tensor.__mul__ in seen or torch.Tensor.mul in seen
    with torch.profiler.profile(acc_events=True) as profile:
        y * 2
    assert "aten::mul" in {event.key for event in profile.key_averages()}


def test_plain_tensors_mix_with_gt_tensors():
    x, plain = gt.to(values(torch.float32, 3)), torch.full((3,), 5.0)
    leaf = torch.ones(3, requires_grad=True)
    for _ in range(2):
        assert (plain - x).tolist() == (5.0 - x).tolist() == [8.0, 7.0, 6.0]
        assert (plain + x).tolist() == (x + plain).tolist() and (plain * x).tolist() == (x * 5).tolist()
        assert (x < plain).tolist() == [True] * 3 and (plain < x).tolist() == [False] * 3
        (leaf * x - x).sum().backward()
    assert leaf.grad.tolist() == (2 * x).tolist()


def test_other_operands_are_torchs_errors_or_results():
    x = gt.ones(3) * 1
    for other in ("a", None, [1], object()):
        with pytest.raises(TypeError):
            x + other
        assert outcome(lambda other=other: x == other) is outcome(lambda other=other: torch.ones(3) == other)
    assert hash(x) == id(x) and x in {x}


def test_users_subclasses_keep_their_operators():
    class Mine(torch.Tensor):
        def __mul__(self, other):
            return "mine"

    x = gt.to(torch.ones(3).as_subclass(Mine))
    for _ in range(2):
        assert x * 2 == "mine"
        assert isinstance(x + 1, Mine) and isinstance(x.add(1), Mine)


def test_lazily_conjugated_operands():
    x = values(torch.complex64, 3) + 1j
    for _ in range(2):
        check(lambda x: x.conj() * 2 + x.conj(), x)
        check(lambda x: x.conj().imag * 2 - 1, x)


def test_parameters():
    p = gt.to(torch.nn.LayerNorm(3)).weight
    with torch.no_grad():
        for _ in range(2):
            p *= 2
            assert isinstance(p * 2, gt.Tensor) and not isinstance(p * 2, torch.nn.Parameter)
    assert isinstance(p, torch.nn.Parameter) and p.tolist() == [4.0] * 3 and p._version == 2


def test_an_operator_is_issued_by_the_users_line():
    x = gt.ones(3)
    session = active_session.current()
    for _ in range(2):
        before = len(session.outbox.tape) + len(session.outbox.queue)
        lines = [x * 3, -x, x.mul(3.0), x.add_(1), 2 - x]
        session.outbox.flush()
        issued = list(session.outbox.tape)[before:]
        sites = {session.sites.lookup(each.site) for each in issued if hasattr(each, "site")}
    assert lines and {site.file for site in sites} == {__file__} and len({site.line for site in sites}) == 1


def test_an_operator_after_the_session_ended_is_an_error_on_its_line():
    x = gt.ones(3)
    x * 2, x * 2
    gt.shutdown()
    with pytest.raises(gt.SessionError) as raised:
        x * 2
    assert {frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)} == {__file__}


def test_threads_write_to_one_tensor():
    x = gt.zeros(3)
    x += 1
    threads = [threading.Thread(target=lambda: [x.add_(1) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert x.tolist() == [201.0] * 3 and x._version == 201
