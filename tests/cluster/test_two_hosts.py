"""Plans for workers on two hosts: what stays within them, and the bytes that travel between them."""

import pytest

from tests.cluster.clusters import cluster

pytestmark = pytest.mark.slow

COUNTED = """
import sys
import torch, gt
gt.connect("alpha:12345", min_workers=4)

def on_the_wire():
    for line in open("/proc/net/dev"):
        name, _, numbers = line.strip().partition(":")
        if name == "eth0":
            return int(numbers.split()[0]) + int(numbers.split()[8])

def count(work, repeats=3):
    work()
    gt.synchronize()
    before = on_the_wire()
    for _ in range(repeats):
        work()
    gt.synchronize()
    return (on_the_wire() - before) / repeats
"""


@pytest.fixture(scope="module")
def alternating(tmp_path_factory):
    """Two hosts with two workers each, which have joined in turns."""
    with cluster(tmp_path_factory.mktemp("two-hosts"), "alpha", "beta") as made:
        alpha, beta = made.hosts
        made.start_server()
        made.start_workers(alpha, beta, alpha, beta)
        yield made


ORDER = """
import gt
gt.connect("alpha:12345", min_workers=4)
host = {each.worker: each.host for each in gt.workers()}
mesh = gt.mesh((2, 2), ("dp", "tp"))
print([host[worker] for worker in range(4)], [host[worker] for worker in mesh.workers])
print(mesh.crosses_hosts("dp"), mesh.crosses_hosts("tp"), gt.randn(8, 2).spec.mesh.workers == mesh.workers)
print(gt.mesh((2, 2), ("dp", "tp"), workers=range(4)).workers)
"""


def test_the_last_axis_stays_within_a_host(alternating):
    assert alternating.run(alternating.hosts[0], ORDER).splitlines() == [
        "['alpha', 'beta', 'alpha', 'beta'] ['alpha', 'alpha', 'beta', 'beta']",
        "True False True",
        "(0, 1, 2, 3)",
    ]


TENSOR_PARALLEL = (
    COUNTED
    + """
def forward(mesh):
    x = gt.distribute(torch.randn(256, 512), mesh, "dp, -")
    up = gt.distribute(torch.randn(512, 1024), mesh, "-, tp")
    down = gt.distribute(torch.randn(1024, 512), mesh, "tp, -")
    return count(lambda: (x @ up).relu().matmul(down).redistribute(placements="dp, -"))

activations = 256 * 512 * 4
print(forward(gt.mesh((2, 2), ("dp", "tp"))) / activations)
print(forward(gt.mesh((2, 2), ("dp", "tp"), workers=range(4))) / activations)
"""
)


def test_tensor_parallel_along_the_last_axis_sends_nothing_between_hosts(alternating):
    within, across = map(float, alternating.run(alternating.hosts[1], TENSOR_PARALLEL).splitlines())
    assert within < 0.1  # commands and answers
    assert 1.9 < across < 2.5  # two halves of the batch, each sent to the other host and back


REDUCED = (
    COUNTED
    + """
value = torch.randn(1024, 512)
mesh = gt.mesh((2, 2), ("dp", "tp"))
for source in ("-, - + dp tp", "-, - + dp", "-, - + tp"):
    x = gt.distribute(value, mesh, source)
    torch.testing.assert_close(x.redistribute(placements="-, -").cpu(), value)
    print(count(lambda: x.redistribute(placements="-, -")) / (value.numel() * 4))
row = gt.distribute(value, gt.mesh(4, ("w",)), "-, - + w")
print(count(lambda: row.redistribute(placements="-, -")) / (value.numel() * 4))
row = gt.distribute(value, gt.mesh(4, ("w",), workers=range(4)), "-, - + w")
print(count(lambda: row.redistribute(placements="-, -")) / (value.numel() * 4))
"""
)


def test_a_reduction_sends_each_value_once_between_hosts_in_each_direction(alternating):
    """Multiples of the tensor that pass the cable, both directions together."""
    both, replicated, within, row, mixed = map(float, alternating.run(alternating.hosts[1], REDUCED).splitlines())
    assert 1.9 < both < 2.3 and 1.9 < replicated < 2.3  # workers of a host divide it
    assert within < 0.1
    assert 2.8 < row < 3.3  # a ring, with two of its four links between hosts
    assert 5.6 < mixed < 6.6  # a ring in the order in which workers have joined: all links are between hosts


TRAINED = """
import torch, gt
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 64))
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 64))
model.load_state_dict(plain.state_dict())
gt.connect("alpha:12345", min_workers=4)
mesh = gt.mesh((2, 2), ("dp", "tp"))
gt.to(model)
for parameter in model.parameters():
    parameter.data = gt.replicate(parameter.detach().cpu(), mesh)
optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]
for _ in range(3):
    x = torch.randn(16, 64)
    for net, batch, optimizer in zip((plain, model), (x, gt.distribute(x, mesh, "dp tp, -")), optimizers):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
for one, other in zip(plain.parameters(), model.parameters()):
    torch.testing.assert_close(other.detach().cpu(), one.detach(), rtol=1e-4, atol=1e-5)
print("right")
"""


def test_data_parallel_training_with_divided_reductions_equals_torch(alternating):
    assert alternating.run(alternating.hosts[0], TRAINED) == "right\n"


PLANNED = """
import sys
import torch, gt
gt.connect("alpha:12345", min_workers=4)
measured = gt.calibrate(sys.argv[1])
print(measured.link_bandwidth, measured.host_bandwidth, measured.message_seconds, measured.host_message_seconds)
print(measured.source)
model = gt.to(torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()

machine = gt.Calibration(flops=5e9, link_bandwidth=10e9, host_bandwidth=measured.host_bandwidth)
plan = gt.auto_shard(step, torch.randn(4096, 256), machine=machine)
print(plan.mesh.shape, plan.config.inputs, plan.config.spec_for("0.weight").dims, plan.config.spec_for("2.weight").dims)
print(plan.mesh.crosses_hosts("tp"))
print(plan, file=sys.stderr)
"""


def test_links_are_measured_and_a_slow_one_has_data_parallel_between_hosts(alternating, tmp_path):
    """The plan takes what is measured between hosts alone: other speeds depend on what else the machine does."""
    for host in alternating.hosts:
        host.limit_rate("100mbit")
    out = alternating.run(alternating.hosts[0], PLANNED, str(tmp_path / "speeds.json"), timeout=200).splitlines()
    within, between, _, _ = map(float, out[0].split())
    assert 0.5 * 12.5e6 < between < 2 * 12.5e6  # bytes a second
    assert within > 2 * between
    assert out[1] == "measured on 4 workers of 2 hosts (cpu)"
    assert out[2] == "(2, 2) (('dp',), '...') (('tp',), ()) ((), ('tp',))"
    assert out[3] == "False"
