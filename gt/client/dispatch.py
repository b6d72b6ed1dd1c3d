"""The one door of every op: arguments in, an instruction out, handles back.

The work is split by how often it happens. `dispatch` runs for every op and only looks things up; `infer_call` runs
once for every combination of op, shapes and constants (infer.py); the few ops that are not instructions are in
special_ops.py.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

from gt.client import session as sessions
from gt.client.call_cache import CachedCall, HandleType
from gt.client.factory_mode import FactoryMode
from gt.client.infer import infer_call
from gt.client.op_schema import Kind, OpSchema
from gt.client.session import Session
from gt.client.special_ops import SPECIAL, run_on_host
from gt.client.storage import Node
from gt.client.torch_patches.op_registry import OpOverload
from gt.client.torch_patches.pytree import tree_leaves
from gt.client.tracebacks import leave_out_own_frames
from gt.client.unsupported import refuse_op, require_strided
from gt.sharding.placements import Layout

_TENSOR, _TENSORS, _TARGET, _TARGETS, _COPIES = Kind.TENSOR, Kind.TENSORS, Kind.TARGET, Kind.TARGETS, Kind.COPIES
_NUMBER, _NUMBERS, _CONSTANT, _DEVICE = Kind.NUMBER, Kind.NUMBERS, Kind.CONSTANT, Kind.DEVICE
_PLAIN_NUMBERS = frozenset((float, int, bool))
_node_of, _key_of = attrgetter("_node"), attrgetter("key")
_default_dtype = torch.get_default_dtype
_records: dict[OpOverload, OpSchema] = {}


def dispatch(
    cls: HandleType,
    func: OpOverload,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    layout: Layout | None = None,
) -> Any:
    """What `__torch_dispatch__` does. `layout`: how a factory's result should be laid out."""
    try:
        record = _records.get(func)
        if record is None:
            refuse_op(func)
            record = _records[func] = OpSchema(func, special=str(func) in SPECIAL)
        session = sessions.active or sessions.current()
        if record.is_special and not (record.split and session.alone):
            return _detour(cls, record, args, kwargs or {})
        if not kwargs and len(args) <= record.leading and layout is None:
            known: tuple[Any, ...]
            try:  # most calls have nothing but our own tensors, one or two of them: by hand, since this is hot
                if len(args) == 2:
                    first, second = args[0]._node, args[1]._node
                    nodes, known = [first, second], (record, _default_dtype(), first.key, second.key)
                elif len(args) == 1:
                    first = args[0]._node
                    nodes, known = [first], (record, _default_dtype(), first.key)
                else:
                    nodes = list(map(_node_of, args))
                    known = (record, _default_dtype(), *map(_key_of, nodes))
            except AttributeError:
                pass
            else:
                entry: CachedCall | None = session.memo.get(known)
                if entry is None:
                    entry = infer_call(session, record, args, {}, known, nodes)
                return entry.run(cls, session, nodes, [], args, None)
        return _sort_and_run(cls, session, record, args, kwargs, layout)
    except Exception as error:
        leave_out_own_frames(error)
        raise


def _sort_and_run(
    cls: HandleType,
    session: Session,
    record: OpSchema,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    layout: Layout | None,
) -> Any:
    """A call with numbers, constants, lists of tensors, tensors that are not ours, or tensors to write to."""
    key: list[Any] = [record, _default_dtype()]
    nodes: list[Node] = []
    numbers: list[Any] = []
    try:
        kinds = record.kinds
        for place, value in enumerate(args):
            kind = kinds[place]
            if kind is _TENSOR:
                try:  # our own tensors are nearly always what is here, or numbers
                    if type(value) in _PLAIN_NUMBERS:
                        numbers.append(value)
                        key.append(type(value))
                        continue
                    node = value._node
                except AttributeError:
                    _take_foreign(session, value, key, nodes, numbers)
                else:
                    nodes.append(node)
                    key.append(node.key)
            else:
                _take(session, kind, value, key, nodes, numbers)
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                _take(session, record.kwarg_kinds[name], value, key, nodes, numbers)
    except _NotOnWorkers:
        return run_on_host(cls, record.func, args, kwargs or {})
    if record.writes:
        key.append(_sharing(nodes))
    if layout is not None:
        key.append(layout)
    known = tuple(key)
    entry: CachedCall | None = session.memo.get(known)
    if entry is None:
        entry = infer_call(session, record, args, kwargs or {}, known, nodes, layout)
    return entry.run(cls, session, nodes, numbers, args, kwargs)


