"""The dtypes that torch's CPU kernels refuse and its shape functions accept: makes `gt/client/kernel_checks.py`.

    python -m tests.conformance.kernel_dtypes > gt/client/kernel_checks.py

The ops that torch's database of ops calls are called again, with their floating-point operands in other dtypes. A dtype
is refused by an op if all calls raise.
"""

from __future__ import annotations

import textwrap
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from gt.client.kernel_checks import check_special_cases
from gt.client.kernel_strides import run_shape_function
from gt.client.op_schema import OpSchema
from gt.client.shape_function_overrides import SHAPE_FUNCTIONS

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
_SAMPLES = 20  # of each op of the database, without empty ones
_CALLS = 10  # of each op that these call
_MAX_ELEMENTS = 5000

Refused: TypeAlias = dict[str, frozenset[torch.dtype]]


class Call(NamedTuple):
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Recorder(TorchDispatchMode):
    """Notes the calls of ops whose first operand is a tensor. Some kernels do not
    look at the dtypes of empty tensors and of scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, list[Call]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_small = all(each.layout is torch.strided and 0 < each.numel() < _MAX_ELEMENTS for each in tensors)
        is_first = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dim() > 0
        if is_first and is_small and func.namespace == "aten" and len(self.calls[func]) < _CALLS:
            self.calls[func].append(Call(func, *_copied((args, kwargs))))
        return func(*args, **kwargs)


def recorded_calls() -> dict[Any, list[Call]]:
    """Calls of ops, by op. Ops in place are called as those that they are the variants of."""
    torch.manual_seed(0)
    recorder = _Recorder()
    for info in op_db:
        dtype = next((each for each in (torch.float32, torch.int64) if each in info.dtypes), None)
        samples = info.sample_inputs("cpu", dtype, requires_grad=False) if dtype is not None else ()
        for sample in islice((each for each in samples if not _is_empty(each.input)), _SAMPLES):
            with recorder, suppress(Exception):  # some samples of the database need a GPU, or other packages
                info.op(sample.input, *sample.args, **sample.kwargs)
    calls = dict(recorder.calls)
    for func, found in recorder.calls.items():
        packet = getattr(torch.ops.aten, f"{func.overloadpacket.__name__}_", None)
        in_place = getattr(packet, func._overloadname, None)
        if in_place is not None and in_place not in calls:
            calls[in_place] = [each._replace(func=in_place) for each in found]
    return calls


def _is_empty(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 0


def refused_dtypes() -> Refused:
    """For each op with a shape function that accepts a dtype which the kernel refuses: the refused dtypes."""
    accepted: dict[str, set[torch.dtype]] = defaultdict(set)
    tried: dict[str, set[torch.dtype]] = defaultdict(set)
    needed = set()
    for func, calls in recorded_calls().items():
        name = func.overloadpacket.__name__
        for call in calls:
            for dtype, variant in _variants(call):
                tried[name].add(dtype)
                if _kernel_accepts(variant):
                    accepted[name].add(dtype)
                elif _shape_function_accepts(variant):
                    needed.add(name)
    refused = {name: frozenset(tried[name] - accepted[name]) for name in sorted(needed) if accepted[name]}
    return {name: dtypes for name, dtypes in refused.items() if dtypes}


def _variants(call: Call) -> Iterator[tuple[torch.dtype, Call]]:
    """The call with its first operand, and all operands of the same dtype, in other dtypes."""
    leaves, structure = tree_flatten((call.args, call.kwargs))
    first = call.args[0].dtype
    for dtype in DTYPES:
        cast = [leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype is first else leaf for leaf in leaves]
        yield dtype, Call(call.func, *tree_unflatten(cast, structure))


def _kernel_accepts(call: Call) -> bool:
    try:
        args, kwargs = _copied((call.args, call.kwargs))
        call.func(*args, **kwargs)
    except Exception as error:  # torch raises errors of any type
        return not _is_about_dtypes(str(error))
    return True


def _is_about_dtypes(message: str) -> bool:
    words = ("not implemented for", "dtype", "scalar type", "support", "type", "can't be cast")
    return any(word in message for word in words) and "overflow" not in message


def _shape_function_accepts(call: Call) -> bool:
    args, kwargs = tree_map(_without_bytes, (list(call.args), call.kwargs))
    op = OpSchema(call.func, special=False)
    try:
        own = SHAPE_FUNCTIONS.get(op.name)
        result = run_shape_function(call.func, args, kwargs) if own is None else own(*args, **kwargs)
        check_special_cases(op, args, kwargs, result, on_cpu=True)
    except Exception:  # the call becomes a query
        return False
    return True


def _copied(arguments: Any) -> Any:
    return tree_map(lambda each: each.detach().clone() if isinstance(each, torch.Tensor) else each, arguments)


def _without_bytes(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def source_of(refused: Refused) -> str:
    """The table as a module: ops by the dtypes that they refuse."""
    ops: dict[frozenset[torch.dtype], list[str]] = defaultdict(list)
    for name, dtypes in refused.items():
        ops[dtypes].append(name)
    lines = [
        '"""The dtypes of first operands that torch\'s CPU kernels refuse and its shape functions accept, by op.',
        "",
        "Made by `python -m tests.conformance.kernel_dtypes`; a test compares it with torch.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "import torch",
        "",
        f'TORCH_VERSION = "{torch.__version__.partition("+")[0]}"  # with which the table was made',
        "# Names of dtypes, and the ops that refuse them.",
        "_OPS = {",
    ]
    for dtypes, names in sorted(ops.items(), key=lambda item: item[1]):
        key = " ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES if dtype in dtypes)
        text = textwrap.wrap(" ".join(names), 108, break_long_words=False, break_on_hyphens=False)
        values = [f'        "{line}{" " if line is not text[-1] else ""}"' for line in text]
        is_short = len(values) == 1 and len(key) + len(values[0]) < 110
        lines += [f'    "{key}": {values[0].strip()},'] if is_short else [f'    "{key}": (', *values, "    ),"]
    lines += [
        "}",
        "REFUSED_DTYPES: dict[str, frozenset[torch.dtype]] = {",
        "    op: frozenset([getattr(torch, dtype) for dtype in dtypes.split()])",
        "    for dtypes, ops in _OPS.items()",
        "    for op in ops.split()",
        "}",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(source_of(refused_dtypes()), end="")
