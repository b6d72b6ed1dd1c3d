"""Records of workers, living and lost. `State` owns and changes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from gt.core.messages import WorkerInfo
from gt.sharding.spec import DeviceMesh

LOOPBACK = "127.0.0.1"


@dataclass
class WorkerRecord:
    """A worker that has joined. `known_ops` are the ids of the ops that were defined on the worker. A worker that is
    not `ready` cannot exchange tensors with others yet and gets no work. `solo_mesh` is the mesh of this worker only.
    `memory` are the bytes of its device (0: not known). `address` is the one at which other workers reach it: a
    loopback address if only those of its machine do. One with `hosts_store` was asked to host the store of process
    groups. One that `is_new` has joined while others worked, and has done no work yet. One that is `leaving` is told to
    end, as the record says: it gets no new tensors, and once it `is_closed`, instructions that name it fail as if it
    were lost."""

    info: WorkerInfo
    solo_mesh: DeviceMesh
    ready: bool = True
    known_ops: set[int] = field(default_factory=set)
    memory: int = 0
    address: str = LOOPBACK
    hosts_store: bool = False
    is_new: bool = False
    leaving: DeadWorker | None = None
    is_closed: bool = False

    @property
    def is_reached_from_outside(self) -> bool:
        """Whether workers of other machines reach this one."""
        return not self.address.startswith("127.")


class DeadWorker(NamedTuple):
    """The process of a worker that was lost, the reason of the loss, and the op that it ran last. `op_key` is the name
    of the key of that op's session (None: not known). One that `is_drained` has given its tensors to others."""

    pid: int
    reason: str
    last_op: str
    op_key: str | None = None
    is_drained: bool = False


LOST_LONG_AGO = DeadWorker(0, "was lost long ago", "")
