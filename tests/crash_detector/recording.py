"""Calls of aten's ops with arguments that make sense, from which wrong ones are derived."""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

CALLS_PER_OP = 4
SAMPLES_PER_OP = 24
LARGEST = 1 << 15  # elements


@dataclass(frozen=True, slots=True)
class Call:
    """An op, by the name that GT has for it, and the arguments of one call."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_recorded: bool = True  # otherwise it was drawn at random


class Recorder(TorchDispatchMode):
    """Keeps calls of each op that differ in more than the values of their tensors: the first `CALLS_PER_OP`, and later
    ones whose tensors have more dims, because some kernels go wrong only where there are several batch dims."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, dict[str, Call]] = defaultdict(dict)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.keep(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def keep(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        name = str(func)
        kept = self.calls[name]
        if not name.startswith("aten.") or not _can_be_kept((args, kwargs)):
            return
        most = max([_most_dims((call.args, call.kwargs)) for call in kept.values()], default=0)
        if len(kept) >= CALLS_PER_OP and _most_dims((args, kwargs)) <= most:
            return
        key = repr(tree_map(_describe, (args, kwargs)))
        if key not in kept:
            args, kwargs = tree_map(_copy, (args, kwargs))
            kept[key] = Call(name, tuple(args), kwargs)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _most_dims(tree: Any) -> int:
    return max([tensor.dim() for tensor in _tensors(tree)], default=0)


def _can_be_kept(tree: Any) -> bool:
    return all(t.layout is torch.strided and t.device.type == "cpu" and t.numel() <= LARGEST for t in _tensors(tree))


def _describe(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def _copy(leaf: Any) -> Any:
    """Plain memory of its own, without gaps."""
    return leaf.detach().clone().contiguous() if isinstance(leaf, torch.Tensor) else leaf


def record_calls() -> dict[str, list[Call]]:
    """The calls that torch's op database makes, forward and backward, by op; and with them calls of the variants of
    these ops that write to their argument or to a given tensor."""
    recorder = Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in op_db:
            for dtype in _dtypes(info):
                _record_op(recorder, info, dtype)
        _record_optimizers(recorder)
        _record_modules(recorder)
    calls = {op: list(kept.values()) for op, kept in recorder.calls.items() if kept}
    return add_variants(calls)


def _dtypes(info: OpInfo) -> list[torch.dtype]:
    wanted = [dtype for dtype in (torch.float32, torch.int64) if dtype in info.dtypes]
    return wanted or sorted(info.dtypes, key=str)[:1]


def _record_op(recorder: Recorder, info: OpInfo, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    requires_grad = dtype.is_floating_point and info.supports_autograd
    try:
        for sample in itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=requires_grad), SAMPLES_PER_OP):
            _run_sample(recorder, info, sample)
    except Exception:  # samples that need a library which is not installed
        return


def _run_sample(recorder: Recorder, info: OpInfo, sample: SampleInput) -> None:
    for overload in _overloads(getattr(info, "aten_name", info.name)):
        if _accepts(overload, (sample.input, *sample.args), sample.kwargs):
            recorder.keep(overload, (sample.input, *sample.args), sample.kwargs)
    try:
        with recorder:
            result = info.op(sample.input, *sample.args, **sample.kwargs)
            outputs = [t for t in _tensors(result) if t.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    except Exception:  # samples that torch itself refuses
        return


def _overloads(name: str) -> list[Any]:
    """The overloads of an op that aten has by this name. Those made of other ops are not seen by a dispatch mode."""
    packet = getattr(torch.ops.aten, name, None)
    return [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []


def _accepts(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        with torch.no_grad():
            overload(*tree_map(_copy, args), **tree_map(_copy, kwargs))
    except Exception:
        return False
    return True


def _record_optimizers(recorder: Recorder) -> None:
    """Fused steps, which are in no database."""
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        weights = [torch.ones(3, 4, requires_grad=True), torch.ones(5, requires_grad=True)]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(weights, lr=0.1, fused=True, **settings)
        with recorder:
            optimizer.step()
            optimizer.step()


def _record_modules(recorder: Recorder) -> None:
    """Ops that training runs, and of whose samples the database has no gradients."""
    normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 4))
    targets = torch.tensor([[1, 2, 3], [4, 3, 2]])
    lengths = torch.tensor([3, 2])
    bags = torch.tensor([1, 2, 3, 4])
    with recorder:
        torch.nn.LSTM(3, 5, bidirectional=True)(torch.randn(7, 2, 3))[0].sum().backward()
        normed(torch.randn(2, 3)).sum().backward()
        for given in (targets, targets.reshape(-1)[:5]):
            scores = torch.randn(6, 2, 5, requires_grad=True).log_softmax(2)
            torch.nn.functional.ctc_loss(scores, given, torch.tensor([6, 6]), lengths).backward()
            scores = torch.randn(6, 2, 5, requires_grad=True).log_softmax(2)
            torch.nn.functional.ctc_loss(scores, given, [6, 6], lengths.tolist()).backward()
        for mode in ("sum", "mean", "max"):
            weight = torch.randn(10, 4, requires_grad=True)
            torch.nn.functional.embedding_bag(bags, weight, torch.tensor([0, 2]), mode=mode).sum().backward()


def all_ops(namespace: str) -> list[str]:
    """The names of all overloads of a namespace that the dispatcher knows."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.partition("::")[0] == namespace]
    return sorted({name.replace("::", ".") + ("" if "." in name else ".default") for name in names})


def schema_of(op: str) -> Any:
    namespace, name, overload = op.split(".")
    return torch._C._get_schema(f"{namespace}::{name}", "" if overload == "default" else overload)


def add_variants(calls: dict[str, list[Call]]) -> dict[str, list[Call]]:
    """With the calls of ops that take the same arguments as a recorded one but for the tensors that they write to."""
    by_inputs: dict[Any, str] = {_inputs_key(op): op for op in calls}
    added = {}
    for op in all_ops("aten"):
        source = by_inputs.get(_inputs_key(op)) if op not in calls else None
        if source is not None:
            added[op] = [variant for call in calls[source] if (variant := _variant(op, call)) is not None]
    return calls | {op: variants for op, variants in added.items() if variants}


def _inputs_key(op: str) -> Any:
    schema = schema_of(op)
    inputs = tuple([(a.name, str(a.type)) for a in schema.arguments if not a.is_out])
    return op.split(".")[1].removesuffix("_"), inputs


def _variant(op: str, call: Call) -> Call | None:
    outputs = [argument.name for argument in schema_of(op).arguments if argument.is_out]
    args, kwargs = tree_map(_copy, (call.args, call.kwargs))
    if not outputs:
        return Call(op, args, kwargs)
    try:
        with torch.no_grad():
            result = overload_of(call.op)(*args, **kwargs)
    except Exception:
        return None
    results = _tensors(result)
    out = results if len(outputs) == 1 and len(results) != 1 else [*results, *[torch.empty(0)] * len(outputs)]
    given = dict(zip(outputs, [out] if out is results else out, strict=False))
    return Call(op, call.args, call.kwargs | tree_map(_copy, given)) if _can_be_kept(given) else None


def overload_of(op: str) -> Any:
    namespace, name, overload = op.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
