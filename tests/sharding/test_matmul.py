"""Every layout of a matrix product: correct values, and exactly the bytes of the published cost table.

Placements are R (replicated), M, K, N (that dim is cut) and P (partial); g = p - 1, h = (p - 1) / p for p workers.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import gt
from gt.sharding.placements import Partial, Placement, Replicate, Shard, placements_of

M, K, N = 64, 128, 32
A_BYTES, B_BYTES, C_BYTES = M * K * 4, K * N * 4, M * N * 4
OF_A = {"R": Replicate(), "M": Shard(0), "K": Shard(1), "P": Partial()}
OF_B = {"R": Replicate(), "K": Shard(0), "N": Shard(1), "P": Partial()}
OF_C = {"R": Replicate(), "M": Shard(0), "N": Shard(1), "P": Partial()}

# (a, b): costs to R, M, N, P in units of g a, g b, g c (capitals) and h a, h b, h c: the least of the alternatives.
TABLE = {
    ("R", "R"): ("0", "0", "0", "0"),
    ("R", "K"): ("B | b+C | 2C", "B | b+c | C", "b | C", "0"),
    ("R", "N"): ("B | C", "B | c", "0", "0"),
    ("R", "P"): ("2B | B+C | 2C", "2B | B+c | C", "B | C", "0"),
    ("M", "R"): ("A | C", "0", "A | c", "0"),
    ("M", "K"): ("A+B | B+C | A+b+C | a+2C", "B | A+b+c | a+C", "B+c | A+b | a+C", "B | a"),
    ("M", "N"): ("A+B | B+C | A+C | a+b+2C", "B | A+c | a+b+C", "B+c | A | a+b+C", "B | A | a+b"),
    ("M", "P"): (
        "A+2B | 2B+C | A+B+C | a+B+2C | A+2C", "2B | A+B+c | a+B+C | A+C",
        "2B+c | A+B | a+B+C | A+C", "2B | a+B | A",
    ),
    ("K", "R"): ("A | a+C | 2C", "a | C", "A | a+c | C", "0"),
    ("K", "K"): ("A+B | a+B+C | A+b+C | 2C", "a+B | A+b+c | C", "a+B+c | A+b | C", "0"),
    ("K", "N"): ("A+B | a+B+C | A+C | b+2C", "a+B | A+c | b+C", "a+B+c | A | b+C", "A | b"),
    ("K", "P"): (
        "A+2B | a+2B+C | A+B+C | B+2C | A+2C", "a+2B | A+B+c | B+C | A+C",
        "a+2B+c | A+B | B+C | A+C", "B | A",
    ),
    ("P", "R"): ("2A | A+C | 2C", "A | C", "2A | A+c | C", "0"),
    ("P", "K"): (
        "2A+B | A+B+C | 2A+b+C | A+2C | B+2C", "A+B | 2A+b+c | A+C | B+C",
        "A+B+c | 2A+b | A+C | B+C", "A | B",
    ),
    ("P", "N"): (
        "2A+B | A+B+C | 2A+C | A+b+2C | B+2C", "A+B | 2A+c | A+b+C | B+C",
        "A+B+c | 2A | A+b+C | B+C", "2A | A+b | B",
    ),
    ("P", "P"): (
        "2A+2B | A+2B+C | 2A+B+C | A+B+2C | 2B+2C | 2A+2C",
        "A+2B | 2A+B+c | A+B+C | 2B+C | 2A+C",
        "A+2B+c | 2A+B | A+B+C | 2B+C | 2A+C",
        "A+B | 2B | 2A",
    ),
}  # fmt: skip


def least(cell: str, p: int, a: int = A_BYTES, b: int = B_BYTES, c: int = C_BYTES) -> int:
    unit = {"A": (p - 1) * a, "B": (p - 1) * b, "C": (p - 1) * c}
    unit |= {"a": (p - 1) * a // p, "b": (p - 1) * b // p, "c": (p - 1) * c // p, "0": 0}
    return min(
        sum(unit[term[-1]] * (int(term[:-1]) if len(term) > 1 else 1) for term in option.split("+"))
        for option in cell.replace(" ", "").split("|")
    )


def laid_out(value: torch.Tensor, mesh: gt.DeviceMesh, placements: list[Placement]) -> gt.Tensor:
    return gt.distribute(value, mesh, placements)


def product(mesh, a_placements, b_placements, out=None, sizes=(M, K, N), dtype=torch.float64):
    """Check a product and its gradients against torch's, and return the bytes moved by the product. The values are
    integers, so that sums are exact in any order."""
    m, k, n = sizes
    a = torch.randint(-4, 5, (m, k)).to(dtype).requires_grad_()
    b = torch.randint(-4, 5, (k, n)).to(dtype).requires_grad_()
    ours_a = laid_out(a.detach(), mesh, a_placements).requires_grad_()
    ours_b = laid_out(b.detach(), mesh, b_placements).requires_grad_()
    with gt.debug.comm() as moved:
        c = gt.distributed.matmul(ours_a, ours_b, out=out)
    assert torch.equal(c.detach().cpu(), (a @ b).detach())
    if out is not None:
        assert placements_of(c.spec) == tuple(out)
    assert moved.bytes == sum(event.bytes for event in moved.events), moved.events
    weight = torch.randint(-2, 3, (m, n)).to(dtype)
    (a @ b).backward(weight)
    c.backward(gt.to(weight))
    assert torch.equal(ours_a.grad.cpu(), a.grad) and torch.equal(ours_b.grad.cpu(), b.grad)
    return moved.bytes


@pytest.mark.parametrize("pair", TABLE, ids="x".join)
def test_every_pair_and_output_on_one_axis(eight_workers, pair):
    mesh = gt.mesh((4,), ("x",))
    for to, cell in zip("RMNP", TABLE[pair], strict=True):
        counted = product(mesh, [OF_A[pair[0]]], [OF_B[pair[1]]], [OF_C[to]], dtype=torch.float32)
        assert counted == least(cell, 4), f"{pair} -> {to}: {cell}"


AXES_A, AXES_B, AXES_C = (list(itertools.product(kinds, repeat=2)) for kinds in ("RMKP", "RKNP", "RMNP"))


@pytest.mark.parametrize("first", AXES_A, ids="".join)
def test_every_pair_on_two_axes(eight_workers, first):
    """All 256 pairs: values, gradients, and no bytes moved if some layout of the result is free."""
    mesh = gt.mesh((2, 4), ("x", "y"))
    for second in AXES_B:
        moved = product(mesh, [OF_A[p] for p in first], [OF_B[p] for p in second], sizes=(10, 9, 7))
        assert (moved == 0) == is_free(first, second), (first, second, moved)


FREE = {("R", "R"), ("M", "R"), ("R", "N"), ("K", "K"), ("P", "R"), ("R", "P"), ("K", "R"), ("R", "K")}


def is_free(first: tuple[str, ...], second: tuple[str, ...]) -> bool:
    """Whether no byte has to move: each axis has a free strategy. Two pairs are not free because their inner dims are
    cut in different orders."""
    if not all(pair in FREE for pair in zip(first, second, strict=True)):
        return False
    return (first, second) not in {(("R", "K"), ("K", "K")), (("K", "K"), ("R", "K"))}


GOLDEN = [
    ("4", "R", "R", "R", 0),
    ("4", "M", "R", "M", 0),
    ("4", "R", "N", "N", 0),
    ("4", "K", "K", "P", 0),
    ("4", "K", "K", "R", 49_152),
    ("4", "K", "K", "M", 24_576),
    ("4", "M", "N", "M", 49_152),
    ("4", "M", "K", "M", 49_152),
    ("4", "K", "R", "M", 24_576),
    ("4", "R", "K", "N", 12_288),
    ("4", "P", "R", "R", 49_152),
    ("4", "M", "R", "R", 24_576),
    ("2x4", "MR", "RN", "MN", 0),
    ("2x4", "MK", "KN", "MN", 53_248),  # by direct pulls; 65,536 by one-axis collectives
    ("2x4", "MK", "RK", "MN", 24_576),
    ("2x4", "MK", "RK", "MR", 49_152),
    ("2x4", "RK", "NK", "NR", 49_152),
    ("2x4", "KK", "KK", "RR", 114_688),
    ("2x4", "MR", "KN", "MN", 16_384),
    ("2x4", "PR", "RN", "PN", 0),
]


@pytest.mark.parametrize(("shape", "a", "b", "c", "expected"), GOLDEN)
def test_golden_numbers(eight_workers, shape, a, b, c, expected):
    mesh = gt.mesh([int(size) for size in shape.split("x")], ("x", "y")[: len(a)])
    moved = product(mesh, [OF_A[p] for p in a], [OF_B[p] for p in b], [OF_C[p] for p in c], dtype=torch.float32)
    assert moved == expected


@pytest.mark.parametrize("sizes", [(5, 7, 3), (2, 1, 9), (1, 1, 1), (4, 0, 3), (0, 3, 2)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_uneven_and_empty_shards(eight_workers, sizes, count):
    mesh = gt.mesh((count,), ("x",))
    for a, b, c in itertools.product("RMKP", "RKNP", "RMNP"):
        product(mesh, [OF_A[a]], [OF_B[b]], [OF_C[c]], sizes=sizes)
