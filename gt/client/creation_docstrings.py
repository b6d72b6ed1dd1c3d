"""Docstrings of the creation functions that are torch's: arguments, a sentence and an example of each."""

from __future__ import annotations

from typing import NamedTuple

_OPTIONS = "dtype=None, requires_grad=False, mesh=None, placements=None"


class _Entry(NamedTuple):
    arguments: str
    text: str
    call: str
    result: str


_ENTRIES = {
    "zeros": _Entry("*size", "Zeros.", "gt.zeros(2, 2).tolist()", "[[0.0, 0.0], [0.0, 0.0]]"),
    "ones": _Entry("*size", "Ones.", "gt.ones(3).tolist()", "[1.0, 1.0, 1.0]"),
    "full": _Entry("size, fill_value", "One value everywhere.", "gt.full((2,), 7).tolist()", "[7, 7]"),
    "empty": _Entry("*size", "A tensor whose values are not set.", "gt.empty(2, 3).shape", "torch.Size([2, 3])"),
    "empty_strided": _Entry(
        "size, stride",
        "A tensor with these strides, whose values are not set.",
        "gt.empty_strided((2, 3), (1, 2)).stride()",
        "(1, 2)",
    ),
    "eye": _Entry("n, m=n", "Ones on the diagonal.", "gt.eye(2).tolist()", "[[1.0, 0.0], [0.0, 1.0]]"),
    "arange": _Entry("start=0, end, step=1", "Numbers up to `end`.", "gt.arange(1, 4).tolist()", "[1, 2, 3]"),
    "linspace": _Entry(
        "start, end, steps", "Numbers at equal distances.", "gt.linspace(0, 1, 3).tolist()", "[0.0, 0.5, 1.0]"
    ),
    "logspace": _Entry(
        "start, end, steps, base=10", "Powers of `base`.", "gt.logspace(0, 2, 3).tolist()", "[1.0, 10.0, 100.0]"
    ),
    "scalar_tensor": _Entry("value", "A tensor without dims.", "gt.scalar_tensor(2.0).item()", "2.0"),
    "tril_indices": _Entry(
        "row, col, offset=0",
        "The indices of a lower triangle.",
        "gt.tril_indices(2, 2).tolist()",
        "[[0, 1, 1], [0, 0, 1]]",
    ),
    "triu_indices": _Entry(
        "row, col, offset=0",
        "The indices of an upper triangle.",
        "gt.triu_indices(2, 2).tolist()",
        "[[0, 0, 1], [0, 1, 1]]",
    ),
    "bartlett_window": _Entry(
        "window_length, periodic=True", "A triangle.", "gt.bartlett_window(4).tolist()", "[0.0, 0.5, 1.0, 0.5]"
    ),
    "blackman_window": _Entry(
        "window_length, periodic=True", "Blackman's window.", "gt.blackman_window(4).argmax().item()", "2"
    ),
    "hamming_window": _Entry(
        "window_length, periodic=True, alpha=0.54, beta=0.46",
        "Hamming's window.",
        "gt.hamming_window(4).argmax().item()",
        "2",
    ),
    "hann_window": _Entry("window_length, periodic=True", "Hann's window.", "gt.hann_window(4).argmax().item()", "2"),
    "kaiser_window": _Entry(
        "window_length, periodic=True, beta=12.0", "Kaiser's window.", "gt.kaiser_window(4).argmax().item()", "2"
    ),
    "rand": _Entry("*size", "Random numbers between 0 and 1.", "bool((gt.rand(100) < 1).all())", "True"),
    "randn": _Entry("*size", "Normal random numbers.", "gt.randn(2, 3).shape", "torch.Size([2, 3])"),
    "randint": _Entry(
        "low=0, high, size", "Random whole numbers below `high`.", "bool((gt.randint(5, (100,)) < 5).all())", "True"
    ),
    "randperm": _Entry("n", "A random permutation.", "sorted(gt.randperm(4).tolist())", "[0, 1, 2, 3]"),
    "normal": _Entry(
        "mean, std, size", "Normal random numbers.", "gt.normal(0.0, 1.0, (2, 3)).shape", "torch.Size([2, 3])"
    ),
    "bernoulli": _Entry(
        "input", "Ones with the probabilities in `input`.", "gt.bernoulli(gt.ones(2)).tolist()", "[1.0, 1.0]"
    ),
    "zeros_like": _Entry("input", "Zeros.", "gt.zeros_like(gt.ones(2)).tolist()", "[0.0, 0.0]"),
    "ones_like": _Entry("input", "Ones.", "gt.ones_like(torch.zeros(2)).tolist()", "[1.0, 1.0]"),
    "full_like": _Entry(
        "input, fill_value", "One value everywhere.", "gt.full_like(gt.ones(2), 7).tolist()", "[7.0, 7.0]"
    ),
    "empty_like": _Entry(
        "input", "A tensor whose values are not set.", "gt.empty_like(gt.ones(2)).shape", "torch.Size([2])"
    ),
    "rand_like": _Entry(
        "input", "Random numbers between 0 and 1.", "gt.rand_like(gt.ones(2)).shape", "torch.Size([2])"
    ),
    "randn_like": _Entry("input", "Normal random numbers.", "gt.randn_like(gt.ones(2)).shape", "torch.Size([2])"),
    "randint_like": _Entry(
        "input, low=0, high", "Random whole numbers.", "gt.randint_like(gt.ones(2), 1).tolist()", "[0.0, 0.0]"
    ),
}


def docstring_of(name: str) -> str:
    """The docstring of a creation function, which begins with its signature."""
    entry = _ENTRIES[name]
    options = _OPTIONS if name != "bernoulli" else "mesh=None, placements=None"
    likeness = " In the shape and dtype of `input`." if name.endswith("_like") else ""
    return (
        f"{name}({entry.arguments}, {options})\n\n"
        f"{entry.text}{likeness} The arguments are those of torch.{name}; `mesh` and `placements` give the layout.\n\n"
        f">>> {entry.call}\n{entry.result}\n"
    )
