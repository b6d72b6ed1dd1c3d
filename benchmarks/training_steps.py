"""Training steps on GT, beside plain torch with all cores, in one run: an MLP, data parallel, and a GPT, data parallel,
tensor parallel and fully sharded.

    python benchmarks/training_steps.py [--workers 2] [--repeats 7]
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gt

Step = Callable[[], object]


def mlp() -> tuple[torch.nn.Module, list[torch.Tensor]]:
    layers = [torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(1024, 10)), [
        torch.randn(512, 784),
        torch.randint(0, 10, (512,)),
    ]


def gpt() -> tuple[torch.nn.Module, list[torch.Tensor]]:
    config = GPT2Config(
        n_layer=4, n_head=4, n_embd=256, vocab_size=1000, n_positions=128, loss_type="ForCausalLM",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), [torch.randint(0, 1000, (8, 128))]


def mlp_step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def gpt_step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss


PLANS = Path(__file__).parent.parent / "examples" / "signals"
WHOLE = PLANS / "gpt2_data_parallel.yaml"
TENSOR = PLANS / "gpt2_tensor_parallel.yaml"
SHARDED = PLANS / "gpt2_fsdp.yaml"


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


CASES = [
    ("MLP, data parallel", mlp, mlp_step, sgd, WHOLE),
    ("GPT, data parallel", gpt, gpt_step, adamw, WHOLE),
    ("GPT, data parallel, fused AdamW", gpt, gpt_step, fused, WHOLE),
    ("GPT, tensor parallel", gpt, gpt_step, adamw, TENSOR),
    ("GPT, fully sharded", gpt, gpt_step, adamw, SHARDED),
]


def measure(step: Step, repeats: int) -> float:
    """The median time of a step, in ms."""
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def run_case(case: tuple[Any, ...], mode: str, workers: int, repeats: int) -> dict[str, float]:
    """One case on plain torch, then on GT."""
    _, make, step, make_optimizer, config = case
    torch.manual_seed(0)
    model, batch = make()
    plain, plain_optimizer = copy.deepcopy(model), None
    plain_optimizer = make_optimizer(plain.parameters())
    torch.set_num_threads(os.cpu_count() or 1)
    found = {"torch": measure(lambda: step(plain, plain_optimizer, *batch).item(), repeats)}
    if mode == "embedded":
        gt.init(mode="embedded")
    else:
        torch.set_num_threads(1)
        gt.init(workers=workers)
        gt.load_config(config)
    ours, ours_batch = gt.to(model), [gt.to(each) for each in batch]
    optimizer = make_optimizer(ours.parameters())
    found["GT"] = measure(lambda: step(ours, optimizer, *ours_batch).item(), repeats)
    with gt.debug.comm() as c:
        step(ours, optimizer, *ours_batch)
    found["MB"] = c.bytes / 1e6
    found["events"] = len(c.events)
    gt.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="", help="part of a case's name")
    arguments = parser.parse_args()
    print("| step | workers | torch, ms | GT, ms | times torch | MB moved | exchanges |\n|---|---|---|---|---|---|---|")
    for case in CASES:
        if arguments.only not in case[0]:
            continue
        for mode in ("embedded", "local"):
            if mode == "embedded" and case[4] is not WHOLE:
                continue
            f = run_case(case, mode, arguments.workers, arguments.repeats)
            workers = "1, embedded" if mode == "embedded" else str(arguments.workers)
            print(
                f"| {case[0]} | {workers} | {f['torch']:.1f} | {f['GT']:.1f} | {f['GT'] / f['torch']:.2f} "
                f"| {f['MB']:.1f} | {f['events']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
