"""Views and in-place writes: aliases of a GT tensor have the values that they have in torch."""

import copy
import io
import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import gt

SEVERAL = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def flatten_last(x):
    return x.flatten(-2) if x.dim() > 1 else x


def strided(x):
    fits = x.numel() > 3 and x.stride(-1) == 1 and x.shape[-1] > 1
    return x.as_strided((2,), (1,), x.storage_offset()) if fits else x


VIEWS = [
    ("x[1:]", lambda x, n: x[1:] if x.dim() and x.shape[0] > 1 else x),
    ("x[..., ::2]", lambda x, n: x[..., ::2] if x.dim() else x),
    ("x.t()", lambda x, n: x.transpose(0, -1) if x.dim() > 1 else x),
    ("x[n]", lambda x, n: x[n % x.shape[0]] if x.dim() > 1 and x.shape[0] else x),
    ("view(-1)", lambda x, n: x.view(-1) if x.is_contiguous() else x),
    ("reshape", lambda x, n: x.reshape(*x.shape[1:], x.shape[0]) if x.dim() > 1 else x),
    ("unsqueeze", lambda x, n: x.unsqueeze(n % (x.dim() + 1)) if x.dim() < 4 else x),
    ("squeeze", lambda x, n: x.squeeze()),
    ("diagonal", lambda x, n: x.diagonal() if x.dim() > 1 else x),
    ("split", lambda x, n: x.split(2)[n % -(-x.shape[0] // 2)] if x.dim() and x.shape[0] else x),
    ("unbind", lambda x, n: x.unbind(-1)[n % x.shape[-1]] if x.dim() > 1 and x.shape[-1] else x),
    ("narrow", lambda x, n: x.narrow(-1, 0, max(1, x.shape[-1] - 1)) if x.dim() and x.shape[-1] else x),
    ("movedim", lambda x, n: x.movedim(0, -1) if x.dim() else x),
    ("flatten", lambda x, n: flatten_last(x)),
    ("detach", lambda x, n: x.detach()),
    ("as_strided", lambda x, n: strided(x)),
    ("unfold", lambda x, n: x.unfold(0, 2, 2) if x.dim() and x.shape[0] >= 2 and x.dim() < 4 else x),
]  # fmt: skip

WRITES = [
    ("+= n", lambda x, n: x.add_(n)),
    ("*= 2", lambda x, n: x.mul_(2)),
    ("fill_", lambda x, n: x.fill_(n)),
    ("zero_", lambda x, n: x.zero_()),
    ("copy_", lambda x, n: x.copy_(torch.arange(float(x.numel())).view(x.shape))),
    ("x[0] = n", lambda x, n: x.__setitem__(0, n) if x.dim() and x.shape[0] else x),
    ("x[..., -1] -= 1", lambda x, n: x[..., -1].sub_(1) if x.dim() and x.shape[-1] else x),
    ("masked", lambda x, n: x.masked_fill_(x > n, -1.0)),
    ("x[x<0]=9", lambda x, n: x.__setitem__(x < 0, 9.0)),
    ("clamp_", lambda x, n: x.clamp_(-5, 50)),
    ("out=", lambda x, n: torch.add(x, 1, out=x)),
    ("index_put", lambda x, n: x.index_fill_(0, torch.tensor([0]), n) if x.dim() and x.shape[0] else x),
    ("relu_", lambda x, n: torch.relu_(x)),
    ("x += x.sum()", lambda x, n: x.add_(x.sum() * 0.125)),
    ("swap", lambda x, n: x.copy_(x.flip(0).clone()) if x.dim() else x),
]

step = st.tuples(st.sampled_from([("view", *v) for v in VIEWS] + [("write", *w) for w in WRITES]), st.integers(0, 5))
programs = st.lists(st.tuples(step, st.integers(0, 6)), min_size=1, max_size=14)
shapes = st.sampled_from([(6,), (4, 3), (2, 3, 4), (5, 1, 2), (1,), (3, 4, 2, 2)])


def run(program, start):
    """Apply steps to a growing pool of aliases; returns the final values of all of them."""
    pool = [start]
    for ((kind, _, function), n), which in program:
        target = pool[which % len(pool)]
        if kind == "view":
            pool.append(function(target, n))
        else:
            function(target, n)
    return pool


@pytest.mark.parametrize("workers", [1, 3])
@SEVERAL
@given(program=programs, shape=shapes)
def test_random_chains_of_views_and_writes(workers, program, shape):
    start = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    expected = run(program, start.clone())
    gt.init(workers=workers, mode="virtual")
    try:
        found = run(program, gt.to(start))
        for plain, ours in zip(expected, found, strict=True):
            assert ours.shape == plain.shape
            assert ours.stride() == plain.stride()
            assert ours.storage_offset() == plain.storage_offset()
            assert torch.equal(ours.cpu(), plain)
    finally:
        gt.shutdown()


def test_writes_through_a_chain_reach_the_base(anywhere):
    x = gt.zeros(4, 6)
    x.view(2, 2, 6)[1].t()[2:5] += 1
    expected = torch.zeros(4, 6)
    expected.view(2, 2, 6)[1].t()[2:5] += 1
    assert torch.equal(x.cpu(), expected)


def test_a_view_sees_a_write_to_its_base(anywhere):
    x = gt.zeros(4)
    view = x[1:3]
    x += 1
    x[2] = 7
    assert view.tolist() == [1.0, 7.0]


def test_versions_count_writes_to_the_storage(anywhere):
    x = gt.zeros(4)
    view = x[1:]
    view.add_(1)
    x.mul_(2)
    assert x._version == view._version == 2
    assert x.detach()._version == 2


def test_is_view_and_base(anywhere):
    x = gt.zeros(4)
    assert x[1:]._is_view()
    assert x[1:]._base is x


def test_a_slice_in_a_loop_stays_cheap(embedded):
    x = gt.arange(3000)
    for _ in range(2000):
        x = x[1:]
    assert len(x._ref.path.steps) <= 9
    assert x.tolist() == list(range(2000, 3000))
    x += 1
    assert x[0].item() == 2001


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t_(),
        lambda x: x.transpose_(0, 1),
        lambda x: x.unsqueeze_(0),
        lambda x: x.squeeze_(),
        lambda x: x.resize_(2, 2),
        lambda x: x.resize_(6),
        lambda x: x.swapaxes_(0, 1),
        lambda x: x.as_strided_((2, 2), (1, 2)),
        lambda x: x.set_(x[1:]),
        lambda x: x.squeeze_(0),
    ],
)
def test_reshaping_in_place(anywhere, change):
    plain = torch.arange(6.0).reshape(2, 3)
    ours = gt.to(plain)
    change(plain), change(ours)
    assert ours.shape == plain.shape
    assert ours.stride() == plain.stride()
    ours += 1
    assert torch.equal(ours.cpu(), plain + 1)


def test_resize_that_grows_keeps_the_old_values(anywhere):
    x = gt.arange(4.0)
    x.resize_(8)
    assert x.shape == (8,)
    assert x[:4].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("op", ["add_", "eq_", "floor_divide_", "ge_"])
def test_an_op_in_place_on_a_view_does_not_resize_it(anywhere, op):
    base = gt.ones(5, 2)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        getattr(base[:, ::2], op)(gt.ones(5))
    assert base.tolist() == [[1.0, 1.0]] * 5


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("view", [lambda base: base[::2], lambda base: base[2:7], lambda base: base[8:]])
def test_a_view_that_an_op_resizes_is_the_view_that_torch_makes_of_it(anywhere, view):
    bases = torch.full((10,), 7.0), gt.to(torch.full((10,), 7.0))
    outs = [view(base) for base in bases]
    for base, out in zip(bases, outs, strict=True):
        ones = torch.ones(1, 5) if base is bases[0] else gt.ones(1, 5)
        assert torch.add(ones, ones, out=out) is out
    assert (outs[1].shape, outs[1].stride(), outs[1].tolist()) == (outs[0].shape, outs[0].stride(), outs[0].tolist())
    if outs[0].storage_offset() + 5 <= 10:  # otherwise torch's storage has grown
        assert bases[1].tolist() == bases[0].tolist()


def test_out_is_resized_as_in_torch(anywhere):
    out = gt.empty(0)
    result = torch.add(gt.ones(3), 1, out=out)
    assert result is out
    assert out.tolist() == [2.0, 2.0, 2.0]
    values, indices = gt.empty(0), gt.empty(0, dtype=torch.int64)
    torch.max(gt.tensor([[1.0, 5.0], [7.0, 2.0]]), 1, out=(values, indices))
    assert values.tolist() == [5.0, 7.0]
    assert indices.tolist() == [1, 0]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("elements", [0, 4])
@pytest.mark.parametrize("alias", [torch.Tensor.detach, lambda out: out.view(-1), lambda out: out[:2]])
def test_aliases_of_an_out_that_is_resized_stay_as_they_are_in_torch(anywhere, elements, alias):
    outs = torch.zeros(elements), gt.zeros(elements)
    aliases = [alias(out) for out in outs]
    torch.add(torch.ones(3), 1, out=outs[0])
    torch.add(gt.ones(3), 1, out=outs[1])
    assert outs[1].tolist() == outs[0].tolist()
    assert (aliases[1].shape, aliases[1].tolist()) == (aliases[0].shape, aliases[0].tolist())


def test_setting_data(anywhere):
    x = gt.ones(2, requires_grad=True)
    x.data = gt.zeros(3)
    assert x.shape == (3,)
    x.data = torch.full((2,), 4.0)
    assert isinstance(x, gt.Tensor)
    assert x.tolist() == [4.0, 4.0]
    x.data.add_(1)
    assert x.tolist() == [5.0, 5.0]


def test_expand_shares_and_refuses_writes_as_torch(anywhere):
    x = gt.ones(3, 1)
    wide = x.expand(3, 4)
    x += 1
    assert wide.sum().item() == 24
    with pytest.raises(RuntimeError, match="single memory location"):
        wide.add_(1)
        wide.tolist()


def test_overlapping_operands(anywhere):
    x, y = torch.arange(5.0), gt.arange(5.0)
    x[1:] = x[:-1].clone()
    y[1:] = y[:-1].clone()
    assert torch.equal(y.cpu(), x)
    x.mul_(x)
    y.mul_(y)
    assert torch.equal(y.cpu(), x)


def test_complex_views(anywhere):
    x = torch.tensor([1 + 2j, 3 - 1j])
    y = gt.to(x)
    torch.view_as_real(x)[:, 0] += 1
    torch.view_as_real(y)[:, 0] += 1
    x.imag.mul_(2), y.imag.mul_(2)
    assert torch.equal(y.conj().cpu(), x.conj().resolve_conj())
    assert torch.equal(torch.view_as_real(y.conj().resolve_conj()).cpu(), torch.view_as_real(x.conj().resolve_conj()))
    y.conj().mul_(2j)
    x.conj().mul_(2j)
    assert torch.equal(y.cpu(), x)


def test_dtype_views(anywhere):
    x = torch.arange(4, dtype=torch.int32)
    y = gt.to(x)
    x.view(torch.int16)[1] = 1
    y.view(torch.int16)[1] = 1
    assert torch.equal(y.cpu(), x)


def test_foreach_writes_to_views_of_one_storage(anywhere):
    x, y = torch.zeros(4), gt.zeros(4)
    torch._foreach_add_([x[:2], x[2:], x[1:3]], 1.0)
    torch._foreach_add_([y[:2], y[2:], y[1:3]], 1.0)
    assert torch.equal(y.cpu(), x)


FOREACH_WRITES = {
    "twice": lambda x: torch._foreach_add_([x, x[1:], x.detach()], [x.detach().clone(), x[:-1].clone(), x.clone()]),
    "one added twice": lambda x: torch._foreach_add_([x, x.data], [torch.ones(4), torch.full((4,), 2.0)]),
    "scaled and added": lambda x: torch._foreach_addcmul_([x, x.data], [x.clone()] * 2, [x.clone()] * 2, 0.5),
    "itself": lambda x: torch._foreach_mul_([x, x.data], [x, x.data]),
}


@pytest.mark.parametrize("write", FOREACH_WRITES.values(), ids=FOREACH_WRITES)
def test_foreach_writes_twice_to_one_tensor(four_workers, write):
    x = torch.arange(4.0)
    y = gt.to(x)
    write(x)
    write(y)
    assert torch.equal(y.cpu(), x)


def values_of(tensors):
    return [(x.tolist(), x.stride(), x.storage_offset(), x.requires_grad) for x in tensors]


def write_to_both_ends(tensors):
    with torch.no_grad():
        tensors[0][1] = 7
        tensors[-1][0] = 5
    return values_of(tensors)


FAMILIES = {
    "rows": lambda x: [x, x[1:], x.view(12)],
    "columns": lambda x: [x.t(), x[:, 1], x],
    "long paths": lambda x: [x, x[0:].t().t().t().t()[:].t().t().t().t()[1:], x],
    "transposed": lambda x: [(y := x.t().contiguous().t() + 0), y[1:], y.t()],
    "equal": lambda x: [x, x.detach(), x.data],
    "a slice alone": lambda x: [x[1:, ::2], x[1:, ::2][0]],
    "leaves": lambda x: [x.requires_grad_(), x.data],
}


def saved(tensors):
    file = io.BytesIO()
    torch.save(tensors, file)
    file.seek(0)
    return torch.load(file)


COPIES = {
    "deepcopy": copy.deepcopy,
    "save": saved,
    "copy of each": lambda tensors: [copy.copy(x) for x in tensors],
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES.keys())
def test_copies_are_tied_as_their_originals(anywhere, make, family):
    results = []
    for start in (torch.arange(12.0).view(3, 4), gt.arange(12.0).view(3, 4)):
        originals = family(start)
        copies = make(originals)
        results.append((write_to_both_ends(copies), values_of(originals)))
    assert results[1] == results[0]


def test_a_copy_is_a_leaf_that_shares(anywhere):
    for start in (torch.ones(3), gt.ones(3)):
        parameter = torch.nn.Parameter(start)
        parameter.note = "kept"
        twin = copy.copy(parameter)
        with torch.no_grad():
            twin[0] = 4
        assert isinstance(twin, torch.nn.Parameter)
        assert (twin.note, twin.requires_grad, parameter[0].item()) == ("kept", True, 4.0)
        assert copy.copy(parameter * 2).is_leaf


def test_parameters_are_copied_one_by_one_as_in_torch(anywhere):
    for start in (torch.zeros(3), gt.zeros(3)):
        one, other = copy.deepcopy([torch.nn.Parameter(start), torch.nn.Parameter(start)])
        with torch.no_grad():
            one.fill_(1)
        assert other.tolist() == [0.0, 0.0, 0.0]


def test_pickled_views_that_read_the_bytes_in_another_way(anywhere):
    x = gt.tensor([1 + 2j, 3 - 1j])
    same, conjugate, real = pickle.loads(pickle.dumps([x, x.conj(), torch.view_as_real(x)]))
    assert torch.equal(conjugate.cpu(), x.cpu().conj().resolve_conj())
    assert torch.equal(real.cpu(), torch.view_as_real(x.cpu()))
    assert torch.equal(same.cpu(), x.cpu())
