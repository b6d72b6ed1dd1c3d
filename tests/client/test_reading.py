import json
import math

import numpy as np
import pytest
import torch

import gt

pytestmark = pytest.mark.usefixtures("anywhere")


def test_reading_numbers():
    x = gt.tensor([[1.5, 2.0], [3.0, 4.0]])
    assert x.tolist() == [[1.5, 2.0], [3.0, 4.0]]
    assert x[0, 0].item() == 1.5
    assert float(x[0, 1]) == 2.0
    assert int(gt.tensor(7)) == 7
    assert complex(gt.tensor(1.0)) == 1 + 0j
    assert [1, 2, 3][gt.tensor(1)] == 2
    assert bool(gt.tensor(True)) and not gt.tensor(0)


def test_bool_of_several_is_refused_as_in_torch():
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(gt.ones(2))
    with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
        gt.ones(2).item()


def test_numpy():
    x = gt.arange(6).reshape(2, 3)
    assert isinstance(x.numpy(), np.ndarray)
    np.testing.assert_array_equal(x.numpy(), np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(np.asarray(x), np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(np.asarray(x, dtype=np.float32), np.arange(6, dtype=np.float32).reshape(2, 3))
    np.testing.assert_array_equal(x.t().data.numpy(), np.arange(6).reshape(2, 3).T)
    assert np.array(x).sum() == 15


def test_numpy_of_a_tensor_that_requires_grad_is_refused_as_in_torch():
    x = gt.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="requires grad"):
        x.numpy()
    assert x.detach().numpy().tolist() == [1.0, 1.0]
    assert x.data.numpy().tolist() == [1.0, 1.0]
    assert x.numpy(force=True).tolist() == [1.0, 1.0]


def test_cpu_returns_an_independent_copy():
    x = gt.zeros(3)
    copy = x.cpu()
    copy += 1
    assert x.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("size", [(3,), (9, 1 << 20)], ids=["small", "on huge pages"])
def test_an_upload_is_a_copy(size):
    source = torch.ones(size)
    x = gt.to(source)
    source += 1
    assert x.shape == size
    assert x.sum().item() == math.prod(size)
    x.add_(1)
    assert source.flatten()[0] == 2
    larger = (size[0] + 1, *size[1:])
    with pytest.warns(UserWarning, match="resized"):
        torch.add(gt.ones(larger), 2, out=x)
    assert x.shape == larger
    assert x.sum().item() == 3 * math.prod(larger)


def test_iteration_and_len():
    x = gt.arange(6).reshape(3, 2)
    assert [row.tolist() for row in x] == [[0, 1], [2, 3], [4, 5]]
    assert len(x) == 3
    first, *rest = x
    assert first.tolist() == [0, 1]
    assert 4 in x


def test_formatting():
    assert f"{gt.tensor(1.23456):.2f}" == "1.23"
    assert f"{gt.tensor(7):04d}" == "0007"
    assert f"loss {gt.tensor(1.5)}, {gt.tensor(2.0, requires_grad=True)}" == "loss 1.5, 2.0"
    x = gt.ones(2)
    assert f"{x}" == repr(x)


def test_a_format_of_several_numbers_is_refused_as_in_torch():
    for x in (torch.ones(2), gt.ones(2)):
        with pytest.raises(TypeError, match=r"unsupported format string passed to Tensor\.__format__"):
            f"{x:.2f}"


def test_repr_shows_values_of_small_tensors_and_facts_always():
    text = repr(gt.arange(3))
    assert "[0, 1, 2]" in text
    assert "shape=(3,)" in text
    assert "dtype=torch.int64" in text
    assert "worker" in text


def test_repr_of_large_tensors_is_summarised():
    text = repr(gt.arange(100_000).reshape(100, 1000))
    assert "..." in text
    assert "99999" in text
    assert "shape=(100, 1000)" in text
    assert len(text) < 1000


def test_repr_of_parameters_gradients_and_empties():
    assert repr(gt.nn.Linear(1, 1).weight).startswith("gt.Parameter(")
    assert "requires_grad=True" in repr(gt.ones(1, requires_grad=True))
    assert "grad_fn=<MulBackward0>" in repr(gt.ones(1, requires_grad=True) * 2)
    assert "shape=(0, 3)" in repr(gt.zeros(0, 3))
    assert "Linear(in_features=2" in repr(gt.nn.Linear(2, 2))


def test_str_and_json():
    x = gt.tensor(1)
    assert str(x) == repr(x)
    assert json.dumps(gt.tensor([1, 2]).tolist()) == "[1, 2]"


def test_dlpack_export():
    x = gt.arange(4.0)
    assert torch.equal(torch.from_dlpack(x), torch.arange(4.0))
    np.testing.assert_array_equal(np.from_dlpack(x), np.arange(4.0))
    with pytest.raises(BufferError, match="require gradient"):
        torch.from_dlpack(gt.ones(1, requires_grad=True))


def test_methods_that_need_memory_raise():
    with pytest.raises(RuntimeError, match=r"its bytes are on a worker; use tensor.cpu\(\)"):
        gt.ones(2).share_memory_()


def test_functions_of_each_element():
    for change in (
        lambda x: x.apply_(lambda v: v * 2),
        lambda x: x[1:].map_(torch.ones(3), lambda v, w: v + w),
        lambda x: x.map2_(x.clone(), torch.ones(4), lambda v, w, u: v * w - u),
    ):
        plain, ours = torch.arange(4.0), gt.arange(4.0)
        version = plain._version
        assert torch.equal(change(ours).cpu(), change(plain))
        assert torch.equal(ours.cpu(), plain)
        assert (ours._version, plain._version) == (version, version)
    with pytest.raises(RuntimeError, match=r"apply_\(\) on Variable that requires grad"):
        gt.ones(2, requires_grad=True).apply_(abs)


def test_host_memory_can_be_the_target():
    host = torch.zeros(3)
    host.copy_(gt.ones(3))
    host += gt.ones(3)
    assert not isinstance(host, gt.Tensor)
    assert host.tolist() == [2.0, 2.0, 2.0]
    out = torch.empty(3)
    torch.add(gt.ones(3), 1, out=out)
    assert out.tolist() == [2.0, 2.0, 2.0]


def test_another_device_of_this_process():
    moved = gt.ones(2, 3).to("meta", torch.float64)
    assert not isinstance(moved, gt.Tensor)
    assert (moved.device.type, moved.shape, moved.dtype) == ("meta", (2, 3), torch.float64)


def test_torch_functions_that_answer_with_python_values():
    x = gt.arange(4.0)
    assert torch.equal(x, gt.arange(4.0)) and not torch.equal(x, x + 1)
    assert torch.allclose(x, x + 1e-9)
    assert torch.is_tensor(x) and x.is_floating_point() and not x.is_cuda
    assert x.device.type == "cpu"
    assert torch.equal(x, torch.arange(4.0))


def test_data_dependent_shapes():
    x = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 4.0]])
    y = gt.to(x)
    cases = [
        lambda v: v.nonzero(),
        lambda v: v[v > 1],
        lambda v: v.masked_select(v > 0),
        lambda v: torch.unique(v),
        lambda v: torch.unique(v, return_counts=True)[1],
        lambda v: torch.nonzero(v, as_tuple=True)[1],
        lambda v: torch.where(v > 0)[0],
        lambda v: torch.argwhere(v),
        lambda v: torch.bincount(v.flatten().long()),
        lambda v: v.flatten().repeat_interleave(v.flatten().long()),
        lambda v: v[:, torch.tensor([True, False, True])],
    ]
    for case in cases:
        assert torch.equal(case(y).cpu(), case(x))


