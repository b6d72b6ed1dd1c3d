"""Infers the call of an op that is not cached: its signature, and the geometries of its results by torch's shape
functions or by shape rules.

If the shape function is missing, cannot tell the shape, which depends on data, or raises, the call is a query: a worker
runs it and the client waits, so that a wrong call raises torch's own error on the user's line.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch

from gt.client.cached_calls import (
    CachedCall,
    HandleType,
    MultiResultCall,
    QueryCall,
    Rebuild,
    Returned,
    SingleResultCall,
    ViewCall,
    WriteCall,
)
from gt.client.call_log import BY_GT, BY_RULE, BY_TORCH, BY_WORKER
from gt.client.call_template import LIST_KINDS, CallTemplate
from gt.client.factory_mode import FactoryMode
from gt.client.kernel_checks import MayBeRefused, check_arguments, check_overlaps
from gt.client.kernel_strides import run_shape_function
from gt.client.op_schema import ArgumentKind, OpSchema
from gt.client.resizing import ResizingCall
from gt.client.rule_inference import InferredResults, RuledCall
from gt.client.session import Session
from gt.client.shape_function_overrides import SHAPE_FUNCTIONS
from gt.client.storage import (
    CONJUGATE,
    NEGATE,
    Geometry,
    TensorRef,
    geometry_of,
    intern_geometry,
    is_lazy,
    reinterpreted,
    storage_elements,
)
from gt.client.torch_patches.avoided_imports import keep_dynamo_out
from gt.client.torch_patches.dispatch import has_kernel, schema_of, tree_flatten, tree_unflatten, unintercepted
from gt.client.torch_patches.tensors import negative_view
from gt.core.errors import SessionError
from gt.core.signatures import ViewStep
from gt.sharding.placements import OpRequest

_TENSOR_KINDS = (ArgumentKind.TENSOR, ArgumentKind.TARGET)
_LAZY_KEYS = {CONJUGATE: "Conjugate", NEGATE: "Negative"}  # dispatch keys of kernels that take lazy operands
_ATTEMPTS = 3
UNKNOWN_INSIDE = (
    "{} was issued in the middle of GT's own work (in a signal handler or a finalizer), and its result cannot be "
    "inferred there; let it set a flag, and issue the op when the program goes on"
)
_inferring: dict[int, int] = {}  # calls inferred in the middle of the one that a thread infers, by thread

keep_dynamo_out()


class UnknownResult(Exception):
    """Only a worker can tell the result of a call, or whether it is valid: the call becomes a query."""


class UncachedCall(NamedTuple):
    """A call of an op that is not cached: `refs` are its tensors, `request` what the user asks of it."""

    session: Session
    op: OpSchema
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: tuple[Any, ...]
    refs: list[TensorRef]
    request: OpRequest | None

    def template(self) -> CallTemplate:
        return CallTemplate(self.op, self.args, self.kwargs, self.refs, self.request)


class SplitCall:
    """An op on lists of tensors, of which a written one shares memory with another: one tensor after another."""

    __slots__ = ("op",)

    def __init__(self, op: OpSchema) -> None:
        self.op = op

    def run(
        self, cls: HandleType, session: Session, refs: list[TensorRef], scalars: list[Any], args: Any, kwargs: Any
    ) -> Any:
        with FactoryMode(cls):
            return self.op.split(*args, **kwargs or {})  # type: ignore[misc]


@unintercepted
def infer_call(
    session: Session,
    op: OpSchema,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    key: tuple[Any, ...],
    refs: list[TensorRef],
    request: OpRequest | None = None,
) -> CachedCall:
    """Make the cached call of an op with these arguments. A signal handler or a finalizer may issue an op in the middle
    of this. That op is inferred too, if torch can do it: torch may be in the middle of importing a module."""
    for ref in refs:
        if ref.session is not session:
            ref.session.require_open()
            raise SessionError("this tensor belongs to another session than the one that is active")
    new = UncachedCall(session, op, args, kwargs, key, refs, request)
    thread = get_ident()
    if thread in _inferring:
        _inferring[thread] += 1
        try:
            return _infer(new)
        except UnknownResult as error:
            raise SessionError(UNKNOWN_INSIDE.format(op.name)) from error
    _inferring[thread] = 0
    try:
        return _infer_outside(new)
    finally:
        del _inferring[thread]


def _infer_outside(new: UncachedCall) -> CachedCall:
    """The call of an op that the program issues: a query if torch cannot infer it. If another op was inferred in the
    middle, torch may have failed because of that, and is asked again."""
    for _ in range(_ATTEMPTS):
        others = _inferring[get_ident()]
        try:
            return _infer(new)
        except UnknownResult as unknown:
            if others == _inferring[get_ident()]:
                if new.op.split and new.op.writes and isinstance(unknown.__cause__, MayBeRefused):
                    new.session.cache_call(new.key, SplitCall(new.op))
                    return SplitCall(new.op)
                if not (new.session.computes or new.op.returns_python):  # a Python value depends on values anyway
                    _raise_if_invalid(unknown)
                break
    call = _query_call(new, new.template())
    _keep(new, call, BY_WORKER)
    return call


def _raise_if_invalid(unknown: UnknownResult) -> None:
    """Raise torch's error if its shape function refuses the arguments of a call, and not just lacks their values. With
    workers, one of them says whether a call is valid."""
    cause = unknown.__cause__
    if isinstance(cause, RuntimeError | ValueError | IndexError | TypeError) and not isinstance(
        cause, NotImplementedError
    ):
        raise cause from None


def _infer(new: UncachedCall) -> CachedCall:
    """The call of an op, by its rule or by torch. Raises UnknownResult."""
    session, op, refs = new.session, new.op, new.refs
    ruled = session.rule_inference.apply_rule(op, new.args, new.kwargs, new.key, refs)
    known = None if ruled is None else session.rule_inference.infer(ruled)
    template = new.template()
    if known is not None:
        call = _functional_call(session, op, template, refs, known)
    else:
        call = _inferred_call(new, template, ruled)
    _keep(new, call, BY_RULE if known is not None else BY_GT if op.name in SHAPE_FUNCTIONS else BY_TORCH)
    return call


def _keep(new: UncachedCall, call: CachedCall, inferred_by: str) -> None:
    new.session.cache_call(new.key, call)
    if new.session.call_log is not None:
        new.session.call_log.note_inferred(new.op.name, new.refs, call, inferred_by)


def _query_call(new: UncachedCall, template: CallTemplate) -> QueryCall:
    """A call that waits for a worker. If only its geometries were unknown, the first answer replaces it by one that
    does not wait."""
    session, op, key = new.session, new.op, new.key
    returned = _returned(op, _structure(op))

    def cache_inferred(outputs: list[Geometry | None]) -> None:
        """Replace the query by a call that does not wait, as the geometries are known now."""
        op_id = session.define(template.signature(op, outputs))
        present = tuple(output for output in outputs if output is not None)
        restore = _returned(op, lambda values: _structure(op)(_with_gaps(outputs, values)))
        session.cache_call(key, WriteCall(op_id, present, template.writes, restore, template.random))
        session.asked.add(key)

    op_id = session.define(template.signature(op, ()))
    on_geometries = cache_inferred if op.needs_worker_shape else None
    return QueryCall(op_id, template.writes, returned, template.random, on_geometries)


def _inferred_call(new: UncachedCall, template: CallTemplate, ruled: RuledCall | None) -> CachedCall:
    """The call by torch's shape function. Raises UnknownResult. `ruled`: the same call by its rule, to be compared."""
    session, op, args, kwargs, _, refs, _ = new
    if op.needs_worker_shape and not _is_same_everywhere(op, args, kwargs, refs):
        if session.computes:
            raise UnknownResult
        session.assumed.add(op.name)  # no device tells the shapes, so torch's are taken
    result, resized = infer_result(op, args, kwargs, refs, session.on_cpu)
    reshaped = {at: found for at, found in resized.items() if found.shape != refs[at].geometry.shape}
    has_out = any(argument.is_out for argument in schema_of(op.func).arguments)
    # an op in place may not resize its target
    if has_out and any(_keeps_aliases(refs[at], found) for at, found in reshaped.items()):
        return ResizingCall(op, reshaped)
    if op.returns_python or resized:
        raise UnknownResult
    result = _apply_mask(op, args, kwargs, result)
    inferred = None if op.writes else _flat_results(op, result)
    if inferred is not None:
        if ruled is not None:
            session.rule_inference.compare(ruled, inferred)
        return _functional_call(session, op, template, refs, inferred)
    fresh = [value for value, name in zip(_as_results(op, result), op.returned, strict=False) if name is None]
    leaves, spec = tree_flatten(fresh if op.writes else result)
    geometries = [None if leaf is None else _fresh_geometry(leaf) for leaf in leaves]
    outputs = tuple(geometry for geometry in geometries if geometry is not None)
    op_id = session.define(template.signature(op, geometries))
    if op.writes:
        returned = _returned(op, lambda values: tree_unflatten(_with_gaps(leaves, values), spec))
        return WriteCall(op_id, outputs, template.writes, returned, template.random)
    return MultiResultCall(
        op_id, outputs, lambda values: tree_unflatten(_with_gaps(leaves, values), spec), template.random
    )


