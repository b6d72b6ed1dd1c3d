"""Every record that crosses a process. To learn the system, read this page.

A client sends *instructions* to the dispatcher, the dispatcher sends *commands* to workers, workers send *reports*
back, and the dispatcher sends *answers* to clients. A record that clients and the dispatcher both send is one class:
a RunOp is an instruction and a command. In one process the same records are passed by reference.

A record declares what other modules need to know about it, and `gt.core.message_fields` reads the declarations:

- the types of its id fields say whose the ids are and which of them are new (`Id`, `NewId`, see `gt.core.ids`);
- a field `byte_range` or `byte_ranges` says that the bytes of tensors travel with the record;
- a command's `timeline_name` is its name in a recorded timeline, None if it is not recorded;
- an instruction that `is_note` changes no tensor, so ops that come after it may be run before it; one that `is_hint`
  changes no value at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, TypeAlias, Union

from msgspec import Meta, Struct

from gt.core.ids import FirstResultId, Id, Ids, NewId, NewIds, OtherId, OtherIds, ScopeId, SiteId
from gt.core.meta import TensorMeta
from gt.core.signatures import Axis, Name, Number, OpProgram, PolicyRecord, Signature, SpecRecord, Text

PROTOCOL = 17
MAX_BATCH = 1 << 16
MAX_STEPS = 128  # of a program
MAX_SLOT = (1 << 16) - 1  # largest slot of a program
MAX_RECORDED = 1 << 20  # commands that a worker records at most
COUNTED_BYTES = 1 << 16  # a read of this size or more counts by itself against the session's limit
ACKNOWLEDGED_BYTES = 1 << 20  # a client acknowledges its other answers together, each time they add up to this size
MAX_WAYS = 1024  # ways of collectives in a report
RAN_AT_ONCE = 1 << 10  # recorded commands of each worker in one answer
MAX_NON_FINITE = 1 << 8  # commands with NaN or infinity that a worker lists
MAX_SAMPLES = 1 << 12  # samples of a worker's memory in one answer
CURRENT, PREVIOUS, KEPT = range(3)  # versions of a tensor, see FetchTensor

STEP_TOKEN = TensorMeta((1,), (1,), 0, "float32")
Version: TypeAlias = Annotated[int, Meta(ge=CURRENT, le=KEPT)]
Limit: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_RECORDED)]
MessageNumber: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
MarkNumber: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
ModuleNumber: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
Slot: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SLOT)]
Slots: TypeAlias = Annotated[tuple[Slot, ...], Meta(max_length=1 << 12)]


class _Record(Struct, array_like=True, tag=True, frozen=True, gc=False):
    """Base of all messages. Tagged by class name, so a union of records is decoded and validated in one pass."""

    is_note: ClassVar = False
    is_hint: ClassVar = False


class ByteRange(Struct, array_like=True, frozen=True):
    """Bytes of a tensor: in a named shared buffer, from `offset` on, or, with an empty name, after the message."""

    name: Name
    nbytes: Annotated[int, Meta(ge=0, lt=1 << 52)]
    offset: Annotated[int, Meta(ge=0, lt=1 << 52)] = 0


# Handshake


class Hello(_Record, frozen=True):
    """First message of a client or worker. `host` identifies the machine: peers on one machine share memory; `hostname`
    is its name for people. `device` is the device a worker computes on, `memory` the bytes of it, and `progress` the
    shared-memory cell that shows its current command. A worker that `overlaps` computes while its exchanges go on.
    `address` is the one at which other workers reach it. `program` is the name of a client's program."""

    version: Name
    role: Name
    host: Name
    pid: int
    device: Name = ""
    progress: Name = ""
    wants_workers: int = 1
    memory: Annotated[int, Meta(ge=0, lt=1 << 62)] = 0
    overlaps: bool = False
    hostname: Name = ""
    address: Name = "127.0.0.1"
    program: Name = ""


class Resume(_Record, frozen=True):
    """First message of a client over a new connection, after its last one was lost: it goes on with its `session`.
    `server` and `token` are the `server` and `session_secret` of its Welcome. It has `received` the messages of the
    dispatcher up to this number."""

    version: Name
    server: Name
    session: int
    token: Name
    received: MessageNumber


class WorkerInfo(Struct, array_like=True, frozen=True):
    """A worker, as a client sees it. A worker that `overlaps` computes while its exchanges go on. `host` identifies its
    machine, and `hostname` is the name of that for people."""

    worker: int
    device: Name
    host: Name
    pid: int
    overlaps: bool = False
    hostname: Name = ""


