"""The models of the workloads in plain torch, for all peers that train torch's modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from benchmarks.comparison import sizes
from benchmarks.comparison.sizes import Transformer

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[], object]


def mlp() -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    for before, after in zip(sizes.MLP_WIDTHS, sizes.MLP_WIDTHS[1:], strict=False):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def mlp_batch() -> Batch:
    return torch.randn(sizes.MLP_BATCH, sizes.MLP_WIDTHS[0]), torch.randint(0, sizes.MLP_WIDTHS[-1], (sizes.MLP_BATCH,))


class Attention(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query, self.key, self.value, self.out = (torch.nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self._by_head(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # (B, T, C)

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # (B, H, T, D); H may be cut over processes


class Layer(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.widen, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.narrow(functional.gelu(self.widen(self.norm2(x)), approximate="tanh"))


class GPT(torch.nn.Module):
    def __init__(self, size: Transformer) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(size.vocabulary, size.width)
        self.positions = torch.nn.Embedding(size.length, size.width)
        self.layers = torch.nn.ModuleList(Layer(size.width, size.heads) for _ in range(size.layers))
        self.norm = torch.nn.LayerNorm(size.width)
        self.head = torch.nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]  # (B, T, C)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).flatten(0, 1)  # (B * T, vocabulary)


def gpt_batch(size: Transformer) -> Batch:
    ids = torch.randint(0, size.vocabulary, (size.batch, size.length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
    optimizer.zero_grad()
    x, y = batch
    loss = functional.cross_entropy(model(x), y.flatten())
    loss.backward()
    optimizer.step()
    return loss


def trainer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Step:
    """A step that ends with the loss as a number: it is done when it returns."""
    return lambda: train_step(model, optimizer, batch).item()


def changing_trainer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, prepare: Callable[[torch.Tensor], torch.Tensor]
) -> Step:
    """A step whose sequence length differs from those of all steps before it, while there are new lengths. `prepare`
    moves a tensor to where it is used."""
    lengths = iter(sizes.changing_lengths())
    ids, targets = gpt_batch(sizes.GPT)

    def step() -> float:
        length = next(lengths)
        batch = prepare(ids[:, :length].contiguous()), prepare(targets[:, :length].contiguous())
        return train_step(model, optimizer, batch).item()

    return step


def chain(x: torch.Tensor, factor: torch.Tensor | float, addend: torch.Tensor | float) -> torch.Tensor:
    for _ in range(sizes.CHAIN_LINKS):
        x = x * factor
        x = x + addend
    return x


def chain_operands() -> dict[str, tuple[torch.Tensor | float, torch.Tensor | float]]:
    """The factor and the addend of each case of W1."""
    shape = (sizes.CHAIN_SIZE, sizes.CHAIN_SIZE)
    tensors = torch.full(shape, sizes.FACTOR), torch.full(shape, sizes.ADDEND)
    return {"numbers": (sizes.FACTOR, sizes.ADDEND), "tensors": tensors}
