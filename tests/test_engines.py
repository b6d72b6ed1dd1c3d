"""What engines promise: the ops they may run, and collectives over real process groups."""

import threading

import pytest
import torch
import torch.distributed as dist

import gt
from gt.core.errors import SettingsError
from gt.worker.engines import NumPyEngine, PyTorchEngine, make_engine
from gt.worker.engines.portable import attention, attention_backward, lstm_layer, lstm_layer_backward


@pytest.mark.parametrize(
    "op",
    ["aten.add.Tensor.extra", "aten.nope.default", "os.system", "prims.add.default", "aten", "",
     "aten.__class__.default", "aten.add.__init__", "builtins.eval.default",
     "torch_nn._linear_cross_entropy_batch_chunked.default"],
)  # fmt: skip
@pytest.mark.parametrize("engine", [PyTorchEngine, NumPyEngine])
def test_only_ops_of_the_allowed_namespaces_run(engine, op):
    with pytest.raises(NotImplementedError):
        engine().resolve(op)


def test_a_namespace_can_be_allowed():
    with pytest.raises(NotImplementedError, match="may run"):
        PyTorchEngine().resolve("prims.sin.default")
    assert PyTorchEngine(namespaces=("aten", "prims")).resolve("prims.sin.default")(torch.zeros(1)).item() == 0


def test_engines_by_name():
    assert isinstance(make_engine("pytorch"), PyTorchEngine)
    assert isinstance(make_engine("numpy"), NumPyEngine)
    with pytest.raises(SettingsError, match="did you mean 'numpy'"):
        make_engine("nunpy")


def in_group(size, work):
    """Run `work(engine, group, rank)` on `size` threads that share a real Gloo group; gives the results by rank."""
    store = dist.HashStore()
    results = [None] * size

    def member(rank):
        group = dist.ProcessGroupGloo(store, rank, size, dist.default_pg_timeout)
        results[rank] = work(PyTorchEngine("cpu"), group, rank)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_sum(size):
    def work(engine, group, rank):
        given = torch.arange(6.0).reshape(2, 3).t() * (rank + 1)  # not contiguous
        result = engine.all_reduce_sum(given, group=group)
        assert torch.equal(given, torch.arange(6.0).reshape(2, 3).t() * (rank + 1))
        return result

    total = sum(range(1, size + 1))
    for result in in_group(size, work):
        assert torch.equal(result, torch.arange(6.0).reshape(2, 3).t() * total)


def test_all_gather():
    for parts in in_group(3, lambda engine, group, rank: engine.all_gather(torch.full((2,), float(rank)), group=group)):
        assert [part.tolist() for part in parts] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


@pytest.mark.parametrize("rows", [6, 7, 2])
def test_reduce_scatter_of_even_and_uneven_parts(rows):
    whole = torch.arange(float(rows * 2)).reshape(rows, 2)
    results = in_group(3, lambda engine, group, rank: engine.reduce_scatter(whole * (rank + 1), group=group))
    assert torch.equal(torch.cat(results), whole * 6)


def test_a_collective_without_a_group_says_so():
    assert PyTorchEngine().supports_distributed()
    with pytest.raises(RuntimeError, match="no process group"):
        PyTorchEngine().all_reduce_sum(torch.ones(2))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_portable_attention_equals_the_cpus(is_causal, masked):
    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
    mask = None if is_causal or not masked else torch.randn(5, 5)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=mask)
    found, found_lse = attention(q, k, v, 0.0, is_causal, attn_mask=mask)
    torch.testing.assert_close(found, out)
    torch.testing.assert_close(found_lse, lse)
    grad = torch.randn_like(out)
    expected = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask
    )
    ours = attention_backward(grad, q, k, v, found, found_lse, 0.0, is_causal, attn_mask=mask)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_portable_lstm_equals_torchs(reverse):
    lstm = torch.nn.LSTM(4, 5, bidirectional=True)
    suffix = "_reverse" if reverse else ""
    weights = [getattr(lstm, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    x = torch.randn(6, 3, 4, requires_grad=True)
    start = torch.zeros(3, 5)
    half = slice(5, 10) if reverse else slice(0, 5)
    expected = lstm(x)[0][..., half]
    found, hidden, cell, _ = lstm_layer(x, *weights, start, start, reverse)
    torch.testing.assert_close(found, expected)
    expected_grads = torch.autograd.grad(expected.sum(), [x, *weights])
    ones = torch.ones_like(found)
    detached = [tensor.detach() for tensor in (x, *weights, start, start, found, hidden, cell)]
    grads = lstm_layer_backward(*detached, ones, None, None, reverse)
    for a, b in zip(grads, expected_grads, strict=False):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("embedded")
def test_a_function_with_other_defaults_is_no_shortcut():
    """torch.binary_cross_entropy_with_logits reduces nothing by default; the op takes the mean."""
    x, y = torch.rand(3), torch.rand(3)
    op = "aten.binary_cross_entropy_with_logits.default"
    assert PyTorchEngine().shortcut(op, [x, y])(x, y).shape == ()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(x, y)
    ours = [torch.nn.functional.binary_cross_entropy_with_logits(gt.to(x), gt.to(y)).item() for _ in range(3)]
    assert ours == [expected.item()] * 3


def test_a_shortcut_is_found_for_each_number_of_tensors():
    engine, x = PyTorchEngine(), torch.rand(3)
    for count in (2, 3):
        function = engine.shortcut("aten.clamp.Tensor", [x] * count)
        assert torch.equal(function(*[x] * count), torch.ops.aten.clamp.Tensor(*[x] * count))
