"""Random ops: kernels and sessions draw them, engines agree, bad arguments raise, and the distributions are right."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings

import gt
from gt.core.meta import TensorMeta
from gt.core.signatures import Input, ListArg, Signature, ViewStep
from gt.worker.bound_ops import BoundOp
from gt.worker.engines import refused_ops
from gt.worker.engines.counter_rng import Region, whole_region
from gt.worker.engines.numpy_random import RANDOM
from gt.worker.engines.random_ops import COUNTER_BASED, DISTRIBUTIONS, WIDTHS
from tests.subprocesses import ROOT
from tests.worker.engines.random_cases import (
    CASES,
    COUNT,
    ENGINE,
    KEYS,
    REFERENCE,
    chi_squared,
    draw,
    farthest,
    made,
    regions,
    spread,
    zeros,
)

# Through kernels and sessions


def test_a_kernel_makes_its_region():
    region = Region((4, 6), ((2, 4), (1, 6)))
    told = TensorMeta((2, 5), (5, 1), 0, "float32")
    signature = Signature("aten.rand.default", (ListArg((2, 5)),), {}, (), (), (told,), (0,), random=True)
    (found,) = BoundOp(ENGINE, signature, region).call([], (77,))
    (reference,) = BoundOp(REFERENCE, signature, region).call([], (77,))
    assert torch.equal(found, draw("aten.rand.default", 77, [4, 6])[2:, 1:])
    assert np.array_equal(found.numpy(), reference)


def test_a_kernel_writes_into_a_view():
    step = ViewStep("aten.t.default", (), {})
    signature = Signature("aten.uniform_.default", (Input(0),), {}, ((step,),), (0,), (), (), random=True)
    base = torch.zeros(3, 2)
    assert BoundOp(ENGINE, signature).call([base], (5,)) == []
    assert torch.equal(base.t(), draw("aten.rand.default", 5, [2, 3]))


def test_an_op_that_is_not_counter_based_refuses_a_region():
    with pytest.raises(NotImplementedError, match=r"aten\.multinomial\.default is not counter-based"):
        draw("aten.multinomial.default", 1, torch.ones(4), 2, region=whole_region((2,)))


def test_an_op_that_is_not_counter_based_follows_its_key():
    first, again = (draw("aten.multinomial.default", 3, torch.ones(1000), 20) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, draw("aten.multinomial.default", 4, torch.ones(1000), 20))


def test_nothing_is_drawn_from_the_programs_generator():
    state = torch.get_rng_state()
    for op in CASES:
        made(op, 1, (3, 4), lambda tensor: tensor)
        assert torch.equal(torch.get_rng_state(), state), op


def test_every_worker_draws_the_same_numbers():
    drawn = []
    for workers in (1, 3):
        gt.init(workers=workers, mode="virtual")
        torch.manual_seed(2)
        drawn.append([gt.randn(5).cpu() for _ in range(3)])
        gt.shutdown()
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))


@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize("p", [0.0, 0.1, 0.75, 1.0])
def test_dropout_keeps_the_mean_and_its_gradient_is_its_mask(p):
    x = gt.ones(COUNT, requires_grad=True)
    y = F.dropout(x, p)
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), y.detach().cpu())
    assert set(y.detach().cpu().unique().tolist()) <= {0.0, torch.tensor(1 / (1 - p) if p < 1 else 0.0).item()}
    assert abs(y.mean().item() - (p < 1)) <= 5 * math.sqrt(p / max(1 - p, 0.01) / COUNT)


def test_native_dropout_scales_what_its_mask_keeps():
    x = torch.randn(50, 40).t()
    y, mask = draw("aten.native_dropout.default", 1, x, 0.25, True)
    assert mask.dtype == torch.bool
    torch.testing.assert_close(y, x * mask / 0.75)
    kept, everything = draw("aten.native_dropout.default", 1, x, 0.25, False)
    assert torch.equal(kept, x) and everything.all()


def test_the_table_of_the_documentation():
    rows = dict(re.findall(r"^\| (by [^|]*) \| (.*) \|$", (ROOT / "docs" / "random.md").read_text(), re.MULTILINE))
    named = {how: set(re.findall(r"`(\w+)`", ops)) for how, ops in rows.items()}
    parts, permutation, *others = named.values()
    assert parts | permutation == {op.split(".")[1] for op in COUNTER_BASED}
    for op in set().union(*others):
        packet = getattr(torch.ops.aten, op)
        tags = [getattr(packet, overload).tags for overload in packet.overloads()]
        assert any(torch.Tag.nondeterministic_seeded in tag for tag in tags)


def test_every_random_function_of_a_tensor_is_counter_based_or_known():
    whole_only = ["multinomial", "_sample_dirichlet", "binomial", "poisson", "_standard_gamma", "_fused_dropout"]
    fused = re.compile(r"rrelu|attention|_rnn|_lstm|dropout_state|dropout_mask|_fused_sdp|_softmax_with_shape")
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        op, _, overload = rest.partition(".")
        if namespace != "aten" or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            continue
        if refused_ops.refusal(op, overload) is not None:
            continue
        found = getattr(getattr(torch.ops.aten, op, None), overload or "default", None)
        if found is not None and torch.Tag.nondeterministic_seeded in found.tags:
            assert str(found) in COUNTER_BASED or op in whole_only or fused.search(op) or name.endswith("dropout.out")


# Both engines


def assert_same(ours, theirs, exact=True):
    assert str(ours.dtype) == f"torch.{theirs.dtype}"
    tolerance = 0.0 if exact else {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3}[ours.dtype]
    torch.testing.assert_close(ours, torch.from_numpy(theirs), rtol=tolerance, atol=tolerance)


def both(op, key, *args, region=None, **kwargs):
    arrays = [arg.numpy().copy() if isinstance(arg, torch.Tensor) else arg for arg in args]
    theirs = {name: np.dtype(str(value).removeprefix("torch.")) for name, value in kwargs.items()}
    ours = draw(op, key, *args, region=region, **kwargs)
    return ours, draw(op, key, *arrays, region=region, engine=REFERENCE, **theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@given(regions(), KEYS)
@settings(max_examples=15, deadline=None)
def test_engines_agree_on_floats(dtype, region, key):
    size = list(region.size)
    like = zeros(size, dtype)
    assert_same(*both("aten.rand.default", key, size, region=region, dtype=dtype))
    assert_same(*both("aten.rand_like.default", key, like, region=region))
    assert_same(*both("aten.uniform_.default", key, like.clone(), -0.1, 2.7, region=region))
    assert_same(*both("aten.bernoulli.default", key, spread(size).to(dtype), region=region))
    assert_same(*both("aten.bernoulli_.float", key, like.clone(), 0.3, region=region))
    assert_same(*both("aten.randn.default", key, size, region=region, dtype=dtype), exact=False)
    assert_same(*both("aten.randn_like.default", key, like, region=region), exact=False)
    assert_same(*both("aten.normal_.default", key, like.clone(), 3.0, 0.5, region=region), exact=False)


def test_engines_round_uniform_numbers_of_few_bits_alike():
    assert_same(*both("aten.uniform_.default", 466, zeros([], torch.float16), -0.1, 2.7))
    assert_same(*both("aten.uniform_.default", 1, zeros([5000], torch.float16), -0.1, 2.7))


SPANS = [(0, 7), (-3, 2**40), (-(2**62), 2**62 + 5), (-(2**63), 2**63 - 1), (-(2**63), 0)]


def test_engines_agree_on_integers():
    for low, high in SPANS:
        ours, theirs = both("aten.randint.low", 6, low, high, [4, 50])
        assert_same(ours, theirs)
        assert low <= ours.min() and ours.max() < high
        assert ours.double().std().item() == pytest.approx((high - low) / math.sqrt(12), rel=0.1)


def test_engines_agree_on_permutations():
    assert_same(*both("aten.randperm.default", 6, 100))
    assert_same(*both("aten.randint.default", 6, 5, [30], dtype=torch.int32))


def test_float32_normals_of_the_engines_are_the_same_bits():
    ours, theirs = both("aten.randn.default", 2, [20_000])
    assert (ours.numpy() != theirs).sum() <= 1


# Bad arguments

BAD = {
    "std below 0": ("normal_", torch.float32, (0.0, -1.0)),
    "std not a number": ("normal_", torch.float32, (0.0, math.nan)),
    "normal integers": ("normal_", torch.int64, ()),
    "from above to": ("uniform_", torch.float32, (2.0, 1.0)),
    "to beyond the dtype": ("uniform_", torch.float16, (0.0, 1e9)),
    "uniform integers": ("uniform_", torch.int32, ()),
    "p above 1": ("bernoulli_", torch.float32, (1.5,)),
    "p below 0": ("bernoulli_", torch.bool, (-0.5,)),
    "complex booleans": ("bernoulli_", torch.complex64, (0.5,)),
    "rate 0": ("exponential_", torch.float32, (0.0,)),
    "exponential integers": ("exponential_", torch.int64, ()),
    "p not inside": ("geometric_", torch.float32, (1.0,)),
    "sigma 0": ("cauchy_", torch.float32, (0.0, 0.0)),
    "log std 0": ("log_normal_", torch.float32, (0.0, 0.0)),
    "no integer": ("random_", torch.int64, (3, 3)),
    "integers beyond the dtype": ("random_", torch.uint8, (0, 1000)),
    "no integer below": ("random_", torch.int64, (0,)),
}


def refusal(run):
    with pytest.raises(Exception) as found:
        run()
    return found.type, str(found.value).splitlines()[0][:60]


def test_bad_arguments_raise_what_torch_raises():
    for what, (method, dtype, params) in BAD.items():
        overload = {"random_": ("default", "to", "from")[len(params)], "bernoulli_": "float"}.get(method, "default")
        target = torch.empty(3, dtype=dtype)
        expected = refusal(lambda: getattr(target, method)(*params))
        assert refusal(lambda: draw(f"aten.{method}.{overload}", 1, target, *params)) == expected, what


BAD_TENSORS = [
    ("bernoulli.default", (torch.tensor([0.5, 2.0]),)),
    ("bernoulli.default", (torch.tensor([0.5, math.nan]),)),
    ("bernoulli.default", (torch.tensor([1, 0]),)),
    ("bernoulli_.Tensor", (torch.zeros(3), torch.zeros(2))),
    ("normal.Tensor_Tensor", (torch.zeros(2), torch.tensor([1.0, -1.0]))),
    ("normal.Tensor_Tensor", (torch.zeros(2), torch.ones(3))),
    ("normal.Tensor_float", (torch.zeros(2), -1.0)),
    ("normal.float_Tensor", (0.0, torch.ones(2, dtype=torch.complex64))),
    ("randint.low", (5, 2, [3])),
    ("native_dropout.default", (torch.ones(3), 2.0, True)),
    ("randperm.default", (-1,)),
]


def test_bad_tensors_and_sizes_raise_what_torch_raises():
    for op, args in BAD_TENSORS:
        name, overload = op.split(".")
        expected = refusal(lambda: getattr(getattr(torch.ops.aten, name), overload)(*args))
        assert refusal(lambda: draw(f"aten.{op}", 1, *args)) == expected, (op, args)


def test_the_numpy_engine_refuses_bad_arguments():
    for op, args in {
        "aten.randint.low": (5, 2, [3]),
        "aten.normal_.default": (np.zeros(3, np.float32), 0.0, -1.0),
        "aten.bernoulli.default": (np.array([0.5, 2.0], np.float32),),
        "aten.rand.default": ([3], np.dtype("int64")),
        "aten.randn.default": ([3], np.dtype("complex64")),
    }.items():
        with pytest.raises((RuntimeError, NotImplementedError)):
            draw(op, 1, *args, engine=REFERENCE)
    with pytest.raises(NotImplementedError, match="no complex numbers"):
        draw("aten.normal_.default", 1, np.zeros(3, np.complex64), engine=REFERENCE)
    assert set(RANDOM) <= set(COUNTER_BASED)


# Distributions


def at_the_ends(method, dtype, *params):
    """The numbers that a distribution makes of the least and the greatest words."""
    distribution = DISTRIBUTIONS[method](dtype, *params)
    words = torch.tensor([-(2 ** (distribution.width - 1)), -1, 0, 2 ** (distribution.width - 1) - 1])
    out = torch.empty(4, dtype=dtype)
    distribution.write(words, torch.empty(4, dtype=torch.float64), out)
    return out.double()


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_the_smallest_and_largest_samples_of_distributions(dtype):
    uniform = at_the_ends("uniform_", dtype)
    assert uniform.tolist() == [0.0, 0.5 - 2.0 ** -WIDTHS[dtype], 0.5, 1 - 2.0 ** -WIDTHS[dtype]]
    assert at_the_ends("uniform_", dtype, 1.0, 2.0).max() < 2
    assert at_the_ends("uniform_", dtype, 2.5, 2.5).unique().tolist() == [2.5]
    assert (at_the_ends("exponential_", dtype) > 0).all()
    assert at_the_ends("normal_", dtype).abs().max().item() == pytest.approx(8.29, abs=0.03)
    assert at_the_ends("geometric_", dtype, 0.5).min() == 1
    assert at_the_ends("exponential_", dtype).isfinite().all()
    assert at_the_ends("bernoulli_", dtype, 0.0).tolist() == [0] * 4
    assert at_the_ends("bernoulli_", dtype, 1.0).tolist() == [1] * 4


CUMULATIVE = {
    "uniform_": ((-1.0, 3.0), lambda x: (x + 1) / 4),
    "normal_": ((1.0, 2.0), lambda x: torch.special.ndtr((x - 1) / 2)),
    "log_normal_": ((0.5, 0.7), lambda x: torch.special.ndtr((x.log() - 0.5) / 0.7)),
    "exponential_": ((2.0,), lambda x: 1 - torch.exp(-2 * x)),
    "cauchy_": ((1.0, 3.0), lambda x: 0.5 + torch.atan((x - 1) / 3) / math.pi),
}


@pytest.mark.parametrize("method", CUMULATIVE)
def test_samples_follow_their_distribution(method):
    params, cumulative = CUMULATIVE[method]
    numbers = draw(f"aten.{method}.default", 0, torch.empty(COUNT, dtype=torch.float64), *params)
    assert farthest(numbers, cumulative) < 1.95
    single = draw(f"aten.{method}.default", 0, torch.empty(COUNT), *params)
    if method != "uniform_":  # which has fewer bits of its own
        torch.testing.assert_close(single, numbers.float(), rtol=0, atol=0)
    assert farthest(single, cumulative) < 1.95


def test_a_wrong_distribution_is_found():
    numbers = draw("aten.randn.default", 1, [COUNT])
    assert farthest(numbers * 1.03, torch.special.ndtr) > 1.95
    assert farthest(numbers + 0.03, torch.special.ndtr) > 1.95


def test_moments_and_tails_of_normals():
    numbers = draw("aten.randn.default", 11, [1_000_000]).double()
    assert abs(numbers.mean()) < 4 / math.sqrt(len(numbers))
    assert abs(numbers.var() - 1) < 4 * math.sqrt(2 / len(numbers))
    assert abs((numbers**4).mean() - 3) < 4 * math.sqrt(96 / len(numbers))
    beyond = (numbers.abs() > 4).sum().item()
    assert abs(beyond - 63.3) < 4 * math.sqrt(63.3)


def test_complex_normals_share_the_variance():
    numbers = draw("aten.randn.default", 2, [COUNT], dtype=torch.complex64)
    assert numbers.real.var().item() == pytest.approx(0.5, rel=0.02)
    assert numbers.imag.var().item() == pytest.approx(0.5, rel=0.02)
    assert abs((numbers.real * numbers.imag).mean()) < 0.01
    mean = draw("aten.normal_.default", 2, numbers.clone(), 3.0, 1.0).mean()
    assert abs(mean - 3) < 0.02


def test_geometric_numbers():
    numbers = draw("aten.geometric_.default", 4, torch.empty(COUNT, dtype=torch.int64), 0.3)
    expected = 0.3 * 0.7 ** torch.arange(20.0, dtype=torch.float64) * COUNT
    assert numbers.min() == 1
    assert abs(chi_squared(numbers.bincount()[1:21], expected)) < 4


def test_integers_are_equally_frequent():
    for span in (2, 10, 100, 1000):
        counts = draw("aten.randint.low", 5, -7, span - 7, [COUNT]).add(7).bincount(minlength=span)
        assert len(counts) == span
        assert abs(chi_squared(counts, torch.full((span,), COUNT / span))) < 4


def test_bernoulli_numbers():
    for p in (0.001, 0.3, 0.5, 0.99):
        numbers = draw("aten.bernoulli_.float", 3, torch.empty(COUNT), p)
        assert abs(numbers.mean().item() - p) < 4 * math.sqrt(p * (1 - p) / COUNT)
        probabilities = torch.full((COUNT,), p, dtype=torch.float64)
        assert torch.equal(draw("aten.bernoulli.default", 3, probabilities), numbers.double())


def test_random_integers_fill_their_dtype():
    for dtype, highest in ((torch.bool, 1), (torch.uint8, 255), (torch.int16, 2**15 - 1), (torch.float32, 2**24)):
        numbers = draw("aten.random_.default", 1, torch.empty(COUNT, dtype=dtype)).double()
        assert numbers.min() >= 0 and numbers.max() <= highest
        assert numbers.mean().item() == pytest.approx(highest / 2, rel=0.01)
