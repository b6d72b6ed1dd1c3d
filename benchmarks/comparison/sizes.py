"""The sizes of the workloads, which all peers share. Imported in every environment: standard library only."""

from __future__ import annotations

from dataclasses import dataclass

CHAIN_SIZE = 64
CHAIN_LINKS = 300  # a link is two ops
FACTOR, ADDEND = 1.0001, 0.5

PRODUCT_ROWS, PRODUCT_INNER, PRODUCT_COLUMNS = 4096, 2048, 2048

MLP_WIDTHS = (784, 1024, 1024, 10)
MLP_BATCH = 512

TRANSFER_FLOATS = 64 << 20  # 256 MB
QUICK_TRANSFER_FLOATS = 8 << 20

DISPATCHER_WORKERS = {"1 worker": 1, "8 workers": 8, "64 workers": 64, "512 workers": 512}


@dataclass(frozen=True)
class Transformer:
    """The sizes of a GPT and of its batch."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    length: int = 128
    batch: int = 8
    vocabulary: int = 1000

    @property
    def parameters(self) -> int:
        """The number of parameters: of each layer 12 matrices of width x width, 9 biases and 2 norms; embeddings, the
        last norm and the output layer."""
        layer = 12 * self.width**2 + 13 * self.width
        return self.layers * layer + (2 * self.vocabulary + self.length + 2) * self.width


GPT = Transformer()
GROWTH = {
    "2 layers": Transformer(layers=2),
    "4 layers": Transformer(layers=4),
    "8 layers": Transformer(layers=8),
    "batch 4": Transformer(batch=4),
    "batch 16": Transformer(batch=16),
}
MEMORY_GPT = Transformer(layers=8, width=512, heads=8, batch=8)
QUICK_MEMORY_GPT = Transformer()
TINY_GPT = Transformer(layers=1, width=32, heads=4, length=16, batch=4, vocabulary=32)  # to load what a step needs
STATE_BYTES = 16  # of a parameter in float32, its gradient and the two moments of AdamW


def changing_lengths(longest: int = GPT.length, shortest: int = 33) -> list[int]:
    """Sequence lengths in an order without a pattern, each once."""
    lengths = range(shortest, longest + 1)
    return [lengths[number * 37 % len(lengths)] for number in range(len(lengths))]
