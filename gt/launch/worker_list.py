"""`gt.workers`: the workers of this program, or of the server that it has joined."""

from __future__ import annotations

import msgspec

from gt.client import active_session
from gt.client.session_reads import read_workers
from gt.core.peer_lists import WorkerList
from gt.core.tracebacks import ends_on_users_line
from gt.wire.process_identity import host_name


@ends_on_users_line
def workers() -> WorkerList:
    """The workers that have joined: `worker` (the id), `host`, `pid`, `device`, `memory` (the bytes of the device),
    `held` (the bytes of tensors on it) and `state` of each: `ready`, `joining`, `busy` (with the same commands for more
    than a second), `stopped`, or `silent for 3 s`. The list prints as a table.

    >>> gt.init(workers=2, mode="virtual")
    >>> [(each.worker, each.device, each.state) for each in gt.workers()]
    [(0, 'cpu', 'ready'), (1, 'cpu', 'ready')]
    """
    listed = read_workers(active_session.current()).workers
    here = host_name()
    return WorkerList(each if each.host else msgspec.structs.replace(each, host=here) for each in listed)
