import numpy as np
import pytest
import torch

import gt

pytestmark = pytest.mark.usefixtures("anywhere")

DETERMINISTIC = {
    "zeros": lambda m: m.zeros(2, 3),
    "ones": lambda m: m.ones((2, 3), dtype=torch.int64),
    "full": lambda m: m.full((2, 2), 7.5),
    "eye": lambda m: m.eye(3, 4),
    "arange": lambda m: m.arange(2, 11, 3),
    "arange float": lambda m: m.arange(0.0, 1.0, 0.25),
    "linspace": lambda m: m.linspace(0, 1, 7),
    "tensor": lambda m: m.tensor([[1, 2], [3, 4]]),
    "tensor scalar": lambda m: m.tensor(2.5),
    "as_tensor": lambda m: m.as_tensor([1.0, 2.0]),
    "from_numpy": lambda m: m.from_numpy(np.arange(6).reshape(2, 3)),
    "zeros_like": lambda m: m.zeros_like(m.ones(3, 2)),
    "ones_like": lambda m: m.ones_like(m.zeros(3, 2), dtype=torch.int32),
    "full_like": lambda m: m.full_like(m.zeros(3, 2), 4),
}


@pytest.mark.parametrize("make", DETERMINISTIC.values(), ids=DETERMINISTIC.keys())
def test_creation_gives_what_torch_gives(make):
    made, expected = make(gt), make(torch)
    assert isinstance(made, gt.Tensor)
    assert made.dtype == expected.dtype
    assert made.stride() == expected.stride()
    assert torch.equal(made.cpu(), expected)


RANDOM = {
    "rand": lambda: gt.rand(50, 4),
    "randn": lambda: gt.randn(50, 4),
    "randint": lambda: gt.randint(3, 9, (50,)),
    "randperm": lambda: gt.randperm(50),
    "bernoulli": lambda: gt.bernoulli(gt.full((50,), 0.5)),
    "rand_like": lambda: gt.rand_like(torch.zeros(9)),
    "randn_like": lambda: gt.randn_like(gt.zeros(9)),
    "randint_like": lambda: gt.randint_like(gt.zeros(9), 5),
    "dropout": lambda: torch.nn.functional.dropout(gt.ones(50)),
    "normal_": lambda: gt.empty(9).normal_(),
    "multinomial": lambda: torch.multinomial(gt.ones(9), 4),
}


@pytest.mark.parametrize("make", RANDOM.values(), ids=RANDOM.keys())
def test_random_numbers_follow_the_seed(make):
    gt.manual_seed(1)
    first, second = make(), make()
    torch.manual_seed(1)
    again = make()
    assert torch.equal(first.cpu(), again.cpu())
    assert not torch.equal(first.cpu(), second.cpu())


def test_a_generator_of_the_users_own():
    numbers = [torch.rand(4, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    with gt.device():
        ours = [torch.rand(4, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(numbers[0], numbers[1])
    assert torch.equal(ours[0].cpu(), ours[1].cpu())


def test_random_ranges():
    assert set(gt.randint(3, 6, (200,)).tolist()) == {3, 4, 5}
    assert sorted(gt.randperm(20).tolist()) == list(range(20))
    uniform = gt.rand(1000)
    assert uniform.min().item() >= 0 and uniform.max().item() < 1


def test_tensor_copies_and_as_tensor_does_not():
    x = gt.ones(2)
    assert gt.as_tensor(x) is x
    copy = gt.tensor(x)
    x += 1
    assert copy.tolist() == [1.0, 1.0]


def test_an_upload_is_a_snapshot():
    array = np.zeros(100_000, dtype=np.float32)
    x = gt.from_numpy(array)
    array[:] = 1
    assert x.sum().item() == 0


def test_requires_grad_at_creation():
    for x in (gt.randn(2, requires_grad=True), gt.tensor([1.0], requires_grad=True), gt.zeros(1, requires_grad=True)):
        assert x.requires_grad
        assert x.is_leaf


def test_to_moves_tensors_and_lets_gradients_back():
    plain = torch.ones(3, requires_grad=True)
    (gt.to(plain) * 2).sum().backward()
    assert plain.grad.tolist() == [2.0, 2.0, 2.0]


def test_to_moves_a_module_with_tied_weights_and_buffers():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    assert gt.to(model) is model
    assert model[2].weight is model[0].weight
    assert isinstance(model[0].weight, torch.nn.Parameter)
    assert all(isinstance(value, gt.Tensor) for value in model.state_dict().values())


def test_to_refuses_what_it_cannot_move():
    with pytest.raises(TypeError, match="not str"):
        gt.to("a string")


def test_device_scope_catches_torch_factories():
    with gt.device():
        made = [torch.zeros(2), torch.tensor([1, 2]), torch.arange(3), torch.empty(2).fill_(1), torch.eye(2)]
        elsewhere = torch.zeros(2, device="meta")
    assert all(isinstance(tensor, gt.Tensor) for tensor in made)
    assert elsewhere.device.type == "meta"
    assert not isinstance(torch.zeros(2), gt.Tensor)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.complex64]
)
def test_dtypes_survive_the_trip(dtype):
    values = torch.arange(6).reshape(2, 3).to(dtype)
    assert torch.equal(gt.to(values).cpu(), values)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 1, 3)])
def test_odd_shapes_survive_the_trip(shape):
    values = torch.randn(shape)
    moved = gt.to(values)
    assert moved.shape == values.shape
    assert torch.equal((moved + 1).cpu(), values + 1)
