"""Example records for tests of the wire and the dispatcher. Ids are of session 1, the first session of a dispatcher."""

from __future__ import annotations

from gt.core.ids import SESSION_SHIFT
from gt.core.messages import (
    KEPT,
    AckMessages,
    Answer,
    BeginModule,
    BeginStep,
    ByteRange,
    Collective,
    Command,
    CreateTensor,
    DefineOp,
    DefineProgram,
    DefineScope,
    DefineSite,
    DropCopies,
    EndStep,
    ExchangeWay,
    Failed,
    Failure,
    Fetched,
    FetchTensor,
    ForgetOps,
    FreeTensors,
    Gathered,
    Goodbye,
    Instruction,
    Joined,
    Leaving,
    Left,
    ListedSession,
    ListedWorker,
    Located,
    LocateTensor,
    Lost,
    MemoryRead,
    MemoryReport,
    MemoryUse,
    MoreRoomNeeded,
    NonFiniteCall,
    NonFiniteRead,
    NonFiniteReport,
    NotCompiled,
    NoteGradient,
    NotPublished,
    OpFailed,
    PlaceTensor,
    ProgramStep,
    Progress,
    Published,
    PublishTensor,
    Queried,
    QueryOp,
    Ran,
    ReadMemory,
    ReadNonFinite,
    ReadStats,
    ReadStory,
    ReadTimeline,
    ReadTraffic,
    ReadVersions,
    ReadWorkers,
    Redistribute,
    Refused,
    Rejected,
    Report,
    Resumed,
    RunOp,
    RunProgram,
    SessionEnded,
    SessionsRead,
    Stats,
    StatsRead,
    StoreReady,
    StoryEvent,
    StoryRead,
    Subscribed,
    SubscribeTensor,
    Swapped,
    Synchronize,
    Synchronized,
    TensorRead,
    TimelineRead,
    TimelineReport,
    Traffic,
    TrafficRead,
    UnpublishTensor,
    Uploaded,
    Versions,
    VersionSpan,
    VersionsRead,
    Waiting,
    Welcome,
    WorkerAgreeOnStep,
    WorkerBeginStep,
    WorkerCreateTensor,
    WorkerDefineProgram,
    WorkerDefineScope,
    WorkerEndSession,
    WorkerEndStep,
    WorkerFetchTensor,
    WorkerHostStore,
    WorkerInfo,
    WorkerJoinStore,
    WorkerLosePeer,
    WorkerMemory,
    WorkerReadTraffic,
    WorkerReportProgress,
    WorkerShareTensor,
    WorkerShutdown,
    WorkersRead,
    WorkerStats,
    WorkerTimeline,
    WorkerUnshareTensor,
)
from gt.core.meta import TensorMeta, contiguous_strides
from gt.core.signatures import (
    Arg,
    Complex,
    Compute,
    DType,
    Input,
    ListArg,
    MemoryFormat,
    MeshRecord,
    Move,
    OpProgram,
    Refuse,
    Scalar,
    Signature,
    SpecRecord,
    TorchLayout,
    ViewStep,
    Whole,
    WorkerDevice,
    WriteBack,
)


def own(number: int, session: int = 1) -> int:
    return (session << SESSION_SHIFT) + number


def meta(*shape: int, dtype: str = "float32") -> TensorMeta:
    return TensorMeta(shape, contiguous_strides(shape), 0, dtype)


SMALL, LARGE = meta(4), meta(1024)


def signature(
    op: str, inputs: int, outputs: tuple[TensorMeta, ...] = (), writes: tuple[int, ...] = (), functional: str = ""
) -> Signature:
    args, paths = tuple(map(Input, range(inputs))), ((),) * inputs
    places = tuple(range(len(outputs)))
    return Signature(op, args, {}, paths, writes, outputs, places, functional=functional)


ZEROS = signature("aten.zeros.default", 0, (SMALL,))
ADD = signature("aten.add.Tensor", 2, (SMALL,))
ADD_ = signature("aten.add_.Tensor", 2, writes=(0,), functional="aten.add.Tensor")
NO_RULE = signature("aten.no_such.default", 1, (SMALL,))
NONZERO = signature("aten.nonzero.default", 1)
RESIZE_ = signature("aten.resize_as_.default", 2, writes=(0,))

# One example at least of every kind of argument; test_messages.py holds that none is missing.
ARGS: tuple[Arg, ...] = (
    None, True, 7, 0.5, "mean", Input(0), Scalar(1), DType("float32"), TorchLayout("strided"),
    MemoryFormat("channels_last"), Complex(1.0, -2.0), WorkerDevice(), ListArg((1, None, ListArg((True, Input(2))))),
)  # fmt: skip

GRID = MeshRecord((2, 2), ("dp", "tp"), (0, 1, 4, 5), "grid")
ROWS = SpecRecord(GRID, (("dp",),), ("tp",), "max", (((0, 3), (3, 4)),))
WHOLE = SpecRecord(GRID, ((),), cuts=(None,))