def test_numpy_operands():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    y, a = gt.to(x), np.array([[1.0, 1.0], [2.0, 2.0]], dtype=np.float32)
    plain = torch.from_numpy(a)
    pairs = [
        (y + a, x + plain),
        (a + y, x + plain),
        (y - a, x - plain),
        (a - y, plain - x),
        (y * a, x * plain),
        (a / y, plain / x),
        (y @ a, x @ plain),
        (a @ y, plain @ x),
        (y**a, x**plain),
        (y > a, x > plain),
        (a <= y, plain <= x),
        (y == a, x == plain),
        (np.add(a, y), plain + x),
        (np.sqrt(y), x.sqrt()),
        (np.float32(2) * y, x * 2),
        (y[np.array([1, 0])], x[[1, 0]]),
    ]
    for found, expected in pairs:
        assert isinstance(found, gt.Tensor)
        torch.testing.assert_close(found.cpu(), expected, check_dtype=False)


UFUNCS = {f for f in vars(np).values() if isinstance(f, np.ufunc) and f.nin <= 2 and not f.signature}
ARRAYS = {
    "float32": np.array([[1.5, -2.0, 0.25], [3.0, 0.5, -0.75]], dtype=np.float32),
    "int64": np.array([[1, -2, 3], [4, 5, 6]]),
    "bool": np.array([[True, False, True], [False, True, True]]),
    "complex64": np.array([[1 + 2j, -1j, 2], [0.5, 1 - 1j, 3j]], dtype=np.complex64),
}