def can_overlap(workers: Sequence[WorkerInfo]) -> bool:
    """Whether workers compute while exchanges among them go on. Those that share memory do not, as they copy."""
    return all(worker.overlaps for worker in workers) or len({worker.host for worker in workers}) > 1


def hosts_of(workers: Sequence[WorkerInfo]) -> dict[int, str]:
    """The host of each worker."""
    return {info.worker: info.host for info in workers}


class Welcome(_Record, frozen=True):
    """The answer to a Hello that is accepted: `ident` is the client's session or the worker's id. `session_secret` is
    known to the session only; it marks its shared buffers, and proves that a client that connects again is the same.
    `server` identifies the server's process, which keeps a session without a connection for `lease` seconds.
    `instruction_log` is the path of the server's log, if any. `signals` is the text of the configuration of signals
    that the server gives to its clients, and `signals_file` the name of its file. A client has at most `max_in_flight`
    instructions in flight (0: no limit)."""

    version: Name
    ident: int
    pid: int
    host: Name
    workers: tuple[WorkerInfo, ...] = ()
    session_secret: Name = ""
    instruction_log: Text = ""
    signals: Text = ""
    signals_file: Text = ""
    max_in_flight: Annotated[int, Meta(ge=0, lt=1 << 62)] = 0
    server: Name = ""
    lease: float = 0.0


class Resumed(_Record, frozen=True):
    """A client goes on with its session. The dispatcher has `received` its messages up to this number."""

    received: MessageNumber


class Refused(_Record, frozen=True):
    """The dispatcher does not accept a client or worker, whose handshake ends here."""

    reason: Text


class SessionEnded(_Record, frozen=True):
    """The dispatcher has ended the session."""

    reason: Text


class Waiting(_Record, frozen=True):
    """News: why a handshake or an answer takes long."""

    reason: Text


class Goodbye(_Record, frozen=True):
    """A client or worker leaves; `reason` is empty for a normal exit."""

    reason: Text = ""


class AckRead(_Record, frozen=True):
    """A client has read the bytes of an answer of COUNTED_BYTES or more, which no longer count against its limit."""

    request: OtherId


class AckBytes(_Record, frozen=True):
    """A client has read `nbytes` of messages since the last AckBytes, not counting reads of COUNTED_BYTES or more. Sent
    about every ACKNOWLEDGED_BYTES."""

    nbytes: Annotated[int, Meta(ge=0, lt=1 << 52)]


class AckMessages(_Record, frozen=True):
    """The header of this message says which messages its sender has received. Sent where no other message does."""


# Requests about sessions: client to server


class ReadSessions(_Record, frozen=True):
    """Ask for a list of the sessions of other clients."""

    request: OtherId


class EndSession(_Record, frozen=True):
    """End the session of another client, which gets the `reason`. Answered with that session."""

    request: OtherId
    session: Annotated[int, Meta(ge=0, lt=1 << 62)]
    reason: Text = ""


# Instructions: client to dispatcher. Those that declare `timeline_name`, even as None, are commands as well.


class DefineOp(_Record, frozen=True):
    """An op call without its tensors and scalars, described once and then named by its id."""

    timeline_name: ClassVar = "define"
    op_id: OtherId
    signature: Signature


class DefineSite(_Record, frozen=True):
    """A line of the user's program, described once and then named by its id."""

    site_id: SiteId
    file: Text
    line: int
    function: Name


class DefineScope(_Record, frozen=True):
    """A signal scope with its present configuration; a changed configuration gets another id. The ops of a scope
    without a policy run like ops outside any scope."""

    scope_id: ScopeId
    name: Name
    policy: PolicyRecord | None = None
    compile: bool = False


class CreateTensor(_Record, frozen=True):
    """A tensor of the client's bytes. Without a `layout` it goes to one worker. The bytes are those of the layout's
    distinct boxes, one after another (`gt.sharding.held_parts`). Bytes in shared memory are answered with Uploaded,
    under the id of the tensor."""

    id: NewId
    meta: TensorMeta
    byte_range: ByteRange
    layout: SpecRecord | None
    site: SiteId


class RunOp(_Record, frozen=True):
    """Run an op. In a command, `op_id` may also name a program (WorkerDefineProgram)."""

    timeline_name: ClassVar = "op"
    op_id: OtherId
    inputs: Ids
    outputs: NewIds
    scalars: tuple[Number, ...]
    scope: ScopeId
    site: SiteId


