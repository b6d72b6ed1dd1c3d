"""`dispatch`, which runs for every op: it classifies the arguments, looks up the cached call, and runs it.

Calls that are not cached are inferred (call_inference.py); the few ops that are not instructions are in special_ops.py.
Everything in this file is a hot path.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.graph import increment_version

from gt.client import active_session
from gt.client.cached_calls import CachedCall, HandleType, is_normal_in_inference
from gt.client.call_inference import infer_call
from gt.client.error_text import refuse_op, require_strided, require_values
from gt.client.factory_mode import FactoryMode
from gt.client.op_schema import ArgumentKind, OpSchema
from gt.client.session import Session
from gt.client.special_ops import SPECIAL, reshape_in_place, run_on_host
from gt.client.storage import TensorRef
from gt.client.torch_patches.dispatch import OpOverload, is_tracing, tree_leaves
from gt.client.torch_patches.profiler_ranges import follow_profilers, profiler_range
from gt.core.tracebacks import leave_out_own_frames
from gt.sharding.placements import OpRequest

_TENSOR = ArgumentKind.TENSOR
_TENSORS = ArgumentKind.TENSORS
_TARGET = ArgumentKind.TARGET
_TARGETS = ArgumentKind.TARGETS
_TARGETS_OR_COPIES = ArgumentKind.TARGETS_OR_COPIES
_SCALAR = ArgumentKind.SCALAR
_SCALARS = ArgumentKind.SCALARS
_CONSTANT = ArgumentKind.CONSTANT
_DEVICE = ArgumentKind.DEVICE
_SCALAR_TYPES = frozenset((float, int, bool))
_ref_of, _key_of = attrgetter("_ref"), attrgetter("key")
_default_dtype = torch.get_default_dtype
_schemas: dict[OpOverload, OpSchema] = {}
_is_profiled = False


def dispatch(  # noqa: PLR0912  (hot path)
    cls: HandleType,
    func: OpOverload,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    request: OpRequest | None = None,
    is_named: bool = False,
) -> Any:
    """The `__torch_dispatch__` of GT tensors. `request`: what the user asks of this call. `is_named`: a recording
    profiler knows the op already."""
    if _is_profiled and not is_named:
        return _dispatch_in_range(cls, func, types, args, kwargs, request)
    try:
        op = _schemas.get(func) or schema_for(func)
        session = active_session.active or active_session.current()
        if op.is_special:
            if op.split:
                return _run_on_lists(cls, session, op, args, kwargs, request)
            if is_tracing() if op.is_untraced else request is None or not request.is_undivided:
                return _run_special(cls, op, args, kwargs or {})
        if not kwargs and len(args) <= op.leading and request is None:
            cache_key: tuple[Any, ...]
            scalars: list[Any] = []
            try:  # hot path: most calls have one or two GT tensors, or a tensor and a number, and nothing else
                if len(args) == 2:
                    first, other = args[0]._ref, args[1]
                    if type(other) in _SCALAR_TYPES:
                        scalars.append(other)
                        refs, cache_key = [first], (op, _default_dtype(), first.key, type(other))
                    else:
                        second = other._ref
                        refs, cache_key = [first, second], (op, _default_dtype(), first.key, second.key)
                elif len(args) == 1:
                    first = args[0]._ref
                    refs, cache_key = [first], (op, _default_dtype(), first.key)
                else:
                    refs = list(map(_ref_of, args))
                    cache_key = (op, _default_dtype(), *map(_key_of, refs))
            except AttributeError:
                pass
            else:
                call: CachedCall | None = session.cached_calls.get(cache_key)
                if call is None:
                    call = infer_call(session, op, args, {}, cache_key, refs)
                return call.run(cls, session, refs, scalars, args, None)
        return _classify_and_run(cls, session, op, args, kwargs, request)
    except Exception as error:
        leave_out_own_frames(error)
        raise


def _dispatch_in_range(
    cls: HandleType,
    func: OpOverload,
    types: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    request: OpRequest | None,
) -> Any:
    """Dispatch an op under a name that torch's profilers show: `gt::aten.mm.default train.py:12`."""
    sites = active_session.current().sites
    line = sites.text(sites.current(1)).rpartition("/")[2]
    with profiler_range(f"gt::{func} {line}"):
        return dispatch(cls, func, types, args, kwargs, request, is_named=True)


def _note_profiler(is_on: bool) -> None:
    global _is_profiled
    _is_profiled = is_on


def schema_for(func: OpOverload) -> OpSchema:
    """The facts about an op, read at its first use."""
    op = _schemas.get(func)
    if op is None:
        refuse_op(func)
        op = _schemas[func] = OpSchema(func, special=str(func) in SPECIAL)
    return op


def _classify_and_run(
    cls: HandleType,
    session: Session,
    op: OpSchema,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    request: OpRequest | None,
) -> Any:
    """Run a call with scalars, constants, lists of tensors, plain tensors, or tensors to write to."""
    key: list[Any] = [op, _default_dtype()]
    refs: list[TensorRef] = []
    scalars: list[Any] = []
    try:
        kinds = op.kinds
        for position, value in enumerate(args):
            kind = kinds[position]
            if kind is _TENSOR:
                try:  # hot path: nearly all of these arguments are GT tensors or scalars
                    if type(value) in _SCALAR_TYPES:
                        scalars.append(value)
                        key.append(type(value))
                        continue
                    ref = value._ref
                except AttributeError:
                    _take_plain(session, value, key, refs, scalars)
                else:
                    refs.append(ref)
                    key.append(ref.key)
            else:
                _take(session, kind, value, key, refs, scalars)
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                _take(session, op.kwarg_kinds[name], value, key, refs, scalars)
    except _NotOnWorkers:
        return _run_special(cls, op, args, kwargs or {}) if op.split else run_on_host(cls, op.func, args, kwargs or {})
    if op.writes:
        key.append(alias_pattern(refs))
    if request is not None:
        key.append(request)
    cache_key = tuple(key)
    call: CachedCall | None = session.cached_calls.get(cache_key)
    if call is None:
        call = infer_call(session, op, args, kwargs or {}, cache_key, refs, request)
    return call.run(cls, session, refs, scalars, args, kwargs)


