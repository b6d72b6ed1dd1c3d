"""Plain torch with all cores, eager and compiled: what the other peers are compared with."""

from __future__ import annotations

import os

import torch

from benchmarks.comparison import sizes
from benchmarks.comparison.peers import torch_models as models
from benchmarks.comparison.peers.command import Case, Cases, Request, cores, run_peer, sample, sample_programs
from benchmarks.comparison.peers.process_memory import PeakMemory
from benchmarks.comparison.sizes import GPT, Transformer

CHANGING_STEPS = 40


def chain(request: Request) -> Cases:
    x, parts = torch.rand(sizes.CHAIN_SIZE, sizes.CHAIN_SIZE), 2 * sizes.CHAIN_LINKS
    cases = {}
    with torch.no_grad():
        for name, (factor, addend) in models.chain_operands().items():
            run = _compiled_chain if request.way == "compiled" else models.chain
            step = lambda: run(x, factor, addend)[0, 0].item()
            cases[name] = Case(sample(step, request.budget, parts=parts))
    return cases


@torch.compile
def _link(x: torch.Tensor, factor: torch.Tensor | float, addend: torch.Tensor | float) -> torch.Tensor:
    return x * factor + addend


def _compiled_chain(x: torch.Tensor, factor: torch.Tensor | float, addend: torch.Tensor | float) -> torch.Tensor:
    for _ in range(sizes.CHAIN_LINKS):
        x = _link(x, factor, addend)
    return x


def product(request: Request) -> Cases:
    a = torch.rand(sizes.PRODUCT_ROWS, sizes.PRODUCT_INNER)
    b = torch.rand(sizes.PRODUCT_INNER, sizes.PRODUCT_COLUMNS)
    return {"product": Case(sample(lambda: (a @ b)[0, 0].item(), request.budget))}


def _trainable(model: torch.nn.Module, request: Request) -> torch.nn.Module:
    return torch.compile(model) if request.way == "compiled" else model


def mlp(request: Request) -> Cases:
    model = models.mlp()
    step = models.trainer(_trainable(model, request), models.sgd(model), models.mlp_batch())
    return {"step": Case(sample(step, request.budget))}


def load_modules() -> None:
    """A tiny step: torch imports some modules at the first, whose memory is not that of the model."""
    model = models.GPT(sizes.TINY_GPT)
    models.train_step(model, models.adamw(model), models.gpt_batch(sizes.TINY_GPT))


def gpt_step(size: Transformer, request: Request) -> Case:
    load_modules()
    peak = PeakMemory([os.getpid()])
    model = models.GPT(size)
    step = models.trainer(_trainable(model, request), models.adamw(model), models.gpt_batch(size))
    samples = sample(step, request.budget)
    return Case(samples, {"peak MB": peak.largest() / 1e6})


def gpt(request: Request) -> Cases:
    return {"step": gpt_step(GPT, request)}


def growth(request: Request) -> Cases:
    return {name: Case(gpt_step(size, request).samples) for name, size in sizes.GROWTH.items()}


def transfer(request: Request) -> Cases:
    """The bytes are in the program's memory already; what is left is a copy to memory that was used before."""
    floats = sizes.QUICK_TRANSFER_FLOATS if request.quick else sizes.TRANSFER_FLOATS
    source, target = torch.ones(floats), torch.empty(floats)
    return {name: Case(sample(lambda: target.copy_(source), request.budget)) for name in ("in", "out")}


def start(request: Request) -> Cases:
    program = "import torch; print((torch.ones(2) + 1).sum().item(), flush=True)"
    return {"start": Case(sample_programs(program, 1 if request.quick else 2))}


def read(request: Request) -> Cases:
    x = torch.ones(sizes.CHAIN_SIZE)
    step = lambda: [x.sum().item() for _ in range(50)]
    return {"read": Case(sample(step, request.budget, parts=50))}


def changing_batch(request: Request) -> Cases:
    model = models.GPT(GPT)
    step = models.changing_trainer(_trainable(model, request), models.adamw(model), lambda x: x)
    return {"step": Case(sample(step, request.budget, agree=lambda count: min(count, CHANGING_STEPS)))}


def ideal_memory(request: Request) -> Cases:
    """The state of AdamW's training cut in `workers` parts, and the activations of a part of the batch: the memory of a
    plain step beyond the whole state."""
    size = sizes.QUICK_MEMORY_GPT if request.quick else sizes.MEMORY_GPT
    inputs, targets = models.gpt_batch(size)
    count = size.batch // request.workers
    torch.set_num_threads(max(1, cores() // request.workers))
    load_modules()
    peak = PeakMemory([os.getpid()])
    model = models.GPT(size)
    step = models.trainer(model, models.adamw(model), (inputs[:count], targets[:count]))
    for _ in range(3):
        step()
    state = sizes.STATE_BYTES * size.parameters
    activations = max(0, peak.largest() - state)
    extras = {"state MB": state / request.workers / 1e6, "activations MB": activations / 1e6}
    return {"peak": Case([state / request.workers + activations], extras)}


MEASURES = {
    "W1": chain,
    "W2": product,
    "W3": mlp,
    "W4": gpt,
    "W4-growth": growth,
    "W5": transfer,
    "W6": start,
    "W7": read,
    "W8": changing_batch,
    "W10": ideal_memory,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(cores())
    run_peer(MEASURES, {"torch": torch.__version__})
