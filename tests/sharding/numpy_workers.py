"""Workers in NumPy: they carry out a plan message by message, and compare it with the promised layouts and bytes."""

import math
from collections import Counter

import numpy as np

from gt.sharding.boxes import balanced_cuts, box_elements
from gt.sharding.cost import lower_bound, reshard_bytes
from gt.sharding.hop_traffic import received
from gt.sharding.reshard import contributions, exchange_group, plan_reshard, pulls, pushes
from gt.sharding.spec import DeviceMesh, compute_local_shape, local_box

REDUCE = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
IDENTITY = {"sum": 0, "prod": 1, "max": np.iinfo(np.int64).min, "min": np.iinfo(np.int64).max, "and": -1, "or": 0}
ITEMSIZE = 8


def slices(box, inside):
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(box, inside, strict=True))


def draw_parts(spec, shape, seed=0):
    """What the workers hold, and the value that it stands for."""
    random = np.random.default_rng(seed)
    count = math.prod(spec.mesh.axis_size(axis) for axis in spec.partial)
    addends = random.integers(-4, 5, (count, *shape))
    first = {spec.mesh.axis_group(worker, spec.partial) for worker in spec.mesh.workers}
    parts = {
        worker: addends[number][slices(local_box(spec, shape, worker), [(0, 0)] * len(shape))].copy()
        for axis_group in first
        for number, worker in enumerate(axis_group)
    }
    return parts, REDUCE[spec.kind].reduce(addends, axis=0)


class Network:
    """Messages between workers, and the elements that each pair of them exchanged."""

    def __init__(self):
        self.messages = {}
        self.elements = Counter()

    def send(self, source, target, data):
        assert source != target and (source, target) not in self.messages
        self.messages[source, target] = data.copy()
        self.elements[source, target] += data.size

    def receive(self, source, target):
        return self.messages.pop((source, target))


def run(plan, shape, parts):
    network = Network()
    for step in plan.steps:
        act = all_reduce if step.kind == "all-reduce" else exchange
        parts = act(step, shape, parts, network)
        assert not network.messages
    return parts, network.elements


def exchange(step, shape, parts, network):
    for worker in step.source.mesh.workers:
        for peer, box in pushes(step, shape, worker):
            assert box_elements(box) > 0
            network.send(worker, peer, parts[worker][slices(box, local_box(step.source, shape, worker))])
    return {worker: assemble(step, shape, worker, parts, network) for worker in step.target.mesh.workers}


def assemble(step, shape, worker, parts, network):
    whole_box = local_box(step.target, shape, worker)
    reduces = step.kind in ("reduce", "reduce-scatter")
    filling = IDENTITY[step.target.kind] if step.kind == "to-partial" else -99  # an element that nothing was put in
    part = np.full(compute_local_shape(step.target, shape, worker), filling)
    for number, addend in enumerate(contributions(step, shape, worker) if reduces else [pulls(step, shape, worker)]):
        for peer, box in addend:
            own = peer == worker
            data = (
                parts[peer][slices(box, local_box(step.source, shape, peer))] if own else network.receive(peer, worker)
            )
            position = slices(box, whole_box)
            part[position] = REDUCE[step.source.kind](part[position], data) if number else data
    return part


def all_reduce(step, shape, parts, network):
    flat = {worker: part.ravel() for worker, part in parts.items()}
    groups = {worker: exchange_group(step, worker) for worker in parts}
    plans = {worker: (group, balanced_cuts(len(flat[worker]), (len(group),))) for worker, group in groups.items()}
    for worker, (peers, cuts) in plans.items():
        for peer, (start, stop) in zip(peers, cuts, strict=True):
            if peer != worker:
                network.send(worker, peer, flat[worker][start:stop])
    reduced = {}
    for worker, (peers, cuts) in plans.items():
        start, stop = cuts[peers.index(worker)]
        addends = [flat[worker][start:stop] if peer == worker else network.receive(peer, worker) for peer in peers]
        reduced[worker] = REDUCE[step.source.kind].reduce(addends, axis=0)
    for worker, (peers, _) in plans.items():
        for peer in peers:
            if peer != worker:
                network.send(worker, peer, reduced[worker])
    return {
        worker: np.concatenate(
            [reduced[worker] if peer == worker else network.receive(peer, worker) for peer in peers]
        ).reshape(parts[worker].shape)
        for worker, (peers, _) in plans.items()
    }


def check_holds(spec, shape, parts, value):
    """The partial values of each group make up the value, and replicas are equal."""
    seen = {}
    for worker in spec.mesh.workers:
        box = local_box(spec, shape, worker)
        assert parts[worker].shape == compute_local_shape(spec, shape, worker)
        group = [parts[peer] for peer in spec.mesh.axis_group(worker, spec.partial)]
        assert np.array_equal(REDUCE[spec.kind].reduce(group), value[slices(box, [(0, 0)] * len(shape))])
        addend = spec.mesh.axis_group(worker, spec.partial).index(worker)
        assert np.array_equal(seen.setdefault((box, addend), parts[worker]), parts[worker])


def check(shape, source, target, seed=0):
    """Carry out a plan; the plan."""
    plan = plan_reshard(shape, ITEMSIZE, source, target)
    parts, value = draw_parts(source, shape, seed)
    parts, elements = run(plan, shape, parts)
    check_holds(target, shape, parts, value)
    assert ITEMSIZE * elements.total() == plan.bytes == reshard_bytes(shape, ITEMSIZE, source, target)
    arrived = Counter()
    for (_, worker), count in elements.items():
        arrived[worker] += count
    promised = Counter()
    for step in plan.steps:
        promised.update(
            dict(zip(step.target.mesh.workers, received(shape, step.source, step.target).tolist(), strict=True))
        )
    assert arrived == promised
    bound = lower_bound(shape, ITEMSIZE, source, target)
    assert plan.bytes >= bound
    if not source.partial and not target.partial:
        assert plan.bytes == bound and len(plan.steps) <= 1
    return plan


def mesh_of(*shape, workers=()):
    return DeviceMesh(shape, "xyz"[: len(shape)], workers)
