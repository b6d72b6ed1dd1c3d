"""The NumPy engine against torch: every op of its table through the whole path, on both backends."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._pytree import tree_map_only

from gt.client import creation as gt
from gt.client.active_session import activate
from gt.client.session import Session
from gt.core.errors import OpError
from gt.core.meta import TensorMeta
from gt.core.signatures import DType, ListArg, ViewStep
from gt.launch.in_process_channel import InProcessChannel
from gt.worker.engines.numpy_arrays import DTYPES, VIEWS, memory_owner, result_dtype
from gt.worker.engines.numpy_engine import NumPyEngine
from gt.worker.engines.numpy_ops import OPS
from gt.worker.engines.numpy_random import RANDOM
from tests.worker.engines.numpy_cases import CASES, Expression, Inputs, aten, make_inputs


@contextmanager
def running(backend: str) -> Iterator[Session]:
    channel = InProcessChannel(1, backend)
    session = Session(channel, channel.welcome())
    activate(session)
    try:
        yield session
    finally:
        activate(None)
        session.close("end")


@pytest.fixture
def on_numpy() -> Iterator[Session]:
    with running("numpy") as session:
        yield session


def evaluate_on_gt(expression: Expression) -> Any:
    inputs = Inputs(*[gt.to(tensor) for tensor in make_inputs()])
    with gt.device():
        results = expression(inputs)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), results)


@pytest.mark.parametrize("backend", ["numpy", "pytorch"])
@pytest.mark.parametrize("name", CASES)
def test_values_dtypes_and_shapes_are_those_of_torch(name: str, backend: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, such as var of one element
        expected = tree_map_only(torch.Tensor, torch.Tensor.detach, CASES[name](make_inputs()))
    with running(backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)  # NumPy's
        actual = evaluate_on_gt(CASES[name])
    torch.testing.assert_close(actual, expected, equal_nan=True, check_stride=False)


def used_ops(session: Session) -> set[str]:
    signatures = session.signatures.values()
    return {sig.op for sig in signatures} | {step.op for sig in signatures for path in sig.paths for step in path}


def test_every_op_of_the_table_has_a_case(on_numpy: Session) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for expression in CASES.values():
            evaluate_on_gt(expression)
    handles_only = {"aten.alias.default", "aten.detach.default", "aten._reshape_alias.default"}
    assert set(OPS) - used_ops(on_numpy) == handles_only | set(RANDOM)


def test_results_share_no_memory(on_numpy: Session) -> None:
    inputs = Inputs(*[gt.to(tensor) for tensor in make_inputs()])
    with gt.device(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [expression(inputs) for expression in CASES.values()]
    on_numpy.synchronize()
    values = on_numpy.channel.executors[0].tensors.values()  # type: ignore[attr-defined]
    assert len({id(memory_owner(value)) for value in values}) == len(values) > len(results)


def test_every_name_of_the_table_is_an_aten_overload() -> None:
    for name in OPS:
        namespace, op, overload = name.split(".")
        assert str(getattr(getattr(aten, op), overload)) == name and namespace == "aten"


@pytest.mark.parametrize("left", DTYPES)
def test_promotion_is_that_of_torch(left: str) -> None:
    shapes = [(2,), ()]
    for right, first, second in itertools.product(DTYPES, shapes, shapes):
        arrays = np.zeros(first, DTYPES[left]), np.zeros(second, DTYPES[right])
        try:
            expected = torch.result_type(torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1]))
        except RuntimeError:
            continue  # torch does not mix these
        if expected != torch.complex32:
            assert str(expected) == f"torch.{result_dtype(*arrays)}", (right, first, second)


RANDOM_CASES: dict[str, tuple[Callable[[], torch.Tensor], torch.dtype, float, float]] = {
    "rand": (lambda: gt.rand(50, 2), torch.float32, 0, 1),
    "rand half": (lambda: gt.rand(50, 2, dtype=torch.float16), torch.float16, 0, 1),
    "rand generator": (lambda: gt.rand(50, 2, generator=torch.Generator().manual_seed(1)), torch.float32, 0, 1),
    "rand_like": (lambda: torch.rand_like(gt.zeros(50, 2, dtype=torch.float64)), torch.float64, 0, 1),
    "randn": (lambda: gt.randn(50, 2), torch.float32, -9, 9),
    "randn generator": (lambda: gt.randn(50, 2, generator=torch.Generator().manual_seed(1)), torch.float32, -9, 9),
    "randn_like": (lambda: torch.randn_like(gt.zeros(50, 2), dtype=torch.float64), torch.float64, -9, 9),
    "randint": (lambda: gt.randint(5, (50, 2)), torch.int64, 0, 5),
    "randint low": (lambda: gt.randint(-3, 5, (50, 2), dtype=torch.int32), torch.int32, -3, 5),
    "randperm": (lambda: gt.randperm(100).view(50, 2), torch.int64, 0, 100),
    "uniform_": (lambda: gt.zeros(50, 2).uniform_(-2, 3), torch.float32, -2, 3),
    "normal_": (lambda: gt.zeros(50, 2).normal_(1, 0.1), torch.float32, 0, 2),
    "bernoulli": (lambda: gt.bernoulli(gt.full((50, 2), 0.5)), torch.float32, 0, 1.1),
    "bernoulli_": (lambda: gt.zeros(50, 2, dtype=torch.int64).bernoulli_(0.5), torch.int64, 0, 1.1),
}


@pytest.mark.parametrize("name", RANDOM_CASES)
def test_random_ops_follow_the_seed(name: str, on_numpy: Session) -> None:
    draw, dtype, low, high = RANDOM_CASES[name]
    torch.manual_seed(3)
    first, other = draw().cpu(), draw().cpu()
    torch.manual_seed(3)
    assert torch.equal(draw().cpu(), first)
    assert torch.equal(other, first) is ("generator" in name)
    assert (first.dtype, first.shape) == (dtype, (50, 2))
    assert first.min() >= low and first.max() < high and first.unique().numel() > 1


def test_every_random_op_has_a_case(on_numpy: Session) -> None:
    for draw, *_ in RANDOM_CASES.values():
        draw().cpu()
    assert set(RANDOM) <= used_ops(on_numpy)


def test_float16_is_drawn_below_one(on_numpy: Session) -> None:
    assert gt.rand(50_000, dtype=torch.float16).cpu().max() < 1


def test_a_permutation_has_every_number_once(on_numpy: Session) -> None:
    assert gt.randperm(20).cpu().sort().values.tolist() == list(range(20))


def test_a_missing_op_is_named_when_its_result_is_read(on_numpy: Session) -> None:
    result = torch.special.bessel_j0(gt.ones(3))
    with pytest.raises(OpError, match=r"NotImplementedError.*aten\.special_bessel_j0\.default"):
        result.cpu()


def test_dependents_of_a_missing_op_fail_with_its_error_and_other_ops_run(on_numpy: Session) -> None:
    fine = gt.ones(3)
    broken = torch.special.bessel_j0(fine) + 1
    with pytest.raises(OpError, match="special_bessel_j0"):
        broken.cpu()
    assert (fine + 1).tolist() == [2.0, 2.0, 2.0]


def test_a_missing_view_op_is_named(on_numpy: Session) -> None:
    with pytest.raises(OpError, match=r"aten\.diagonal\.default"):
        gt.ones(3, 3).diagonal().cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_missing_dtype_is_named(dtype: torch.dtype, on_numpy: Session) -> None:
    with pytest.raises(OpError, match=f"NumPy has no dtype {str(dtype).removeprefix('torch.')}"):
        gt.ones(3).to(dtype).cpu()


REFUSED: dict[str, Expression] = {
    "mm of other shapes": lambda t: t.x @ t.x,
    "mm of other dtypes": lambda t: t.x @ t.d.t(),
    "mm of too many dims": lambda t: torch.mm(t.b, t.x),
    "broadcast": lambda t: t.x + t.pick,
    "float into int": lambda t: t.i.clone().add_(1.5),
    "division into int": lambda t: t.i.clone().div_(2),
    "growing in place": lambda t: t.v.clone().add_(t.x),
    "more dims in place": lambda t: t.v.clone().add_(t.v[None]),
    "mean of ints": lambda t: t.i.mean(),
    "var of ints": lambda t: t.i.var(),
    "minus bools": lambda t: t.m - t.m,
    "view across strides": lambda t: t.x.t().view(12),
    "t of many dims": lambda t: t.b.t(),
    "embedding out of range": lambda t: F.embedding(t.pick + 3, t.x),
    "embedding of a negative": lambda t: F.embedding(t.pick - 1, t.x),
    "index out of range": lambda t: t.x[:, t.pick + 3],
    "gather of a negative": lambda t: t.x.gather(1, t.pick[:, None] - 1),
    "max of nothing": lambda t: t.x[:0].max(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_torch_refuses_are_refused(name: str, on_numpy: Session) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        REFUSED[name](make_inputs())
    with pytest.raises((RuntimeError, IndexError, ValueError, TypeError)):  # the last two are NumPy's
        evaluate_on_gt(REFUSED[name])


def test_training_follows_torch(on_numpy: Session) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2), torch.nn.Tanh())
    twin = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2), torch.nn.Tanh())
    twin.load_state_dict(model.state_dict())
    x, y = torch.randn(16, 3), torch.randn(16, 2)
    expected = train(model, x, y)
    assert train(gt.to(twin), gt.to(x), gt.to(y)) == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]
    for ours, plain in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), plain.detach(), rtol=1e-4, atol=1e-5)


def train(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_module_can_be_made_on_the_engine(on_numpy: Session) -> None:
    with gt.device():
        layer = torch.nn.Linear(3, 4)
    assert layer(gt.ones(2, 3)).detach().cpu().shape == (2, 4)
    assert layer.weight.detach().cpu().abs().max() <= 3**-0.5


@pytest.mark.parametrize("name", VIEWS)
def test_views_share_memory(name: str) -> None:
    engine = NumPyEngine()
    args = {
        "aten.view.default": (ListArg((6,)),),
        "aten._reshape_alias.default": (ListArg((6,)), ListArg((1,))),
        "aten.view.dtype": (DType("int32"),),
        "aten.transpose.int": (0, 1),
        "aten.permute.default": (ListArg((1, 0)),),
        "aten.expand.default": (ListArg((4, 2, 3)),),
        "aten.unsqueeze.default": (0,),
        "aten.squeeze.dim": (0,),
        "aten.squeeze.dims": (ListArg((0, 1)),),
        "aten.select.int": (0, 1),
        "aten.split.Tensor": (1,),
        "aten.split_with_sizes.default": (ListArg((1, 1)),),
    }.get(name, ())
    pick = 1 if name in ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.unbind.int") else None
    base = np.zeros((2, 3), np.float32)
    view = engine.make_view(ViewStep(name, args, {}, pick))(base)
    view[...] = 1
    assert engine.aliases(view, base) and base.any()


def test_a_view_of_a_received_buffer_shares_memory() -> None:
    engine, meta = NumPyEngine(), TensorMeta((2, 3), (3, 1), 0, "float32")
    base = engine.from_buffer(bytearray(24), meta, owned=True)
    assert engine.aliases(engine.make_view(ViewStep("aten.t.default", (), {}))(base), base)
    assert not engine.aliases(base.copy(), base)
    assert not engine.aliases(engine.from_buffer(bytearray(24), meta, owned=True), base)


@pytest.mark.parametrize("owned", [True, False])
def test_only_an_owned_buffer_is_kept(owned: bool) -> None:
    buffer = bytearray(np.arange(3, dtype=np.int64).tobytes())
    value = NumPyEngine().from_buffer(buffer, TensorMeta((3,), (1,), 0, "int64"), owned)
    value[0] = 7
    assert (buffer[0] == 7) is owned
    NumPyEngine().from_buffer(bytes(buffer), TensorMeta((3,), (1,), 0, "int64"), owned)[0] = 1


def test_a_view_that_must_be_a_copy_is_written_through() -> None:
    engine = NumPyEngine()
    view = engine.make_view(ViewStep("aten.view.default", (ListArg((6,)),), {}))
    base = np.zeros((3, 2), np.float32).T  # the client believes it is contiguous
    assert not engine.aliases(view(base), base)
    engine.write_through(base, view, np.arange(6))
    assert base.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_as_strided_counts_in_the_strides_that_the_client_knows() -> None:
    engine = NumPyEngine()
    step = ViewStep("aten.as_strided.default", (ListArg((2,)), ListArg((2,)), 1), {}, None, (1, 2))
    base = np.arange(6).reshape(2, 3)
    view = engine.make_view(step)
    assert view(base).tolist() == [3, 4]  # the storage with strides (1, 2) is 0 3 1 4 2 5
    engine.write_through(base, view, np.array([30, 40]))
    assert base.tolist() == [[0, 1, 2], [30, 40, 5]]


def test_as_strided_of_the_storage_itself_shares_memory() -> None:
    engine, base = NumPyEngine(), np.zeros((1, 3))  # any stride will do for a dim of size 1
    step = ViewStep("aten.as_strided.default", (ListArg((2,)), ListArg((2,)), 0), {}, None, (1, 1))
    assert engine.aliases(engine.make_view(step)(base), base)


@pytest.mark.parametrize(("size", "stride", "offset"), [(4, 2, 0), (3, 2, 2), (1, 1, 6), (2, 1, -1), (2, -1, 3)])
def test_as_strided_beyond_the_storage_is_refused(size: int, stride: int, offset: int) -> None:
    step = ViewStep("aten.as_strided.default", (ListArg((size,)), ListArg((stride,)), offset), {}, None, (3, 1))
    with pytest.raises(RuntimeError, match="out of bounds of 6 elements"):
        NumPyEngine().make_view(step)(np.zeros((2, 3)))


def test_bytes_leave_in_row_major_order() -> None:
    engine, value = NumPyEngine(), np.arange(6, dtype=np.int16).reshape(2, 3).T
    target = memoryview(bytearray(12))
    engine.read_into(value, target)
    assert bytes(target) == np.array([0, 3, 1, 4, 2, 5], np.int16).tobytes()


def test_the_bytes_of_an_array_are_those_of_its_memory() -> None:
    value = np.arange(6, dtype=np.int16).reshape(2, 3).T
    assert NumPyEngine().bytes_of(value).tobytes() == np.arange(6, dtype=np.int16).tobytes()


def test_the_numpy_engine_has_no_collectives() -> None:
    engine = NumPyEngine()
    assert not engine.supports_distributed()
    for collective in (engine.all_reduce_sum, engine.all_gather, engine.reduce_scatter):
        with pytest.raises(NotImplementedError, match=collective.__name__):
            collective(np.zeros(3))
