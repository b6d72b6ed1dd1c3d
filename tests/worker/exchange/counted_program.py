"""A program that moves tensors among two and among four workers in each way, and prints the bytes that GT counts and
those that the kernel counts at the loopback interface. It runs in a network namespace of its own."""

import json
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

import gt

SIZE = 1 << 18  # elements: 1 MB
MOVES = {
    "all-reduce": ("- + x", "-", torch.float32, (SIZE + 1,)),
    "all-reduce of short floats": ("- + x", "-", torch.bfloat16, (SIZE + 1,)),
    "all-reduce of maxima": ("- + x:max", "-", torch.float32, (SIZE,)),
    "all-gather": ("x", "-", torch.float32, (SIZE,)),
    "reduce-scatter": ("- + x", "x", torch.float32, (SIZE,)),
    "all-to-all": ("x, -", "-, x", torch.float32, (SIZE // 256, 1024)),
    "uneven all-gather": ("x", "-", torch.float32, (SIZE + 1,)),
}


def loopback_bytes():
    lines = Path("/proc/net/dev").read_text().splitlines()
    (counts,) = [line.partition(":")[2].split() for line in lines if line.strip().startswith("lo:")]
    return int(counts[0])


def count(act):
    """The bytes that GT and the kernel count while `act` runs, and the ways that GT says they went. `act` has run
    once, so that workers are connected."""
    act()
    gt.synchronize()
    before = loopback_bytes()
    with gt.debug.comm() as counted:
        act()
        gt.synchronize()
    return counted.bytes, loopback_bytes() - before, sorted({event.way for event in counted.events})


def train(mesh):
    """One data-parallel step: gradients are reduced in buckets."""
    inputs = gt.distribute(torch.randn(16, 512), mesh, "x, -")
    weights = [gt.distribute(torch.randn(512, 512) / 20, mesh, "-, -").requires_grad_() for _ in range(3)]
    optimizer = torch.optim.SGD(weights, lr=0.1)

    def step():
        optimizer.zero_grad()
        hidden = inputs
        for weight in weights:
            hidden = functional.relu(hidden @ weight)
        hidden.square().mean().backward()
        optimizer.step()

    return step


def count_all(workers):
    mesh, first, last = (gt.mesh(len(each), ("x",), workers=each) for each in (range(workers), [0], [workers - 1]))
    counts = {}
    for name, (source, target, dtype, shape) in MOVES.items():
        tensor = gt.distribute(torch.ones(shape, dtype=dtype), mesh, source)
        counts[name] = count(partial(tensor.redistribute, mesh, target))
    whole = gt.distribute(torch.ones(SIZE), first, "-")
    counts["send"] = count(partial(whole.redistribute, last, "-"))
    counts["broadcast"] = count(partial(whole.redistribute, mesh, "-"))
    counts["training step"] = count(train(mesh))
    return counts


def main():
    gt.init(workers=4)
    counts = {f"{name}, {workers} workers": each for workers in (2, 4) for name, each in count_all(workers).items()}
    gt.shutdown()
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
