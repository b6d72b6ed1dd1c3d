"""Picking and putting by index, shard by shard."""

import pytest
import torch

from gt.sharding.op_calls import LocalContext, OpCall
from gt.sharding.propagation import FactorSharding, build_strategy
from gt.sharding.rules import lower, rule_of
from gt.sharding.spec import DeviceMesh
from tests.sharding.simulate import check, encode, flat, meta_of, resolve, run, split

LINE = DeviceMesh((3,), ("x",))


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-9, 10, shape).to(dtype)


# --- Picking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [7, 2, 1])
def test_embedding(vocabulary):
    check("aten.embedding.default", torch.randn(vocabulary, 3), ints(vocabulary, 2, 5))
    check("aten.embedding.default", torch.randn(vocabulary, 3), ints(vocabulary, 4).int(), 0)
    check("aten.embedding.default", torch.randn(vocabulary, 3), ints(vocabulary, 0))


def test_what_is_elsewhere_is_masked_not_multiplied():
    weight = torch.tensor([[1.0], [float("nan")], [float("inf")], [2.0]])
    check("aten.embedding.default", weight, torch.tensor([0, 3, 3]))


@pytest.mark.parametrize("padding", [-1, 0, 5])
def test_embedding_dense_backward(padding):
    check("aten.embedding_dense_backward.default", torch.randn(3, 5, 2), ints(7, 3, 5), 7, padding, False)
    check("aten.embedding_dense_backward.default", torch.randn(5, 2), ints(7, 5), 7, padding, True)
    check("aten.embedding_dense_backward.default", torch.randn(4, 3), ints(2, 4), 2, -1, False)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("features", [4, 1])
def test_embedding_bag_features(mode, features):
    weight, index, offsets = torch.randn(5, features), torch.tensor([0, 1, 4, 3]), torch.tensor([0, 1])
    check("aten._embedding_bag.default", weight, index, offsets, False, mode)
    check("aten._embedding_bag_forward_only.default", weight, index, offsets, False, mode)
    grad, bag = torch.randn(2, features), torch.tensor([0, 1, 1, 1])
    _, _, sizes, largest = torch.ops.aten._embedding_bag(weight, index, offsets, False, mode)
    check("aten._embedding_bag_dense_backward.default", grad, index, bag, sizes, largest, 5, False, mode, None)
    rest = (5, False, mode, False, None)
    check("aten._embedding_bag_backward.default", grad, index, offsets, bag, sizes, largest, *rest)


def test_embedding_bag_weights():
    index, offsets, bag = torch.tensor([0, 1, 4, 3]), torch.tensor([0, 1]), torch.tensor([0, 1, 1, 1])
    weights = torch.randn(4)
    check("aten._embedding_bag.default", torch.randn(5, 3), index, offsets, False, 0, False, weights)
    op = "aten._embedding_bag_per_sample_weights_backward.default"
    check(op, torch.randn(2, 3), torch.randn(5, 3), index, offsets, bag, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_index_select(dtype):
    x = numbers(5, 3, 2, dtype=dtype)
    check("aten.index_select.default", x, 0, ints(5, 4))
    check("aten.index_select.default", x, -2, ints(3, 7).int())
    check("aten.index_select.default", x, 2, torch.tensor(1))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather(dim):
    x = numbers(5, 4, 3)
    check("aten.gather.default", x, dim, ints(3, 5, 4, 3))
    check("aten.gather.default", x, dim, ints(3, 2, 3, 3))
    check("aten.gather.default", x, dim, ints(3, 5, 1, 2), sparse_grad=False)
    check("aten.gather.default", x > 0, dim, ints(3, 0, 4, 3))


@pytest.mark.parametrize(
    "indices",
    [
        [ints(5, 6)], [None, ints(4, 2, 3)], [ints(5, 3), ints(4, 3)], [ints(5, 2, 1), None, ints(3, 4)],
        [None, ints(4, 3), ints(3, 1)], [torch.tensor(-2), torch.tensor([-4, 3, 0])],
        [None, None, torch.tensor([-3, 2, -1])], [ints(5, 0)],
    ],
)  # fmt: skip
def test_index(indices):
    check("aten.index.Tensor", numbers(5, 4, 3), indices)
    check("aten.index.Tensor", numbers(5, 4, 3) > 0, indices, meshes=[LINE])


def test_index_of_dims_that_are_not_side_by_side():
    check("aten.index.Tensor", numbers(2, 5, 3, 4), [None, ints(5, 2, 1), None, ints(4, 3)], meshes=[LINE])
    check("aten.index_put.default", numbers(2, 5, 3), [None, ints(5, 1), ints(3, 4)], numbers(2, 4), True)
    apart = [None, torch.tensor([4, 0]), None, torch.tensor([1])]
    check("aten.index_put.default", numbers(2, 5, 3, 4), apart, numbers(2, 2, 3), meshes=[LINE])


def test_parts_of_bool_tensors_are_put_together_by_or():
    x, index, mask = torch.ones(4, dtype=torch.bool), torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool)
    args, inputs = (encode(x, []), 0, encode(index, [x])), (meta_of(x), meta_of(index))
    call = OpCall("aten.index_select.default", args, {}, inputs, (meta_of(mask),))
    assert str(rule_of(call)) == "d0, i -> i | mask(or): d0"


