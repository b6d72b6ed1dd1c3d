"""The workers and layouts of tensors and ops inside scopes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gt
from gt import ShardConfig, SignalConfig
from gt.client import active_session
from tests.signals.recorded_scopes import configure, layout_and_workers


@pytest.mark.parametrize(
    ("shape", "axis", "expected"),
    [
        ((8, 6), 0, "w, -"),
        ((8, 6), 1, "-, w"),
        ((8, 6), -1, "-, w"),
        ((8, 6, 4), -2, "-, w, -"),
        ((8,), 1, "-"),
        ((5, 3), 0, "w, -"),
        ((1, 8), 0, "-, -"),
        ((0, 8), 0, "-, -"),
        ((), 0, ""),
    ],
)
def test_created_tensors_are_cut_on_the_axis(four_workers, shape, axis, expected):
    configure("s", axis)
    with gt.signal.context("s"):
        made = [gt.zeros(shape), gt.randn(shape), gt.tensor(torch.ones(shape)), gt.full(shape, 2.0)]
    for x in made:
        assert layout_and_workers(x) == f"{expected} on 0 1 2 3"
        assert x.cpu().shape == shape
    assert made[2].sum().item() == made[2].numel()


def test_a_created_operand_that_is_needed_whole_becomes_whole_for_good(four_workers):
    """Its updates are gathered no more, whether ops run one by one or as a segment."""
    configure("s", 0)
    moved = []
    with gt.signal.context("s"):
        a, b = gt.randn(128, 64), gt.randn(64, 32)
        for _ in range(8):
            with gt.debug.comm() as c:
                y = a @ b
                b.mul_(0.5)
            moved.append(c.bytes)
    assert moved == [3 * 64 * 32 * 4] + [0] * 7
    assert [str(x.spec) for x in (a, b, y)] == ["w, -", "-, -", "w, -"]
    torch.testing.assert_close(y.cpu(), a.cpu() @ b.cpu() * 2)


def test_a_created_tensor_that_its_scope_uses_as_it_is_stays_cut(four_workers):
    configure("s", 0)
    for _ in range(6):  # in a segment too
        with gt.signal.context("s"):
            x = gt.randn(8, 8)
            y = x.sin()
            z = y @ x
        assert [str(each.spec) for each in (x, y, z)] == ["w, -", "w, -", "w, -"]


def test_a_created_tensor_is_copied_to_a_scope_on_other_workers(four_workers):
    configure("one", 0, [0, 1])
    configure("two", 0, [2, 3])
    with gt.signal.context("one"):
        x = gt.randn(8, 8)
    with gt.signal.context("two"):
        y = x * 2
    assert (layout_and_workers(x), layout_and_workers(y)) == ("w, - on 0 1", "w, - on 2 3")


def test_a_layout_that_the_user_gave_is_kept_where_a_scope_needs_the_whole(four_workers):
    configure("s", 0)
    with gt.signal.context("s"):
        a, b = gt.randn(8, 8), gt.randn(8, 8, mesh=gt.mesh(4, ["x"]), placements="x, -")
        y = a @ b
    assert [str(each.spec) for each in (b, y)] == ["x, -", "w, -"]


def test_a_misspelt_name_is_warned_of_once_with_the_users_line(four_workers, caplog):
    configure("forward", 0)
    for _ in range(2):
        with gt.signal.context("forwrd"), gt.signal.context("backward"), gt.signal.context("forward_2"):
            gt.ones(4)
    gt.signal.tensor(torch.ones(2), "froward")
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.partition(": ")[2] for text in said] == [
        f"signal {name!r} is not configured and changes nothing; did you mean 'forward'?"
        for name in ("forwrd", "froward")
    ]
    assert all("test_scopes.py:" in text for text in said)


def test_created_tensors_by_dims_of_a_mesh(four_workers):
    configure("grid", mesh={"dp": 2, "tp": 2}, dims=["dp", "tp"])
    configure("ends", mesh={"dp": 2, "tp": 2}, dims=["dp", "...", "tp"])
    configure("same", replicate=True, workers=[1, 3])
    with gt.signal.context("grid"):
        assert [str(gt.zeros(shape).spec) for shape in [(4, 4), (4,), (4, 4, 4)]] == ["dp, tp", "dp", "dp, tp, -"]
    with gt.signal.context("ends"):
        assert [str(gt.zeros(shape).spec) for shape in [(4, 4), (4,), (4, 4, 4)]] == ["dp, tp", "dp", "dp, -, tp"]
    with gt.signal.context("same"):
        assert layout_and_workers(gt.zeros(4, 4)) == "-, - on 1 3"


def test_a_layout_that_is_given_counts_more_than_the_scope(four_workers):
    configure("s", 0)
    with gt.signal.context("s"):
        assert layout_and_workers(gt.zeros(4, 4, mesh=gt.mesh(2, ["x"]), placements="-, x")) == "-, x on 0 1"


def test_random_numbers_do_not_depend_on_the_scope(four_workers):
    configure("s", 1)
    gt.manual_seed(3)
    plain = gt.randn(7, 9).cpu()
    gt.manual_seed(3)
    with gt.signal.context("s"):
        assert torch.equal(gt.randn(7, 9).cpu(), plain)


def test_a_constraint_is_carried_back_to_the_operands(four_workers):
    x, w = gt.tensor(torch.randn(8, 6)), gt.tensor(torch.randn(6, 10))
    configure("rows", 0)
    with gt.signal.context("rows"):
        y = x @ w
    assert [layout_and_workers(t) for t in (x, w, y)] == ["w, - on 0 1 2 3", "-, - on 0 1 2 3", "w, - on 0 1 2 3"]
    torch.testing.assert_close(y.cpu(), x.cpu() @ w.cpu())


def test_an_op_that_is_divided_already_moves_its_result_only(four_workers):
    """A weight gradient is reduce-scattered to the constraint, even if moving an operand would be cheaper."""
    configure("rows", 0)
    with gt.signal.context("rows"):
        x, g = gt.randn(8, 64), gt.randn(8, 64)
        with gt.debug.comm() as moved:
            y = x.t() @ g
    assert [event.kind for event in moved.events] == ["reduce-scatter"]
    assert str(y.spec) == "w, -"


def test_other_axes_of_a_mesh_stay_as_the_operands_have_them(four_workers):
    configure("dp", mesh={"dp": 2, "tp": 2}, dims=["dp"])
    mesh = gt.mesh((2, 2), ("dp", "tp"))
    w = gt.randn(6, 8, mesh=mesh, placements="-, tp")
    with gt.signal.context("dp"):
        x = gt.randn(4, 6)
        with gt.debug.comm() as moved:
            y = (x @ w).relu()
    assert (str(x.spec), str(y.spec), moved.bytes) == ("dp, -", "dp, tp", 0)


def test_ops_on_parameters_alone_introduce_no_cut(four_workers):
    configure("rows", 0)
    w = torch.nn.Parameter(gt.tensor(torch.randn(8, 8)))
    with gt.signal.context("rows"):
        assert layout_and_workers(w * 2) == "-, - on 0 1 2 3"
        assert layout_and_workers(w.to(torch.bfloat16)) == "-, - on 0 1 2 3"
        assert layout_and_workers(gt.tensor(torch.randn(8, 8)) * 2) == "w, - on 0 1 2 3"


def test_in_place_ops_keep_the_placement_of_their_target(four_workers):
    configure("rows", 0)
    x, y = gt.tensor(torch.ones(8, 4)), gt.replicate(torch.ones(8, 4), gt.mesh(2, ["x"], [1, 2]))
    before = layout_and_workers(x)
    with gt.signal.context("rows"):
        x += 1
        y.mul_(3)
        x[2:4] = 7
    assert (layout_and_workers(x), layout_and_workers(y)) == (before, "-, - on 1 2")
    assert x.sum().item() == 6 * 4 * 2 + 2 * 4 * 7


def test_a_tensor_without_a_placement_is_moved_to_the_first_scope_that_uses_it(four_workers):
    configure("left", 0, [0, 1])
    configure("right", 0, [2, 3])
    w = torch.nn.Parameter(gt.tensor(torch.randn(4, 4)))
    x = gt.tensor(torch.randn(8, 4))

    def step(name):
        with gt.debug.comm() as moved, gt.signal.context(name):
            x @ w
        return moved.bytes

    assert step("left") > 0
    assert (layout_and_workers(w), layout_and_workers(x)) == ("-, - on 0 1", "w, - on 0 1")
    with torch.no_grad():
        w.add_(1)
    assert step("left") == 0, "the new weights are on these workers already"
    assert step("right") > 0
    assert layout_and_workers(w) == "-, - on 0 1", "it was moved to the first scope already"


def test_a_tensor_without_a_placement_stays_where_a_scope_first_uses_it(four_workers):
    """Even if it already was on the workers of the scope."""
    w = gt.tensor(torch.randn(4, 4))
    home = w.spec.mesh.workers[0]
    configure("home", replicate=True, workers=[home])
    configure("away", replicate=True, workers=[(home + 1) % 4])
    for name in ("home", "away"):
        with gt.signal.context(name):
            w * 2
    assert w.spec.mesh.workers == (home,)


def test_automatic_cuts_last_until_a_scope_needs_something_else(four_workers):
    configure("rows", 0)
    model = gt.nn.Linear(8, 8)
    assert str(model.weight.spec) == "w, -"
    x = gt.tensor(torch.randn(4, 8))
    for step in range(2):
        with gt.debug.comm() as moved, gt.signal.context("rows"):
            model(x)
        assert (moved.bytes == 0) == (step == 1)
    assert str(model.weight.spec) == "-, -"


def test_an_existing_copy_is_used(four_workers):
    mesh = gt.mesh(4, ["w"])
    mean, square = gt.zeros(8, 8, mesh=mesh), gt.zeros(8, 8, mesh=mesh)
    gradient = gt.randn(8, 8, mesh=mesh, placements=gt.Shard(0))
    with gt.debug.comm() as moved:
        mean.lerp_(gradient, 0.1)
        square.addcmul_(gradient, gradient, value=0.1)
        mean.t().add_(gradient.t())
    assert moved.bytes == 3 * 8 * 8 * 4
    value = gradient.cpu()
    torch.testing.assert_close(square.cpu(), 0.1 * value * value)
    torch.testing.assert_close(mean.cpu(), 1.1 * value)


def test_a_query_runs_on_the_workers_of_the_scope(four_workers):
    configure("pair", 0, [2, 3])
    with gt.signal.context("pair"):
        x = gt.tensor([[1.0, 0.0], [0.0, 2.0]])
        found = x.nonzero()
    assert found.tolist() == [[0, 0], [1, 1]]
    assert found.spec.mesh.workers == (2, 3)


def test_on_the_embedded_worker_only_the_numbers_matter():
    configure("s", 0, [0, 1, 2, 3], backward="b")
    configure("b", 1, [4, 5])
    gt.init()
    x = gt.randn(3, 3).requires_grad_()
    with gt.signal.context("s"):
        y = (x @ gt.ones(3, 3)).sum()
    y.backward()
    assert torch.equal(x.grad.cpu(), torch.full((3, 3), 3.0))
    assert gt.signal.tensor(torch.ones(4), name="s").spec.mesh.size == 1
    gt.shutdown()


def test_signal_tensor_copies_into_the_layout_of_its_signal(four_workers):
    configure("rows", 0)
    x = torch.randn(6, 4)
    sharded = gt.signal.tensor(x, name="rows")
    assert layout_and_workers(sharded) == "w, - on 0 1 2 3"
    assert torch.equal(sharded.cpu(), x)
    leaf = gt.tensor(x).requires_grad_()
    copy = gt.signal.tensor(leaf, "rows")
    (copy * 2).sum().backward()
    assert torch.equal(leaf.grad.cpu(), torch.full_like(x, 2))
    other = gt.signal.tensor(leaf, "nowhere")
    with torch.no_grad():
        other.zero_()
    assert torch.equal(leaf.detach().cpu(), x), "a copy"
    assert gt.signal.tensor([[1, 2]], name="rows").tolist() == [[1, 2]]


def test_ops_that_write_beside_their_results_run_where_the_scope_says(four_workers):
    configure("s", 0)
    x = torch.randn(8, 3)
    for _ in range(3):  # the first time a worker is asked
        statistics = torch.zeros(3), torch.ones(3)
        ours = [gt.tensor(value) for value in (x, *statistics)]
        with gt.signal.context("s"):
            y = torch.nn.functional.batch_norm(*ours, training=True)
        expected = torch.nn.functional.batch_norm(x, *statistics, training=True)
        torch.testing.assert_close(y.cpu(), expected)
        torch.testing.assert_close(ours[1].cpu(), statistics[0])
        assert y.spec.mesh.workers == ours[1].spec.mesh.workers == (0, 1, 2, 3)


CONFIGS = [
    ShardConfig(axis=0),
    ShardConfig(axis=1, workers=[1, 2, 3]),
    ShardConfig(axis=-1, workers=[3, 0]),
    ShardConfig(replicate=True, workers=[0, 2]),
    ShardConfig(mesh={"a": 2, "b": 2}, dims=["a", "b"]),
    ShardConfig(mesh={"a": 2, "b": 2}, dims=[["b", "a"]]),
    ShardConfig(mesh={"a": 2, "b": 2}, dims=["-", "...", "b"]),
    ShardConfig(axis=0, workers=[2]),
]
OPS = [
    lambda x, w: x @ w,
    lambda x, w: (x * 2).tanh(),
    lambda x, w: x + w.sum(0),
    lambda x, w: x.softmax(-1),
    lambda x, w: x.t().contiguous().t() @ w.t(),
    lambda x, w: torch.nn.functional.layer_norm(x, (x.shape[-1],), w[0], w[1]),
    lambda x, w: x - x.mean(0, keepdim=True),
    lambda x, w: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
    lambda x, w: torch.cat([x[:2], x[2:] * 3]),
]


@given(
    st.lists(st.tuples(st.integers(0, len(OPS) - 1), st.integers(-1, len(CONFIGS) - 1)), min_size=1, max_size=6),
    st.data(),
)
@settings(max_examples=25, deadline=None)
def test_numbers_do_not_depend_on_scopes(program, data):
    for number, shard in enumerate(CONFIGS):
        backward = data.draw(st.sampled_from([None, *range(number)]))
        gt.register_config(str(number), SignalConfig(shard, None if backward is None else str(backward)))
    torch.manual_seed(0)
    x, w = torch.randn(5, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)

    def run(x, w):
        x, w = x.requires_grad_(), w.requires_grad_()
        y = x
        for op, scope in program:
            with gt.signal.context(str(scope)):
                y = OPS[op](y, w)
        y.square().mean().backward()
        return y, x.grad, w.grad

    if active_session.active is None:
        gt.init(workers=4, mode="virtual")
    try:
        ours = [None if t is None else t.cpu() for t in run(gt.tensor(x), gt.tensor(w))]
    finally:
        gt.shutdown()
    for mine, theirs in zip(ours, run(x.clone(), w.clone()), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
