"""Torch's fully_shard (FSDP2) on Gloo: each layer is a unit, and so is the rest of the model."""

from __future__ import annotations

import os

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.comparison import sizes
from benchmarks.comparison.peers import torch_models as models
from benchmarks.comparison.peers.command import Case, Cases, Request, sample
from benchmarks.comparison.peers.ddp import own_part
from benchmarks.comparison.peers.process_group import Exchanges, agree, largest, run_group
from benchmarks.comparison.peers.process_memory import PeakMemory
from benchmarks.comparison.sizes import GPT, Transformer


def sharded(size: Transformer, workers: int) -> torch.nn.Module:
    """Each process makes its part only, as FSDP2's guide says: on the meta device, then empty, then filled."""
    mesh = init_device_mesh("cpu", (workers,))
    with torch.device("meta"):
        model = models.GPT(size)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def trainer(size: Transformer, request: Request) -> models.Step:
    x, y = models.gpt_batch(size)
    model = sharded(size, request.workers)
    return models.trainer(model, models.adamw(model), (own_part(x), own_part(y)))


def gpt(request: Request) -> Cases:
    trainer(sizes.TINY_GPT, request)()
    peak = PeakMemory([os.getpid()])
    step = trainer(GPT, request)
    samples = sample(step, request.budget, agree=agree)
    extras = {"peak MB": largest(peak.largest()) / 1e6}
    with Exchanges() as exchanges:
        step()
    return {"step": Case(samples, extras | exchanges.figures())}


def memory(request: Request) -> Cases:
    size = sizes.QUICK_MEMORY_GPT if request.quick else sizes.MEMORY_GPT
    trainer(sizes.TINY_GPT, request)()
    peak = PeakMemory([os.getpid()])
    step = trainer(size, request)
    for _ in range(3):
        step()
    return {"peak": Case([largest(peak.largest())])}


MEASURES = {"W4": gpt, "W10": memory}

if __name__ == "__main__":
    run_group(MEASURES)
