"""Every record that crosses a process. Reading this page teaches the system.

A client sends *instructions* to the dispatcher, the dispatcher sends *commands* to workers, workers send *reports*
back, and the dispatcher sends *answers* to clients. In one process the same records are passed by reference.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, Union

from msgspec import Meta, Struct

from gt.core.ids import Id, Ids
from gt.core.meta import TensorMeta
from gt.core.signatures import Axis, Name, Number, PolicyRecord, Program, Signature, SpecRecord, Text

PROTOCOL = 6
MAX_BATCH = 1 << 16
MAX_RECORDED = 1 << 20  # commands that a worker records at most
COUNTED_BYTES = 1 << 16  # of a read that a session's limit counts by itself
TAKEN_BYTES = 1 << 20  # of other answers, of which a client says together that it has taken them
RAN_AT_ONCE = 1 << 10  # and how many of them one answer has of each worker
CURRENT, FORMER, KEPT = range(3)  # versions of a tensor, see FetchTensor

STEP_TOKEN = TensorMeta((1,), (1,), 0, "float32")
Version: TypeAlias = Annotated[int, Meta(ge=CURRENT, le=KEPT)]
Limit: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_RECORDED)]


class _Record(Struct, array_like=True, tag=True, frozen=True, gc=False):
    """Base of what is sent. Tagged by class name, so a union of records is decoded and validated in one pass."""


class Segment(Struct, array_like=True, frozen=True):
    """Where the bytes of a tensor travel: in a named shared-memory segment, or (empty name) with the message."""

    name: Name
    nbytes: Annotated[int, Meta(ge=0, lt=1 << 52)]


# Handshake


class Hello(_Record, frozen=True):
    """First message of a client or worker. `host` identifies the machine, so that memory can be shared; a worker's
    `device` is what it computes on, and `progress` names the shared cell with the command it is at."""

    version: Name
    role: Name
    host: Name
    pid: int
    device: Name = ""
    progress: Name = ""
    wants_workers: int = 1


class WorkerInfo(Struct, array_like=True, frozen=True):
    worker: int
    device: Name
    host: Name
    pid: int


class Welcome(_Record, frozen=True):
    """`ident` is a client's session or a worker's id. `token` is a secret of the session and the dispatcher, by which
    the session's segments are known as its own. `instruction_log` is the file that a server logs to, if any."""

    version: Name
    ident: int
    pid: int
    host: Name
    workers: tuple[WorkerInfo, ...] = ()
    token: Name = ""
    instruction_log: Text = ""


class Refused(_Record, frozen=True):
    reason: Text


class Waiting(_Record, frozen=True):
    """The server says why the handshake is not complete yet."""

    reason: Text


class Goodbye(_Record, frozen=True):
    """A client or worker leaves; `reason` is empty when that is as it should be."""

    reason: Text = ""


class Received(_Record, frozen=True):
    """A client has taken the bytes of an answer, of which it may have so many before it reads more. For itself: the
    dispatcher passes it to nobody. Said of COUNTED_BYTES and more."""

    request: Id


class Taken(_Record, frozen=True):
    """A client has taken so many bytes of messages since it last said so, reads of COUNTED_BYTES and more left out. For
    the dispatcher itself, about every TAKEN_BYTES."""

    nbytes: Annotated[int, Meta(ge=0, lt=1 << 52)]


# Instructions: client to dispatcher


class DefineOp(_Record, frozen=True):
    code: Id
    signature: Signature


class DefineSite(_Record, frozen=True):
    """A place in the user's program, named once and referred to by code."""

    code: Id
    file: Text
    line: int
    function: Name


class DefineScope(_Record, frozen=True):
    """A signal scope as it is configured now; a changed configuration has another code. Without a policy its ops run
    as outside any scope."""

    code: Id
    name: Name
    policy: PolicyRecord | None = None
    compile: bool = False


class CreateTensor(_Record, frozen=True):
    id: Id
    meta: TensorMeta
    segment: Segment
    scope: int
    site: Id


