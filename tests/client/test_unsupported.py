"""Unsupported tensors and ops raise errors with a remedy; similar supported ones work."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gt


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: dist.all_reduce(x),
        lambda x: dist.broadcast(x, 0),
        lambda x: dist.all_gather([x], x),
        lambda x: dist.scatter(x, [x], 0),
        lambda x: dist.all_to_all_single(x, x),
        lambda x: torch.nn.parallel.DistributedDataParallel(gt.to(torch.nn.Linear(3, 3))),
    ],
)
def test_collectives_name_the_remedy(embedded: None, process_group: None, collective: object) -> None:
    with pytest.raises(NotImplementedError, match="does not work on GT tensors.*DistributedDataParallel.*gt.shard"):
        collective(gt.ones(3))


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, sparse: x + sparse,
        lambda x, sparse: sparse @ x,
        lambda x, sparse: torch.sparse.mm(sparse, x),
        lambda x, sparse: gt.to(sparse),
    ],
)
def test_sparse_operands_name_the_remedy(embedded: None, mix: object) -> None:
    with pytest.raises(NotImplementedError, match=r"GT tensors do not mix with .*sparse_coo.*to_dense\(\)"):
        mix(gt.ones(3, 3), torch.eye(3).to_sparse())


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: torch.sparse_coo_tensor(gt.tensor([[0, 1, 2]]), x, (3, 3)),
        lambda x: torch.nn.functional.embedding(gt.tensor([1]), x.requires_grad_(), sparse=True).sum().backward(),
    ],
)
def test_sparse_results_name_the_remedy(embedded: None, make: object) -> None:
    with pytest.raises(NotImplementedError, match=r"GT holds strided tensors.*sparse=False.*tensor.cpu\(\)"):
        make(gt.ones(3, 3))


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, nested: x + nested,
        lambda x, nested: nested @ x,
        lambda x, nested: torch.nn.functional.linear(nested, x),
        lambda x, nested: gt.to(nested),
    ],
)
def test_nested_operands_name_the_remedy(embedded: None, mix: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)])
    with pytest.raises(NotImplementedError, match="GT tensors do not mix with nested tensors.*to_padded_tensor"):
        mix(gt.ones(3, 3), nested)


def test_nested_tensors_of_gt_tensors_name_the_remedy(embedded: None) -> None:
    with pytest.raises(NotImplementedError, match="GT holds strided tensors.*pad_sequence"):
        torch.nested.nested_tensor([gt.ones(2), gt.ones(3)])


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.asarray, torch.FloatTensor])
def test_lists_of_losses_are_read(anywhere: str, make: object) -> None:
    loss = gt.ones(2, requires_grad=True).sum()
    made = make([loss.detach(), loss.detach() * 2])
    assert made.tolist() == [2.0, 4.0]
    assert type(made) is torch.Tensor


def test_lists_of_integers_truths_and_complex_numbers_are_read(embedded: None) -> None:
    assert torch.tensor([gt.tensor(3), gt.tensor(4)]).tolist() == [3, 4]
    assert torch.tensor([gt.tensor(True), gt.tensor(False)]).tolist() == [True, False]
    assert torch.tensor([gt.tensor(1j)]).tolist() == [1j]
    with pytest.raises(ValueError, match="only one element tensors can be converted"):
        torch.tensor([gt.ones(2), gt.ones(2)])
    with pytest.raises(TypeError, match="only integer tensors of a single element can be converted to an index"):
        range(4)[gt.tensor(1.5)]
