"""Engines: the ops they may run, default dtypes, shortcuts, and collectives over real process groups."""

import math
import threading

import pytest
import torch
import torch.distributed as dist

import gt
from gt.core.errors import SettingsError
from gt.core.signatures import ViewStep
from gt.worker.engines import NumPyEngine, PyTorchEngine, make_engine
from gt.worker.engines.device_fallbacks import attention, attention_backward, lstm_layer, lstm_layer_backward
from gt.worker.engines.refused_ops import refusal


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


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("aten.from_file.default", "files"),
        ("aten.from_file.out", "files"),
        ("aten._print.default", "stdout"),
        ("aten._reshape_alias.default", "strides"),
        ("aten.fbgemm_pack_quantized_matrix.KN", "addresses"),
    ],
)
def test_an_op_that_reaches_beyond_its_tensors_is_refused_with_the_reason(op, why):
    with pytest.raises(NotImplementedError, match=f"{op} is not an op that this worker may run: .*{why}"):
        PyTorchEngine().resolve(op)


def test_a_view_cannot_be_made_by_a_refused_op():
    with pytest.raises(NotImplementedError, match="files"):
        PyTorchEngine().make_view(ViewStep("aten.from_file.default", (), {}))


WORDS = {
    "a", "activation", "algorithm", "api_name", "approximate", "assert_msg", "b", "driver", "equation", "indexing",
    "interpolation", "mode", "norm", "ord", "p", "pad_mode", "padding", "padding_side", "reduce", "rounding_mode",
    "side", "UPLO",
}  # fmt: skip


def test_no_op_that_may_run_takes_a_string_of_an_unknown_meaning():
    """A new version of torch may have one that is the name of a file."""
    engine = PyTorchEngine()
    for name in engine._allowed:
        qualified, _, overload = name.partition(".")
        strings = {arg.name for arg in torch._C._get_schema(qualified, overload).arguments if "str" in str(arg.type)}
        if strings - WORDS:
            with pytest.raises(NotImplementedError, match="may run: "):
                engine.resolve(f"{qualified.replace('::', '.')}.{overload or 'default'}")


@pytest.mark.parametrize(
    ("name", "overload"), [("rand", "generator_with_names"), ("sum", "DimnameList_out"), ("rename_", "")]
)
def test_ops_with_names_of_dims_are_refused(name, overload):
    """Torch 2.10 has them."""
    assert "names for their dims" in refusal(name, overload)
    assert refusal("sum", "dim_IntList") is None


