"""Error messages about remote failures: the user's line first, then the op, then the worker's traceback."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import NoReturn

import torch

from gt.client.call_sites import Site
from gt.client.torch_patches.dispatch import OpOverload, schema_of
from gt.core.errors import OP_NOT_ALLOWED, LimitError, OpError, SessionError
from gt.core.messages import Failure, Gathered, Left, Lost, LostLine, NotCompiled
from gt.core.tables import print_bytes

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor")


def require_strided(tensor: torch.Tensor) -> None:
    """Raises NotImplementedError: torch's operators would replace a TypeError by one that names neither GT nor the
    remedy."""
    if tensor.is_nested:
        raise NotImplementedError(
            "GT tensors do not mix with nested tensors: GT holds strided tensors; make it one first, with "
            "torch.nested.to_padded_tensor(tensor, 0.0)"
        )
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"GT tensors do not mix with tensors of layout {tensor.layout}: GT holds strided tensors; make it one "
            f"first, with tensor.to_dense()"
        )


def require_values(tensor: torch.Tensor) -> None:
    """Raise for a tensor of device "meta"."""
    if tensor.is_meta:
        raise NotImplementedError(
            "a tensor of device 'meta' has no values that could be moved to GT; make one there, with "
            "gt.empty(tensor.shape, dtype=tensor.dtype), or give a module memory with module.to_empty(device='cpu'), "
            "then gt.to(module), and load its weights"
        )


def refuse_other_processes(kind: type[torch.Tensor]) -> None:
    """Let `multiprocessing` refuse the tensors of a class that holds no memory: torch would send its storage."""
    ForkingPickler.register(kind, _refuse_to_send)


def _refuse_to_send(tensor: torch.Tensor) -> NoReturn:
    raise SessionError(
        "a GT tensor cannot be sent to another process, because a session belongs to one process; send tensor.cpu(). "
        "Let the dataset of a data loader hold plain tensors and move its batches to GT, or use num_workers=0"
    )


def refuse_op(func: OpOverload) -> None:
    """Raise for ops that no worker can run: those that make nested tensors, and those of process groups."""
    if schema_of(func).name == "aten::_nested_tensor_from_tensor_list":
        raise NotImplementedError(
            "nested tensors of GT tensors are not possible: GT holds strided tensors; pad them, with "
            "torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)"
        )
    if func.namespace in _COLLECTIVES:
        raise NotImplementedError(
            f"torch.distributed ({func}) does not work on GT tensors, nor do DistributedDataParallel and FSDP: one "
            f"program uses all of GT's workers. Start them with gt.init(workers=N) and cut the batch or the weights "
            f"instead, with gt.shard(x, gt.mesh(N)) or a configuration (docs/sharding.md, docs/strategies.md); to "
            f"exchange a value with other programs, use tensor.cpu()"
        )


_TRACEBACK = "  Traceback of the "


def describe_failure(failure: Failure, site: Site) -> str:
    """A failure for the exception that a read of its result raises."""
    lines = [
        quote(site),
        f"  issued {failure.op}({', '.join(failure.inputs)}), which failed {where_it_failed(failure)}:",
        f"  {failure.kind}: {failure.message}",
    ]
    if failure.traceback:
        lines.append(f"{_TRACEBACK}{'worker' if failure.worker >= 0 else 'dispatcher'}:")
        lines += [f"    {text}" for text in failure.traceback.rstrip().splitlines()]
    return "\n".join(lines)


def without_traceback(text: str) -> str:
    """The description of a failure without the worker's traceback: the user's line, the op and the error."""
    return text.partition(f"\n{_TRACEBACK}")[0]


def quote(site: Site) -> str:
    """A line of the program, as in a traceback."""
    file, line, function = site
    source = linecache.getline(file, line).strip()
    header = f'File "{file}", line {line}, in {function or "<module>"}'
    return f"{header}\n    {source}" if source else header


def where_it_failed(failure: Failure) -> str:
    """The place of a failure: a worker, or none for an op that could not be planned."""
    return f"on worker {failure.worker}" if failure.worker >= 0 else "before it reached a worker"


def describe_unread(failure: Failure, site: Site) -> str:
    """One line about a failure that no read has shown."""
    file, line, _ = site
    problem = next(iter(failure.message.splitlines()), "")
    return f"{file}:{line}: {failure.op} failed and its result was never read: {failure.kind}: {problem}"


_ERROR_TYPES: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        RuntimeError,
        IndexError,
        ValueError,
        TypeError,
        NotImplementedError,
        ZeroDivisionError,
        OverflowError,
        MemoryError,
    )
} | {"_LinAlgError": torch.linalg.LinAlgError, OP_NOT_ALLOWED: NotImplementedError}


def error_of_op(failure: Failure, site: Site) -> OpError:
    """The error of a read whose value depends on an op that has failed."""
    return (LimitError if failure.kind == LimitError.__name__ else OpError)(describe_failure(failure, site))


def error_of_query(failure: Failure, site: Site) -> Exception:
    """The error of a query, which is raised on the user's line as torch would raise it."""
    if failure.kind == LimitError.__name__:
        return error_of_op(failure, site)
    return _ERROR_TYPES.get(failure.kind, RuntimeError)(failure.message)


