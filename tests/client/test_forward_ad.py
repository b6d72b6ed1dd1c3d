"""Forward-mode derivatives and the transforms of `torch.func`, on GT and on torch."""

import pytest
import torch
from torch.autograd import forward_ad

import gt
from tests.conformance.expected import unexpected
from tests.conformance.opdb import Task, dtypes_of, ops_by_name, run_task
from tests.conformance.sides import MODES, make_side
from tests.slow_parameters import some_of

# torch's own derivatives import torch.jit, which warns
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

X, T = torch.linspace(-1, 1, 6).view(2, 3), torch.linspace(0.5, 2, 6).view(2, 3)


def tangent_of(function, primal, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(primal, tangent))).tangent


def written_view(dual):
    whole = torch.zeros_like(dual).repeat(2, 1)
    whole[:2].copy_(dual)
    return whole.sin()


PROGRAMS = {
    "a transposed view": lambda dual: dual.t().exp(),
    "a view of a view": lambda dual: dual.t()[1:].sum(0) * dual.reshape(-1)[:2],
    "a write to a view": written_view,
    "a write to a part": lambda dual: (dual * 1)[0].mul_(dual[1]),
    "real parts": lambda dual: torch.view_as_real(torch.complex(dual, dual * 2).conj().resolve_conj()).square(),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("transposed", [False, True])
def test_tangents_of_views(anywhere, program, transposed):
    """A tangent gets the strides of its primal."""
    primal, tangent = (X.t().contiguous().t(), T) if transposed else (X, T)
    expected = tangent_of(PROGRAMS[program], primal.clone(), tangent)
    found = tangent_of(PROGRAMS[program], gt.to(primal), gt.to(tangent))
    torch.testing.assert_close(found.cpu(), expected)


def test_tangents_of_a_part_of_a_larger_tensor(anywhere):
    def part(to):
        return tangent_of(lambda dual: dual.t() * 2, to(torch.arange(20.0).view(4, 5))[1:3, 1:4], to(T))

    torch.testing.assert_close(part(gt.to).cpu(), part(lambda tensor: tensor))


def test_plain_tangents_and_plain_primals(embedded):
    expected = tangent_of(lambda dual: dual.t().sin(), X, T)
    torch.testing.assert_close(tangent_of(lambda dual: dual.t().sin(), gt.to(X), T).cpu(), expected)


def cube(x):
    return (x.t().reshape(-1) ** 3).cumsum(0)


TRANSFORMS = {
    "jvp": lambda f, x, t: torch.func.jvp(f, (x,), (t,))[1],
    "vjp": lambda f, x, t: torch.func.vjp(f, x)[1](torch.ones_like(x).reshape(-1))[0],
    "grad": lambda f, x, t: torch.func.grad(lambda v: f(v).sum())(x),
    "jacrev": lambda f, x, t: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x, t: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x, t: torch.func.hessian(lambda v: f(v).sum())(x),
    "jacfwd of jacfwd": lambda f, x, t: torch.func.jacfwd(torch.func.jacfwd(f))(x),
    "vmap": lambda f, x, t: torch.func.vmap(f)(torch.stack([x, t])),
    "vmap of jvp": lambda f, x, t: torch.func.vmap(lambda v: torch.func.jvp(f, (x,), (v,))[1])(torch.stack([x, t])),
    "vmap of the last dim": lambda f, x, t: torch.func.vmap(f, in_dims=2, out_dims=1)(torch.stack([x, t], -1)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_equal_torchs(anywhere, transform):
    expected = TRANSFORMS[transform](cube, X, T)
    found = TRANSFORMS[transform](cube, gt.to(X), gt.to(T))
    assert isinstance(found, gt.Tensor)
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_plain_tensors_are_moved_inside_transforms(anywhere, transform):
    """An argument, a constant and new tensors."""

    def function(move, make):
        return lambda x: (move(x) * move(T.t().reshape(-1)[: x.numel()].view(x.shape)) + make([2.0])).sin().reshape(-1)

    expected = TRANSFORMS[transform](function(lambda x: x, torch.tensor), X, T)
    for move in (lambda x: x, gt.to):
        found = TRANSFORMS[transform](function(gt.to, gt.tensor), move(X), move(T))
        torch.testing.assert_close(found.cpu(), expected)


def test_values_of_gt_are_read_inside_transforms(anywhere):
    w = gt.to(T)
    found = torch.func.grad(lambda x: (x * w.cpu() * w.sum().item()).sum())(gt.to(X))
    torch.testing.assert_close(found.cpu(), T * T.sum())


def test_layouts_are_given_inside_transforms(anywhere):
    mesh = gt.mesh(len(gt.workers()))
    whole = gt.replicate(T, mesh)
    for laid_out in (lambda: gt.shard(T, mesh, 1), lambda: whole.redistribute(mesh, [gt.Shard(1)])):
        found = torch.func.grad(lambda x: (x * laid_out()).sum())(gt.to(X))
        torch.testing.assert_close(found.cpu(), T)
    with pytest.raises(gt.LayoutError, match="lay out the batch before"):
        torch.func.vmap(lambda x: gt.shard(x, mesh))(X)


def test_tangents_go_with_the_tensors_that_are_moved(anywhere):
    torch.testing.assert_close(tangent_of(lambda dual: gt.to(dual) * 2, X, T).cpu(), T * 2)
    torch.testing.assert_close(tangent_of(lambda dual: dual.cpu() * 2, gt.to(X), gt.to(T)), T * 2)


def test_derivatives_of_a_module_in_forward_mode(anywhere):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 4, 2), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(8, 3))

    def jacobian(to):
        moved = to(model)
        parameters = dict(moved.named_parameters())
        return torch.func.jacfwd(lambda x: torch.func.functional_call(moved, parameters, (x,)))(to(X.unsqueeze(0)))

    expected = jacobian(lambda what: what)
    torch.testing.assert_close(jacobian(gt.to).cpu(), expected, rtol=1e-4, atol=1e-5)


def test_shapes_are_compared_without_a_worker(anywhere):
    x = gt.to(X)
    with gt.debug.comm() as c:
        assert x.is_same_size(x * 2) and not x.is_same_size(x.t())
        assert x.t().is_set_to(x.t()) and not x.is_set_to(x.view(3, 2)) and not x.is_set_to(X)
    assert c.bytes == 0


_NAMES = [name for name, op in ops_by_name().items() if op.supports_forward_ad and "float32" in dtypes_of(name)]
_PARTS = [_NAMES[start::6] for start in range(6)]


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", some_of(range(len(_PARTS)), 3))
def test_ops_have_torchs_tangents(mode, part):
    """The first sample of each op, in one of the modes."""
    names = _PARTS[part][list(MODES).index(mode) :: len(MODES)]
    side = make_side(mode)
    side.reopen()
    reports = [run_task(Task(name, "float32", 1, tangents=True), side) for name in names]
    side.close()
    found = [f"{f.op} {f.variant}: {f.reason}" for f in unexpected(reports)]
    assert not found, "\n".join(found)
