"""Published tensors: values that a session shares with others, read-only and without moving a byte.

A published version has its own id, and so has the tensor of each subscriber. All of them name the same memory of
the workers, which they keep as long as one of them is there. A tensor that shares memory is copied before it is
written, so that no session sees another one's writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gt.core.errors import nearest
from gt.core.messages import (
    NotPublished,
    Published,
    PublishTensor,
    Subscribed,
    SubscribeTensor,
    UnpublishTensor,
    WorkerShareTensor,
    WorkerUnshareTensor,
)
from gt.dispatcher.gradient_buckets import GradientBuckets
from gt.dispatcher.message_queue import MessageQueue
from gt.dispatcher.redistribution import Redistributor
from gt.dispatcher.state import State
from gt.dispatcher.state_records import SessionRecord
from gt.dispatcher.tensor_records import PublishedTensor, TensorRecord
from gt.wire.codec import Buffer

EVERYBODY = "*"  # replaces the name of a key: all sessions may subscribe
MAX_PUBLISHED = 1 << 14  # names of a server
MAX_OF_KEY = 1 << 12  # names that sessions of one key publish


class Publications(NamedTuple):
    """Carries out the instructions about published tensors, and unshares memory before it is written."""

    state: State
    outgoing: MessageQueue
    redistributor: Redistributor
    buckets: GradientBuckets

    def publish(self, session: SessionRecord, publish: PublishTensor, _: Buffer | None) -> None:
        """Let other sessions subscribe to the present value of a tensor. A name that sessions of the same key have
        published before names the new value from now on."""
        state, known = self.state, self.state.published.get(publish.name)
        self.state.require_new_request(publish.request)
        if known is not None and state.sessions[known.session].key != session.key:
            self._refuse(session, publish.request, f"{publish.name!r} is published by sessions of another key")
            return
        if known is None and (full := self._describe_limit(session.key)):
            self._refuse(session, publish.request, full)
            return
        self.buckets.reduce(session, (publish.id,), "publish", publish.site)
        spec = state.tensor(publish.id).spec
        if spec.partial:
            self.redistributor.in_layout(session, publish.id, spec.replace(partial=()), "publish", publish.site)
        self.redistributor.require_room(session, (), 1)
        version = state.new_id(session)
        self._share(publish.id, version)
        if known is not None:
            self.outgoing.free(state.unpublish(publish.name))
        state.publish(publish.name, PublishedTensor(version, session.ident, publish.to))
        self.outgoing.answer(session.ident, Published(publish.request))

    def _describe_limit(self, key: str) -> str:
        """The limit that one more name of a key would exceed; "" if there is none."""
        state = self.state
        if len(state.published) >= MAX_PUBLISHED:
            return f"{MAX_PUBLISHED} tensors are published already"
        if len(state.published) < MAX_OF_KEY:
            return ""
        count = sum(state.sessions[published.session].key == key for published in state.published.values())
        return f"sessions of this key publish {count} tensors already" if count >= MAX_OF_KEY else ""

    def unpublish(self, session: SessionRecord, unpublish: UnpublishTensor, _: Buffer | None) -> None:
        self.state.require_new_request(unpublish.request)
        known = self.state.published.get(unpublish.name)
        if known is None or self.state.sessions[known.session].key != session.key:
            self._refuse(session, unpublish.request, self._describe_names(session, unpublish.name))
            return
        self.outgoing.free(self.state.unpublish(unpublish.name))
        self.outgoing.answer(session.ident, Published(unpublish.request))

    def subscribe(self, session: SessionRecord, subscribe: SubscribeTensor, _: Buffer | None) -> None:
        """Give a session a tensor with the memory of a published one."""
        state, known = self.state, self.state.published.get(subscribe.name)
        self.state.require_new_request(subscribe.request)
        state.require_new((subscribe.id,))
        if known is None or not self._may_see(session, known):
            self._refuse(session, subscribe.request, self._describe_names(session, subscribe.name))
            return
        if known.ident in state.missing:  # lost with its worker: reading it says so
            missing = state.missing[known.ident]
            state.mark_missing(subscribe.id, missing.meta, missing.cause)
        else:
            self.redistributor.require_room(session, (), 1)
            self._share(known.ident, subscribe.id)
            state.note_use(session.ident, state.tensors[subscribe.id].spec.mesh.workers)
        self.outgoing.answer(session.ident, Subscribed(subscribe.request, state.meta(subscribe.id)))

    def unshare(self, session: SessionRecord, idents: Sequence[int], site: int) -> None:
        """Give tensors that are about to be written their own memory, if they share it with others."""
        for ident in dict.fromkeys(idents):
            if ident in self.state.shared:
                tensor = self.state.tensors[ident]
                self.redistributor.require_room(session, [TensorRecord.of(tensor.meta, tensor.spec)])
                self.state.unshare(ident)
                self.outgoing.command(tensor.spec.mesh.workers, WorkerUnshareTensor(ident, site))

    def _share(self, source: int, target: int) -> None:
        tensor = self.state.tensors[source]
        self.state.share(source, target)
        self.outgoing.command(tensor.spec.mesh.workers, WorkerShareTensor(source, target))

    def _may_see(self, session: SessionRecord, published: PublishedTensor) -> bool:
        key = self.state.sessions[published.session].key
        return key == session.key or EVERYBODY in published.to or bool(session.key and session.key in published.to)

    def _describe_names(self, session: SessionRecord, name: str) -> str:
        seen = [known for known, published in self.state.published.items() if self._may_see(session, published)]
        there = nearest(name, seen) if seen else "nothing is published for this session"
        return f"{name!r} is not published for this session; {there}"

    def _refuse(self, session: SessionRecord, request: int, reason: str) -> None:
        self.outgoing.answer(session.ident, NotPublished(request, reason))
