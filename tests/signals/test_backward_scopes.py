"""Backward scopes: the signals under which gradients run."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gt
from tests.signals.recorded_scopes import configure, scopes_of


def test_a_backward_without_a_configuration_changes_nothing_and_is_warned_of_once(four_workers, caplog):
    configure("forward", 0, backward="bakward")
    configure("backward", 0)
    x, w = gt.tensor(torch.randn(8, 4)), torch.randn(4, 4)
    for _ in range(2):
        weight = gt.tensor(w).requires_grad_()
        with gt.signal.context("forward"):
            y = (x @ weight).sin()
        y.sum().backward()
    expected = w.clone().requires_grad_()
    (x.cpu() @ expected).sin().sum().backward()
    torch.testing.assert_close(weight.grad.cpu(), expected.grad)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "gt.signals"]
    assert "test_backward_scopes.py:" in warning
    assert "signal 'forward': backward names signal 'bakward', which is not configured" in warning
    assert "did you mean 'backward'?" in warning


def test_a_backward_of_a_file_may_be_registered_in_python_later(four_workers, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("forward: {shard: {axis: 0}, backward: gradients}")
    gt.load_config(path)
    configure("gradients", 0, [2, 3])
    x, w = gt.tensor(torch.randn(4, 4)), gt.tensor(torch.randn(4, 4)).requires_grad_()
    with gt.signal.context("forward"):
        y = x @ w
    assert ("mm", "gradients") in scopes_of(y.sum().backward)[1]


def two_layers(scopes=("one", "two"), **contexts):
    """Ops in two scopes, with one op between them and the loss outside of scopes."""
    x, w = gt.tensor(torch.randn(4, 4)), gt.tensor(torch.randn(4, 4)).requires_grad_()
    with gt.signal.context(scopes[0], **contexts):
        h = x @ w
    h = h.sin()
    with gt.signal.context(scopes[1]):
        y = h.exp()
    return y.sum(), w


def test_gradients_run_under_the_backward_scope(four_workers):
    configure("one", 0, [0, 1], backward="one back")
    configure("one back", 0, [2, 3])
    configure("two", 0, [2])
    loss, w = two_layers()
    _, ops = scopes_of(loss.backward)
    assert ops == [("ones_like", "-"), ("mul", "two"), ("cos", "-"), ("mul", "-"), ("mm", "one back")]
    assert w.grad.spec.mesh.workers == (2, 3)


def test_backward_may_be_called_in_any_scope_and_thread(four_workers):
    configure("one", 0, [0, 1], backward="one back")
    configure("one back", 0, [2, 3])
    configure("two", 0, [2])
    configure("caller", 0, [3])
    loss, w = two_layers()

    def call():
        with gt.signal.context("caller"):
            return scopes_of(loss.backward)[1]

    ops = dict(call())
    assert (ops["mm"], ops["cos"]) == ("one back", "caller"), "what ran outside any scope is the caller's"
    loss, w = two_layers()
    seen = []
    thread = threading.Thread(target=lambda: seen.append(scopes_of(loss.backward)[1]))
    thread.start()
    thread.join()
    assert dict(seen[0])["mm"] == "one back"
    assert w.grad.spec.mesh.workers == (2, 3)


def test_the_backward_of_a_context_counts_more(four_workers):
    configure("one", 0, [0, 1], backward="one back")
    configure("one back", 0, [2, 3])
    configure("own", 0, [1, 3])
    loss, w = two_layers(("one", "unknown"), backward="own")
    assert dict(scopes_of(loss.backward)[1])["mm"] == "own"
    loss, w = two_layers(("unknown", "unknown"), backward="own")
    assert dict(scopes_of(loss.backward)[1])["mm"] == "own"


def test_double_backward_stays_in_the_backward_scopes(four_workers):
    configure("one", 0, [0, 1], backward="back")
    configure("back", 0, [2, 3], backward="back again")
    configure("back again", 0, [1, 2])
    x = gt.tensor(torch.randn(4, 4)).requires_grad_()
    with gt.signal.context("one"):
        y = x.sin()
    (first,), ops = scopes_of(lambda: torch.autograd.grad(y.sum(), x, create_graph=True))
    assert ("cos", "back") in ops
    (second,), ops = scopes_of(lambda: torch.autograd.grad(first.sum(), x))
    assert ("sin", "back again") in ops
    torch.testing.assert_close(second.cpu(), -x.detach().cpu().sin())


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_ops_run_in_the_scope_that_they_enter_or_in_that_of_the_gradient(four_workers, reentrant):
    configure("one", 0, [0, 1], backward="back")
    configure("back", 0, [2, 3])
    configure("inside", 0, [1])

    def layer(x):
        with gt.signal.context("inside"):
            x = x.sin()
        return x.exp()

    x = gt.tensor(torch.randn(4, 4)).requires_grad_()
    with gt.signal.context("one"):
        y = checkpoint(layer, x, use_reentrant=reentrant)
    loss = y.sum()
    _, ops = scopes_of(loss.backward)
    named = {}
    for op, scope in ops:
        named.setdefault(op, set()).add(scope)
    assert named["sin"] == {"inside"}
    assert named["exp"] <= {"back"}
    assert named["cos"] == {"inside"}
    plain = x.detach().cpu().requires_grad_()
    layer(plain).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), plain.grad)


def test_accumulation_stays_where_the_gradient_is(four_workers):
    configure("one", 0, [0, 1])
    w = gt.tensor(torch.randn(4, 4)).requires_grad_()
    for _ in range(2):
        with gt.signal.context("one"):
            y = (w * 2).sum()
        _, ops = scopes_of(y.backward)
    assert w.grad.spec.mesh.workers == (0, 1)
    assert torch.equal(w.grad.cpu(), torch.full((4, 4), 4.0))


def test_accumulation_is_not_the_callers(four_workers):
    """Accumulation runs neither in the scope of the caller nor in that of the nodes numbered before it."""
    configure("one", 0, [0, 1])
    configure("caller", 0, [3])
    w = gt.tensor(torch.randn(4, 4)).requires_grad_()
    for _ in range(2):
        with gt.signal.context("one"):
            y = (w * 2).sum()
        with gt.signal.context("caller"):
            _, ops = scopes_of(y.backward)
    assert [scope for op, scope in ops if op.startswith("add")] == ["-"]
    assert w.grad.spec.mesh.workers == (0, 1)


class Scaled(torch.autograd.Function):
    """A function whose forward issues no op."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.exp()


def test_gradients_of_functions_without_ops_run_in_their_scope(four_workers):
    configure("one", 0, [0, 1])
    x = gt.tensor(torch.randn(4, 4)).requires_grad_()
    with gt.signal.context("one"):
        y = Scaled.apply(x)
    loss = y.sin().sum()
    _, ops = scopes_of(loss.backward)
    assert dict(ops)["exp"] == "one"