def describe_gathering(gathered: Gathered, site: Site) -> str:
    """The warning that the inputs of an op are gathered."""
    file, line, _ = site
    if gathered.is_query:
        reason = "runs whole on gathered inputs, since the program waits for its results"
    else:
        reason = "has no sharding rule for this call: its inputs are gathered and it runs whole"
    return f"{gathered.op} {reason} ({file}:{line})"


def describe_eager_scope(news: NotCompiled, site: Site) -> str:
    file, line, _ = site
    scope = f"signal {news.scope!r}: " if news.scope else ""
    return f"{scope}{news.reason} ({file}:{line})"


def describe_loss(
    lost: Lost, how_it_ended: str, site: Site | None = None, lines: Sequence[tuple[str, LostLine]] = ()
) -> str:
    """The text about a lost worker. `site`: the line whose op exchanged tensors with it then. `lines`: the tensors that
    are lost, with the lines that made them as text."""
    ending = how_it_ended or lost.reason
    last = f"its last op was {lost.last_op}" if lost.last_op else "it had not run an op"
    issued = "" if site is None else f"{quote(site)}\n  needed a worker that was lost:\n  "
    return (
        f"{issued}worker {lost.worker} (pid {lost.pid}) {ending}; {last}. The tensors it held are lost; those of other "
        f"workers can still be read, and gt.recover(model) brings back weights that others hold too. Start again with "
        f"gt.shutdown() and gt.init() or gt.connect().{_list_lost_tensors(lines)}"
    )


def describe_departure(left: Left | Lost, site: Site | None = None) -> str:
    """The text about a worker that has left. `site`: as of `describe_loss`."""
    worker = f"worker {left.worker} (pid {left.pid}) {left.reason}"
    if isinstance(left, Lost):
        issued = "" if site is None else f"{quote(site)}\n  needed a worker that has left:\n  "
        return (
            f"{issued}{worker}. A mesh or a signal that names it makes no tensors any more: name workers of "
            f"gt.workers(). Tensors that were made before it left are on other workers"
        )
    return (
        f"{worker}; its tensors move to other workers, on which the program goes on. Meshes and signals that name it "
        f"fail from now on: name workers of gt.workers()"
    )


def _list_lost_tensors(lines: Sequence[tuple[str, LostLine]]) -> str:
    if not lines:
        return ""
    total = sum(line.tensors for _, line in lines)
    listed = [_describe_lost_line(text or "other lines", line) for text, line in lines]
    nbytes = print_bytes(sum(line.nbytes for _, line in lines))
    return "\n".join([f"\n  Lost are {_count(total)}, {nbytes}, made by:", *listed])


def _describe_lost_line(text: str, line: LostLine) -> str:
    more = ", ..." if line.tensors > len(line.examples) else ""
    return f"    {text}: {_count(line.tensors)}, {print_bytes(line.nbytes)}: {', '.join(line.examples)}{more}"


def _count(tensors: int) -> str:
    return "1 tensor" if tensors == 1 else f"{tensors} tensors"
