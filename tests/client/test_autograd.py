"""Torch's autograd on GT tensors, compared with plain ones."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gt

pytestmark = pytest.mark.usefixtures("anywhere")


def both(function, *shapes):
    """The same function on plain and on GT leaves with the same values; returns (plain results, GT results)."""
    plain = [torch.randn(shape) for shape in shapes]
    ours = [gt.to(value).requires_grad_() for value in plain]
    plain = [value.requires_grad_() for value in plain]
    return function(*plain), function(*ours)


def assert_same(plain, ours):
    for expected, found in zip(plain, ours, strict=True):
        torch.testing.assert_close(found.detach().cpu() if isinstance(found, gt.Tensor) else found, expected)


def test_backward():
    def run(a, b):
        (a @ b).tanh().sum().backward()
        return a.grad, b.grad

    assert_same(*both(run, (3, 4), (4, 5)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [torch.nn.functional.silu, torch.nn.functional.mish])
def test_half_precision_gradients_are_those_of_torchs_kernels(function, dtype):
    """The kernels compute in float32; torch's composites of the same names round every step to half precision."""
    x, grad = torch.randn(256).to(dtype), torch.randn(256).to(dtype)
    ours, plain = gt.to(x).requires_grad_(), x.requires_grad_()
    function(ours).backward(gt.to(grad))
    function(plain).backward(grad)
    assert torch.equal(ours.grad.cpu(), plain.grad)


def test_autograd_grad_and_double_backward():
    def run(x):
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return first.detach(), second

    assert_same(*both(run, (5,)))


def test_retain_graph_accumulates():
    def run(x):
        y = (x * x).sum()
        y.backward(retain_graph=True)
        y.backward()
        return (x.grad,)

    assert_same(*both(run, (4,)))


def test_a_graph_is_freed_without_retain():
    x = gt.ones(2, requires_grad=True)
    y = (x * x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_hooks():
    seen = []
    x = gt.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: grad * 10)
    x.register_hook(lambda grad: seen.append(grad.tolist()))
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.tolist()))
    y.sum().backward()
    assert seen == [[20.0, 20.0, 20.0], [20.0, 20.0, 20.0]]


def test_no_grad_and_inference_mode():
    x = gt.ones(3, 3, requires_grad=True)
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():
        y = torch.nn.functional.linear(x, x).reshape(-1)
        assert y.tolist() == [3.0] * 9


