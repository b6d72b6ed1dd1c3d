"""Optimizer steps: on all workers, either all writes of a step are done or none."""

from __future__ import annotations

from collections.abc import Collection

from gt.core.messages import BeginStep, EndStep, FreeTensors, WorkerAgreeOnStep, WorkerBeginStep, WorkerEndStep
from gt.dispatcher.gradient_buckets import GradientBuckets, layout_of_gradient
from gt.dispatcher.message_queue import MessageQueue
from gt.dispatcher.redistribution import Redistributor
from gt.dispatcher.state import State
from gt.dispatcher.state_records import HaltedStep, SessionRecord
from gt.sharding.spec import DeviceMesh, ShardingSpec
from gt.wire.codec import Buffer


class StepCoordinator:
    """Begins and ends the optimizer steps of clients on the workers."""

    def __init__(
        self, state: State, outgoing: MessageQueue, redistributor: Redistributor, buckets: GradientBuckets
    ) -> None:
        self._state = state
        self._outgoing = outgoing
        self._redistributor = redistributor
        self._buckets = buckets

    def begin(self, session: SessionRecord, begin: BeginStep, _: Buffer | None) -> None:
        """Move gradients into the layouts of their parameters, so that no exchange can fail in the middle of the step.
        If a gradient has no value, the step is halted: it writes to no older tensor."""
        state, layouts, cause = self._state, [], None
        targets: set[ShardingSpec | DeviceMesh] = set()
        for gradient_id, parameter_id in zip(begin.gradients, begin.parameters, strict=False):
            missing = state.missing.get(gradient_id) or state.missing.get(parameter_id)
            if missing is not None:
                cause = missing.cause
                continue
            gradient, parameter = state.tensor(gradient_id), state.tensor(parameter_id)
            targets.add(parameter.spec.mesh if parameter.spec.is_whole else parameter.spec)
            noted = state.gradients.get(gradient_id)
            layout = noted.move.target if noted is not None else layout_of_gradient(gradient.meta, parameter)
            if layout is not None:
                layouts.append((gradient_id, layout))
        moved = self._buckets.move_into(session, layouts, "optimizer", begin.site)
        state.set_halted(session, None if cause is None else HaltedStep(begin.step, cause))
        must_agree = cause is None and _differ(targets, session.workers & state.workers.keys())
        self._begin_on_workers(session, begin, tuple(dict.fromkeys((*begin.gradients, *moved))), must_agree)

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
        self._redistributor.sum_tokens(session, ready, token, tokens, begin.site)
        self._outgoing.command(tuple(ready), WorkerAgreeOnStep(begin.step, tokens))
        self._outgoing.command(tuple(workers), FreeTensors((token,)))

    def end(self, session: SessionRecord, end: EndStep, _: Buffer | None) -> None:
        self._outgoing.command(tuple(self._state.workers), WorkerEndStep(end.end, session.halted is None))
        self._state.set_halted(session, None)


def _differ(targets: Collection[ShardingSpec | DeviceMesh], workers: Collection[int]) -> bool:
    """Whether some worker of a session does not hold all parameters of a step. `targets` are the meshes of whole
    parameters and the specs of sharded ones."""
    return len(targets) > 1 or any(
        isinstance(target, ShardingSpec) or {*workers} - {*target.workers} for target in targets
    )