def _run_on_lists(
    cls: HandleType,
    session: Session,
    op: OpSchema,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    request: OpRequest | None,
) -> Any:
    """Run an op on lists of tensors, and raise the versions of those that it writes to, by which autograd finds values
    that were overwritten before backward. Torch raises them for other ops, but for these only in its kernels."""
    is_whole = op.joins or session.alone or (request is not None and request.is_undivided)
    if is_whole:
        result = _classify_and_run(cls, session, op, args, kwargs, request)
    else:
        result = _run_special(cls, op, args, kwargs or {})
    if op.writes:
        increment_version([each for each in _written_in_lists(op, args, kwargs or {}) if not each.is_inference()])
    return result


def _written_in_lists(op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for kind, value in zip(op.kinds, args, strict=False):
        if kind is _TARGETS:
            yield from value
    for name, value in kwargs.items():
        if op.kwarg_kinds[name] is _TARGETS:
            yield from value


def _run_special(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that is not one instruction: one of special_ops.py, or one that is composed of others. A list of
    tensors is split if some of them are in this process, and for a few ops if there are several workers."""
    special = SPECIAL.get(op.name) or (reshape_in_place if op.reshapes else None)
    if special is not None:
        if op.aliases and is_normal_in_inference(args[0]):
            with torch.inference_mode(False):
                return special(cls, op, args, kwargs)
        return special(cls, op, args, kwargs)
    try:
        with FactoryMode(cls):
            return (op.split or op.decomposition)(*args, **kwargs)  # type: ignore[misc]
    except RuntimeError:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                require_strided(value)
        raise


def _take(  # noqa: PLR0912  (hot path: one branch for each kind of argument)
    session: Session, kind: ArgumentKind, value: Any, key: list[Any], refs: list[TensorRef], scalars: list[Any]
) -> None:  # fmt: skip
    """Classify one argument: a tensor, a scalar, which may change from call to call, or a constant of the cache key."""
    if kind is _TENSOR:
        _take_tensor(session, value, key, refs, scalars)
    elif kind is _SCALAR and type(value) in _SCALAR_TYPES:
        scalars.append(value)
        key.append(type(value))
    elif kind is _TARGET:
        _take_target(value, key, refs)
    elif (kind is _TENSORS or kind is _TARGETS) and value is not None:
        key.append(len(value))
        for item in value:
            if kind is _TARGETS:
                _take_target(item, key, refs)
            else:
                _take_tensor(session, item, key, refs, scalars)
    elif kind is _SCALARS and value is not None:
        key.append(tuple(map(type, value)))
        scalars.extend(value)
    elif kind is _DEVICE:
        if value is not None and value.type != "cpu":
            raise _NotOnWorkers
    elif kind is _CONSTANT or kind is _SCALAR:
        key.append(tuple(value) if type(value) is list else value)
        key.append(type(value))  # 1, 1.0 and True are equal as keys
    elif kind is _TARGETS_OR_COPIES:
        key.append(len(value))
        for item in value:
            ref = getattr(item, "_ref", None)
            _take_ref(session.upload(item) if ref is None else ref, key, refs)
    elif kind is _SCALARS or kind is _TENSORS or kind is _TARGETS:
        key.append(None)


def _take_tensor(session: Session, value: Any, key: list[Any], refs: list[TensorRef], scalars: list[Any]) -> None:
    ref = getattr(value, "_ref", None)
    if ref is None:
        _take_plain(session, value, key, refs, scalars)
    else:
        _take_ref(ref, key, refs)


def _take_target(value: Any, key: list[Any], refs: list[TensorRef]) -> None:
    ref = getattr(value, "_ref", None)
    if ref is not None:
        _take_ref(ref, key, refs)
    elif value is None:
        key.append(None)
    else:
        raise _NotOnWorkers


def _take_ref(ref: TensorRef, key: list[Any], refs: list[TensorRef]) -> None:
    refs.append(ref)
    key.append(ref.key)


def _take_plain(session: Session, value: Any, key: list[Any], refs: list[TensorRef], scalars: list[Any]) -> None:
    """A tensor argument that is no GT tensor: None, a Python number, or a plain tensor, which is uploaded."""
    if type(value) in _SCALAR_TYPES:
        scalars.append(value)
        key.append(type(value))
    elif isinstance(value, torch.Tensor):
        require_strided(value)
        require_values(value)
        _take_ref(session.upload_cache.storage_of(value), key, refs)
    else:
        key.append(value)


def alias_pattern(refs: list[TensorRef]) -> tuple[int, ...] | None:
    """For each tensor of a call, the first position with the same storage; None if all storages differ. A write to
    one changes the others."""
    if len(refs) == 1:
        return None
    first: dict[int, int] = {}
    pattern = tuple([first.setdefault(id(ref.storage), position) for position, ref in enumerate(refs)])
    return None if len(first) == len(refs) else pattern


class _NotOnWorkers(Exception):
    """The op writes to a plain tensor, or its result goes to a device of this process: it must run in this process."""


follow_profilers(_note_profiler)