class RunProgram(_Record, frozen=True):
    """Run the steps of a program on `inputs`, with the scalars of all steps in order. The ids that the steps give are
    `first` and those after it. `dead` are the slots that nothing after the run uses: they are freed, each after the
    last step that names it."""

    timeline_name: ClassVar = "op"
    program_id: OtherId
    first: NewId
    inputs: Ids
    scalars: Annotated[tuple[Number, ...], Meta(max_length=1 << 16)]
    dead: Slots


class QueryOp(_Record, frozen=True):
    """A RunOp whose answer the client waits for, because only running it tells the shapes or gives a Python value.
    Tensors among the results take the ids from `first` on, at most MAX_RESULTS of them."""

    timeline_name: ClassVar = "op"
    request: OtherId
    op_id: OtherId
    inputs: Ids
    written: NewIds
    first: FirstResultId
    scalars: tuple[Number, ...]
    scope: ScopeId
    site: SiteId


class Redistribute(_Record, frozen=True):
    """Make a new tensor with the value of another one and a given layout."""

    input: Id
    output: NewId
    layout: SpecRecord
    site: SiteId


class FreeTensors(_Record, frozen=True):
    timeline_name: ClassVar = "free"
    ids: Ids


class DropCopies(_Record, frozen=True):
    """Free the copies of tensors in other layouts than their own. An op that needs such a copy makes it again."""

    is_hint: ClassVar = True
    ids: Ids


class PlaceTensor(_Record, frozen=True):
    """Give a tensor another layout, for good: its value and its id stay."""

    id: Id
    layout: SpecRecord
    site: SiteId


class BeginModule(_Record, frozen=True):
    """A module is about to use its `parameters`, and the next one is likely to follow. The numbers, which the client
    chooses, tell modules apart, and forward from backward."""

    is_hint: ClassVar = True
    module: ModuleNumber
    parameters: Ids
    next_module: ModuleNumber
    next_parameters: Ids
    site: SiteId


class ForgetOps(_Record, frozen=True):
    """The session will not use these ops again."""

    timeline_name: ClassVar = "forget"
    op_ids: OtherIds


class FetchTensor(_Record, frozen=True):
    """Read a tensor. `version` PREVIOUS is the value before a write that was skipped, if any; KEPT is the value at the
    end of the last complete step, if the tensor was written since. `place`: shared memory of the client for the bytes.
    `worker`: read only the part that this worker holds."""

    request: OtherId
    id: Id
    version: Version = CURRENT
    site: SiteId = 0
    place: ByteRange | None = None
    worker: int | None = None


class ReadVersions(_Record, frozen=True):
    """Ask which versions of tensors can still be read; answered with a VersionSpan for each."""

    timeline_name: ClassVar = None
    request: OtherId
    ids: Ids


class NoteGradient(_Record, frozen=True):
    """Autograd has made a tensor the gradient of a parameter. A partial gradient is reduced together with others, into
    the layout of its parameter, when its value is needed. `is_transposed`: the gradient is the tensor with its dims in
    reverse order, as that of a linear layer's weight is."""

    is_note: ClassVar = True
    gradient: Id
    parameter: Id
    site: SiteId
    is_transposed: bool = False


ProgramStep: TypeAlias = Union[RunOp, NoteGradient, BeginModule, DropCopies, PlaceTensor]
"""An instruction of a program. Workers' programs consist of ops."""


class DefineProgram(_Record, frozen=True):
    """Instructions that are described once; a RunProgram runs them. In `steps` slots stand for ids and scalars: first
    those of the inputs, which exist before a run, then of the scalars of all steps, in order, then of the ids that the
    steps give, in order (`gt.core.program`)."""

    timeline_name: ClassVar = "define"
    program_id: OtherId
    input_count: Slot
    scalar_count: Slot
    steps: Annotated[tuple[ProgramStep, ...], Meta(max_length=MAX_STEPS)]


class BeginStep(_Record, frozen=True):
    """An optimizer begins a step on parameters with these gradients. If a gradient has no value, the step writes to no
    tensor that was made before it."""

    step: Id
    gradients: Ids
    parameters: Ids
    site: SiteId


class EndStep(_Record, frozen=True):
    """The step is over. `end` is the id of its end: smaller than the ids of all later tensors."""

    end: Id


class LocateTensor(_Record, frozen=True):
    """Ask for the layout of a tensor."""

    request: OtherId
    id: Id