def attempt(function, operands):
    """The results of a function as plain tensors; none where it refuses."""
    try:
        results = function(*operands)
        return [torch.as_tensor(np.asarray(x)) for x in (results if isinstance(results, tuple) else (results,))]
    except (TypeError, RuntimeError, ValueError):
        return []


# They are torch's operators, which promote as torch does and know fewer dtypes.
OPERATORS = {
    "divide", "floor_divide", "divmod", "remainder", "power", "subtract", "left_shift", "right_shift",
    "greater", "greater_equal", "less", "less_equal",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:RuntimeWarning")
@pytest.mark.parametrize("dtype", ARRAYS)
def test_numpy_functions_equal_those_of_plain_tensors(dtype):
    array = ARRAYS[dtype]
    two = [lambda x: (x, np.abs(array)), lambda x: (np.abs(array), x), lambda x: (x, 2), lambda x: (2, x)]
    for function in UFUNCS:
        for operands in two if function.nin == 2 else [lambda x: (x,)]:
            expected, found = (attempt(function, operands(move(array))) for move in (torch.tensor, gt.tensor))
            assert found or not expected or function.__name__ in OPERATORS, function
            for x, y in zip(expected, found, strict=False):
                torch.testing.assert_close(y, x.to(y.dtype) if as_bool(x, y, function) else x, equal_nan=True)


def as_bool(x, y, function):
    """NumPy's answers are uint8 tensors in torch."""
    return (x.dtype, y.dtype) == (torch.uint8, torch.bool) or function.__name__ in OPERATORS


def test_comparing_an_array_with_a_tensor():
    a, x = np.array([1.0, 2.0], dtype=np.float32), gt.tensor([1.0, 3.0])
    for found in (a == x, np.equal(a, x)):
        assert found.tolist() == [True, False]
    assert (a != x).tolist() == [False, True]
    assert [part.tolist() for part in divmod(a, x)] == [[1.0, 0.0], [0.0, 2.0]]


def test_numpy_functions_that_read_the_values():
    x, a = gt.tensor([1.0, 8.0, 3.0]), np.zeros(3, dtype=np.float32)
    assert isinstance(np.add.reduce(x), gt.Tensor)
    assert (np.add.reduce(x).item(), np.multiply.accumulate(x).tolist()) == (12.0, [1.0, 8.0, 24.0])
    assert np.add(x, 1, out=a) is a
    a += x
    assert a.tolist() == [3.0, 17.0, 7.0]
    np.add.at(a, [0], x[:1])
    assert a[0] == 4.0
    assert np.clip(x, 2, 5).tolist() == [2.0, 5.0, 3.0]
    with pytest.raises(TypeError, match="cannot write to a tensor"):
        np.add(a, x, out=x)
    with pytest.raises(TypeError, match="cannot write to a tensor"):
        np.add.at(x, [0], 1.0)


def test_numpy_functions_let_gradients_pass():
    x = gt.tensor([4.0, 0.25], requires_grad=True)
    np.maximum(np.sqrt(x), 1).sum().backward()
    assert x.grad.tolist() == [0.25, 0.0]
    with pytest.raises(RuntimeError, match="requires grad"):
        np.cbrt(x)


def test_in_place_with_numpy_and_plain_operands():
    y = gt.ones(3)
    y += torch.ones(3)
    y[1:] = torch.zeros(2)
    y[0] = np.float32(5)
    y *= gt.tensor(2.0)
    assert y.tolist() == [10.0, 0.0, 0.0]
    y += np.ones(3, dtype=np.float32)
    assert y.tolist() == [11.0, 1.0, 1.0]


def test_a_changed_array_is_uploaded_again():
    array = np.ones(4, dtype=np.float32)
    plain = torch.from_numpy(array)
    first = (gt.zeros(4) + plain).tolist()
    array[:] = 2
    assert (first, (gt.zeros(4) + plain).tolist()) == ([1.0] * 4, [2.0] * 4)
