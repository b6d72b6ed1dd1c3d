"""Published tensors: memory that sessions share, counted once, and copied before a write."""

import pytest

from gt.core.messages import (
    FetchTensor,
    FreeTensors,
    Lost,
    NotPublished,
    PlaceTensor,
    Published,
    PublishTensor,
    Rejected,
    Subscribed,
    SubscribeTensor,
    UnpublishTensor,
    WorkerShareTensor,
    WorkerUnshareTensor,
)
from gt.core.settings import Limits
from gt.dispatcher import state
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.message_queue import ToWorkers
from tests.dispatcher_harness import OP, PAIR, A, B, C, DispatcherHarness, answers, given, over, run
from tests.records import ADD_, SMALL, own

R1, R2 = own(900), own(900, 2)
THEIRS = own(1, 2)


def test_the_keys_that_a_session_names_are_limited(monkeypatch):
    harness = publishing()
    monkeypatch.setattr(state, "MAX_DEFINED", harness.state.sessions[1].defined_bytes + (1 << 17))
    keys = tuple([f"key-{number}" for number in range(400)])
    for number in range(3):  # a name that is published again counts once
        assert answers(harness.tell(PublishTensor(R1 + number, A, "weights", keys))) == [Published(R1 + number)]
    (refused,) = answers(harness.tell(PublishTensor(R1 + 3, A, "more", keys * 5)))
    assert isinstance(refused, Rejected) and "published names of a session may take" in refused.reason
    harness.tell(UnpublishTensor(R1 + 4, "weights"))
    assert answers(harness.tell(PublishTensor(R1 + 5, A, "other", keys))) == [Published(R1 + 5)]


def publishing(workers=1, limits=None, keys=("team", "team")):
    """Sessions 1 and 2, and a tensor A of session 1."""
    harness = DispatcherHarness(0)
    harness.dispatcher = Dispatcher(limits=limits)
    harness.state = harness.dispatcher.state
    for _ in range(workers):
        harness.dispatcher.make_ready(harness.dispatcher.join_worker("cpu", "here", 1000)[0])
    for key in keys:
        harness.dispatcher.open_session("here", 2000, key)
    harness.create(B)
    if workers > 1:
        harness.redistribute(B, A, "x")
    else:
        harness.create(A)
    harness.tell(FreeTensors((B,)))
    return harness


def publish(harness, ident=A, name="weights", to=(), session=1):
    return harness.tell(PublishTensor(own(900, session), ident, name, to), session=session)


def subscribe(harness, ident=THEIRS, name="weights", session=2):
    return harness.tell(SubscribeTensor(own(900, session), ident, name), session=session)


def commands(outgoing):
    return [(out.workers, out.command) for out in outgoing if isinstance(out, ToWorkers)]


