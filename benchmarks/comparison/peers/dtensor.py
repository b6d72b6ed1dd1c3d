"""Torch's DTensor on Gloo: tensors cut by their rows, and tensor-parallel modules."""

from __future__ import annotations

import os

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.comparison import sizes
from benchmarks.comparison.peers import torch_models as models
from benchmarks.comparison.peers.command import Case, Cases, Request, sample
from benchmarks.comparison.peers.process_group import Exchanges, agree, largest, run_group
from benchmarks.comparison.peers.process_memory import PeakMemory
from benchmarks.comparison.sizes import GPT, Transformer


def first(x: torch.Tensor) -> float:
    """One value of a tensor that is cut, for which all processes wait."""
    assert isinstance(x, DTensor)
    return x.full_tensor().flatten()[0].item()


def mesh_of(request: Request) -> DeviceMesh:
    return init_device_mesh("cpu", (request.workers,))


def chain(request: Request) -> Cases:
    mesh, parts = mesh_of(request), 2 * sizes.CHAIN_LINKS
    x = distribute_tensor(torch.rand(sizes.CHAIN_SIZE, sizes.CHAIN_SIZE), mesh, [Shard(0)])
    cases = {}
    with torch.no_grad():
        for name, operands in models.chain_operands().items():
            factor, addend = (
                distribute_tensor(y, mesh, [Shard(0)]) if isinstance(y, torch.Tensor) else y for y in operands
            )
            step = lambda: first(models.chain(x, factor, addend))
            cases[name] = Case(sample(step, request.budget, parts=parts, agree=agree))
    return cases


def product(request: Request) -> Cases:
    """Ends with a sum of the product, since gathering it would take longer than the product itself."""
    mesh = mesh_of(request)
    a = distribute_tensor(torch.rand(sizes.PRODUCT_ROWS, sizes.PRODUCT_INNER), mesh, [Shard(0)])
    b = distribute_tensor(torch.rand(sizes.PRODUCT_INNER, sizes.PRODUCT_COLUMNS), mesh, [Replicate()])
    step = lambda: first((a @ b)[:, :1].sum())
    return {"product": Case(sample(step, request.budget, agree=agree))}


def trainer(size: Transformer, mesh: DeviceMesh) -> models.Step:
    model = tensor_parallel(models.GPT(size), mesh)
    batch, optimizer = models.gpt_batch(size), models.adamw(model)

    def step() -> float:
        with loss_parallel():
            loss = models.train_step(model, optimizer, batch)
        return first(loss)

    return step


def gpt(request: Request) -> Cases:
    mesh = mesh_of(request)
    trainer(sizes.TINY_GPT, mesh)()
    peak = PeakMemory([os.getpid()])
    step = trainer(GPT, mesh)
    samples = sample(step, request.budget, agree=agree)
    extras = {"peak MB": largest(peak.largest()) / 1e6}
    with Exchanges() as exchanges:
        step()
    return {"step": Case(samples, extras | exchanges.figures())}


def tensor_parallel(model: models.GPT, mesh: DeviceMesh) -> torch.nn.Module:
    """Megatron's plan, as for GT: see plans/tensor_parallel.yaml. The input of attention becomes a DTensor once, so
    that its gradient is reduced once and not for each of query, key and value."""
    plan = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    whole = Replicate()
    layer_plan = plan | {
        "attention": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
        "attention.out": RowwiseParallel(),
        "widen": ColwiseParallel(),
        "narrow": RowwiseParallel(),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, layer_plan)
    return parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})


def transfer(request: Request) -> Cases:
    mesh = mesh_of(request)
    x = torch.ones(sizes.QUICK_TRANSFER_FLOATS if request.quick else sizes.TRANSFER_FLOATS)
    cut = distribute_tensor(x, mesh, [Shard(0)])
    return {
        "in": Case(sample(lambda: distribute_tensor(x, mesh, [Shard(0)]), request.budget, agree=agree)),
        "out": Case(sample(cut.full_tensor, request.budget, agree=agree)),
    }


def read(request: Request) -> Cases:
    x = distribute_tensor(torch.ones(sizes.CHAIN_SIZE), mesh_of(request), [Shard(0)])
    step = lambda: [first(x.sum()) for _ in range(20)]
    return {"read": Case(sample(step, request.budget, parts=20, agree=agree))}


MEASURES = {"W1": chain, "W2": product, "W4": gpt, "W5": transfer, "W7": read}

if __name__ == "__main__":
    run_group(MEASURES)
