"""A session may name its own tensors, ops and requests, and no others."""

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt.core.errors import ProtocolError
from gt.core.ids import FIRST_DISPATCHER_ID, FIRST_QUERY_ID, MAX_RESULTS, SESSION_SHIFT
from gt.core.message_fields import require_ownership
from gt.core.messages import (
    BeginModule,
    BeginStep,
    CreateTensor,
    DefineOp,
    DefineScope,
    DefineSite,
    DropCopies,
    EndStep,
    FetchTensor,
    ForgetOps,
    FreeTensors,
    Goodbye,
    Instruction,
    LocateTensor,
    NoteGradient,
    PlaceTensor,
    PublishTensor,
    QueryOp,
    ReadMemory,
    ReadNonFinite,
    ReadStats,
    ReadStory,
    ReadTimeline,
    ReadTraffic,
    ReadVersions,
    ReadWorkers,
    Redistribute,
    RunOp,
    RunProgram,
    SubscribeTensor,
    Synchronize,
    UnpublishTensor,
)
from tests.records import ADD, INLINE, INSTRUCTIONS, ROWS, SMALL, define_program, own

OURS, RUN = own(1), own(FIRST_QUERY_ID)

# Each way to name an id, with every other id being the session's own.
NAMING = {
    "RunOp code": lambda x: RunOp(x, (OURS,), (OURS,), (), 0, 0),
    "RunOp input": lambda x: RunOp(OURS, (OURS, x), (OURS,), (), 0, 0),
    "RunOp output": lambda x: RunOp(OURS, (OURS,), (OURS, x), (), 0, 0),
    "QueryOp request": lambda x: QueryOp(x, OURS, (OURS,), (OURS,), RUN, (), 0, 0),
    "QueryOp code": lambda x: QueryOp(OURS, x, (OURS,), (OURS,), RUN, (), 0, 0),
    "QueryOp input": lambda x: QueryOp(OURS, OURS, (OURS, x), (OURS,), RUN, (), 0, 0),
    "QueryOp written": lambda x: QueryOp(OURS, OURS, (OURS,), (OURS, x), RUN, (), 0, 0),
    "QueryOp first": lambda x: QueryOp(OURS, OURS, (OURS,), (OURS,), x, (), 0, 0),
    "FreeTensors": lambda x: FreeTensors((OURS, x)),
    "DropCopies": lambda x: DropCopies((OURS, x)),
    "PlaceTensor": lambda x: PlaceTensor(x, ROWS, 0),
    "BeginModule": lambda x: BeginModule(1, (OURS, x), 0, (), 0),
    "BeginModule next": lambda x: BeginModule(1, (OURS,), 2, (OURS, x), 0),
    "ForgetOps": lambda x: ForgetOps((OURS, x)),
    "CreateTensor": lambda x: CreateTensor(x, SMALL, INLINE, None, 0),
    "Redistribute input": lambda x: Redistribute(x, OURS, ROWS, 0),
    "Redistribute output": lambda x: Redistribute(OURS, x, ROWS, 0),
    "FetchTensor request": lambda x: FetchTensor(x, OURS),
    "FetchTensor id": lambda x: FetchTensor(OURS, x),
    "LocateTensor request": lambda x: LocateTensor(x, OURS),
    "LocateTensor id": lambda x: LocateTensor(OURS, x),
    "ReadVersions request": lambda x: ReadVersions(x, (OURS,)),
    "ReadVersions id": lambda x: ReadVersions(OURS, (OURS, x)),
    "NoteGradient gradient": lambda x: NoteGradient(x, OURS, 0),
    "NoteGradient parameter": lambda x: NoteGradient(OURS, x, 0),
    "BeginStep step": lambda x: BeginStep(x, (), (), 0),
    "BeginStep gradient": lambda x: BeginStep(OURS, (OURS, x), (), 0),
    "BeginStep parameter": lambda x: BeginStep(OURS, (), (OURS, x), 0),
    "EndStep": EndStep,
    "Synchronize": Synchronize,
    "ReadTraffic": lambda x: ReadTraffic(x, True),
    "ReadStats": ReadStats,
    "ReadMemory": lambda x: ReadMemory(x, True),
    "ReadStory request": lambda x: ReadStory(x, OURS),
    "ReadWorkers request": lambda x: ReadWorkers(x),
    "PublishTensor request": lambda x: PublishTensor(x, OURS, "name"),
    "PublishTensor id": lambda x: PublishTensor(OURS, x, "name"),
    "UnpublishTensor": lambda x: UnpublishTensor(x, "name"),
    "SubscribeTensor request": lambda x: SubscribeTensor(x, OURS, "name"),
    "SubscribeTensor id": lambda x: SubscribeTensor(OURS, x, "name"),
    "ReadStory id": lambda x: ReadStory(OURS, x),
    "ReadNonFinite": lambda x: ReadNonFinite(x, True),
    "ReadTimeline": lambda x: ReadTimeline(x, 1),
    "DefineOp": lambda x: DefineOp(x, ADD),
    "DefineProgram": lambda x: define_program(x, (OURS, (0,))),
    "RunProgram": lambda x: RunProgram(x, OURS, (OURS,), (), ()),
    "RunProgram first": lambda x: RunProgram(OURS, x, (OURS,), (), ()),
    "RunProgram input": lambda x: RunProgram(OURS, OURS, (OURS, x), (), ()),
}
NAMELESS = {DefineSite, DefineScope, Goodbye}  # their codes are looked up in the session's own tables