STEP = ViewStep("aten.as_strided.default", (ListArg((2, 2)), 3), {"storage_offset": 1}, 0, (2, 1), (SMALL, LARGE))
PATHS = ((STEP, STEP), ())
RICH = Signature(
    "aten.x_.default", ARGS, {"all": ListArg(ARGS)}, PATHS, (0,), (SMALL, LARGE), (0, 2),
    random=True, default_dtype="float64", functional="aten.x.default", layout=ROWS,
)  # fmt: skip
_COMPUTE = Compute(
    "aten.x.default", ARGS, {"all": ListArg(ARGS)}, (3, 1), (4, 1), (SMALL, SMALL), (LARGE, SMALL), (WHOLE, ROWS),
    (ROWS, ROWS), (-1, 1), RICH, random=True, default_dtype="float64", is_view=True,
)  # fmt: skip
PROGRAM = OpProgram(  # with an example of every kind of step
    (
        Move(0, 3, SMALL, ROWS, WHOLE),
        _COMPUTE,
        Whole(RICH, (3, 4), (5,)),
        WriteBack(1, 4, ((1, 0),)),
        Refuse("aten.x.default", "why", (6,)),
    ),
    takes=(0, 1),
    gives=(4, 5),
    consumes=(1,),
)
FAILURE = Failure(
    2, "aten.mm.default", ("float32[2, 3]", "float32[4]"), 9, own(7), "RuntimeError", "shapes", "Traceback ..."
)
INLINE, SHARED = ByteRange("", 16), ByteRange("gt-1-1-2-0123456789abcdef", 16)


def define_program(
    program_id: int, *steps: ProgramStep | tuple[int, tuple[int, ...]], inputs: int = 2
) -> DefineProgram:
    """The definition of a program whose ops, given by their ids and inputs, have no scalars and one output each."""
    made = iter(range(inputs, inputs + len(steps)))
    ops = [RunOp(step[0], step[1], (next(made),), (), 0, 0) if isinstance(step, tuple) else step for step in steps]
    return DefineProgram(program_id, inputs, 0, tuple(ops))


DEFINITION = DefineProgram(
    own(30),
    1,
    1,
    (
        RunOp(own(2), (0,), (2,), (), 0, 3),
        NoteGradient(2, 0, 3),
        BeginModule(1, (0,), 2, (), 3),
        DropCopies((0,)),
        PlaceTensor(2, ROWS, 3),
        RunOp(own(2), (0, 2), (3,), (1,), 4, 3),
    ),
)

INSTRUCTIONS: list[Instruction] = [
    DEFINITION,
    RunProgram(own(30), own(40), (own(5),), (0.5,), (0, 2)),
    DefineOp(own(1), RICH),
    DefineOp(own(2), ZEROS),
    DefineSite(3, "train.py", 12, "step"),
    DefineScope(4, "forward"),
    CreateTensor(own(5), SMALL, SHARED, ROWS, 3),
    CreateTensor(own(5), SMALL, INLINE, None, 3),
    RunOp(own(1), (own(5), own(6)), (own(7),), (1, 1.0, True), 0, 3),
    QueryOp(own(8), own(1), (own(5),), (own(9),), own(10), (False, -2, float("inf")), 0, 3),
    Redistribute(own(5), own(14), ROWS, 3),
    FreeTensors((own(5), own(6))),
    DropCopies((own(5), own(6))),
    PlaceTensor(own(5), ROWS, 3),
    BeginModule(4, (own(5), own(6)), 6, (own(7),), 3),
    ForgetOps((own(1),)),
    FetchTensor(own(11), own(5)),
    FetchTensor(own(11), own(5), KEPT, 3, SHARED),
    FetchTensor(own(11), own(5), worker=1),
    LocateTensor(own(12), own(5)),
    Synchronize(own(13)),
    ReadVersions(own(19), (own(5), own(6))),
    NoteGradient(own(5), own(6), 3),
    BeginStep(own(20), (own(5),), (own(6),), 3),
    EndStep(own(21)),
    ReadTraffic(own(15), True),
    ReadStats(own(18)),
    ReadMemory(own(18), True),
    ReadNonFinite(own(18), False, False),
    ReadStory(own(18), own(5)),
    PublishTensor(own(9), own(3), "weights", ("team",), 5),
    UnpublishTensor(own(9), "weights"),
    SubscribeTensor(own(9), own(71), "weights"),
    ReadWorkers(own(18)),
    ReadTimeline(own(17), 64),
    Goodbye("done"),
]