class RunOp(_Record, frozen=True):
    code: Id
    inputs: Ids
    outputs: Ids
    scalars: tuple[Number, ...]
    scope: int
    site: Id


class QueryOp(_Record, frozen=True):
    """A RunOp whose answer the client waits for, because only running it tells the shapes or gives a Python value.
    Tensors among the results take the ids from `first` on, at most MAX_RESULTS of them."""

    request: Id
    code: Id
    inputs: Ids
    written: Ids
    first: Id
    scalars: tuple[Number, ...]
    scope: int
    site: Id


class Redistribute(_Record, frozen=True):
    """A new tensor with the value of another one, laid out as said."""

    input: Id
    output: Id
    layout: SpecRecord
    site: Id


class FreeTensors(_Record, frozen=True):
    ids: Ids


class ForgetOps(_Record, frozen=True):
    """The session will not use these op codes again."""

    codes: Ids


class FetchTensor(_Record, frozen=True):
    """`version`: FORMER is the value before a write that never began, where there was one; KEPT is the value at the end
    of the last step that was done, where the tensor was written since."""

    request: Id
    id: Id
    version: Version = CURRENT
    site: Id = 0


class ReadVersions(_Record, frozen=True):
    """Since when and until when tensors had the values that can still be had of them."""

    request: Id
    ids: Ids


class BeginStep(_Record, frozen=True):
    """An optimizer begins a step, of parameters with these gradients. What was there before is written in it only if
    all gradients have a value."""

    step: Id
    gradients: Ids
    parameters: Ids
    site: Id


class EndStep(_Record, frozen=True):
    """The step that was begun is over. `step` is an id of its own."""

    step: Id


class LocateTensor(_Record, frozen=True):
    request: Id
    id: Id


class Synchronize(_Record, frozen=True):
    request: Id


class ReadTraffic(_Record, frozen=True):
    """What has moved between workers: bytes by pair since they started, and the collectives of this session since it
    last asked with `watch`."""

    request: Id
    watch: bool


class ReadStats(_Record, frozen=True):
    """What each worker has done and holds, for all sessions together."""

    request: Id


class ReadTimeline(_Record, frozen=True):
    """Take what the workers have recorded of their work for this session, at most RAN_AT_ONCE commands of each, the
    oldest first. From now on they record while they hold fewer than `limit` of them."""

    request: Id
    limit: Limit


Instruction = Union[
    RunOp, QueryOp, FreeTensors, CreateTensor, Redistribute, FetchTensor, LocateTensor, Synchronize, BeginStep, EndStep,
    ReadVersions, ReadTraffic, ReadStats, ReadTimeline, DefineOp, ForgetOps, DefineSite, DefineScope, Goodbye,
]  # fmt: skip


# Commands: dispatcher to worker


class WorkerDefineOp(_Record, frozen=True):
    code: Id
    signature: Signature


class WorkerDefineProgram(_Record, frozen=True):
    """What a RunOp with this code does; `op` is its name for people."""

    code: Id
    op: Name
    program: Program


class WorkerDefineScope(_Record, frozen=True):
    """A scope that ops of a session are about to run in; `compile`: what runs in it may be compiled together."""

    session: int
    code: Id
    name: Name
    compile: bool


class WorkerForgetOps(_Record, frozen=True):
    codes: Ids


class WorkerCreateTensor(_Record, frozen=True):
    id: Id
    meta: TensorMeta
    segment: Segment
    site: Id


class WorkerRunOp(_Record, frozen=True):
    code: Id
    inputs: Ids
    outputs: Ids
    scalars: tuple[Number, ...]
    scope: int
    site: Id


class WorkerQueryOp(_Record, frozen=True):
    request: Id
    code: Id
    inputs: Ids
    written: Ids
    first: Id
    scalars: tuple[Number, ...]
    scope: int
    site: Id


class WorkerFreeTensors(_Record, frozen=True):
    ids: Ids


class WorkerFetchTensor(_Record, frozen=True):
    request: Id
    id: Id
    shared: bool
    version: Version = CURRENT


class WorkerReviveTensor(_Record, frozen=True):
    """A version of a tensor becomes a tensor of its own."""

    id: Id
    output: Id
    version: Version


