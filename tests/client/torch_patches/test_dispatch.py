"""The states in which an operator must take torch's way, and the overloads that torch dispatches for operators."""

from __future__ import annotations

import gc
import inspect
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import gt
from gt.client.operators import BINARY, IN_PLACE, REFLECTED, UNARY
from gt.client.torch_patches.dispatch import (
    DispatchKey,
    UntracedMode,
    current_dispatch_modes,
    disable_current_modes,
    has_kernel,
    is_intercepted,
    kernel_of,
    packet_name,
    schema_of,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
    unintercepted,
)


def test_nested_containers_are_taken_apart_and_put_together():
    nested = (1, [2, None], {"a": 3})
    leaves, spec = tree_flatten(nested)
    assert leaves == tree_leaves(nested) == [1, 2, None, 3], "None must be a leaf: it stands for a missing gradient"
    assert tree_unflatten(leaves, spec) == nested, "ops would return their results in another structure"
    assert tree_map(str, (1, [2])) == ("1", ["2"])
    assert tree_map_only(int, lambda n: -n, (1, "x")) == (-1, "x"), "NumPy functions would not see arrays"


WALKS = {"flatten": lambda test: tree_flatten([1], test), "map": lambda test: tree_map(str, [1], is_leaf=test)}


@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
def test_nothing_is_kept_of_a_test_of_leaves(walk):
    class Held:
        pass

    held = Held()
    alive = weakref.ref(held)
    gc.disable()  # what is in a cycle stays
    try:
        walk(lambda value, held=held: value is held)
        del held
        assert alive() is None, "arguments of compiled calls would stay on workers until a garbage collection"
    finally:
        gc.enable()


ADD = torch.ops.aten.add_.Tensor


def test_a_schema_tells_what_an_op_writes():
    schema = schema_of(ADD)
    first = schema.arguments[0]
    assert (schema.name, packet_name(ADD)) == ("aten::add_", "add_"), "ops are looked up in GT's tables by these names"
    assert first.alias_info.is_write, "GT would not know that an op writes in place"
    assert first.alias_info.before_set == schema.returns[0].alias_info.before_set, "in-place ops would return copies"
    assert [str(argument.type) for argument in schema.arguments] == ["Tensor", "Tensor", "number"], (
        "op_schema.py sorts arguments by these type names"
    )
    assert schema.is_mutable and schema_of(torch.ops.aten.add.out).arguments[-1].is_out
    assert schema_of(torch.ops.aten.convolution_backward.default).arguments[-1].N == 3, (
        "masks of gradients are found by N"
    )


def test_kernels_are_found_by_dispatch_key():
    linear, foreach = torch.ops.aten.linear.default, torch.ops.aten._foreach_add.Scalar
    assert has_kernel(linear, DispatchKey.CompositeImplicitAutograd), "composite ops would be sent to workers whole"
    assert has_kernel(foreach, DispatchKey.CompositeExplicitAutograd), "lists of tensors on several workers need it"
    assert has_kernel(torch.ops.aten.add.Tensor, DispatchKey.CompositeExplicitAutogradNonFunctional), (
        "strides would come from torch's Python shape functions, which differ from its kernels"
    )
    assert has_kernel(torch.ops.aten.mm.default, "Conjugate"), "strides of results of lazily conjugated operands"
    doubled = kernel_of(foreach, DispatchKey.CompositeExplicitAutograd)([torch.ones(1)], 1)
    assert doubled[0].item() == 2


def test_padded_sequences_of_plain_and_gt_tensors(embedded):
    plain = torch.arange(12.0).reshape(3, 2, 2)
    for tensor in (plain, gt.to(plain)):
        packed = pack_padded_sequence(tensor, [3, 2], enforce_sorted=True)
        padded, lengths = pad_packed_sequence(packed)
        assert (padded.tolist(), lengths.tolist()) == (
            [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [0, 0]]],
            [3, 2],
        ), "recurrent layers would read the memory of GT tensors, which is elsewhere"


class Recording(UntracedMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*args, **(kwargs or {}))


seen: list[object] = []


def test_modes_are_listed_and_can_be_disabled():
    with Recording() as mode:
        listed = current_dispatch_modes()
        with disable_current_modes():
            inside = current_dispatch_modes()
            torch.zeros(2)
    assert mode in listed, "gt.device() is not noticed: modules that are built in it stay plain"
    assert not inside and not seen, "reading a value inside gt.device() would make GT tensors instead of plain memory"


def test_torch_asks_whether_a_mode_is_hidden_from_dynamo():
    source = inspect.getsource(TorchDispatchMode)
    asks_or_wraps_nothing = "_should_skip_dynamo" in source or "dynamo" not in source
    assert asks_or_wraps_nothing, "torch wraps FactoryMode: the first gt.ones() imports dynamo (1.6 s)"


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