def test_masks_have_no_rule():
    x, mask = torch.zeros(4), torch.ones(4, dtype=torch.bool)
    call = OpCall(
        "aten.index.Tensor", (encode(x, []), encode([mask], [x])), {}, (meta_of(x), meta_of(mask)), (meta_of(x),)
    )
    assert rule_of(call) is None


def test_take():
    check("aten.take.default", numbers(5, 3), torch.tensor([[0, 14, -1], [7, -15, 3]]))
    check("aten.take.default", numbers(4), torch.tensor(-2))
    check("aten.take.default", torch.tensor(3.0), torch.tensor([0, -1]))


# --- Putting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_index_put(accumulate, dtype):
    x = numbers(5, 4, 3, dtype=dtype)
    values = numbers(3, 4, 3, dtype=dtype)
    check("aten.index_put.default", x, [torch.tensor([0, 4, -2])], values, accumulate)
    check("aten.index_put.default", x, [torch.tensor([4, 0, 2])], values[0, 0], accumulate)
    check("aten.index_put.default", x, [None, torch.tensor([-1, 0])], values[0, 0, 0], accumulate)
    check("aten.index_put.default", x, [torch.tensor([[1], [3]]), torch.tensor([0, -1])], values[:2, :2], accumulate)
    check(
        "aten.index_put.default", x, [torch.tensor([3, 0]), None, torch.tensor([2, -2])], values[:2, :, 0], accumulate
    )
    check("aten.index_put.default", x, [torch.tensor([3, 0])], values[:1, :1], accumulate=accumulate)


def test_index_put_adds_duplicates_once():
    index = torch.tensor([0, 2, 0, -3, 0])
    check("aten.index_put.default", torch.randn(3, 2), [index], torch.randn(5, 2), True)
    check("aten._index_put_impl.default", torch.randn(3, 2), [index], torch.randn(5, 2), True)
    check("aten.index_put.default", torch.rand(3, 2) > 0.5, [index], torch.rand(5, 2) > 0.5, True)


@pytest.mark.parametrize("dim", [0, -1])
def test_scatter(dim):
    x = numbers(5, 4)
    index = torch.stack([torch.randperm(4) for _ in range(4)])
    for own in (index, index[:2], index[:, :3], index[:3, :2] if dim == 0 else index[:2, :3]):
        check("aten.scatter.value", x, dim, own.contiguous(), 7.0)
        check("aten.scatter.src", x, dim, own.contiguous(), numbers(6, 5))
        check("aten.scatter_add.default", x, dim, own.contiguous(), numbers(6, 5))
        check("aten.scatter_add.default", x, dim, own.contiguous(), numbers(*own.shape))
    check("aten.scatter.reduce", x, dim, index, numbers(4, 4), reduce="add")
    check("aten.scatter.value_reduce", x, dim, index, 2.0, reduce="multiply")
    check("aten.scatter.value", x > 0, dim, index, True)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("kind", ["sum", "prod", "amax", "amin", "mean"])
def test_scatter_reduce(kind, include_self):
    index = ints(4, 5, 4)
    for dtype in (torch.float32, torch.int64):
        x, source = numbers(5, 4, dtype=dtype), numbers(5, 4, dtype=dtype)
        check("aten.scatter_reduce.two", x, 1, index, source, kind, include_self=include_self)
    if kind in ("amax", "amin") and include_self:
        check("aten.scatter_reduce.two", x > 0, 0, index, source > 3, kind)
        nans = torch.full((5, 4), float("nan"))
        check("aten.scatter_reduce.two", torch.randn(5, 4), 1, index, nans, kind)


@pytest.mark.filterwarnings("ignore:index_reduce")
def test_rows():
    x, index, unique = numbers(5, 3), torch.tensor([4, 0, 4, 1]), torch.tensor([4, 0, 3, 1])
    check("aten.index_add.default", x, 0, index, numbers(4, 3))
    check("aten.index_add.default", x.t().contiguous(), -1, index.int(), numbers(3, 4), alpha=2.5)
    check("aten.index_add.default", x > 0, 0, index, numbers(4, 3) > 5)
    check("aten.index_copy.default", x, 0, unique, numbers(4, 3))
    check("aten.index_fill.int_Scalar", x, 0, torch.tensor([-1, 0, 2]), 7)
    check("aten.index_fill.int_Tensor", x, -1, torch.tensor([-1]), torch.tensor(7.0))
    for kind in ("prod", "mean", "amax", "amin"):
        check("aten.index_reduce.default", x, 0, index, numbers(4, 3), kind)
    check("aten.index_reduce.default", x, 0, index, numbers(4, 3), "amax", include_self=False)