@pytest.mark.parametrize("workers", [1, 2])
def test_subscribing_moves_nothing_and_keeps_the_layout(workers):
    harness = publishing(workers)
    version = given(harness.state.sessions[1].ids_given + 1)
    mesh = tuple(range(workers))
    assert commands(publish(harness)) == [(mesh, WorkerShareTensor(A, version))]
    sent = subscribe(harness)
    assert commands(sent) == [(mesh, WorkerShareTensor(version, THEIRS))]
    assert answers(sent) == [Subscribed(R2, SMALL)]
    assert harness.state.tensors[THEIRS].spec is harness.state.tensors[A].spec
    assert harness.state.bytes_by_worker() == dict.fromkeys(range(workers), SMALL.nbytes // workers)


def test_a_write_copies_first_and_once():
    harness = publishing()
    publish(harness)
    subscribe(harness)
    harness.define(OP, ADD_)
    sent = commands(harness.tell(run(OP, (A, A), (C,), site=7)))
    assert ((0,), WorkerUnshareTensor(A, 7)) == sent[0]
    assert len([command for _, command in sent if isinstance(command, WorkerUnshareTensor)]) == 1
    assert harness.state.bytes_by_worker() == {0: 2 * SMALL.nbytes}
    again = commands(harness.tell(run(OP, (C, C), (own(8),))))
    assert not any(isinstance(command, WorkerUnshareTensor) for _, command in again)


def test_subscribers_keep_what_they_have_when_the_publisher_ends():
    harness = publishing()
    publish(harness)
    subscribe(harness)
    harness.close(1)
    assert list(harness.state.tensors) == [THEIRS] and not harness.state.shared and not harness.state.published
    assert harness.state.bytes_by_worker() == {0: SMALL.nbytes}
    assert harness.tell(FetchTensor(own(901, 2), THEIRS), session=2)
    (answer,) = answers(subscribe(harness, own(2, 2)))
    assert answer == NotPublished(R2, "'weights' is not published for this session; "
                                  "nothing is published for this session")  # fmt: skip


def test_publishing_again_replaces_the_value_for_later_subscribers():
    harness = publishing()
    publish(harness)
    subscribe(harness)
    harness.create(C)
    publish(harness, C)
    subscribe(harness, own(2, 2))
    groups = {frozenset(members) for members in harness.state.shared.values()}
    assert {frozenset({A, THEIRS}) <= group for group in groups} == {True, False}
    assert harness.state.bytes_by_worker() == {0: 2 * SMALL.nbytes}


def test_unpublish():
    harness = publishing()
    publish(harness)
    subscribe(harness)
    assert answers(harness.tell(UnpublishTensor(own(902), "weights"))) == [Published(own(902))]
    assert isinstance(answers(subscribe(harness, own(2, 2)))[0], NotPublished)
    assert THEIRS in harness.state.tensors


@pytest.mark.parametrize(
    ("keys", "to", "allowed"),
    [
        (("team", "team"), (), True),
        (("team", "other"), (), False),
        (("team", "other"), ("other",), True),
        (("team", "other"), ("third",), False),
        (("team", "other"), ("*",), True),
        (("", ""), (), True),
        (("team", ""), ("",), False),
    ],
)
def test_who_may_subscribe(keys, to, allowed):
    harness = publishing(keys=keys)
    publish(harness, to=to)
    (answer,) = answers(subscribe(harness))
    assert isinstance(answer, Subscribed) == allowed
    assert allowed or "nothing is published" in answer.reason


def test_a_name_of_another_key_is_not_taken_nor_removed():
    harness = publishing(keys=("team", "other"))
    publish(harness)
    harness.create(own(5, 2), session=2)
    (answer,) = answers(publish(harness, own(5, 2), session=2))
    assert answer == NotPublished(R2, "'weights' is published by sessions of another key")
    (answer,) = answers(harness.tell(UnpublishTensor(own(902, 2), "weights"), session=2))
    assert isinstance(answer, NotPublished) and "weights" in harness.state.published


def test_memory_counts_once_against_the_limit_of_the_publisher():
    harness = publishing(limits=Limits(bytes=2 * SMALL.nbytes))
    publish(harness)
    subscribe(harness)
    uses = harness.state.uses
    assert [uses[session].bytes_at(0) for session in (1, 2)] == [SMALL.nbytes, 0]
    harness.tell(FreeTensors((A,)))
    assert [uses[session].bytes_at(0) for session in (1, 2)] == [SMALL.nbytes, 0]
    harness.tell(UnpublishTensor(own(902), "weights"))
    assert [uses[session].bytes_at(0) for session in (1, 2)] == [0, SMALL.nbytes]


def test_a_session_whose_bytes_on_all_workers_are_over_the_limit_of_one_publishes_and_subscribes():
    harness = publishing(workers=2, limits=Limits(bytes=2 * SMALL.nbytes))  # half of A on each worker
    harness.create(B, C, session=1)
    harness.create(own(8, 2), own(9, 2), own(10, 2), session=2)
    assert isinstance(answers(publish(harness))[0], Published)
    assert isinstance(answers(subscribe(harness))[0], Subscribed)


def test_a_copy_on_write_over_the_limit_fails_the_write_alone():
    harness = publishing(limits=Limits(bytes=2 * SMALL.nbytes))
    publish(harness)
    subscribe(harness)
    harness.create(own(6))
    harness.define(OP, ADD_)
    harness.tell(run(OP, (A, A), (C,)))
    assert C in harness.state.missing
    assert THEIRS in harness.state.tensors and A not in harness.state.shared


@pytest.mark.parametrize("keeps_copy", [False, True])
def test_a_lost_worker_is_lost_to_both(keeps_copy):
    harness = publishing(2)
    if keeps_copy:
        harness.tell(PlaceTensor(A, over("-", PAIR).record(), 0))
    publish(harness)
    subscribe(harness)
    lost = harness.lose(1)
    assert {answer.worker for answer in answers(lost) if isinstance(answer, Lost)} == {1}
    for ident in (A, THEIRS):
        assert (ident in harness.state.tensors) == keeps_copy
    (answer,) = answers(subscribe(harness, own(2, 2)))
    assert isinstance(answer, Subscribed)
    (read,) = answers(harness.tell(FetchTensor(own(903, 2), own(2, 2)), session=2)) or [None]
    assert (read is None) == keeps_copy and (keeps_copy or isinstance(read, Lost))


def test_a_tensor_that_is_placed_anew_shares_nothing():
    harness = publishing(2)
    publish(harness)
    harness.tell(PlaceTensor(A, over("-", PAIR).record(), 0))
    assert A not in harness.state.shared


@pytest.mark.parametrize("inputs", [(), (A, A, A)], ids=["too few", "too many"])
def test_a_write_with_another_number_of_inputs_is_refused(inputs, caplog):
    harness = publishing()
    publish(harness)
    harness.define(OP, ADD_)
    (answer,) = answers(harness.tell(run(OP, inputs, (C,))))
    assert "aten.add_.Tensor takes 2 tensors and gives 1" in answer.reason and "Traceback" not in caplog.text


def test_the_published_names_of_a_key_are_limited(monkeypatch):
    monkeypatch.setattr("gt.dispatcher.publications.MAX_OF_KEY", 2)
    harness = publishing(keys=("team", "others"))
    for name in "ab":
        assert answers(publish(harness, name=name)) == [Published(R1)]
    (answer,) = answers(publish(harness, name="c"))
    assert answer == NotPublished(R1, "sessions of this key publish 2 tensors already")
    harness.create(THEIRS, session=2)
    assert answers(publish(harness, THEIRS, "d", session=2)) == [Published(R2)]
    assert answers(publish(harness, name="a")) == [Published(R1)], "a name that is there may get another value"
