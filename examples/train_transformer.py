"""Train a small transformer three times, from the same weights and on the same batches: with plain torch, with GT on
its embedded worker, and with GT on two worker processes. The losses are printed side by side.

The model is plain PyTorch. The only lines that know of GT are `gt.init`, `gt.to` and `gt.shutdown`.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import gt

ALPHABET = " .abcdefghijklmnopqrstuvwxyz"
CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 48, 16, 64, 4, 2
STEPS, QUICK_STEPS = 30, 3
TOLERANCE = 1e-4
SHOWN_ROWS = 15

Batch = tuple[Tensor, Tensor]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, C / H)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed(self.feed_norm(x))


class Transformer(nn.Module):
    def __init__(self, symbols: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)
        self.head.weight = self.symbols.weight  # tied, and it stays tied when the model is moved
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, symbols: Tensor) -> Tensor:
        places = torch.arange(symbols.shape[1])  # a plain tensor: it mixes in
        x = self.symbols(symbols) + self.places(places)  # (B, T, C)
        return self.head(self.norm(self.blocks(x)))  # (B, T, symbols)


def write_sentences(count: int) -> str:
    """The text to learn: `the cat sees a bird. a fox hears the cat. ...`"""
    draw = random.Random(0)
    nouns = [f"{article} {noun}" for article in ("a", "the") for noun in ("bird", "cat", "dog", "fox")]
    verbs = ("hears", "likes", "sees")
    return "".join(f"{draw.choice(nouns)} {draw.choice(verbs)} {draw.choice(nouns)}. " for _ in range(count))


def make_batches(steps: int) -> list[Batch]:
    text = torch.tensor([ALPHABET.index(symbol) for symbol in write_sentences(2000)])
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
        windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
        batches.append((windows[:, :-1], windows[:, 1:].contiguous()))
    return batches


def train(
    model: nn.Module, batches: list[Batch], place: Callable[[Tensor], Tensor], tick: Callable[[], None]
) -> Tensor:
    """The loss of every step. `place` says where the batches go."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for symbols, following in batches:
        optimizer.zero_grad()
        guesses = model(place(symbols))
        loss = functional.cross_entropy(guesses.flatten(0, 1), place(following).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        tick()
    return torch.tensor(losses, dtype=torch.float64)


def train_everywhere(model: nn.Module, batches: list[Batch], progress: Progress) -> dict[str, Tensor]:
    def bar(name: str) -> Callable[[], None]:
        task = progress.add_task(name, total=len(batches))
        return lambda: progress.advance(task)

    losses = {"torch": train(copy.deepcopy(model), batches, lambda tensor: tensor, bar("torch"))}
    for name, workers, mode in (("embedded", 1, "embedded"), ("2 workers", 2, "local")):
        tick = bar(name)
        gt.init(workers=workers, mode=mode)
        try:
            losses[name] = train(gt.to(copy.deepcopy(model)), batches, gt.to, tick)
        finally:
            gt.shutdown()
    return losses


def report(losses: dict[str, Tensor]) -> int:
    """Print the losses side by side and say whether they agree; the exit code."""
    differences = torch.stack([(column - losses["torch"]).abs() for column in losses.values()]).amax(0)
    agree = bool((differences <= TOLERANCE).all())  # false also for a loss that is not a number
    out = Console(highlight=False)
    out.print(tabulate(losses, differences))
    steps, verdict = len(differences), "agree" if agree else "DISAGREE"
    out.print(
        f"The losses of {steps} steps {verdict} to {TOLERANCE:g}: they differ by at most {differences.max():.1e}."
    )
    return 0 if agree else 1


def tabulate(losses: dict[str, Tensor], differences: Tensor) -> Table:
    table = Table("step", *losses, "max difference", title="loss")
    for column in table.columns:
        column.justify = "right"
    last = len(differences) - 1
    for step in sorted({*range(0, last, -(-len(differences) // SHOWN_ROWS)), last}):
        values = [f"{column[step]:.6f}" for column in losses.values()]
        table.add_row(str(step + 1), *values, f"{differences[step]:.1e}")
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small transformer with torch and with GT, and compare losses."
    )
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"training steps (default: {STEPS})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps only")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps takes a whole number of at least 1, not {options.steps}")
    return options


def main() -> int:
    options = parse_arguments()
    batches = make_batches(QUICK_STEPS if options.quick else options.steps)
    torch.set_num_threads(1)  # a model this small computes slower on more
    torch.manual_seed(0)
    model = Transformer(len(ALPHABET), CONTEXT, WIDTH, HEADS, LAYERS)
    columns = (TextColumn("{task.description:<9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        losses = train_everywhere(model, batches, progress)
    return report(losses)


if __name__ == "__main__":
    sys.exit(main())
