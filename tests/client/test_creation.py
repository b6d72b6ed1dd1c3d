import copy
import pickle

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
def test_creation_equals_torchs(make):
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


def test_an_uploaded_tensor_can_still_be_resized():
    plain = torch.ones(3)
    assert (gt.to(plain) + plain).tolist() == [2, 2, 2]
    assert plain.resize_(100).shape == (100,)


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


def tied_model():
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight.data = first.weight.data
    second.bias = torch.nn.Parameter(first.weight.data[1])
    first.register_buffer("transposed", first.weight.data.t())
    memory = torch.zeros(20)
    first.register_buffer("start", memory[:10].view(2, 5))
    second.register_buffer("end", memory[5:].view(3, 5))
    first.register_buffer("apart", torch.zeros(4)[2:])
    return torch.nn.Sequential(first, second)


def test_to_keeps_tensors_that_share_memory_tied():
    torch.manual_seed(0)
    plain = tied_model()
    torch.manual_seed(0)
    ours = gt.to(tied_model())
    for model in (plain, ours):
        with torch.no_grad():
            model[0].weight[1] = 7
            model[1].weight[0, 2] = 3
            model[1].end[0] = 4
    for (name, expected), found in zip(plain.state_dict().items(), ours.state_dict().values(), strict=True):
        assert isinstance(found, gt.Tensor)
        assert (name, found.tolist(), found.stride()) == (name, expected.tolist(), expected.stride())


def test_to_moves_parts_of_one_memory_that_do_not_overlap_by_themselves():
    memory = torch.arange(8.0)
    module = torch.nn.Module()
    module.register_buffer("left", memory[:4])
    module.register_buffer("right", memory[4:])
    gt.to(module)
    assert (module.left.storage_offset(), module.right.storage_offset()) == (0, 0)
    assert module.right.tolist() == [4.0, 5.0, 6.0, 7.0]


STRIDED = {
    "transposed": lambda: torch.randn(3, 4).t(),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one channel last": lambda: torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "conjugate": lambda: torch.randn(2, 3, dtype=torch.complex64).t().conj(),
    "a leaf": lambda: torch.randn(2, 3).t().requires_grad_(),
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED.keys())
def test_to_keeps_the_order_of_memory(make):
    plain = make()
    moved = gt.to(plain)
    assert moved.stride() == plain.stride()
    assert (moved * 2).stride() == (plain * 2).stride()
    assert torch.equal(moved.detach().cpu(), plain.detach().resolve_conj())
    assert moved.requires_grad == plain.requires_grad


def test_gaps_between_elements_are_not_moved():
    plain = torch.randn(4, 6)[::2, ::3]
    moved = gt.to(plain)
    assert moved.is_contiguous()
    assert torch.equal(moved.cpu(), plain)


def _buffer_on_gt(plain):
    module = torch.nn.Module()
    module.register_buffer("held", plain)
    return gt.to(module).held


WAYS_IN = {
    "to": gt.to,
    "tensor": gt.tensor,
    "as_tensor": gt.as_tensor,
    "from_numpy": lambda plain: gt.from_numpy(plain.numpy()),
    "an array": lambda plain: gt.to(plain.numpy()),
    "shard": lambda plain: gt.shard(plain, gt.mesh(len(gt.workers())), dim=plain.dim() - 1),
    "replicate": lambda plain: gt.replicate(plain, gt.mesh(len(gt.workers()))),
    "from_shards": lambda plain: gt.from_shards([plain], gt.mesh(1)),
    "dlpack": lambda plain: gt.to(torch.from_dlpack(plain)),
    "a buffer": _buffer_on_gt,
    "an operand": lambda plain: gt.to(plain) * 0 + plain,
    "copy_": lambda plain: torch.empty_like(gt.to(plain)).copy_(plain),
    "data": lambda plain: setattr(tensor := gt.zeros(1), "data", plain) or tensor,
}


@pytest.mark.parametrize("way", WAYS_IN.values(), ids=WAYS_IN)
def test_gaps_and_shared_elements_go_in_as_torch_copies_them(way):
    """Steps of 0 repeat elements, others leave gaps or overlap. What is wrong is seen where a reshape is a view."""
    for shape, stride in (
        ((2, 4), (0, 1)),
        ((3, 2, 2), (0, 8, 0)),
        ((2, 1, 3, 4), (6, 8, 0, 3)),
        ((4, 3), (1, 1)),
        ((3, 4), (2, 12)),
        ((4, 3, 2), (0, 0, 1)),
        ((0, 3), (1, 2)),
    ):
        plain = torch.arange(48.0).as_strided(shape, stride)
        ours, theirs = way(plain), plain.clone()
        assert torch.equal(ours.cpu(), theirs) and (0 in shape or ours.stride() == theirs.stride())
        ours.reshape(-1).zero_()
        theirs.reshape(-1).zero_()
        assert torch.equal(ours.cpu(), theirs)