def _keeps_aliases(target: TensorRef, found: Geometry) -> bool:
    """Whether the target of an op can be resized before the op without a change of what its aliases show: it is a view,
    the result fits into its storage, or it has no elements, so that its aliases have none either."""
    held = storage_elements(target)
    return target is not target.storage or not held or found.storage_span() <= held


def _flat_results(op: OpSchema, result: Any) -> InferredResults | None:
    """The results of an op that writes nothing; None if they are nested."""
    several = list if isinstance(result, list) else tuple if isinstance(result, tuple) else None
    values = list(result) if several else [result]
    if not all(value is None or isinstance(value, torch.Tensor) for value in values):
        return None
    geometry = geometry_of if op.aliases else _fresh_geometry
    return InferredResults(several, tuple(None if value is None else geometry(value) for value in values))


def _functional_call(
    session: Session, op: OpSchema, template: CallTemplate, refs: Sequence[TensorRef], inferred: InferredResults
) -> CachedCall:
    """The call of an op that writes nothing."""
    container, geometries = inferred
    if op.aliases:
        return _view_call(op, template, refs[0], inferred)
    op_id = session.define(template.signature(op, geometries))
    outputs = tuple(geometry for geometry in geometries if geometry is not None)
    if container is None:
        return SingleResultCall(op_id, outputs[0], template.random)
    rebuild = container if None not in geometries else lambda values: tuple(_with_gaps(geometries, values))
    return MultiResultCall(op_id, outputs, rebuild, template.random)