VIEWS = {
    "select": lambda x: x[1],
    "view": lambda x: x.view(-1),
    "split": lambda x: x.split(2)[1],
    "chunk": lambda x: x.chunk(2, 1)[0],
    "detach": lambda x: x.detach(),
    "as_strided": lambda x: x.as_strided((2, 3), (4, 1)),
    "transpose": lambda x: x.t(),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_in_inference_mode(view):
    for made_inside in (False, True):
        with torch.inference_mode(made_inside):
            plain = torch.arange(16.0).reshape(4, 4) * 1
            ours = gt.to(plain)
        with torch.inference_mode():
            expected, found = VIEWS[view](plain), VIEWS[view](ours)
            assert torch.equal(found.cpu(), expected) and found.stride() == expected.stride()
            assert found.is_inference() == expected.is_inference() == made_inside
            expected += 1
            found += 1
        assert torch.equal(ours.cpu(), plain)


def test_values_made_in_inference_mode_can_be_written_later():
    with torch.inference_mode():
        y = gt.ones(2) * 2
    z = y.clone() if y.is_inference() else y
    z += 1
    assert z.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_with_dropout_recomputes_the_same_mask(use_reentrant):
    dropout = torch.nn.Dropout(0.5)
    x = gt.randn(64, requires_grad=True)
    torch.manual_seed(7)
    checkpoint(lambda v: dropout(v * 2), x, use_reentrant=use_reentrant).sum().backward()
    checkpointed, x.grad = x.grad, None
    torch.manual_seed(7)
    dropout(x * 2).sum().backward()
    assert torch.equal(checkpointed.cpu(), x.grad.cpu())


def test_a_custom_function():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 2 + x * 0

    x = gt.ones(2, requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


def test_a_write_to_a_saved_tensor_is_noticed():
    x = gt.ones(3, requires_grad=True)
    y = x.exp()
    z = (y * y).sum()
    y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


WRITES_TO_LISTS = {
    "_foreach_add_": lambda written: torch._foreach_add_(written, 1.0),
    "_foreach_lerp_": lambda written: torch._foreach_lerp_(written, [each.detach() * 2 for each in written], 0.5),
    "_foreach_mul_": lambda written: torch._foreach_mul_(written, 2.0),
    "_foreach_copy_": lambda written: torch._foreach_copy_(written, [torch.ones(2) for _ in written]),
    "_foreach_zero_": torch._foreach_zero_,
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("write", WRITES_TO_LISTS.values(), ids=WRITES_TO_LISTS)
def test_a_write_to_a_list_of_saved_tensors_is_noticed(write, grad):
    """Also where one tensor of the list is plain."""
    x = gt.ones(2, requires_grad=True)
    saved, other, plain = x * 2, gt.ones(2), torch.ones(2)
    y = saved.exp().sum() + (saved * saved).sum()
    versions = [each._version for each in (saved, other, plain)]
    for written in ([saved, other], [plain, other]):
        with torch.set_grad_enabled(grad):
            write(written)
    after = [each._version for each in (saved, other, plain)]
    assert [new - old for new, old in zip(after, versions, strict=True)] == [1, 2, 1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("write", WRITES_TO_LISTS.values(), ids=WRITES_TO_LISTS)
def test_lists_of_tensors_without_versions_can_be_written(write):
    with torch.inference_mode():
        written = [gt.ones(2), gt.ones(2)]
        write(written)
        assert torch.equal(*written)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_a_step_between_forward_and_backward_is_noticed(kind):
    model = gt.nn.Sequential(gt.nn.Linear(3, 3), gt.nn.Linear(3, 1))
    optimizer = kind(model.parameters(), lr=0.1)
    first, second = (model(gt.ones(2, 3)).sum() for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


def test_a_write_through_data_is_not_noticed():
    def run(x):
        y = x * x
        version = x._version
        x.data.mul_(2)
        x.data[1:].add_(1)
        assert x._version == version
        y.sum().backward()
        return x, x.grad

    assert_same(*both(run, (3,)))


def test_gradcheck():
    a, b = (gt.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2), (2, 3)))
    assert torch.autograd.gradcheck(lambda a, b: (a @ b).tanh(), (a, b))
    assert torch.autograd.gradgradcheck(lambda a, b: (a @ b).tanh(), (a, b))


def test_gradcheck_of_attention_tries_undefined_gradients():
    operands = [gt.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(torch.nn.functional.scaled_dot_product_attention, operands)


def test_a_write_to_a_leaf_is_refused():
    x = gt.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x += 1


def test_gradients_through_views_and_in_place():
    def run(x):
        y = x * 1
        y[1:, 0] *= 3
        y.t()[1].add_(x[1])
        (y**2).sum().backward()
        return (x.grad,)

    assert_same(*both(run, (2, 2)))


def test_autocast_to_bfloat16():
    def run(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.nn.functional.linear(x, w)
        y.float().sum().backward()
        return y.detach(), x.grad, w.grad

    plain, ours = both(run, (3, 4), (5, 4))
    assert ours[0].dtype == torch.bfloat16
    assert_same(plain, ours)


def test_func_grad_and_vmap():
    def loss(w, x):
        return (torch.tanh(x @ w) ** 2).sum()

    w, x = torch.randn(4, 3), torch.randn(6, 4)
    expected = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x)
    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(gt.to(w), gt.to(x))
    torch.testing.assert_close(found.cpu(), expected)


def test_func_jacrev_and_functional_call():
    model = torch.nn.Linear(3, 2)
    ours = gt.to(copy.deepcopy(model))
    x = torch.randn(3)
    expected = torch.func.jacrev(lambda v: torch.func.functional_call(model, dict(model.named_parameters()), (v,)))(x)
    found = torch.func.jacrev(lambda v: torch.func.functional_call(ours, dict(ours.named_parameters()), (v,)))(gt.to(x))
    torch.testing.assert_close(found.cpu(), expected)


def test_cpu_is_differentiable():
    x = gt.ones(3, requires_grad=True)
    (x.cpu() * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad.tolist() == [1.0, 2.0, 3.0]


def test_gradient_clipping():
    def run(a, b):
        (a * 10).sum().backward()
        (b * 3).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_([a, b], 1.0)
        torch.nn.utils.clip_grad_value_([a], 0.1)
        return norm, a.grad, b.grad

    assert_same(*both(run, (3,), (2, 2)))


def test_an_exception_in_a_hook_reaches_the_user():
    x = gt.ones(2, requires_grad=True)
    y = x * 2

    def fail(grad):
        raise KeyError("from the hook")

    y.register_hook(fail)
    with pytest.raises(KeyError, match="from the hook"):
        y.sum().backward()


def _write_transposed(base, by):
    view = base[:]
    view.t_()
    view.mul_(by)
    return (base * base * by).sum()


def _write_a_row_of_transposed(base, by):
    view = base[:]
    view.transpose_(0, 1)
    view[0] = by[1] * base[0, 0]
    return (base * base * by).sum()


def _read_transposed_after_a_write(base, by):
    view = base[:]
    view.swapaxes_(0, 1)
    base.mul_(by)
    return (view * view * by).sum()


def _write_strided(base, by):
    view = base[:]
    view.as_strided_((3, 3), (1, 3))
    view.mul_(by)
    return (base * base * by).sum()


def _write_squeezed(base, by):
    view = base[0]
    view.unsqueeze_(1).mul_(3)
    view.squeeze_(1).mul_(by[1])
    return (base * base * by).sum()


def _write_not_square(base, by):
    view = base[:2]
    view.transpose_(0, 1)
    view.mul_(by[:, :2])
    return (view * view).sum()


@pytest.mark.parametrize(
    "run",
    [
        _write_transposed,
        _write_a_row_of_transposed,
        _read_transposed_after_a_write,
        _write_strided,
        _write_squeezed,
        _write_not_square,
    ],
)
def test_gradients_after_a_view_was_changed_in_place(anywhere, run):
    plain = torch.arange(9.0).reshape(3, 3)
    expected = torch.tensor(2.0, requires_grad=True)
    ours = gt.tensor(2.0, requires_grad=True)
    run(gt.to(plain) * ours, gt.to(plain)).backward()
    run(plain * expected, plain).backward()
    assert ours.grad.item() == expected.grad.item()
