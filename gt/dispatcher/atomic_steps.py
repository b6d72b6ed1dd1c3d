"""Optimizer steps: on all workers, either all writes of a step are done or none."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gt.core.messages import BeginStep, EndStep, FreeTensors, WorkerAgreeOnStep, WorkerBeginStep, WorkerEndStep
from gt.dispatcher.message_queue import MessageQueue
from gt.dispatcher.redistribution import Redistributor
from gt.dispatcher.session_records import Buffer, HaltedStep, SessionRecord
from gt.dispatcher.state import State
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.spec import DeviceMesh, ShardingSpec, whole


class OptimizerSteps:
    def __init__(self, state: State, outgoing: MessageQueue, redistributor: Redistributor) -> None:
        self._state = state
        self._outgoing = outgoing
        self._redistributor = redistributor

    def begin(self, session: SessionRecord, begin: BeginStep, _: Buffer | None) -> None:
        """Move gradients into the layouts of their parameters, so that no exchange can fail in the middle of the step.
        If a gradient has no value, the step is halted: it writes to no older tensor."""
        state, gradients, cause = self._state, list(begin.gradients), None
        targets: set[ShardingSpec | DeviceMesh] = set()
        for gradient_id, parameter_id in zip(begin.gradients, begin.parameters, strict=False):
            missing = state.missing.get(gradient_id) or state.missing.get(parameter_id)
            if missing is not None:
                cause = missing.cause
                continue
            gradient, parameter = state.tensor(gradient_id), state.tensor(parameter_id)
            targets.add(parameter.spec.mesh if parameter.spec.is_whole else parameter.spec)
            spec = _layout_like(parameter, gradient.meta.shape)
            if spec is not None:
                moved = self._redistributor.in_layout(
                    session, gradient_id, spec, "optimizer", begin.site, in_use=gradients
                )
                gradients.append(moved)
        state.set_halted(session, None if cause is None else HaltedStep(begin.step, cause))
        must_agree = cause is None and _differ(targets, session.workers & state.workers.keys())
        self._begin_on_workers(session, begin, tuple(dict.fromkeys(gradients)), must_agree)

    def _begin_on_workers(
        self, session: SessionRecord, begin: BeginStep, gradients: tuple[int, ...], must_agree: bool
    ) -> None:
        """Workers with different parameters `must_agree` on whether all gradients have a value."""
        workers = self._state.workers
        ready = [ident for ident in sorted(session.workers) if ident in workers and workers[ident].ready]
        if not must_agree or len(ready) < 2:
            self._outgoing.command(tuple(workers), WorkerBeginStep(begin.step, gradients))
            return
        token, tokens = self._state.new_id(session), self._state.new_id(session)
        self._outgoing.command(tuple(workers), WorkerBeginStep(begin.step, gradients, token))
        self._redistributor.add_up(session, ready, token, tokens, begin.site)
        self._outgoing.command(tuple(ready), WorkerAgreeOnStep(begin.step, tokens))
        self._outgoing.command(tuple(workers), FreeTensors((token,)))

    def end(self, session: SessionRecord, end: EndStep, _: Buffer | None) -> None:
        self._outgoing.command(tuple(self._state.workers), WorkerEndStep(end.end, session.halted is None))
        self._state.set_halted(session, None)


def _layout_like(parameter: TensorRecord, shape: Sequence[int]) -> ShardingSpec | None:
    """The layout of a parameter for its gradient, which may have more or fewer dims of one element, as that of a bias
    has, or any shape if the parameter is whole. None if the parameter's layout does not fit the shape."""
    spec, own = parameter.spec, parameter.meta.shape
    if spec.is_whole:
        return whole(spec.mesh, len(shape))
    if spec.partial or tuple(shape) == own:
        return None if spec.partial else spec
    long = [position for position, size in enumerate(own) if size != 1]
    if [own[position] for position in long] != [size for size in shape if size != 1]:
        return None
    remaining = iter(long)
    sources = [None if size == 1 else next(remaining) for size in shape]
    dims = [() if source is None else spec.dims[source] for source in sources]
    return spec.replace(dims=dims, cuts=[None if source is None else spec.cuts[source] for source in sources])


def _differ(targets: Collection[ShardingSpec | DeviceMesh], workers: Collection[int]) -> bool:
    """Whether some worker of a session does not hold all parameters of a step. `targets` are the meshes of whole
    parameters and the specs of sharded ones."""
    return len(targets) > 1 or any(
        isinstance(target, ShardingSpec) or {*workers} - {*target.workers} for target in targets
    )
