"""Train GPT-2 of `transformers`, untouched, under a plan that is a YAML file. This script knows of GT `gt.to` alone.

    python examples/signals/gpt2_by_yaml.py
    GT_WORKERS=2 GT_CONFIG=examples/signals/gpt2_data_parallel.yaml python examples/signals/gpt2_by_yaml.py
    GT_WORKERS=2 GT_CONFIG=examples/signals/gpt2_tensor_parallel.yaml python examples/signals/gpt2_by_yaml.py
    GT_WORKERS=2 GT_CONFIG=examples/signals/gpt2_fsdp.yaml python examples/signals/gpt2_by_yaml.py
    GT_WORKERS=2 GT_CONFIG=examples/signals/gpt2_pipeline.yaml python examples/signals/gpt2_by_yaml.py
    GT_WORKERS=4 GT_CONFIG=examples/signals/gpt2_mesh.yaml python examples/signals/gpt2_by_yaml.py

The model is tiny and its weights are random. Losses are compared with those of plain torch.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import gt

VOCABULARY, BATCH, LENGTH, MICRO_BATCHES = 96, 8, 16, 2
STEPS, QUICK_STEPS = 10, 2
TOLERANCE = 1e-5


def make_model() -> GPT2LMHeadModel:
    config = GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=VOCABULARY, n_positions=32, loss_type="ForCausalLM",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_batches(steps: int) -> list[Tensor]:
    return [torch.randint(0, VOCABULARY, (BATCH, LENGTH)) for _ in range(steps)]


def train(model: GPT2LMHeadModel, batches: list[Tensor]) -> list[float]:
    """The loss of every step. Batches come in parts, so that the stages of a pipeline have something to overlap."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        total = torch.zeros(())
        for ids in batch.chunk(MICRO_BATCHES):
            loss = model(input_ids=ids, labels=ids).loss / MICRO_BATCHES
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        losses.append(total.item())
    return losses


def report(plan: str, losses: list[float], expected: list[float]) -> int:
    """Print the losses side by side and say whether they agree; the exit code."""
    table = Table("step", "torch", plan, title="loss")
    for step, (ours, theirs) in enumerate(zip(losses, expected, strict=True), start=1):
        table.add_row(str(step), f"{theirs:.6f}", f"{ours:.6f}")
    difference = max(abs(ours - theirs) for ours, theirs in zip(losses, expected, strict=True))
    agree = difference <= TOLERANCE
    out = Console(highlight=False)
    out.print(table)
    verdict = "agree" if agree else "DISAGREE"
    out.print(f"The losses of {len(losses)} steps {verdict} to {TOLERANCE:g}: they differ by at most {difference:.1e}.")
    return 0 if agree else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps only")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a model this small computes slower on more
    torch.manual_seed(0)
    model, batches = make_model(), make_batches(QUICK_STEPS if options.quick else STEPS)
    expected = train(copy.deepcopy(model), batches)
    model = gt.to(model)
    plan = os.path.basename(os.environ.get("GT_CONFIG", "no plan"))
    return report(plan, train(model, batches), expected)


if __name__ == "__main__":
    sys.exit(main())