class ReadStory(_Record, frozen=True):
    """Ask for the events of a tensor, as far as the dispatcher remembers its latest messages."""

    request: OtherId
    id: Id


class ReadWorkers(_Record, frozen=True):
    """Ask for a list of the workers."""

    request: OtherId


class PublishTensor(_Record, frozen=True):
    """Let other sessions subscribe to the present value of a tensor by a name: those of the same key, and of the keys
    that `to` names (`*`: all sessions)."""

    request: OtherId
    id: Id
    name: Name
    to: Annotated[tuple[Name, ...], Meta(max_length=1 << 12)] = ()
    site: SiteId = 0


class UnpublishTensor(_Record, frozen=True):
    """Let no more sessions subscribe to a name. Those that have keep the value."""

    request: OtherId
    name: Name


class SubscribeTensor(_Record, frozen=True):
    """Make a tensor that has the value, and the memory, of a published one."""

    request: OtherId
    id: NewId
    name: Name


class Synchronize(_Record, frozen=True):
    """Ask for an answer when all earlier work is done."""

    timeline_name: ClassVar = "synchronize"
    request: OtherId


class ReadTraffic(_Record, frozen=True):
    """Ask for the bytes that workers have exchanged since they started, and for the collectives of this session since
    its last ReadTraffic with `watch`."""

    request: OtherId
    watch: bool


class ReadStats(_Record, frozen=True):
    """Ask for the counters of each worker, for all sessions together."""

    timeline_name: ClassVar = None
    request: OtherId


class ReadMemory(_Record, frozen=True):
    """Ask for the memory that the tensors of this session have taken since its last ReadMemory, if that had `watch`:
    memory is recorded from now on."""

    timeline_name: ClassVar = None
    request: OtherId
    watch: bool


class ReadNonFinite(_Record, frozen=True):
    """Ask for the commands of this session that have made NaN, or `infinity`, since its first ReadNonFinite with
    `watch`; without it, workers stop looking for them."""

    timeline_name: ClassVar = None
    request: OtherId
    watch: bool
    infinity: bool = True


class ReadTimeline(_Record, frozen=True):
    """Take the oldest commands that workers have recorded for this session, at most RAN_AT_ONCE of each worker. From
    now on each worker records while it holds fewer than `limit`."""

    timeline_name: ClassVar = None
    request: OtherId
    limit: Limit


Instruction = Union[
    RunOp, RunProgram, QueryOp, FreeTensors, DropCopies, CreateTensor, Redistribute, FetchTensor, LocateTensor,
    ReadStory, ReadWorkers, Synchronize, PublishTensor, UnpublishTensor, SubscribeTensor,
    PlaceTensor, BeginModule, NoteGradient, BeginStep, EndStep, ReadVersions, ReadTraffic, ReadStats, ReadMemory,
    ReadNonFinite, ReadTimeline,
    DefineOp, DefineProgram, ForgetOps, DefineSite, DefineScope, Goodbye,
]  # fmt: skip


# Commands: dispatcher to worker. `Worker...` differs from the instruction of that name, or has none.


class WorkerDefineProgram(_Record, frozen=True):
    """The program that a RunOp with this `op_id` runs; `op` is its name for people."""

    timeline_name: ClassVar = "define"
    op_id: OtherId
    op: Name
    program: OpProgram


class WorkerDefineScope(_Record, frozen=True):
    """A scope in which ops of a session will run; with `compile` they may be compiled together."""

    timeline_name: ClassVar = None
    session: int
    scope_id: ScopeId
    name: Name
    compile: bool


class WorkerCreateTensor(_Record, frozen=True):
    """Make a tensor of bytes that the client has uploaded."""

    timeline_name: ClassVar = "upload"
    id: NewId
    meta: TensorMeta
    byte_range: ByteRange
    site: SiteId


class WorkerFetchTensor(_Record, frozen=True):
    """Report the part of a tensor that the worker holds."""

    timeline_name: ClassVar = "fetch"
    request: OtherId
    id: Id
    version: Version = CURRENT
    place: ByteRange | None = None
    site: SiteId = 0


class WorkerShareTensor(_Record, frozen=True):
    """Hold the memory of a tensor, which may be of another session, under another id too."""

    timeline_name: ClassVar = None
    source: Id
    target: NewId


class WorkerUnshareTensor(_Record, frozen=True):
    """Copy a tensor, so that its memory is not shared any more: it is about to be written."""

    timeline_name: ClassVar = None
    id: Id
    site: SiteId


