"""The states in which an operator must take torch's way, and the overloads that torch dispatches for operators."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gt.client.operators import BINARY, IN_PLACE, REFLECTED, UNARY
from gt.client.torch_patches.op_interception import is_intercepted, unintercepted


def test_nothing_intercepts_by_default():
    with torch.no_grad():
        assert not is_intercepted(), "every operator would take torch's way, which is three times as long"


@pytest.mark.parametrize("enter", [
    TorchFunctionMode,
    TorchDispatchMode,
    forward_ad.dual_level,
    torch.profiler.profile,
    torch.autograd.profiler.profile,
    lambda: torch.device("cpu"),
])  # fmt: skip
def test_modes_levels_and_profiles_are_noticed(enter):
    with enter():
        assert is_intercepted(), "it would not see GT's ops"
    assert not is_intercepted()


def seen_inside(run):
    seen = []

    def function(x):
        seen.append(is_intercepted())
        return x * x

    run(function)
    return seen


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("run", [
    lambda function: torch.vmap(function)(torch.ones(2)),
    lambda function: torch.func.grad(function)(torch.ones(())),
    lambda function: torch.func.jvp(function, (torch.ones(2),), (torch.ones(2),)),
    lambda function: torch.func.jacfwd(function)(torch.ones(2)),
    lambda function: torch.func.functionalize(function)(torch.ones(2)),
    lambda function: torch.jit.trace(function, torch.ones(2), check_trace=False),
])  # fmt: skip
def test_transforms_and_traces_are_noticed(run):
    assert set(seen_inside(run)) == {True}, "ops on captured GT tensors would not be transformed"
    assert not is_intercepted()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_sizes_are_numbers_where_nothing_intercepts():
    found = []

    @unintercepted
    def own_work(x):
        found.append((type(x.shape[0]), torch.frombuffer(bytearray(8), dtype=torch.float32).tolist()))

    def function(x):
        own_work(x)
        return x * x

    torch.jit.trace(function, torch.ones(2), check_trace=False)
    torch.func.grad(lambda x: function(x).sum())(torch.ones(2))
    with torch.device("meta"):
        function(torch.ones(2))
    assert found == [(int, [0.0, 0.0])] * 3, "GT's own work would be traced and transformed"


class Overloads(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._can_decompose():  # torch does so above autograd, which inference mode leaves out
            with self:
                return func.decompose(*args, **(kwargs or {}))
        shown = [type(a) if isinstance(a, torch.Tensor) else a for a in args]
        self.seen.append((func, shown, kwargs))
        return func(*args, **(kwargs or {}))


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64]
NUMBERS = [2, -3, 0.5, 2.0, 0, 1, True, False, float("inf"), 1 << 40]
ROWS = [(name, (op, op)) for name, op in UNARY.items()] + [*BINARY.items(), *IN_PLACE.items()]
ROWS += [(name, (op, None)) for name, (_, op) in REFLECTED.items()]


def dispatched(name, x, *others):
    """The ops that torch dispatches for an operator; None if it refuses the operands."""
    with Overloads() as mode:
        try:
            getattr(x, name)(*others)
        except (RuntimeError, TypeError):
            return None
    return mode.seen


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
@pytest.mark.parametrize(("name", "overloads"), ROWS)
def test_torch_dispatches_one_overload_for_an_operator(name, overloads, context):
    told = f"{name} of a GT tensor would compute something else than torch's"
    for dtype in DTYPES:
        for shape in ((3,), ()):
            with context():
                x = torch.ones(shape, dtype=dtype)
                if name in UNARY:
                    assert dispatched(name, x) in (None, [(overloads[0], [torch.Tensor], {})]), told
                    continue
                for number in NUMBERS:
                    found = dispatched(name, x.clone(), number)
                    assert found in (None, [(overloads[0], [torch.Tensor, number], {})]), (told, dtype, number)
                    if found is not None:
                        assert type(found[0][1][1]) is type(number), told
                for other in (torch.ones(3, dtype=dtype), torch.ones(()), torch.ones(3, dtype=torch.int64)):
                    if overloads[1] is not None:
                        found = dispatched(name, x.clone(), other)
                        assert found in (None, [(overloads[1], [torch.Tensor] * 2, {})]), told