@pytest.mark.usefixtures("anywhere")
def test_a_client_cannot_read_a_file_of_a_worker(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret!!")
    with pytest.raises(NotImplementedError, match="may run: it reads and writes files"), gt.device():
        torch.ops.aten.from_file.default(str(secret), True, 8, dtype=torch.uint8).tolist()


@pytest.fixture
def a_gpu(monkeypatch):
    """Pretends that the machine has GPUs, of which the second is current; gives the devices that were selected."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    return chosen


@pytest.mark.parametrize(
    ("asked", "found", "current"),
    [("", "cuda:1", [1]), ("cuda", "cuda:1", [1]), ("cuda:3", "cuda:3", [3]), ("cpu", "cpu", []), ("xpu", "xpu", [])],
)
def test_a_gpu_is_known_by_its_index(a_gpu, asked, found, current):
    assert (PyTorchEngine(asked).device, a_gpu) == (found, current)


@pytest.fixture
def default_dtype():
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


def test_an_engine_leaves_the_default_dtype_alone_where_it_does_not_matter(default_dtype, monkeypatch):
    engine, whole, real = PyTorchEngine("cpu"), torch.arange(3), torch.rand(3)
    default_dtype(torch.float64)
    monkeypatch.setattr(torch, "set_default_dtype", lambda dtype: pytest.fail(f"the default dtype was set to {dtype}"))
    with engine.isolated():
        assert torch.get_default_dtype() is torch.float64
        assert engine.resolve("aten.mul.Tensor")(real, 2.5).dtype is torch.float32
        assert engine.resolve("aten.zeros.default")([2], dtype=torch.int8).dtype is torch.int8
        assert engine.with_default_dtype("float64", engine.resolve("aten.sqrt.default"))(whole).dtype is torch.float64
        assert engine.make_view(ViewStep("aten.select.int", (0, 1), {}))(whole).item() == 1


@pytest.mark.parametrize("recorded", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("now", [torch.float32, torch.float64])
def test_an_op_runs_with_the_default_dtype_it_was_recorded_with(default_dtype, recorded, now):
    engine, whole = PyTorchEngine("cpu"), torch.arange(3)
    default_dtype(now)

    def run(function, *args):
        function = function if recorded == "float32" else engine.with_default_dtype(recorded, function)
        return str(function(*args).dtype).removeprefix("torch.")

    assert run(engine.resolve("aten.sqrt.default"), whole) == recorded
    assert run(engine.resolve("aten.cat.default"), [whole, whole]) == "int64"
    assert run(engine.resolve("aten.zeros.default"), [3]) == recorded
    assert run(engine.seeded("aten.rand.default", engine.resolve("aten.rand.default"), None), 7, [3]) == recorded
    assert engine.shortcut("aten.div.Tensor", [whole, whole])(whole, whole).dtype is torch.float32
    assert torch.get_default_dtype() is now


def test_a_default_dtype_that_is_set_while_an_op_runs_stays(default_dtype):
    PyTorchEngine("cpu").with_default_dtype("float64", lambda: torch.set_default_dtype(torch.bfloat16))()
    assert torch.get_default_dtype() is torch.bfloat16


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


@pytest.mark.parametrize("shape", [(6, 2), (7, 2), (2, 3), (2,)])  # of 2 rows one member has none
def test_all_gather_joins_the_shards(shape):
    whole = torch.arange(float(math.prod(shape))).reshape(shape)
    for joined in in_group(3, lambda engine, group, rank: engine.all_gather(whole.tensor_split(3)[rank], group=group)):
        assert torch.equal(joined, whole)


def test_all_gather_of_numbers_is_a_vector():
    for joined in in_group(2, lambda engine, group, rank: engine.all_gather(torch.tensor(rank), group=group)):
        assert joined.tolist() == [0, 1]


@pytest.mark.parametrize("rows", [6, 7, 2])
def test_reduce_scatter_of_even_and_uneven_parts(rows):
    whole = torch.arange(float(rows * 2)).reshape(rows, 2)
    results = in_group(3, lambda engine, group, rank: engine.reduce_scatter(whole * (rank + 1), group=group))
    assert torch.equal(torch.cat(results), whole * 6)


def test_collectives_take_the_default_group_of_torch(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        engine = PyTorchEngine()
        assert engine.all_reduce_sum(torch.ones(2)).tolist() == [1.0, 1.0]
        assert engine.all_gather(torch.ones(2)).tolist() == [1.0, 1.0]
        assert engine.reduce_scatter(torch.ones(2)).tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


def test_a_collective_without_a_group_says_so():
    assert PyTorchEngine().supports_distributed()
    with pytest.raises(RuntimeError, match="no process group"):
        PyTorchEngine().all_reduce_sum(torch.ones(2))


CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_fallback_attention_equals_the_cpus(is_causal, masked, dtype):
    q, k, v = (torch.randn(2, 3, 5, 8, dtype=dtype) for _ in range(3))
    mask = None if is_causal or not masked else torch.randn(5, 5, dtype=dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=mask)
    found, found_lse = attention(q, k, v, 0.0, is_causal, attn_mask=mask)
    torch.testing.assert_close(found, out, atol=CLOSE[dtype], rtol=CLOSE[dtype])
    torch.testing.assert_close(found_lse, lse, atol=CLOSE[lse.dtype], rtol=CLOSE[lse.dtype])
    grad = torch.randn_like(out)
    expected = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask
    )
    ours = attention_backward(grad, q, k, v, found, found_lse, 0.0, is_causal, attn_mask=mask)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, atol=CLOSE[dtype], rtol=10 * CLOSE[dtype])


@pytest.mark.parametrize("reverse", [False, True])
def test_the_fallback_lstm_equals_torchs(reverse):
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