class WorkerReadVersions(_Record, frozen=True):
    request: Id
    ids: Ids


class WorkerBeginStep(_Record, frozen=True):
    """`token`: a small tensor to make, which has no value where a gradient has none (0: none)."""

    step: Id
    gradients: Ids
    token: Id = 0


class WorkerAgreeOnStep(_Record, frozen=True):
    """The tokens of all workers were added up: where that has no value, some worker has a gradient without one."""

    step: Id
    tokens: Id


class WorkerEndStep(_Record, frozen=True):
    """`is_done`: the dispatcher has let all of the step's ops run."""

    step: Id
    is_done: bool


class WorkerSynchronize(_Record, frozen=True):
    request: Id


class WorkerReadTraffic(_Record, frozen=True):
    request: Id


class WorkerReadStats(_Record, frozen=True):
    request: Id


class WorkerReadTimeline(_Record, frozen=True):
    request: Id
    limit: Limit


class WorkerReportProgress(_Record, frozen=True):
    """Say when everything before this is done."""

    mark: Id


class WorkerEndSession(_Record, frozen=True):
    """Forget every tensor and op definition of a session."""

    session: int


class WorkerJoinStore(_Record, frozen=True):
    """Where the key-value store is that process groups meet at, and which worker hosts it."""

    host: Name
    port: int
    worker: int


class WorkerHostStore(_Record, frozen=True):
    """Start that store here and report its port."""


class WorkerShutdown(_Record, frozen=True):
    pass


Command = Union[
    WorkerRunOp, WorkerFreeTensors, WorkerDefineOp, WorkerDefineProgram, WorkerDefineScope, WorkerForgetOps,
    WorkerCreateTensor, WorkerQueryOp, WorkerFetchTensor, WorkerReviveTensor, WorkerReadVersions, WorkerBeginStep,
    WorkerAgreeOnStep, WorkerEndStep, WorkerSynchronize, WorkerReadTraffic, WorkerReadStats,
    WorkerReadTimeline, WorkerReportProgress, WorkerEndSession, WorkerJoinStore, WorkerHostStore, WorkerShutdown,
]  # fmt: skip


# Reports and answers: worker to dispatcher to client


class Failure(Struct, array_like=True, frozen=True):
    """Why a tensor has no value: the op that failed, on what, and both tracebacks' facts (the site is the client's).
    `origin` is the first id that the failed command would have filled, or its request: the same from every worker.
    `worker` is -1 for an op that failed in the dispatcher. `peers`: of an exchange that failed, the workers whose loss
    may be the reason."""

    worker: int
    op: Name
    inputs: tuple[Text, ...]
    site: Id
    origin: Id
    kind: Name
    message: Text
    traceback: Text
    peers: tuple[int, ...] = ()


Result: TypeAlias = Union[None, bool, int, float, Text, TensorMeta]


class Fetched(_Record, frozen=True):
    request: Id
    segment: Segment


class Queried(_Record, frozen=True):
    """The results of a query, and what the tensors it wrote to are now: an op may resize its `out`."""

    request: Id
    results: tuple[Result, ...]
    written: tuple[TensorMeta, ...]


class Failed(_Record, frozen=True):
    """The answer to a request whose tensor has no value. `own`: the request itself failed, not what it depends on."""

    request: Id
    failure: Failure
    own: bool = False


class OpFailed(_Record, frozen=True):
    """Told when it happens, so that a failure nobody reads is not lost."""

    session: int
    failure: Failure


class Span(Struct, array_like=True, frozen=True):
    """A tensor had the value that can still be had under the id `since`, until it should have been written under the id
    `until` (0: nothing failed). `since` is 0 where no value can be had. The same for a value that was kept from before
    a step."""

    since: Id
    until: Id
    kept_since: Id = 0
    kept_until: Id = 0


class Versions(_Record, frozen=True):
    """Of the tensors that a worker holds something of."""

    request: Id
    spans: tuple[tuple[Id, Span], ...]