COMMANDS: list[Command] = [
    DEFINITION,
    RunProgram(own(30), own(40), (own(5),), (0.5,), ()),
    DefineOp(own(1), RICH),
    WorkerDefineProgram(own(16), "aten.x.default", PROGRAM),
    WorkerDefineScope(1, 2, "forward", True),
    ForgetOps((own(1),)),
    WorkerCreateTensor(own(5), SMALL, SHARED, 3),
    WorkerCreateTensor(own(5), SMALL, INLINE, 3),
    RunOp(own(1), (own(5),), (own(7),), (0, 0.0, False), 0, 3),
    QueryOp(own(8), own(1), (own(5),), (own(9),), own(10), (2,), 0, 3),
    FreeTensors((own(5),)),
    WorkerShareTensor(own(3), own(71)),
    WorkerUnshareTensor(own(3), 5),
    WorkerFetchTensor(own(11), own(5)),
    WorkerFetchTensor(own(11), own(5), KEPT, SHARED),
    ReadVersions(own(19), (own(5), own(6))),
    WorkerBeginStep(own(20), (own(5),), own(23)),
    WorkerAgreeOnStep(own(20), own(24)),
    WorkerEndStep(own(21), True),
    Synchronize(own(13)),
    WorkerReadTraffic(own(15)),
    ReadStats(own(18)),
    ReadMemory(own(18), False),
    ReadNonFinite(own(18), True),
    ReadTimeline(own(17), 64),
    WorkerReportProgress(7),
    WorkerEndSession(1),
    WorkerJoinStore("127.0.0.1", 40000, 0),
    WorkerHostStore(),
    WorkerLosePeer(1),
    WorkerShutdown(),
]

_FROM_WORKERS = [
    Uploaded(own(5)),
    Queried(own(8), (None, True, 1, 1.0, "text", SMALL), (LARGE,)),
    Failed(own(8), FAILURE),
    OpFailed(1, FAILURE),
    Synchronized(own(13)),
    Goodbye(),
]

RAN = Ran("aten.x.default", 3, "forward", 100, 190, (Swapped(110, 150, ((1, 64),), ((1, 32), (2, 0))),))

MEMORY = WorkerMemory((MemoryUse(3, False, 64, 128), MemoryUse(0, True, 0, 32)), 48)

NON_FINITE = NonFiniteCall("aten.x.default", 3, own(5), own(5), True, False, ("float32[2] finite",), True, False)

STORY_EVENT = StoryEvent("used", own(5), own(6), "aten.x.default", 3, (0, 1), "", own(6))

REPORTS: list[Report] = [
    *_FROM_WORKERS,
    Fetched(own(11), SHARED),
    Fetched(own(11), INLINE),
    StoreReady(40000),
    Leaving(),
    NotCompiled(1, "forward", 3, "a reason"),
    Versions(own(19), ((own(5), VersionSpan(own(5), 0)), (own(6), VersionSpan(own(6), own(7), own(3), own(4))))),
    Progress(7, 1500),
    Traffic(own(15), {0: 64, 3: 0}, (ExchangeWay("all-reduce", ("x",), 64, "shared memory"),)),
    Stats(own(18), WorkerStats(7, 2, 64, {0: 64}, 1, {"shared memory": 3})),
    MemoryReport(own(18), MEMORY),
    NonFiniteReport(own(18), (NON_FINITE,)),
    TimelineReport(own(17), (RAN, RAN), 5),
]

ANSWERS: list[Answer] = [
    *_FROM_WORKERS,
    TensorRead(own(11), (INLINE,)),
    TensorRead(own(11), (SHARED, INLINE), ROWS),
    MoreRoomNeeded(own(11), 32),
    Located(own(12), ROWS),
    VersionsRead(own(19), (VersionSpan(own(5), 0), VersionSpan(0, 0))),
    TrafficRead(own(15), {0: {}, 1: {0: 64}}, (Collective("all-gather", ("dp", "tp"), 64, "aten.x.default", 3),)),
    StatsRead(own(18), {0: WorkerStats(7, 2, 64, {}), 1: WorkerStats(0, 0, 0, {0: 64})}),
    MemoryRead(own(18), ((0, MEMORY), (1, WorkerMemory((), 0)))),
    StoryRead(own(18), (STORY_EVENT,), "worker 0", ("replicated on 0-1",), ""),
    NonFiniteRead(own(18), ((0, (NON_FINITE,)), (1, ()))),
    SessionsRead(own(9), (ListedSession(2, "team", "node1", 77, "train.py", 1.5, 3, ((0, 16),), 1, "idle"),)),
    SessionEnded("why"),
    Published(own(9)),
    Subscribed(own(9), SMALL),
    NotPublished(own(9), "why"),
    WorkersRead(own(18), (ListedWorker(0, "alpha", 4243, "cpu", 1 << 30, 64, "ready"),)),
    TimelineRead(own(17), (WorkerTimeline(0, (RAN,), 5), WorkerTimeline(1, (), 0))),
    Lost(own(11), 1, 4242, "was killed by SIGKILL", "aten.mm.default (train.py:12)"),
    Joined(WorkerInfo(2, "cpu", "here", 4244)),
    Left(1, 4243, "left: it was told to end (SIGTERM)"),
    Gathered("aten.x.default", 3, True),
    NotCompiled(1, "forward", 3, "a reason"),
    Rejected(own(11), "unknown"),
    Welcome("0.1.0", 1, 4242, "here", (WorkerInfo(0, "cpu", "here", 4243),)),
    Refused("another protocol"),
    Waiting("0 of 2 workers have joined"),
    Resumed(12),
    SessionEnded("the server has no session 3"),
    AckMessages(),
]

DIRECTIONS = {
    "instructions": (Instruction, INSTRUCTIONS),
    "commands": (Command, COMMANDS),
    "reports": (Report, REPORTS),
    "answers": (Answer, ANSWERS),
}
