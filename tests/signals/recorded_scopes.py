"""Helpers of tests of scopes: they configure signals, print layouts, and record the scope of each op that is sent."""

from __future__ import annotations

import gt
from gt import ShardConfig, SignalConfig
from gt.client import active_session
from gt.core.messages import DefineScope, RunOp

ALL = [0, 1, 2, 3]


def configure(name, axis=None, workers=ALL, backward=None, **shard):
    gt.register_config(name, SignalConfig(ShardConfig(axis, workers, **shard), backward))


def layout_and_workers(x):
    """As text: `w, - on 0 1`."""
    return f"{x.spec} on {' '.join(map(str, x.spec.mesh.workers))}"


def scopes_of(work):
    """The result of `work`, and the ops that it issued, each with the name of its scope (`~`: without constraints)."""
    session = active_session.current()
    session.outbox.flush()
    sent = []
    send, session.channel.send = (
        session.channel.send,
        lambda batch, buffers: (sent.extend(batch), send(batch, buffers)),
    )
    try:
        result = work()
        session.outbox.flush()
    finally:
        session.channel.send = send
    names = {
        scope_id: key[0] + ("" if key[1] is None or key[1].constrains else "~")
        for key, scope_id in session.scope_resolver.scope_ids.items()
    }
    ops = [
        (session.signatures[op.op_id].op.split(".")[1], names.get(op.scope, "-"))
        for op in sent
        if isinstance(op, RunOp)
    ]
    assert all(isinstance(record, DefineScope) is False or record.scope_id in names for record in sent)
    return result, ops
