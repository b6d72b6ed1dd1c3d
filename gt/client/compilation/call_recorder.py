"""Records the instructions that one call of a function emits, for `gt.compile`.

While the function runs, a CallRecorder is the outbox of its session: it notes each instruction and passes it on. It
refuses instructions that cannot be repeated without the function, such as reads, on the line of the program that issues
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from types import TracebackType
from typing import Any, NamedTuple, get_args
from weakref import ref as WeakRef  # noqa: N812

import torch
from msgspec import structs
from torch.nn.modules.module import register_module_forward_pre_hook

from gt.client import cached_calls, scope_stack
from gt.client.op_schema import OpSchema
from gt.client.outbox import BuildInstruction, Outbox
from gt.client.session import Session
from gt.client.storage import Storage, TensorRef
from gt.client.torch_patches.dispatch import current_function_modes
from gt.client.transfers import UploadCache
from gt.core.errors import CompileError
from gt.core.message_fields import id_fields
from gt.core.messages import (
    BeginStep,
    CreateTensor,
    DefineOp,
    DefineScope,
    DefineSite,
    EndStep,
    ForgetOps,
    FreeTensors,
    Instruction,
    ProgramStep,
    Queried,
    QueryOp,
    Redistribute,
    Synchronize,
)
from gt.wire.client_channel import Upload

RECORDED = (*get_args(ProgramStep), Redistribute, BeginStep, EndStep)
_NOT_RECORDED = (DefineOp, DefineScope, DefineSite, ForgetOps, FreeTensors, Synchronize)


class CollectedTensor(NamedTuple):
    """A tensor that was collected when `position` instructions had been emitted."""

    position: int
    id: int
    nbytes: int


class KeyDraw(NamedTuple):
    """A random key that `generator`, in `state`, gave for the instruction at `position`."""

    position: int
    generator: torch.Generator
    state: torch.Tensor


class Recording:
    """The instructions of one call, and the tensors that they name.

    - `externals`: the tensors that the call used and did not make, by their ids at that time
    - `made`: the tensors that the call made, by id, with the positions of the instructions that made them
    - `alive`: those of them that still exist
    - `modules`: the modules that the call has run, by id()
    - `operands`: the plain tensors that the call used, with their versions then, by the id() of the storages that they
      were uploaded to; tensors with the same content share one
    - `obstacle`: the reason why the recording cannot be repeated, or an empty text
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._outbox = session.outbox
        self.instructions: list[Instruction] = []
        self.externals: dict[int, Storage] = {}
        self.first_use: dict[int, int] = {}  # positions of instructions, by id of an external
        self.alive: dict[int, int] = {}
        self.made: dict[int, int] = {}
        self.collected: list[CollectedTensor] = []
        self.draws: list[KeyDraw] = []
        self.random_state = torch.get_rng_state()
        self.ambient = ambient_state()
        self.operands: dict[int, list[tuple[torch.Tensor, int]]] = {}
        self.modules: dict[int, WeakRef[torch.nn.Module]] = {}
        self.obstacle = ""

    def note_collected(self) -> None:
        """Note the tensors that were collected since the last instruction, and have them freed."""
        count = len(self._outbox.collected)
        for storage in list(self._outbox.collected)[:count]:
            if storage.id in self.alive:
                del self.alive[storage.id]
                self.collected.append(CollectedTensor(len(self.instructions), storage.id, storage.geometry.nbytes))
        self._outbox.pass_on(count)

    def forget_hinted(self) -> None:
        """Leave out of hints the tensors that only hints name, so that calls with other hints use the same tensors."""
        for position, each in enumerate(self.instructions):
            if each.is_hint:
                named = {name: getattr(each, name) for name in id_fields(type(each)).names}
                used = {name: tuple(filter(self._is_used, ids)) for name, ids in named.items()}
                self.instructions[position] = structs.replace(each, **used)

    def _is_used(self, ident: int) -> bool:
        return ident in self.externals or ident in self.made

    def side_effect(self) -> str | None:
        """A setting of the process that the call has changed."""
        if ambient_state() != self.ambient:
            return "it leaves torch's grad mode, default dtype, autocast, another setting or a signal scope changed"
        return None

    def line(self, position: int) -> str:
        """The line of the program that emitted an instruction."""
        site = getattr(self.instructions[position], "site", 0) if position < len(self.instructions) else 0
        return line_of(self.session, site)


def ambient_state() -> tuple[Any, ...]:
    """The settings of torch and GT that may change the instructions of a function, besides its arguments."""
    scopes = []
    frame = scope_stack.top()
    while frame is not None:
        scopes.append((frame.name, frame.backward))
        frame = frame.outer
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_anomaly_enabled(),
        tuple([(type(mode), getattr(mode, "device", None)) for mode in current_function_modes()]),
        tuple(scopes),
    )


def line_of(session: Session, site: int) -> str:
    """The file and line of a site."""
    found = session.sites.lookup(site)
    return f"{found.file}:{found.line}"