class VersionsRead(_Record, frozen=True):
    """Of each tensor that was asked for, in order."""

    request: Id
    spans: tuple[Span, ...]


class Synchronized(_Record, frozen=True):
    request: Id


class Progress(_Record, frozen=True):
    """Everything before a mark is done; what came since the mark before it took so many nanoseconds."""

    mark: Id
    nanoseconds: Annotated[int, Meta(ge=0, lt=1 << 62)]


class StoreReady(_Record, frozen=True):
    port: int


class Traffic(_Record, frozen=True):
    """Payload bytes that a worker has received, by sender."""

    request: Id
    received: dict[int, int]


class WorkerStats(Struct, array_like=True, frozen=True):
    """What a worker has done since it started, and what it holds now. New fields come last, with a default.

    - `ops`: how many commands that run an op, or a program of several, it has begun
    - `tensors`, `bytes`: how many tensors it holds, and their size
    - `received`: payload bytes that came from other workers, by sender
    - `restrided`: how many tensors it copied into the strides that the client was told
    """

    ops: int
    tensors: int
    bytes: int
    received: dict[int, int]
    restrided: int = 0


class Stats(_Record, frozen=True):
    request: Id
    stats: WorkerStats


class Swapped(Struct, array_like=True, frozen=True):
    """A point of a command at which its worker exchanged tensors: from when to when, and bytes by peer."""

    start: int
    end: int
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]


class Ran(Struct, array_like=True, frozen=True):
    """One command that a worker ran. Times are nanoseconds of its machine's monotonic clock."""

    op: Name
    site: Id
    scope: Name
    start: int
    end: int
    swaps: tuple[Swapped, ...] = ()


class TimelineReport(_Record, tag="Timeline", frozen=True):
    """`dropped` counts the commands that came when as many as wanted were recorded."""

    request: Id
    ran: tuple[Ran, ...]
    dropped: int


Report = Union[
    Fetched, Queried, Failed, OpFailed, Synchronized, Versions, Traffic, Stats, TimelineReport, Progress, StoreReady,
    Goodbye,
]  # fmt: skip


class Collective(Struct, array_like=True, frozen=True):
    """One step of communication: what it is, along which mesh axes, how many bytes all workers together receive, and
    for which line of the program."""

    kind: Name
    axes: tuple[Axis, ...]
    bytes: int
    op: Name
    site: Id = 0


class TrafficRead(_Record, frozen=True):
    request: Id
    received: dict[int, dict[int, int]]
    collectives: tuple[Collective, ...]


class StatsRead(_Record, frozen=True):
    request: Id
    stats: dict[int, WorkerStats]


class WorkerTimeline(Struct, array_like=True, frozen=True):
    worker: int
    ran: tuple[Ran, ...]
    dropped: int


class TimelineRead(_Record, frozen=True):
    request: Id
    workers: tuple[WorkerTimeline, ...]


class Located(_Record, frozen=True):
    request: Id
    layout: SpecRecord


class Lost(_Record, frozen=True):
    """The answer to a request that needs a worker that is gone (`request` 0: news, not an answer). `site`: the line of
    the op that exchanged tensors with that worker when it was lost, if it was one."""

    request: Id
    worker: int
    pid: int
    reason: Text
    last_op: Text
    site: Id = 0


class Joined(_Record, frozen=True):
    """News: a worker has joined since the session began, and can be used."""

    worker: WorkerInfo


class Gathered(_Record, frozen=True):
    """News, not an answer: the inputs of an op are gathered, because it has no rule for this call, or because the
    client waits for its results (`is_query`)."""

    op: Name
    site: Id
    is_query: bool


class Rejected(_Record, frozen=True):
    """The dispatcher could not accept an instruction: a mistake of the client's side, or of the dispatcher's."""

    request: Id
    reason: Text


Answer = Union[
    Fetched,
    Queried,
    Failed,
    OpFailed,
    Synchronized,
    VersionsRead,
    Located,
    TrafficRead,
    StatsRead,
    TimelineRead,
    Lost,
    Joined,
    Gathered,
    Rejected,
    Welcome,
    Refused,
    Waiting,
    Goodbye,
]
