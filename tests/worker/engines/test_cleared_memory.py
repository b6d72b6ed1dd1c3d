"""A worker that several sessions share gives none of them memory that another one has written."""

import pytest
import torch

import gt
from gt.worker.engines import make_engine
from gt.worker.engines.cleared_memory import leaves_unwritten
from tests.subprocesses import serving

SECRET = 12345.5


@pytest.fixture(scope="module")
def server():
    """The address of a server with a worker."""
    with serving(1) as port:
        yield f"localhost:{port}"


@pytest.fixture
def worker(server):
    """Connects this process to a worker that an earlier session has used and left."""
    gt.connect(server)
    kept = [gt.full((1000,), SECRET) + 0 for _ in range(200)]
    assert kept[-1][0].item() == SECRET
    del kept
    gt.shutdown()
    gt.connect(server)
    yield
    gt.shutdown()


def permuted():
    with gt.device():
        return torch.empty_permuted((20, 50), (1, 0))


def ctc():
    """Of two targets the second is shorter."""
    scores = gt.zeros(9, 2, 5).log_softmax(-1)
    return torch.ops.aten._ctc_loss(scores, gt.ones(2, 12, dtype=torch.long), [9, 2], [3, 1])[1]


LEFT = {
    "empty": lambda: gt.empty(1000),
    "empty_like": lambda: torch.empty_like(gt.ones(1000)),
    "empty_strided": lambda: gt.empty_strided((10, 10), (100, 1)).as_strided((910,), (1,)),
    "empty_permuted": permuted,
    "new_empty": lambda: gt.ones(1).new_empty(1000),
    "new_empty_strided": lambda: gt.ones(1).new_empty_strided((1000,), (1,)),
    "resize_": lambda: gt.ones(10).resize_(1000)[10:],
    "resize_as_": lambda: gt.ones(10).resize_as_(gt.ones(1000))[10:],
    "empty.out": lambda: torch.ops.aten.empty.out([1000], out=gt.ones(10)),
    "empty_like.out": lambda: torch.ops.aten.empty_like.out(gt.ones(1000), out=gt.ones(1000)),
    "_ctc_loss": ctc,
}


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT.keys())
def test_a_session_does_not_see_what_another_one_has_freed(worker, make):
    for made in [make() for _ in range(150)]:
        assert SECRET not in made.cpu()


ENGINE = make_engine("pytorch", "cpu", clears=True)


@pytest.mark.parametrize("target", [torch.full((4,), SECRET), torch.full((8,), SECRET)[:4]], ids=["all", "a part"])
def test_a_tensor_that_grows_keeps_its_values_and_is_padded_with_zeros(target):
    kept = target.untyped_storage().nbytes() // 4
    resized = ENGINE.resolve("aten.resize_.default")(target, [1000])
    assert resized.tolist() == [SECRET] * kept + [0.0] * (1000 - kept)


def test_a_resized_copy_is_padded_with_zeros():
    assert ENGINE.resolve("aten.resize.default")(torch.ones(2), [4]).tolist() == [1.0, 1.0, 0.0, 0.0]


def test_writing_to_a_view_leaves_the_rest_of_its_memory_unchanged():
    base = torch.ones(6)
    ENGINE.resolve("aten.empty_like.out")(torch.ones(2), out=base[2:4])
    ENGINE.resolve("aten.resize.out")(torch.full((1,), 5.0), [2], out=base[4:])
    assert base.tolist() == [1.0, 1.0, 0.0, 0.0, 5.0, 0.0]


@pytest.mark.parametrize("op", ["aten.set.source_Tensor", "aten.set_.source_Tensor"])
def test_memory_that_grows_with_another_dtype_is_padded_with_zeros(op):
    source = torch.ones(100)
    result = ENGINE.resolve(op)(torch.ones(1, dtype=torch.float64), source)
    assert result.view(torch.float32).tolist() == [1.0] * 100 + [0.0] * 100


def test_gaps_between_elements_are_zero():
    assert ENGINE.with_strides(torch.ones(3), (400,)).as_strided((801,), (1,)).sum() == 3


@pytest.mark.parametrize("op", ["aten.add.Tensor", "aten.zeros.default", "aten.mm.default"])
def test_ops_that_write_all_of_their_results_are_not_wrapped(op):
    assert not leaves_unwritten(op)
    assert type(ENGINE._overload(op)) is type(make_engine("pytorch", "cpu")._overload(op))