def _apply_mask(op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """The results of a backward op, with None in place of gradients that its mask excludes. Torch's kernels and
    its shape functions differ in which of those they give."""
    if op.mask < 0:
        return result
    mask = args[op.mask] if op.mask < len(args) else kwargs[schema_of(op.func).arguments[op.mask].name]
    return tuple(value if asked else None for value, asked in zip(result, mask, strict=True))


def _is_same_everywhere(op: OpSchema, args: Sequence[Any], kwargs: dict[str, Any], refs: Sequence[TensorRef]) -> bool:
    """Whether an op whose results may differ by device gives the same geometries on every device in this call."""
    if any(ref.geometry.dtype not in (torch.float32, torch.float64) for ref in refs):
        return False
    given = dict(zip(op.kwarg_kinds, args, strict=False)) | kwargs
    return op.differs_only_in_half or (op.differs_in_evaluation and bool(given["training"]))


def infer_result(
    op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any], refs: list[TensorRef], on_cpu: bool
) -> tuple[Any, dict[int, Geometry]]:
    """The result of an op for tensors without bytes, and the new geometries of the inputs that it resizes, by position.
    Raises UnknownResult if its kernel may give another result; `on_cpu`: the workers have the same kernels as this
    process."""
    metas = _MetaArguments(refs, op)
    meta_args = [metas.argument(kind, value) for kind, value in zip(op.kinds, args, strict=False)]
    meta_kwargs = {name: metas.argument(op.kwarg_kinds[name], value) for name, value in kwargs.items()}
    meta_kwargs.pop("pin_memory", None)
    if "device" in op.kwarg_kinds and not refs:
        meta_kwargs["device"] = torch.device("meta")
    try:
        own = SHAPE_FUNCTIONS.get(op.name)
        result = run_shape_function(op.func, meta_args, meta_kwargs) if own is None else own(*meta_args, **meta_kwargs)
        check_arguments(op, meta_args, meta_kwargs, result, on_cpu)
        check_overlaps(op, refs, metas.written)
    except Exception as error:
        raise UnknownResult from error
    written = {position: geometry_of(meta) for position, meta in metas.written.items()}
    return result, {position: found for position, found in written.items() if found is not refs[position].geometry}