class WorkerBeginStep(_Record, frozen=True):
    """Begin a step. `token`: a small tensor to make, which gets no value if a gradient has none (0: make none)."""

    timeline_name: ClassVar = None
    step: Id
    gradients: Ids
    token: Id = 0


class WorkerAgreeOnStep(_Record, frozen=True):
    """Settle a step by the sum of all workers' `tokens`, which has no value if a gradient on any worker has none."""

    timeline_name: ClassVar = None
    step: Id
    tokens: Id


class WorkerEndStep(_Record, frozen=True):
    """End a step. `is_done`: the dispatcher has let all ops of the step run."""

    timeline_name: ClassVar = None
    end: Id
    is_done: bool


class WorkerReadTraffic(_Record, frozen=True):
    timeline_name: ClassVar = None
    request: OtherId


class WorkerReportProgress(_Record, frozen=True):
    """Send Progress when all earlier commands are done."""

    timeline_name: ClassVar = None
    mark: MarkNumber


class WorkerEndSession(_Record, frozen=True):
    """Forget every tensor and op definition of a session."""

    timeline_name: ClassVar = None
    session: int


class WorkerJoinStore(_Record, frozen=True):
    """The address of the key-value store at which process groups are formed, and the worker that hosts it. Workers that
    know its `token` were introduced by the dispatcher."""

    timeline_name: ClassVar = None
    host: Name
    port: int
    worker: int
    token: Name = ""


class WorkerHostStore(_Record, frozen=True):
    """Start that key-value store, with a new token, and report both."""

    timeline_name: ClassVar = None


class WorkerLosePeer(_Record, frozen=True):
    """Another worker is lost: exchanges that wait for it fail. A worker reads this while it waits in an exchange."""

    timeline_name: ClassVar = None
    worker: int


class WorkerShutdown(_Record, frozen=True):
    timeline_name: ClassVar = None


Command = Union[
    RunOp, RunProgram, FreeTensors, DefineOp, DefineProgram, WorkerDefineProgram, WorkerDefineScope, ForgetOps,
    WorkerCreateTensor, QueryOp,
    WorkerShareTensor, WorkerUnshareTensor,
    WorkerFetchTensor, ReadVersions, WorkerBeginStep, WorkerAgreeOnStep, WorkerEndStep, Synchronize,
    WorkerReadTraffic, ReadStats, ReadMemory, ReadNonFinite, ReadTimeline, WorkerReportProgress, WorkerEndSession,
    WorkerJoinStore, WorkerHostStore, WorkerLosePeer, WorkerShutdown,
]  # fmt: skip


# Reports and answers: worker to dispatcher to client


class Failure(Struct, array_like=True, frozen=True):
    """Why a tensor has no value: the failed op, the shapes of its inputs, the client's site and the worker's traceback.
    `origin` is the first output id of the failed command, or its request: the same from every worker. `worker` is -1
    for an op that failed in the dispatcher. `peers` are the workers whose loss may explain a failed exchange."""

    worker: int
    op: Name
    inputs: tuple[Text, ...]
    site: SiteId
    origin: Id
    kind: Name
    message: Text
    traceback: Text
    peers: tuple[int, ...] = ()


QueryResult: TypeAlias = Union[None, bool, int, float, Text, TensorMeta]


class Fetched(_Record, frozen=True):
    """The part of a tensor that a worker was asked for."""

    request: OtherId
    byte_range: ByteRange


class TensorRead(_Record, tag="Fetched", frozen=True):
    """The parts of a tensor, in the order of `gt.sharding.held_parts` for its layout; without a `layout`, one whole
    tensor."""

    request: OtherId
    byte_ranges: tuple[ByteRange, ...]
    layout: SpecRecord | None = None


class MoreRoomNeeded(_Record, frozen=True):
    """The answer to a read whose `place` is too small for all addends of a partial tensor."""

    request: OtherId
    nbytes: Annotated[int, Meta(ge=0, lt=1 << 52)]


class Uploaded(_Record, frozen=True):
    """The shared memory of an upload is no longer used: its workers have copied their parts, or none will."""

    request: OtherId


class Queried(_Record, frozen=True):
    """The results of a query, and the metas of the tensors it wrote: an op may resize its `out`."""

    request: OtherId
    results: tuple[QueryResult, ...]
    written: tuple[TensorMeta, ...]


class Failed(_Record, frozen=True):
    """The answer to a request for a tensor without a value. `is_own_failure`: the request itself failed, not one of its
    inputs."""

    request: OtherId
    failure: Failure
    is_own_failure: bool = False


