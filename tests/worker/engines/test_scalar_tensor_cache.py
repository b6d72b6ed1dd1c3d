"""A number that is kept as a tensor gives the same bits as the number itself."""

import itertools
import math

import pytest
import torch

from gt.worker.engines import PyTorchEngine
from gt.worker.engines.torch_values import takes_number_as_tensor, with_number_as_tensor

NUMBERS = [0.1, -3.0, 1 / 3, 1e-40, 1e300, 65520.0, 1e-8, math.inf, -math.inf, math.nan, 0.0, -0.0, 3, True, 2**60 + 1]
OPS = ["add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_"]
ELEMENTS = [0.0, -0.0, 1.0, -1 / 3, 1e-30, 6e4, math.inf, -math.inf, math.nan, 1e-45, 123456.789]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_the_bits_are_those_of_the_number(name, dtype):
    op = f"aten.{name}.Tensor"
    engine = PyTorchEngine("cpu")
    values = torch.tensor(ELEMENTS, dtype=dtype)
    with engine.isolated():
        direct = engine.shortcut(op, [values.clone()], [0.5])
        for number in itertools.chain(NUMBERS, NUMBERS):  # once more: most are kept by now
            if isinstance(number, bool) and "sub" in name:
                continue  # torch refuses it
            expected = engine.resolve(op)(values.clone(), number)
            found = direct(values.clone(), number)
            assert (found.dtype, bits(found)) == (expected.dtype, bits(expected)), number


def test_what_torch_refuses_is_refused():
    engine = PyTorchEngine("cpu")
    x = torch.ones(3)
    with engine.isolated(), pytest.raises(RuntimeError, match="bool"):
        engine.shortcut("aten.sub.Tensor", [x], [0.5])(x, True)


def test_operands_whose_result_would_have_another_type():
    assert takes_number_as_tensor("aten.mul.Tensor", torch.ones(2))
    for operand in (torch.ones(()), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.complex64)):
        assert not takes_number_as_tensor("aten.mul.Tensor", operand)
    assert not takes_number_as_tensor("aten.pow.Tensor_Scalar", torch.ones(2))


def test_the_number_of_kept_tensors_is_limited():
    call = with_number_as_tensor(lambda operand, number: number)
    first = call(torch.ones(1), 0.25)
    assert call(torch.ones(1), 0.25) is first
    for number in range(5000):
        call(torch.ones(1), number + 0.5)
    assert call(torch.ones(1), 0.25) is not first