class _MetaArguments:
    """Replaces GT tensors among the arguments of a call by tensors without bytes; `written` are those that the op
    writes to, by position. Lazily conjugated or negated operands are copied, as torch copies them, except for ops that
    make views and ops with kernels for lazy operands. A class and not a nested function: a function that calls itself
    is a reference cycle, which would keep the call's tensors until the next collection."""

    def __init__(self, refs: list[TensorRef], op: OpSchema) -> None:
        self.written: dict[int, torch.Tensor] = {}
        self._op = op
        self._remaining = enumerate(refs)

    def argument(self, kind: ArgumentKind, value: Any) -> Any:
        """An argument without GT tensors, generators and devices of this process."""
        if kind in LIST_KINDS and value is not None:
            inner = ArgumentKind.TENSOR if kind is ArgumentKind.TENSORS else ArgumentKind.TARGET
            return [self.argument(inner, item) for item in value]
        if kind in _TENSOR_KINDS and isinstance(value, torch.Tensor):
            return self._tensor(kind, *next(self._remaining))
        return (
            None if kind is ArgumentKind.GENERATOR else torch.device("meta") if kind is ArgumentKind.DEVICE else value
        )

    def _tensor(self, kind: ArgumentKind, position: int, ref: TensorRef) -> torch.Tensor:
        meta = ref.geometry.on_meta()
        if kind is ArgumentKind.TARGET:
            self.written[position] = meta
        elif is_lazy(ref):
            return self._lazy(meta, reinterpreted(ref))
        return meta

    def _lazy(self, meta: torch.Tensor, ops: Sequence[str]) -> torch.Tensor:
        taken = all(has_kernel(self._op.func, _LAZY_KEYS[op]) for op in ops)
        if not (taken or self._op.aliases):
            return meta.clone()
        meta = meta.conj() if CONJUGATE in ops else meta
        return negative_view(meta) if NEGATE in ops else meta


def _as_results(op: OpSchema, result: Any) -> list[Any]:
    return list(result) if len(op.returned) > 1 else [result]


def _fresh_geometry(tensor: torch.Tensor) -> Geometry:
    """The geometry of a new tensor, which has its own storage even if torch's shape function gave a view."""
    if tensor.layout is not torch.strided:
        raise UnknownResult
    return intern_geometry(tensor.shape, tensor.stride(), 0, tensor.dtype)


def _view_call(op: OpSchema, template: CallTemplate, ref: TensorRef, inferred: InferredResults) -> ViewCall:
    source, container = ref.geometry, inferred.container
    outputs = tuple(output for output in inferred.geometries if output is not None)
    metas = tuple(output.meta() for output in outputs)
    steps = tuple(
        ViewStep(op.name, template.args[1:], template.kwargs, None if container is None else pick, None, metas)
        for pick in range(len(outputs))
    )
    same = container is None and outputs[0] is source and not op.reinterprets
    strided = not op.reinterprets and all(output.dtype is source.dtype for output in outputs)
    lazy = op.reinterprets or is_lazy(ref)
    return ViewCall(steps, outputs, container, same, strided, lazy)


def _with_gaps(leaves: Sequence[object], values: Sequence[Any]) -> list[Any]:
    """Values in the positions of leaves, None in the positions of None."""
    remaining = iter(values)
    return [None if leaf is None else next(remaining) for leaf in leaves]


def _structure(op: OpSchema) -> Rebuild:
    """A function that gives the flat results of a query the structure of the op's return value."""
    if op.returns_list:
        return lambda values: [values]
    return list


def _returned(op: OpSchema, restore: Rebuild) -> Returned:
    """A function that returns results in the schema's order: new tensors by `restore`, and written arguments as the
    caller's own objects."""
    names = [argument.name for argument in schema_of(op.func).arguments]

    def returned(values: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fresh = iter(restore(values))
        given = dict(zip(names, args, strict=False)) | kwargs
        results = [next(fresh, None) if name is None else given[name] for name in op.returned]
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    return returned