def test_lists_of_numbers_on_gt():
    for nested, dtype in (
        (lambda m: [m.tensor(1.5), m.tensor(2.0)], torch.float32),
        (lambda m: [[m.tensor(1), 2], (m.tensor([3]), m.tensor(2.5))], torch.float32),
        (lambda m: [m.tensor(1, dtype=torch.int8)], torch.int8),
        (lambda m: [m.tensor(1.5, dtype=torch.float64), m.tensor(2.0)], torch.float64),
    ):
        expected = torch.tensor(nested(torch))
        with gt.device():
            inside = [torch.tensor(nested(gt)), torch.as_tensor(nested(gt)), torch.tensor(data=nested(gt))]
        for found in (gt.tensor(nested(gt)), gt.as_tensor(nested(gt)), *inside):
            assert isinstance(found, gt.Tensor)
            assert found.dtype == expected.dtype == dtype
            assert torch.equal(found.cpu(), expected)
    with pytest.raises(ValueError, match="only one element"):
        gt.tensor([gt.ones(2)])


LAZY = {
    "linear": (lambda nn: nn.LazyLinear(4), (2, 3)),
    "convolution": (lambda nn: nn.LazyConv2d(4, 3), (2, 3, 6, 6)),
    "norm": (lambda nn: nn.LazyBatchNorm1d(), (4, 3)),
}


def inside_device(make):
    with gt.device():
        return make(torch.nn)


WAYS = {
    "gt.device()": inside_device,
    "gt.nn": lambda make: make(gt.nn),
    "gt.to": lambda make: gt.to(make(torch.nn)),
    "deepcopy": lambda make: copy.deepcopy(gt.to(make(torch.nn))),
    "pickle": lambda make: pickle.loads(pickle.dumps(gt.to(make(torch.nn)))),
    "another dtype": lambda make: gt.to(make(torch.nn)).double().float(),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize(("make", "shape"), LAZY.values(), ids=LAZY.keys())
def test_lazy_modules_get_their_parameters_on_gt(make, shape, way):
    x, plain, ours = torch.randn(shape), make(torch.nn), way(make)
    plain(x)
    found = ours(gt.to(x))
    plain.load_state_dict(ours.state_dict())
    torch.testing.assert_close(found.detach().cpu(), plain(x).detach())
    assert all(type(value).__name__ == "Tensor" for value in (*ours.parameters(), *ours.buffers()))
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in ours.parameters())
    found.sum().backward()
    assert all(isinstance(parameter.grad, gt.Tensor) for parameter in ours.parameters())


def test_lazy_parameters_before_their_first_input():
    layer, plain = gt.nn.LazyLinear(4), torch.nn.Linear(3, 4)
    assert isinstance(layer.weight, gt.Tensor)
    assert isinstance(layer.weight, torch.nn.UninitializedParameter)
    with pytest.raises(ValueError, match="uninitialized parameter"):
        layer.weight + 1
    layer.load_state_dict(plain.state_dict())
    assert torch.equal(layer(gt.ones(2, 3)).detach().cpu(), plain(torch.ones(2, 3)).detach())
    assert not isinstance(torch.nn.LazyLinear(4).weight, gt.Tensor)


def test_to_refuses_other_objects():
    with pytest.raises(TypeError, match="not str"):
        gt.to("a string")


def test_tensors_without_values_name_the_remedy():
    meta, module = torch.ones(2, device="meta"), torch.nn.Linear(2, 2, device="meta")
    for attempt in (lambda: gt.to(meta), lambda: gt.to(module), lambda: gt.ones(2) + meta):
        with pytest.raises(NotImplementedError, match=r"'meta' has no values .* gt\.empty\(.*module\.to_empty"):
            attempt()
    assert module.weight.is_meta
    assert gt.empty(meta.shape, dtype=meta.dtype).shape == meta.shape
    gt.to(module.to_empty(device="cpu")).load_state_dict(torch.nn.Linear(2, 2).state_dict())
    assert isinstance(module.weight, gt.Tensor)


def test_to_refuses_tensors_of_an_ended_session():
    tensor, module = gt.ones(2), gt.nn.Linear(2, 2)
    gt.shutdown()
    for value in (tensor, module):
        with pytest.raises(gt.SessionError, match=r"GT was shut down.*gt\.init"):
            gt.to(value)


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
