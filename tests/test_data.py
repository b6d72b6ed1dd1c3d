"""`gt.data.loader`: batches on GT, ahead of their use."""

import dataclasses
from collections import UserList, deque, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding

import gt

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Labelled:
    x: torch.Tensor
    label: str = "one"


@pytest.fixture(autouse=True)
def workers(four_workers, no_signals):
    pass


def counted(batches):
    """Batches, and the number of those that were drawn."""
    drawn = []

    def draw():
        for batch in batches:
            drawn.append(batch)
            yield batch

    return draw(), drawn


def test_a_dataloader_gives_its_batches_on_gt():
    data = torch.arange(20.0).reshape(10, 2)
    batches = DataLoader(TensorDataset(data, data[:, 0]), batch_size=4)
    found = list(gt.data.loader(batches))
    assert all(isinstance(tensor, gt.Tensor) for batch in found for tensor in batch)
    assert torch.equal(torch.cat([x.cpu() for x, _ in found]), data)
    assert torch.equal(torch.cat([y.cpu() for _, y in found]), data[:, 0])


def test_a_loader_has_the_length_and_the_attributes_of_its_dataloader():
    batches = DataLoader(TensorDataset(torch.ones(10, 2)), batch_size=4)
    ours = gt.data.loader(batches)
    assert len(ours) == 3 and ours.batch_size == 4 and ours.dataset is batches.dataset
    with pytest.raises(AttributeError, match="no_such"):
        _ = ours.no_such


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_are_drawn_ahead(ahead):
    batches, drawn = counted([torch.full((2,), float(number)) for number in range(6)])
    for number, batch in enumerate(gt.data.loader(batches, ahead=ahead)):
        assert batch.tolist() == [number] * 2
        assert len(drawn) == min(number + ahead + 1, 6)


def test_every_epoch_is_a_new_iteration():
    batches = [torch.ones(2), torch.zeros(2)]
    ours = gt.data.loader(batches)
    assert [[batch.tolist() for batch in ours] for _ in range(2)] == [[[1, 1], [0, 0]]] * 2


def test_batches_go_straight_to_their_shards():
    mesh = gt.mesh((4,), ("dp",))
    ours = gt.data.loader([torch.arange(8.0)], mesh=mesh, placements=[gt.Shard(0)])
    with gt.debug.comm() as c:
        (batch,) = ours
        assert str(batch.spec) == "dp" and batch.tolist() == list(range(8))
    assert c.bytes == 0


def test_a_signal_says_how_batches_lie(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("batch: {shard: {mesh: {dp: 4}, dims: [dp]}}\n")
    gt.load_config(path)
    (named,) = gt.data.loader([torch.ones(8, 2)], signal="batch")
    with gt.signal.context("batch"):
        (around,) = gt.data.loader([torch.ones(8, 2)])
    assert str(named.spec) == str(around.spec) == "dp, -"


CONTAINERS = {
    "dict": {"x": torch.ones(2), "name": "a"},
    "nested": [torch.ones(2), (torch.ones(2), 3), {"y": [torch.ones(2)]}],
    "named tuple": Pair(torch.ones(2), None),
    "encoding": BatchEncoding({"x": torch.ones(2), "y": torch.zeros(2)}),
}


@pytest.mark.parametrize("batch", CONTAINERS.values(), ids=CONTAINERS)
def test_containers_keep_their_types_and_other_values(batch):
    (found,) = gt.data.loader([batch])
    assert type(found) is type(batch) and describe(found) == describe(batch)
    assert not any(isinstance(leaf, gt.Tensor) for leaf in leaves(batch)), "the batch itself was changed"
    assert all(isinstance(leaf, gt.Tensor) for leaf in leaves(found))


def describe(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if hasattr(value, "items"):
        return {key: describe(item) for key, item in value.items()}
    return [*map(describe, value)] if isinstance(value, list | tuple) else value


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "items"):
        value = list(value.values())
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list | tuple) else []


def test_an_error_of_the_dataset_comes_when_its_batch_is_due():
    def batches():
        yield torch.ones(1)
        yield torch.zeros(1)
        raise LookupError("no such file")

    ours = iter(gt.data.loader(batches(), ahead=3))
    assert [next(ours).item(), next(ours).item()] == [1, 0]
    with pytest.raises(LookupError, match="no such file"):
        next(ours)


def test_batches_that_are_not_used_are_freed():
    ours = iter(gt.data.loader([torch.ones(1000) for _ in range(5)], ahead=3))
    next(ours)
    del ours
    gt.synchronize()
    assert sum(stats.bytes for stats in gt.debug.get_worker_stats().values()) < 4000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placements": [gt.Shard(0)]}, "needs both mesh= and placements="),
        ({"mesh": "any", "placements": "dp", "signal": "batch"}, "from signal= or from mesh="),
        ({"ahead": -1}, "0 or more"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises((gt.LayoutError, ValueError), match=message):
        gt.data.loader([], **options)


def test_tensors_in_dataclasses_are_moved():
    batch = Labelled(torch.ones(2))
    (found,) = gt.data.loader([batch])
    assert isinstance(found, Labelled) and isinstance(found.x, gt.Tensor) and found.label == "one"
    assert not isinstance(batch.x, gt.Tensor)


@pytest.mark.parametrize("wrap", [deque, UserList, lambda items: MappingProxyType({0: items[0]})])
def test_tensors_in_other_containers_are_moved(wrap):
    (found,) = gt.data.loader([wrap([torch.ones(2)])])
    assert isinstance(found[0], gt.Tensor)


def test_arrays_are_moved_unless_torch_has_no_such_dtype():
    read_only, texts = np.ones(2, dtype=np.float32), np.array(["one"])
    read_only.flags.writeable = False
    found, same = gt.data.loader([read_only, texts])
    assert isinstance(found, gt.Tensor) and found.tolist() == [1, 1] and same is texts