@pytest.mark.parametrize("make", NAMING.values(), ids=NAMING.keys())
@pytest.mark.parametrize(
    "foreign", [own(1, 2), own(1, 0), own(0, 2), OURS - 2, own(FIRST_DISPATCHER_ID), own(FIRST_QUERY_ID - 1)]
)
def test_an_id_of_another_session_is_refused(make, foreign):
    instruction = make(foreign)
    with pytest.raises(ProtocolError, match=f"of session 1 names {foreign}"):
        require_ownership(1, instruction)


ONLY_NEW = {
    "RunProgram first",
    "RunOp output",
    "QueryOp written",
    "CreateTensor",
    "Redistribute output",
    "SubscribeTensor id",
}
LOW = [own(0), OURS, own(FIRST_DISPATCHER_ID - MAX_RESULTS)]
RUNS = [own(FIRST_QUERY_ID), own((1 << SESSION_SHIFT) - MAX_RESULTS)]


@pytest.mark.parametrize("way", NAMING)
def test_the_sessions_own_ids_are_accepted(way):
    for ident in LOW if way in ONLY_NEW else RUNS if way == "QueryOp first" else LOW + RUNS:
        require_ownership(1, NAMING[way](ident))


@pytest.mark.parametrize("way", [*sorted(ONLY_NEW), "QueryOp first"])
def test_results_of_queries_and_other_new_tensors_take_ids_apart(way):
    for ident in LOW if way == "QueryOp first" else RUNS:
        with pytest.raises(ProtocolError, match="results of"):
            require_ownership(1, NAMING[way](ident))


def test_the_results_of_a_query_may_not_reach_into_the_next_session():
    with pytest.raises(ProtocolError, match="not its own"):
        require_ownership(1, NAMING["QueryOp first"](own((1 << SESSION_SHIFT) - 1)))


def test_every_instruction_is_checked():
    assert {type(make(OURS)) for make in NAMING.values()} | NAMELESS == set(typing.get_args(Instruction))


@pytest.mark.parametrize("instruction", [record for record in INSTRUCTIONS if type(record) in NAMELESS], ids=repr)
def test_instructions_without_ids_are_accepted(instruction):
    require_ownership(1, instruction)


@given(st.integers(0, (1 << 62) - 1), st.integers(1, 1 << 20))
def test_an_id_belongs_to_one_session(ident, session):
    its_own = ident >> SESSION_SHIFT == session
    if its_own and not FIRST_DISPATCHER_ID <= ident - (session << SESSION_SHIFT) < FIRST_QUERY_ID:
        require_ownership(session, FreeTensors((ident,)))
        return
    with pytest.raises(ProtocolError):
        require_ownership(session, FreeTensors((ident,)))