class OpFailed(_Record, frozen=True):
    """Sent as soon as an op fails, so that the failure is known even if no result is ever read."""

    session: int
    failure: Failure


class VersionSpan(Struct, array_like=True, frozen=True):
    """The ids for which a tensor has a readable value. `since`: the id of the value (0: no value is readable). `until`:
    the id that a failed write would have given it (0: no write failed). `kept_since` and `kept_until` are the same for
    the value that was kept from before a step."""

    since: Id
    until: Id
    kept_since: Id = 0
    kept_until: Id = 0


class Versions(_Record, frozen=True):
    """A VersionSpan for each tensor that the worker holds a part of."""

    request: OtherId
    spans: tuple[tuple[Id, VersionSpan], ...]


class VersionsRead(_Record, frozen=True):
    """A VersionSpan for each requested tensor, in order."""

    request: OtherId
    spans: tuple[VersionSpan, ...]


class Synchronized(_Record, frozen=True):
    request: OtherId


class Progress(_Record, frozen=True):
    """All commands before a mark are done; those since the previous mark, or since the start of the batch, took
    `nanoseconds`."""

    mark: MarkNumber
    nanoseconds: Annotated[int, Meta(ge=0, lt=1 << 62)]


class Activity(_Record, frozen=True):
    """What a worker of another machine does: the words of `core/worker_progress.py`. Its clock is its own, so SINCE is
    the age of its state in nanoseconds."""

    words: Annotated[tuple[Annotated[int, Meta(ge=-1, lt=1 << 62)], ...], Meta(max_length=1 << 10)]


class TakeFrames(_Record, frozen=True):
    """A worker asks for frames of uploads, which its server holds for it. It needs none of those before them."""

    start: Annotated[int, Meta(ge=0, lt=1 << 62)]
    stop: Annotated[int, Meta(ge=0, lt=1 << 62)]


class StoreReady(_Record, frozen=True):
    """A worker has started the key-value store."""

    port: int
    token: Name = ""


class ExchangeWay(Struct, array_like=True, frozen=True):
    """The way in which workers did a collective, which is given by its kind, axes and bytes: see Collective."""

    kind: Name
    axes: tuple[Axis, ...]
    nbytes: int
    way: Name


class Traffic(_Record, frozen=True):
    """Payload bytes that a worker has received, by sender, and the ways of its latest collectives."""

    request: OtherId
    received: dict[int, int]
    ways: tuple[ExchangeWay, ...] = ()


class WorkerStats(Struct, array_like=True, frozen=True):
    """Counters of a worker since its start, and the memory it holds now. New fields come last, with a default.

    - `ops`: RunOp commands received; moves count, queries do not
    - `tensors`, `bytes`: the number of tensors held, and their size
    - `received`: payload bytes from other workers, by sender
    - `restrided`: tensors copied into the strides that the signature declares
    - `exchanges`: exchanges with other workers, by their way: "shared memory", "gloo all-reduce", ...
    - `segments`: repeated runs of ops that the worker knows; it has replayed `replayed_ops` of their ops
    - `compiled`: runs of ops for which there is compiled code
    - `compiled_runs`: how often such code ran in place of the ops
    - `compiling`: runs of ops whose code is being compiled, or waits for that
    - `busy`, `waited`: nanoseconds of work, and in exchanges with other workers
    """

    ops: int
    tensors: int
    bytes: int
    received: dict[int, int]
    restrided: int = 0
    exchanges: dict[Name, int] = {}
    segments: int = 0
    replayed_ops: int = 0
    compiled: int = 0
    compiled_runs: int = 0
    busy: int = 0
    waited: int = 0
    compiling: int = 0


class NotCompiled(_Record, frozen=True):
    """News for the client as well: ops of a scope with `compile` run one by one, from the one at `site` on."""

    session: int
    scope: Name
    site: SiteId
    reason: Text


class Stats(_Record, frozen=True):
    request: OtherId
    stats: WorkerStats


class MemoryUse(Struct, array_like=True, frozen=True):
    """The bytes that a worker holds for a line of the user's program, as tensors or as copies of tensors: now, and when
    the worker held the most. `site` is 0 for memory that was taken before the recording."""

    site: SiteId
    is_copy: bool
    live: int
    peak: int


class WorkerMemory(Struct, array_like=True, frozen=True):
    """The memory of a session on a worker. `most_copies` are the most bytes of copies, maybe not at the peak."""

    uses: tuple[MemoryUse, ...]
    most_copies: int