class CallRecorder:
    """Inside `with`, the outbox of a session: records the instructions of this thread, and passes on all of them."""

    def __init__(self, session: Session) -> None:
        self.recording = Recording(session)
        self._session = session
        self._outbox: Outbox = session.outbox
        self._upload_cache: UploadCache = session.upload_cache
        self._thread = get_ident()
        self._is_operand = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outbox, name)

    def __enter__(self) -> Recording:
        session = self._session
        session.is_traced = True
        session.outbox = self  # type: ignore[assignment]
        session.upload_cache = _RecordedUploads(self, self._upload_cache)  # type: ignore[assignment]
        cached_calls.before_draw, cached_calls.after_query = self._note_draw, self._refuse_query
        self._module_hook = register_module_forward_pre_hook(self._note_module)
        self._outbox.hold_collected()
        self._outbox.pass_on(len(self._outbox.collected))
        return self.recording

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        session = self._session
        cached_calls.before_draw = cached_calls.after_query = None
        self._module_hook.remove()
        self._outbox.free_collected()
        session.outbox, session.upload_cache, session.is_traced = self._outbox, self._upload_cache, False

    # The interface of the outbox

    def emit(self, instruction: Instruction) -> None:
        if get_ident() == self._thread:
            self.recording.note_collected()
            self._check(instruction)
            self._note(instruction)
        self._outbox.emit(instruction)

    def submit(
        self,
        build: BuildInstruction,
        refs: Sequence[TensorRef],
        written: Sequence[Storage] = (),
        new_ids: Sequence[int] = (),
    ) -> Any:
        if get_ident() != self._thread:
            return self._outbox.submit(build, refs, written, new_ids)

        def noted(ids: tuple[int, ...]) -> Any:  # with the outbox's lock held
            self.recording.note_collected()
            instruction = build(ids)
            self._check(instruction)
            if not instruction.is_hint:
                self._note_uses(refs)
            for storage in written:
                self.recording.alive.pop(storage.id, None)
            self._note(instruction)
            return instruction

        return self._outbox.submit(noted, refs, written, new_ids)

    def emit_upload(self, instruction: CreateTensor, upload: Upload, at_once: bool) -> None:
        if get_ident() == self._thread and not self._is_operand:
            raise CompileError(self._refusal("uploads data to GT", "upload it before the call and pass it as argument"))
        self._outbox.emit_upload(instruction, upload, at_once)

    # Notes

    def _note_uses(self, refs: Sequence[TensorRef]) -> None:
        recording = self.recording
        for ref in refs:
            storage = ref.storage
            if storage.id not in recording.made and storage.id not in recording.externals:
                recording.externals[storage.id] = storage
                recording.first_use[storage.id] = len(recording.instructions)

    def _note(self, instruction: Instruction) -> None:
        recording, kind = self.recording, type(instruction)
        if kind in RECORDED:
            position = len(recording.instructions)
            recording.instructions.append(instruction)
            for ident in id_fields(kind).new(instruction):
                recording.made[ident] = recording.alive[ident] = position
        elif isinstance(instruction, ForgetOps):
            recording.obstacle = "the session has forgotten its ops"
        elif isinstance(instruction, QueryOp):
            recording.obstacle = "a worker was asked for the shapes of an op"

    def _note_draw(self, generator: torch.Generator | None) -> None:
        if get_ident() != self._thread:
            return
        drawn = generator or torch.default_generator
        self.recording.draws.append(KeyDraw(len(self.recording.instructions), drawn, drawn.get_state()))

    def _note_module(self, module: torch.nn.Module, _: Any) -> None:
        if get_ident() == self._thread:
            self.recording.modules[id(module)] = WeakRef(module)

    def operand(self, tensor: torch.Tensor) -> Storage:
        """The upload of a plain tensor that an op of the call uses."""
        if get_ident() != self._thread:
            return self._upload_cache.storage_of(tensor)
        self._is_operand = True
        try:
            storage = self._upload_cache.storage_of(tensor)
        finally:
            self._is_operand = False
        version = 0 if tensor.is_inference() else tensor._version
        self.recording.operands.setdefault(id(storage), []).append((tensor, version))
        return storage

    # Refusals

    def _check(self, instruction: Instruction) -> None:
        if isinstance(instruction, (*RECORDED, *_NOT_RECORDED, QueryOp)):
            return
        raise CompileError(
            self._refusal("reads a value from the workers", "return the tensor and read it after the call")
        )

    def _refuse_query(self, query: QueryOp, _: Queried) -> None:
        """Refuse an op that waits for a worker in each call. A wrong call is a query too, whose answer is torch's own
        error: so a query is refused after its answer."""
        op = self._session.signatures[query.op_id].op
        if get_ident() == self._thread and not _only_first_time(op):
            raise CompileError(self._refusal(f"waits for the result of {op}", "its shape depends on data"))

    def _refusal(self, action: str, remedy: str) -> str:
        line = line_of(self._session, self._session.sites.current())
        return f"{line}: a function of gt.compile {action}, which a call that skips the function could not do; {remedy}"


class _RecordedUploads:
    """The upload cache of a session while a call is recorded."""

    def __init__(self, recorder: CallRecorder, upload_cache: UploadCache) -> None:
        self._recorder = recorder
        self._upload_cache = upload_cache

    def storage_of(self, tensor: torch.Tensor) -> Storage:
        return self._recorder.operand(tensor)

    def forget(self) -> None:
        self._upload_cache.forget()


def _only_first_time(op: str) -> bool:
    """Whether an op waits for a worker in its first call only."""
    namespace, name, overload = op.split(".")
    func = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return OpSchema(func, special=False).needs_worker_shape
