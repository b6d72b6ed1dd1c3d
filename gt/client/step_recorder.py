"""Records the instruction stream of steps of a program, and the modules that the steps go through, for `gt.auto_shard`.

The program is an ordinary function: while it runs, hooks note where modules begin and end, and the recorder is the
outbox of the session, which notes the tensors that instructions name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from gt.client import active_session, cached_calls
from gt.client.compilation.compiled_function import CompiledFunction
from gt.client.model_layout import apply_hooks, hook_all_gathers, unhook
from gt.client.outbox import BuildInstruction, Outbox
from gt.client.session import Session
from gt.client.session_reads import locate
from gt.client.storage import Storage, TensorRef
from gt.client.tensor import Tensor, to_gt
from gt.client.torch_patches.dispatch import tree_leaves, tree_map
from gt.core.errors import SessionError
from gt.core.messages import CreateTensor, Instruction, Queried, QueryOp, RunOp
from gt.core.meta import TensorMeta
from gt.core.signatures import PolicyRecord
from gt.sharding.solver.recorded_program import ENTER, GRADIENT, INPUT, LEAVE, OUTPUT, ModuleMark, RecordedSteps
from gt.sharding.spec import ShardingSpec
from gt.wire.client_channel import Upload

_DEPTH = 4  # levels of containers and of attributes of the program's own objects that are searched


class StepObjects(NamedTuple):
    """The `model`, the optimizers and the tensors of a step."""

    model: torch.nn.Module
    optimizers: tuple[Optimizer, ...]
    tensors: tuple[Tensor, ...]


def find_step_objects(
    step: Callable[..., Any], args: Sequence[Any], model: torch.nn.Module | None = None
) -> StepObjects:
    """The objects of a step. Raises SessionError unless it has one model."""
    found: dict[int, Any] = {}
    for root in (model, step, *args):
        _visit(root, found, _DEPTH)
    modules = [value for value in found.values() if isinstance(value, torch.nn.Module)]
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    roots = [model] if model is not None else [module for module in modules if id(module) not in inner]
    if len(roots) != 1:
        names = ", ".join(type(root).__name__ for root in roots)
        raise SessionError(
            f"gt.auto_shard has to know the model of the step, and {step!r} uses {names or 'none that was found'}; "
            "name it with model=, or put several into one torch.nn.Module"
        )
    optimizers = [value for value in found.values() if isinstance(value, Optimizer)]
    tensors = [value for value in found.values() if isinstance(value, Tensor)]
    return StepObjects(roots[0], tuple(optimizers), tuple(tensors))


def _visit(value: Any, found: dict[int, Any], depth: int) -> None:
    if id(value) in found or depth < 0:
        return
    if isinstance(value, torch.nn.Module | Optimizer | torch.Tensor):
        found[id(value)] = value
        return
    for inside in _inside(value):
        _visit(inside, found, depth - 1)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set):
        return value
    if isinstance(value, CompiledFunction):
        return (value.__wrapped__, value._state)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if inspect.ismethod(value):
        return (value.__self__, value.__func__)
    if inspect.isfunction(value):
        return _used_by(value)
    own = getattr(value, "__dict__", None)
    is_own = type(value).__module__.partition(".")[0] not in ("torch", "gt", "builtins") and not inspect.ismodule(value)
    return list(own.values()) if isinstance(own, dict) and is_own and not inspect.isclass(value) else ()


def _used_by(function: Any) -> Iterator[Any]:
    """What the code of a function names."""
    if hasattr(function, "__wrapped__"):
        yield function.__wrapped__
    yield from function.__defaults__ or ()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    names = set(function.__code__.co_names)
    yield from [value for name, value in function.__globals__.items() if name in names]


STEPS = 2  # the first one creates the optimizer's state, the second one is like all that follow
MAX_INSTRUCTIONS = 1 << 22


def record_steps(step: Callable[..., Any], args: Sequence[Any], objects: StepObjects) -> RecordedSteps:
    """Run a step a few times and record it. Raises SessionError with the line, in a session that computes nothing, if
    the step reads a value."""
    session = active_session.current()
    if session.embedded:
        raise SessionError(
            "a program with one worker has no layouts to choose; start more with gt.init(workers=8, mode='shapes')"
        )
    parameters = {name: tensor for name, tensor in _named_tensors(objects.model) if isinstance(tensor, Tensor)}
    if not parameters:
        raise SessionError("the model of the step is not on GT; move it with gt.to(model) before gt.auto_shard")
    states = dict(_states(objects.optimizers))
    known = [*parameters.values(), *objects.tensors, *[state for state, _ in states.values()]]
    layouts = {ref.id: locate(ref) for ref in _storages(session, known)}
    named = {name: tensor._ref.storage.id for name, tensor in parameters.items()}
    before = {ident: parameter._ref.storage.id for ident, (_, parameter) in states.items()}
    for key in session.asked:  # the first step asks again, as in a run
        session.cached_calls.pop(key, None)
    recorder = _Recorder(session)
    with recorder, _hooked(objects.model, recorder):
        for _ in range(STEPS):
            recorder.begin_step()
            step(*args)
    return recorder.finish(layouts, named, before, _owners(objects.model))


def require_known_memory(steps: RecordedSteps) -> None:
    """Raise SessionError if an op gives results whose sizes only a worker knows, in a session that has none."""
    assumed = active_session.current().assumed
    for run in [each for each in steps.instructions if isinstance(each, RunOp)]:
        op = steps.signatures[run.op_id].op
        if op in assumed:
            raise SessionError(
                f"{steps.sites[run.site]}: only workers know how much memory {op} takes, and there are none, so no "
                "plan can promise to stay within memory=; plan in a session with workers, as "
                "gt.init(workers=4, mode='virtual') starts, or without memory="
            )


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _owners(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """The names of the parameters and buffers that each module itself has."""
    found: dict[str, tuple[str, ...]] = {}
    for name, part in model.named_modules():
        prefix = f"{name}." if name else ""
        own = [key for key, _ in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))]
        if own:
            found[name] = tuple([prefix + key for key in own])
    return found


def _states(optimizers: Sequence[Optimizer]) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """The tensors of optimizers' state that are like their parameter, by id, with the parameter."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor) and isinstance(parameter, Tensor) and value.shape == parameter.shape:
                    yield value._ref.storage.id, (value, parameter)