class MemoryReport(_Record, tag="Memory", frozen=True):
    request: OtherId
    memory: WorkerMemory


class NonFiniteCall(Struct, array_like=True, frozen=True):
    """A command that involved NaN or infinity on a worker. `output` is its first output, the same on all workers, and
    `newest` the newest tensor of the program that the worker had seen. `inputs` describes the worker's inputs.
    `is_origin`: its own inputs do not explain the NaN or infinity that it made; those of another worker may do so if
    the command `exchanges` tensors. Commands that exchange tensors are listed for their inputs too."""

    op: Name
    site: SiteId
    output: int
    newest: int
    has_nan: bool
    has_inf: bool
    inputs: tuple[Text, ...]
    is_origin: bool
    exchanges: bool


class NonFiniteReport(_Record, tag="NonFinite", frozen=True):
    request: OtherId
    calls: tuple[NonFiniteCall, ...]


class Swapped(Struct, array_like=True, frozen=True):
    """One exchange of tensors during a command: its start, its end, bytes by peer, the kind of its collective, and the
    line and the first tensor that it is for. These differ from the command's if an earlier command began it."""

    start: int
    end: int
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]
    kind: Name = ""
    site: SiteId = 0
    target: int = 0


class Ran(Struct, array_like=True, frozen=True):
    """One command that a worker ran. Times are nanoseconds of its machine's monotonic clock. `inputs` and `outputs` are
    the first tensors that it reads and makes. `ops` is the number of the program's ops that it stands for: 0 for a move
    or an upload, several for compiled code. `layouts` are those of its results, as text; there are none if the results
    are whole on each worker that ran it. `moves` are the changes of layouts that are part of it."""

    op: Name
    site: SiteId
    scope: Name
    start: int
    end: int
    swaps: tuple[Swapped, ...] = ()
    session: int = 0
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    ops: int = 0
    layouts: tuple[Text, ...] = ()
    moves: tuple[tuple[Text, Text], ...] = ()


class TimelineReport(_Record, tag="Timeline", frozen=True):
    """The commands that a worker has run. `dropped` counts those that ran while `limit` were already recorded. `memory`
    are samples of the bytes that the worker holds, each with its time."""

    request: OtherId
    ran: tuple[Ran, ...]
    dropped: int
    memory: tuple[tuple[int, int], ...] = ()


TOLD_TO_END = "it was told to end (SIGTERM)"


class Leaving(_Record, frozen=True):
    """A worker was asked to end. It goes on until its tensors are with other workers, or its time is over."""


Report = Union[
    Fetched, Uploaded, Queried, Failed, OpFailed, Synchronized, Versions, Traffic, Stats, MemoryReport, NonFiniteReport,
    TimelineReport, Progress,
    StoreReady, NotCompiled, Leaving, Goodbye,
]  # fmt: skip


class Collective(Struct, array_like=True, frozen=True):
    """One communication step: its kind, the mesh axes it runs along, the bytes that all workers together receive, the
    op and site it is for, and the number of tensors that are exchanged together."""

    kind: Name
    axes: tuple[Axis, ...]
    nbytes: int
    op: Name
    site: SiteId = 0
    tensors: int = 1


class TrafficRead(_Record, frozen=True):
    """The answer to ReadTraffic."""

    request: OtherId
    received: dict[int, dict[int, int]]
    collectives: tuple[Collective, ...]
    ways: tuple[ExchangeWay, ...] = ()


class StatsRead(_Record, frozen=True):
    """The answer to ReadStats. `plans_made` counts the plans of ops and moves made for the session."""

    request: OtherId
    stats: dict[int, WorkerStats]
    plans_made: int = 0


class MemoryRead(_Record, frozen=True):
    request: OtherId
    workers: tuple[tuple[int, WorkerMemory], ...]


class NonFiniteRead(_Record, frozen=True):
    request: OtherId
    workers: tuple[tuple[int, tuple[NonFiniteCall, ...]], ...]


class WorkerTimeline(Struct, array_like=True, frozen=True):
    worker: int
    ran: tuple[Ran, ...]
    dropped: int
    memory: tuple[tuple[int, int], ...] = ()


class TimelineRead(_Record, frozen=True):
    request: OtherId
    workers: tuple[WorkerTimeline, ...]


class Located(_Record, frozen=True):
    """The answer to LocateTensor: the layout of a tensor, and of the copies that exist of it."""

    request: OtherId
    layout: SpecRecord
    copies: tuple[SpecRecord, ...] = ()