@pytest.mark.parametrize("accumulate", [False, True])
def test_put(accumulate):
    index = torch.tensor([0, -1, 7])
    check("aten.put.default", numbers(5, 3), index, numbers(3), accumulate)
    check("aten.put.default", numbers(4), torch.tensor([[3, 0]]), numbers(2), accumulate)


# --- Indices that are out of range ------------------------------------------------------------------------------------


REFUSED = [
    ("aten.embedding.default", "v", lambda i: (torch.randn(5, 2), i)),
    ("aten.index_select.default", "d0", lambda i: (torch.randn(5, 2), 0, i)),
    ("aten.gather.default", "v", lambda i: (torch.randn(5, 2), 0, i[:, None].clone())),
    ("aten.index.Tensor", "d0", lambda i: (torch.randn(5, 2), [i])),
    ("aten.take.default", "v", lambda i: (torch.randn(5), i)),
    ("aten.index_put.default", "d0", lambda i: (torch.randn(5, 2), [i], torch.randn(2))),
    ("aten.scatter.value", "d0", lambda i: (torch.randn(5, 2), 0, i[:, None].clone(), 1.0)),
    ("aten.scatter_add.default", "d1", lambda i: (torch.randn(2, 5), 1, i[None].clone(), torch.randn(1, 3))),
    ("aten.index_add.default", "d0", lambda i: (torch.randn(5, 2), 0, i, torch.randn(3, 2))),
    ("aten.index_copy.default", "d0", lambda i: (torch.randn(5, 2), 0, i, torch.randn(3, 2))),
    ("aten.index_fill.int_Scalar", "d0", lambda i: (torch.randn(5, 2), 0, i, 1.0)),
    ("aten.put.default", "v", lambda i: (torch.randn(5), i, torch.randn(3))),
]


WRAPPING = {"aten.index.Tensor", "aten.take.default", "aten.index_put.default", "aten.index_fill.int_Scalar"}
WRAPPING |= {"aten.put.default"}


@pytest.mark.parametrize("bad", [5, 6, 100, -6, -7, -1])
@pytest.mark.parametrize(("op", "factor", "args"), REFUSED, ids=[op for op, *_ in REFUSED])
def test_an_index_in_no_shard_is_refused_by_some_worker(op, factor, args, bad):
    bad -= 5 * (op in WRAPPING and bad == -1)  # where -1 is the last element
    good, wrong = args(torch.tensor([0, 3, 4])), args(torch.tensor([0, bad, 4]))
    tensors: list[torch.Tensor] = []
    call_args = tuple([encode(value, tensors) for value in wrong])
    results = flat(resolve(op)(*good))
    call = OpCall(op, call_args, {}, tuple(map(meta_of, tensors)), tuple(map(meta_of, results)))
    rule = rule_of(call)
    strategy = build_strategy(rule, call.shapes, call.result_shapes, LINE, {factor: FactorSharding(("x",))})
    held = [split(tensor, spec) for tensor, spec in zip(tensors, strategy.operands, strict=True)]
    refused = 0
    for worker in LINE.workers:
        try:
            run(
                lower(LocalContext(call, strategy.operands, strategy.results, worker)),
                [shards[worker] for shards in held],
            )
        except (IndexError, RuntimeError):
            refused += 1
    assert refused


# --- Places in sorted sequences, and membership -----------------------------------------------------------------------


def test_searchsorted_and_bucketize():
    edges = torch.tensor([-1.0, 0.0, 0.0, 2.5, float("inf")])
    values = torch.tensor([[0.0, -2.0, float("nan")], [3.0, 2.5, float("inf")]])
    check("aten.bucketize.Tensor", values, edges)
    check("aten.bucketize.Tensor", values, edges, right=True, out_int32=True)
    check("aten.bucketize.Scalar", 1.0, edges)
    check("aten.searchsorted.Tensor", edges, values, side="right")
    check("aten.searchsorted.Tensor", torch.stack([edges, edges + 1]), values)
    check("aten.searchsorted.Scalar", edges, 0.0)
    check("aten.searchsorted.Tensor", edges[[4, 3, 2, 1, 0]], values, sorter=torch.tensor([4, 3, 2, 1, 0]))


@pytest.mark.parametrize("invert", [False, True])
def test_isin(invert):
    check("aten.isin.Tensor_Tensor", ints(6, 5, 2), ints(6, 3, 2), invert=invert)
    check("aten.isin.Tensor_Scalar", ints(3, 5), 1, invert=invert)
    check("aten.isin.Scalar_Tensor", 1, ints(3, 5), invert=invert)