def _scopes(session: Session) -> dict[int, tuple[str, PolicyRecord | None]]:
    known = session.scope_resolver.scope_ids if session.scope_resolver is not None else {}
    return {ident: (name, policy) for (name, policy, _), ident in known.items()}


def _storages(session: Session, tensors: Sequence[Tensor]) -> list[Storage]:
    found = {tensor._ref.storage.id: tensor._ref.storage for tensor in tensors if tensor._ref.session is session}
    return list(found.values())


class _Recorder:
    """Replaces a session's outbox inside `with`: notes the tensors that instructions name, and passes these on."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._outbox: Outbox = session.outbox
        self._metas: dict[int, TensorMeta] = {}
        self._marks: list[ModuleMark] = []
        self._starts: list[tuple[int, int]] = []
        self._instructions: list[Instruction] = []
        self._answers: dict[int, Queried] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outbox, name)

    def __enter__(self) -> _Recorder:
        self._session.outbox = self  # type: ignore[assignment]
        self._session.is_traced = True
        cached_calls.after_query = self._note_answer
        self._outbox.flush()
        self._outbox.record_times(MAX_INSTRUCTIONS)
        return self

    def __exit__(self, *error: object) -> None:
        self._session.outbox, self._session.is_traced = self._outbox, False
        cached_calls.after_query = None
        self._outbox.flush()
        self._instructions = [instruction for _, instruction in self._outbox.take_times()]

    # The interface of the outbox

    def submit(
        self,
        build: BuildInstruction,
        refs: Sequence[TensorRef],
        written: Sequence[Storage] = (),
        new_ids: Sequence[int] = (),
    ) -> Any:
        for ref in refs:
            self._metas.setdefault(ref.storage.id, ref.storage.geometry.meta())
        return self._outbox.submit(build, refs, written, new_ids)

    def emit_upload(self, instruction: CreateTensor, upload: Upload, at_once: bool) -> None:
        self._metas[instruction.id] = instruction.meta
        self._outbox.emit_upload(instruction, upload, at_once)

    # Notes

    @property
    def _position(self) -> int:
        return len(self._outbox.queue.times)  # type: ignore[attr-defined]

    def begin_step(self) -> None:
        self._starts.append((self._position, len(self._marks)))

    def _note_answer(self, query: QueryOp, answer: Queried) -> None:
        self._answers[query.request] = answer

    def mark(self, kind: str, module: str) -> None:
        self._marks.append(ModuleMark(self._position, kind, module))

    def mark_tensor(self, kind: str, module: str, tensor: Any, *, is_upload: bool = False) -> None:
        """Note a tensor that a run places in a layout, by an instruction, unless it is uploaded in it."""
        if isinstance(tensor, Tensor) and tensor._ref.session is self._session:
            ref = tensor._ref
            steps = ref.path.steps if ref.path is not None else ()
            meta = ref.geometry.meta()
            self._metas.setdefault(ref.storage.id, ref.storage.geometry.meta())
            dead = () if is_upload else self._outbox.due_frees()
            self._marks.append(ModuleMark(self._position, kind, module, ref.storage.id, tuple(steps), meta, dead))

    def finish(
        self,
        layouts: dict[int, ShardingSpec],
        parameters: dict[str, int],
        states: dict[int, int],
        owners: dict[str, tuple[str, ...]],
    ) -> RecordedSteps:
        session = self._session
        expanded = [each for instruction in self._instructions for each in session.expand(instruction)]
        if len(expanded) != len(self._instructions):
            raise SessionError("gt.auto_shard cannot record a function of gt.compile; pass the function itself")
        self._require_known_shapes(expanded[self._starts[-1][0] :])
        sites = {site: session.sites.text(site) for site in {getattr(each, "site", 0) for each in expanded}}
        return RecordedSteps(
            tuple(expanded),
            tuple([position for position, _ in self._starts]),
            tuple([mark for _, mark in self._starts]),
            tuple(self._marks),
            dict(session.signatures),
            self._metas,
            layouts,
            parameters,
            states,
            owners,
            sites,
            _scopes(session),
            self._answers,
        )

    def _require_known_shapes(self, step: Sequence[Instruction]) -> None:
        """Raise if an op of a step gives results whose shapes only a worker knows."""
        for query in [each for each in step if isinstance(each, QueryOp)]:
            op = self._session.signatures[query.op_id].op
            raise SessionError(
                f"{self._session.sites.text(query.site)}: the result of {op} depends on values, so that no plan can "
                "know its shape; leave it out of the step that is planned"
            )


class _Hooks:
    """The hooks of one module while steps are recorded."""

    def __init__(self, recorder: _Recorder, name: str) -> None:
        self._recorder = recorder
        self._name = name

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        self._recorder.mark(ENTER, self._name)

    def note_inputs(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Note the tensors that the model is called with. Plain ones are uploaded, as if they had a layout."""
        return tree_map(self._noted_input, (args, kwargs))

    def _noted_input(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim():
            moved = to_gt(value)
            self._recorder.mark_tensor(INPUT, self._name, moved, is_upload=moved is not value)
            return moved
        return value

    def leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and not tensor._ref.storage.is_parameter:
                self._recorder.mark_tensor(OUTPUT, self._name, tensor)
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._note_gradient)
        self._recorder.mark(LEAVE, self._name)

    def _note_gradient(self, gradient: Any) -> None:
        self._recorder.mark_tensor(GRADIENT, self._name, gradient)


@contextmanager
def _hooked(model: torch.nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Inside, the modules of a model are recorded, and the configuration of signals does not lay them out."""
    unhook(model)
    with ExitStack() as stack:
        stack.callback(apply_hooks, model)
        stack.callback(unhook, model)
        hook_all_gathers(model)
        for name, part in model.named_modules():
            hooks = _Hooks(recorder, name)
            handles = [
                part.register_forward_pre_hook(hooks.enter),
                part.register_forward_hook(hooks.leave, always_call=True),
            ]
            if part is model:
                handles.append(part.register_forward_pre_hook(hooks.note_inputs, with_kwargs=True))
            for handle in handles:
                stack.callback(handle.remove)
        yield