class StoryEvent(Struct, array_like=True, frozen=True):
    """Something that was done to the tensor with the id `tensor`, which a write changes. `kind` is one of created,
    uploaded, copied, moved, written, used, read, freed and copy freed. `result` is the id of a copy, of a new version
    or of the tensor that an op made; `layout` is that of a created, moved or written tensor, or of a copy. `newest` is
    the newest tensor of the program at that time."""

    kind: Name
    tensor: int
    result: int
    op: Name
    site: SiteId
    workers: tuple[int, ...]
    layout: Text
    newest: int


class StoryRead(_Record, frozen=True):
    """The answer to ReadStory: events in the order of the program, the tensor's layout now, those of its copies, and
    why it has no value, if it has none."""

    request: OtherId
    events: tuple[StoryEvent, ...]
    layout: Text
    copies: tuple[Text, ...]
    missing: Text


class ListedWorker(Struct, array_like=True, frozen=True):
    """A worker in the list of a server. `memory` are the bytes of its device (0: not known), and `held` those of the
    tensors on it. `state` is `joining` while it cannot exchange tensors with the others yet, `ready`, `busy` if it has
    worked on the same commands for more than a second, `stopped`, or `silent for 3 s`."""

    worker: int
    host: Name
    pid: int
    device: Name
    memory: int
    held: int
    state: Name


class WorkersRead(_Record, frozen=True):
    """The answer to ReadWorkers."""

    request: OtherId
    workers: tuple[ListedWorker, ...]


class ListedSession(Struct, array_like=True, frozen=True):
    """A session in the list of a server: the name of its key, its process, the name of its program, for how many
    seconds it has been there, the tensors that it holds, their bytes on each worker, its instructions and requests
    `in_flight`, and its `state`: idle, working, or lost."""

    session: int
    key: Name
    host: Name
    pid: int
    program: Name
    seconds: float
    tensors: int
    held: tuple[tuple[int, int], ...]
    in_flight: int
    state: Name


class SessionsRead(_Record, frozen=True):
    """The answer to ReadSessions, and to EndSession."""

    request: OtherId
    sessions: tuple[ListedSession, ...]


class Published(_Record, frozen=True):
    """The answer to PublishTensor and UnpublishTensor."""

    request: OtherId


class Subscribed(_Record, frozen=True):
    """The answer to SubscribeTensor: the meta of the tensor."""

    request: OtherId
    meta: TensorMeta


class NotPublished(_Record, frozen=True):
    """The answer to a request about a published tensor that is not there, or belongs to others."""

    request: OtherId
    reason: Text


class LostLine(Struct, array_like=True, frozen=True):
    """Tensors that were lost with a worker and that one line has made (`site` 0: any other line): their number, their
    bytes, and some of them as text."""

    site: SiteId
    tensors: int
    nbytes: int
    examples: tuple[Text, ...]


class Lost(_Record, frozen=True):
    """The answer to a request that needs a lost worker (`request` 0: news, not an answer). `site` is the line of the
    op whose exchange with that worker failed, if any. In news, `lines` are the tensors of the session that are lost."""

    request: OtherId
    worker: int
    pid: int
    reason: Text
    last_op: Text
    site: SiteId = 0
    lines: tuple[LostLine, ...] = ()


class Joined(_Record, frozen=True):
    """News: another worker has joined and can be used."""

    worker: WorkerInfo


class Left(_Record, frozen=True):
    """News: a worker leaves, and its tensors move to others. If some cannot in time, a `Lost` follows."""

    worker: int
    pid: int
    reason: Text


class Gathered(_Record, frozen=True):
    """News: the inputs of an op are gathered, because it has no rule for this call, or because the client waits for
    its results (`is_query`)."""

    op: Name
    site: SiteId
    is_query: bool


class Rejected(_Record, frozen=True):
    """The dispatcher could not accept an instruction, because of an error of the client or of GT."""

    request: OtherId
    reason: Text


Answer = Union[
    TensorRead, MoreRoomNeeded, Uploaded, Queried, Failed, OpFailed, Synchronized, VersionsRead, Located, TrafficRead,
    StatsRead, MemoryRead, NonFiniteRead, TimelineRead, StoryRead, WorkersRead, Published, Subscribed,
    NotPublished, SessionsRead, SessionEnded, Lost, Joined, Left, Gathered, NotCompiled,
    Rejected, Welcome, Refused, Waiting, Goodbye, Resumed, AckMessages,
]  # fmt: skip
