"""GT: embedded in the program (no workers of its own), and on worker processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

import gt
from benchmarks.comparison import sizes
from benchmarks.comparison.peers import torch_models as models
from benchmarks.comparison.peers.command import Case, Cases, Request, cores, run_peer, sample, sample_programs
from benchmarks.comparison.peers.process_memory import PeakMemory
from benchmarks.comparison.sizes import GPT, Transformer
from benchmarks.echo import echoing
from gt.client import active_session
from gt.client.compilation.compiled_function import CompiledFunction

PLANS = Path(__file__).parent / "plans"
COMPILED, INDUCTOR = "compiled", "inductor"  # ends of a way
COMPILATION_SECONDS = 200  # a limit
STEPS_BETWEEN = 20  # code is compiled for ops that have run some times
CHANGING_STEPS = 40
RECORDED_CALLS = 8  # after which a function of gt.compile is skipped up to its first regular check
# The payload bytes of a collective over p workers, as a multiple of the whole tensor: see docs/strategies.md.
RECEIVED: dict[str, Callable[[int], float]] = {
    "broadcast": lambda p: p - 1,
    "all-gather": lambda p: p - 1,
    "reduce-scatter": lambda p: p - 1,
    "all-reduce": lambda p: 2 * (p - 1),
    "scatter": lambda p: (p - 1) / p,
    "all-to-all": lambda p: (p - 1) / p,
}


def begin(request: Request) -> None:
    if request.way.endswith(INDUCTOR):
        os.environ |= {"GT_AUTO_COMPILE": "1", "GT_COMPILE_NICE": "0"}
    if not request.workers:
        torch.set_num_threads(cores())
        gt.init(mode="embedded")
        return
    gt.init(workers=request.workers)
    if plan := request.way.removesuffix(COMPILED).removesuffix(INDUCTOR).strip():
        gt.load_config(PLANS / f"{plan}.yaml")
    gt.synchronize()


def is_compiled(request: Request) -> bool:
    """Whether the step is a function of gt.compile."""
    return request.way.endswith((COMPILED, INDUCTOR))


def warm(step: models.Step, request: Request) -> models.Step:
    """The step, after the workers have compiled their code, if they do."""
    if not request.way.endswith(INDUCTOR):
        return step
    end = time.monotonic() + COMPILATION_SECONDS
    for _ in range(STEPS_BETWEEN):
        step()
    while any(stats.compiling for stats in gt.debug.get_worker_stats().values()):
        if time.monotonic() > end:
            raise TimeoutError(f"the code was not compiled after {COMPILATION_SECONDS} s")
        step()
        time.sleep(0.5)  # compilation takes the cores
    for _ in range(STEPS_BETWEEN):  # the first results of code are compared
        step()
    return step


def check_skipped(function: Callable[..., object]) -> None:
    """Raise if a function of gt.compile has run its code in every call: its times would be those of another row."""
    if isinstance(function, CompiledFunction) and not function.skipped:
        raise RuntimeError(f"{function}: {'; '.join(function.reasons)}")


def cut(x: torch.Tensor, request: Request) -> torch.Tensor:
    """A tensor whose rows are cut over the workers."""
    if request.workers < 2:
        return gt.to(x)
    return gt.distribute(x, gt.mesh(request.workers), [gt.Shard(0)])


def chain(request: Request) -> Cases:
    begin(request)
    x, parts = cut(torch.rand(sizes.CHAIN_SIZE, sizes.CHAIN_SIZE), request), 2 * sizes.CHAIN_LINKS
    cases = {}
    with torch.no_grad():
        for name, operands in models.chain_operands().items():
            factor, addend = (cut(y, request) if isinstance(y, torch.Tensor) else y for y in operands)
            run = gt.compile(models.chain) if is_compiled(request) else models.chain
            step = lambda: run(x, factor, addend)[0, 0].item()
            cases[name] = Case(sample(warm(step, request), request.budget, parts=parts))
            check_skipped(run)
    return cases


def product(request: Request) -> Cases:
    begin(request)
    a = cut(torch.rand(sizes.PRODUCT_ROWS, sizes.PRODUCT_INNER), request)
    b = torch.rand(sizes.PRODUCT_INNER, sizes.PRODUCT_COLUMNS)
    whole = gt.distribute(b, gt.mesh(request.workers), [gt.Replicate()]) if request.workers > 1 else gt.to(b)
    return {"product": Case(sample(lambda: (a @ whole)[0, 0].item(), request.budget))}


def mlp(request: Request) -> Cases:
    begin(request)
    model = gt.to(models.mlp())
    x, y = (gt.to(each) for each in models.mlp_batch())
    return {"step": Case(sample(step_of(model, models.sgd(model), (x, y), request), request.budget))}


def step_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: models.Batch, request: Request
) -> models.Step:
    if not is_compiled(request):
        return models.trainer(model, optimizer, batch)
    train = gt.compile(models.train_step)
    step = lambda: train(model, optimizer, batch).item()
    for _ in range(RECORDED_CALLS):
        step()
    check_skipped(train)
    return warm(step, request)


def trainer(size: Transformer, request: Request) -> models.Step:
    model = gt.to(models.GPT(size))
    x, y = (gt.to(each) for each in models.gpt_batch(size))
    return step_of(model, models.adamw(model), (x, y), request)


def gpt_step(size: Transformer, request: Request) -> Case:
    trainer(sizes.TINY_GPT, request)()
    peak = PeakMemory(worker_pids())
    step = trainer(size, request)
    samples = sample(step, request.budget)
    extras = {"peak MB": peak.largest() / 1e6}
    return Case(samples, extras | (exchanges(step, request.workers) if request.workers else {}))


def worker_pids() -> list[int]:
    """The processes of the workers, not those that start them or compile for them."""
    return [worker.pid for worker in active_session.current().workers]


def exchanges(step: models.Step, workers: int) -> dict[str, float]:
    with gt.debug.comm() as comm:
        step()
    whole = [event.bytes / RECEIVED.get(event.kind, lambda _: 1)(workers) for event in comm.events]
    return {"MB a step": sum(whole) / 1e6, "exchanges": len(whole)}


def gpt(request: Request) -> Cases:
    begin(request)
    return {"step": gpt_step(GPT, request)}


def growth(request: Request) -> Cases:
    begin(request)
    return {name: Case(gpt_step(size, request).samples) for name, size in sizes.GROWTH.items()}


def transfer(request: Request) -> Cases:
    begin(request)
    x = torch.ones(sizes.QUICK_TRANSFER_FLOATS if request.quick else sizes.TRANSFER_FLOATS)

    def upload() -> torch.Tensor:
        ours = cut(x, request)
        gt.synchronize()
        return ours

    ours = upload()
    return {"in": Case(sample(upload, request.budget)), "out": Case(sample(ours.cpu, request.budget))}


def start(request: Request) -> Cases:
    program = "import gt; print((gt.ones(2) + 1).sum().item(), flush=True)"
    environment = {"GT_WORKERS": str(request.workers)} if request.workers else {}
    return {"start": Case(sample_programs(program, 1 if request.quick else 2, environment))}


def read(request: Request) -> Cases:
    begin(request)
    x = cut(torch.ones(sizes.CHAIN_SIZE), request)
    step = lambda: [x.sum().item() for _ in range(50)]
    case = Case(sample(step, request.budget, parts=50))
    if request.workers:
        with echoing(request.workers) as echo:
            echoes = sample(lambda: [echo() for _ in range(50)], request.budget / 2, parts=50)
        case.extras["bare echo, us"] = sorted(echoes)[len(echoes) // 2] * 1e6
    return {"read": case}


def changing_batch(request: Request) -> Cases:
    begin(request)
    model = gt.to(models.GPT(GPT))
    step = models.changing_trainer(model, models.adamw(model), gt.to)
    return {"step": Case(sample(step, request.budget, agree=lambda count: min(count, CHANGING_STEPS)))}


def memory(request: Request) -> Cases:
    """Of the workers; the program's own process, which makes the model, is not counted."""
    begin(request)
    size = sizes.QUICK_MEMORY_GPT if request.quick else sizes.MEMORY_GPT
    trainer(sizes.TINY_GPT, request)()
    peak = PeakMemory(worker_pids())
    step = trainer(size, request)
    for _ in range(3):
        step()
    return {"peak": Case([peak.largest()])}


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
    "W10": memory,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    run_peer(MEASURES, {"gt": gt.__version__, "torch": torch.__version__})
    gt.shutdown()