def _detour(cls: HandleType, record: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ops that are not one instruction: those of special_ops.py, and those that are made of others. A list of tensors
    is split where there are several workers, since its tensors may be on different ones."""
    special = SPECIAL.get(record.name) or (SPECIAL["reshape in place"] if record.reshapes else None)
    if special is not None:
        return special(cls, record, args, kwargs)
    try:
        with FactoryMode(cls):
            return (record.split or record.decomposition)(*args, **kwargs)  # type: ignore[misc]
    except RuntimeError:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                require_strided(value)
        raise


def _take(  # noqa: PLR0912  (hot path: one branch for each kind of argument)
    session: Session, kind: Kind, value: Any, key: list[Any], nodes: list[Node], numbers: list[Any]
) -> None:  # fmt: skip
    """Sort one argument: a tensor, a number that may change, or a constant of the memo key."""
    if kind is _TENSOR:
        _take_tensor(session, value, key, nodes, numbers)
    elif kind is _NUMBER and type(value) in _PLAIN_NUMBERS:
        numbers.append(value)
        key.append(type(value))
    elif kind is _TARGET:
        _take_target(value, key, nodes)
    elif (kind is _TENSORS or kind is _TARGETS) and value is not None:
        key.append(len(value))
        for item in value:
            if kind is _TARGETS:
                _take_target(item, key, nodes)
            else:
                _take_tensor(session, item, key, nodes, numbers)
    elif kind is _NUMBERS and value is not None:
        key.append(tuple(map(type, value)))
        numbers.extend(value)
    elif kind is _DEVICE:
        if value is not None and value.type != "cpu":
            raise _NotOnWorkers
    elif kind is _CONSTANT or kind is _NUMBER:
        key.append(tuple(value) if type(value) is list else value)
        key.append(type(value))  # 1, 1.0 and True are equal as keys
    elif kind is _COPIES:
        key.append(len(value))
        for item in value:
            node = getattr(item, "_node", None)
            _take_node(session.upload(item) if node is None else node, key, nodes)
    elif kind is _NUMBERS or kind is _TENSORS or kind is _TARGETS:
        key.append(None)


def _take_tensor(session: Session, value: Any, key: list[Any], nodes: list[Node], numbers: list[Any]) -> None:
    node = getattr(value, "_node", None)
    if node is None:
        _take_foreign(session, value, key, nodes, numbers)
    else:
        _take_node(node, key, nodes)


def _take_target(value: Any, key: list[Any], nodes: list[Node]) -> None:
    node = getattr(value, "_node", None)
    if node is not None:
        _take_node(node, key, nodes)
    elif value is None:
        key.append(None)
    else:
        raise _NotOnWorkers


def _take_node(node: Node, key: list[Any], nodes: list[Node]) -> None:
    nodes.append(node)
    key.append(node.key)


def _take_foreign(session: Session, value: Any, key: list[Any], nodes: list[Node], numbers: list[Any]) -> None:
    """A tensor argument that is not ours: None, a Python number, or a plain tensor, which is uploaded."""
    if type(value) in _PLAIN_NUMBERS:
        numbers.append(value)
        key.append(type(value))
    elif isinstance(value, torch.Tensor):
        require_strided(value)
        _take_node(session.constant(value), key, nodes)
    else:
        key.append(value)


def _sharing(nodes: list[Node]) -> tuple[int, ...] | None:
    """Which tensors of the call are of the same storage, where any are: a write to one changes the others."""
    if len(nodes) == 1:
        return None
    first: dict[int, int] = {}
    pattern = tuple([first.setdefault(id(node.base), position) for position, node in enumerate(nodes)])
    return None if len(first) == len(nodes) else pattern


class _NotOnWorkers(Exception):
    """The op writes into a plain tensor, or its result goes to a device of this process: it must run here."""
