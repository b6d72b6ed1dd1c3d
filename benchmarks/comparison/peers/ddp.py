"""Torch's DistributedDataParallel on Gloo."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparison import sizes
from benchmarks.comparison.peers import torch_models as models
from benchmarks.comparison.peers.command import Case, Cases, Request, sample
from benchmarks.comparison.peers.process_group import agree, largest, run_group
from benchmarks.comparison.peers.process_memory import PeakMemory
from benchmarks.comparison.sizes import GPT, Transformer

CHANGING_STEPS = 40


def own_part(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def mlp(request: Request) -> Cases:
    x, y = models.mlp_batch()
    model = DistributedDataParallel(models.mlp())
    step = models.trainer(model, models.sgd(model), (own_part(x), own_part(y)))
    return {"step": Case(sample(step, request.budget, agree=agree))}


def trainer(model: torch.nn.Module, size: Transformer) -> models.Step:
    x, y = models.gpt_batch(size)
    return models.trainer(model, models.adamw(model), (own_part(x), own_part(y)))


def gpt_step(size: Transformer, request: Request) -> Case:
    trainer(DistributedDataParallel(models.GPT(sizes.TINY_GPT)), sizes.TINY_GPT)()
    peak = PeakMemory([os.getpid()])
    model = DistributedDataParallel(models.GPT(size))
    step = trainer(model, size)
    samples = sample(step, request.budget, agree=agree)
    return Case(samples, {"peak MB": largest(peak.largest()) / 1e6} | exchanges(model))


def exchanges(model: DistributedDataParallel) -> dict[str, float]:
    """As DDP logs them: its buckets of gradients, each reduced once in a step."""
    logged = model._get_ddp_logging_data()
    text = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
    buckets = [int(size) for size in text.split(",")]
    return {"MB a step": sum(buckets) / 1e6, "exchanges": len(buckets)}


def gpt(request: Request) -> Cases:
    return {"step": gpt_step(GPT, request)}


def growth(request: Request) -> Cases:
    return {name: Case(gpt_step(size, request).samples) for name, size in sizes.GROWTH.items()}


def changing_batch(request: Request) -> Cases:
    model = DistributedDataParallel(models.GPT(GPT))
    step = models.changing_trainer(model, models.adamw(model), own_part)
    agreed = lambda count: agree(min(count, CHANGING_STEPS))
    return {"step": Case(sample(step, request.budget, agree=agreed))}


MEASURES = {"W3": mlp, "W4": gpt, "W4-growth": growth, "W8": changing_batch}

if __name__ == "__main__":
    run_group(MEASURES)
