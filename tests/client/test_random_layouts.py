"""Random numbers do not depend on the layout of the tensors that they fill."""

import gc

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import gt
from tests.client.layout_cases import EVERYWHERE, mesh_of

ODDS = torch.linspace(0, 1, 35).reshape(7, 5)
RANDOM = {
    "rand": lambda **where: gt.rand(7, 5, **where),
    "randn": lambda **where: gt.randn(7, 5, **where),
    "randint": lambda **where: gt.randint(-50, 50, (7, 5), **where),
    "bernoulli": lambda **where: gt.bernoulli(ODDS, **where),
    "rand_like": lambda **where: gt.rand_like(ODDS, **where),
}
OF_A_TENSOR = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout of rows": lambda x: F.dropout1d(x, 0.4),
    "bernoulli": torch.bernoulli,
    "normal": lambda x: torch.normal(x, 2.0),
    "uniform_": lambda x: x.uniform_(-1, 1),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
}


def seeded(make, *args, **kwargs):
    gt.manual_seed(11)
    first = make(*args, **kwargs).cpu()
    return torch.stack([first, make(*args, **kwargs).cpu()])  # the second draw goes on where the first has ended


@pytest.fixture(scope="module")
def alone():
    """The numbers that one embedded worker makes."""
    gt.init()
    made = {name: seeded(make) for name, make in RANDOM.items()}
    made |= {f"{name} of a tensor": seeded(lambda: make(gt.to(ODDS))) for name, make in OF_A_TENSOR.items()}
    made["randperm"] = seeded(gt.randperm, 21)
    gt.shutdown()
    gc.collect()
    gc.freeze()  # what torch loaded for these ops need not be walked by the collection after each test: 0.1 s of it
    return made


@pytest.fixture(scope="module")
def eight_workers(alone, eight_workers):
    """After the session of one worker has ended."""


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_do_not_depend_on_the_layout(alone, eight_workers, name):
    assert torch.equal(seeded(RANDOM[name]), alone[name])
    assert not torch.equal(*alone[name])
    for grid, layout in EVERYWHERE:
        ours = seeded(RANDOM[name], mesh=mesh_of(grid), placements=layout)
        assert torch.equal(ours, alone[name]), f"{layout} on {mesh_of(grid)}"


@pytest.mark.parametrize("name", OF_A_TENSOR)
def test_random_functions_do_not_depend_on_the_layout(alone, eight_workers, name):
    expected = alone[f"{name} of a tensor"]
    assert torch.equal(seeded(lambda: OF_A_TENSOR[name](gt.to(ODDS))), expected)
    for grid, layout in EVERYWHERE:
        ours = seeded(lambda: OF_A_TENSOR[name](gt.distribute(ODDS, mesh_of(grid), layout)))
        assert torch.equal(ours, expected), f"{layout} on {mesh_of(grid)}"


@pytest.mark.parametrize(("grid", "layout"), [("1", "dp"), ("2", "dp"), ("3", "dp"), ("8", "dp"), ("2x4", "tp dp")])
def test_permutations_do_not_depend_on_the_layout(alone, eight_workers, grid, layout):
    for text in (layout, "-", "- + dp"):
        assert torch.equal(seeded(gt.randperm, 21, mesh=mesh_of(grid), placements=text), alone["randperm"])


def test_gradients_of_dropout_use_the_same_mask(alone, eight_workers):
    for grid, layout in EVERYWHERE:
        x = gt.distribute(torch.ones(7, 5), mesh_of(grid), layout).requires_grad_()
        y = F.dropout(x, 0.4)
        y.sum().backward()
        assert torch.equal(x.grad.cpu(), y.detach().cpu())
