"""Changes that are rolled back leave everything as it was; changes that are committed stay."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt.dispatcher.undo_log import UndoLog

KEYS = st.integers(0, 3)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, st.integers()),
        st.tuples(st.just("drop"), KEYS),
        st.tuples(st.just("add"), st.sets(KEYS)),
        st.tuples(st.just("discard"), st.sets(KEYS)),
        st.tuples(st.just("extend"), st.lists(KEYS)),
        st.tuples(st.just("assign"), st.integers()),
    )
)


class Tables:
    def __init__(self):
        self.table, self.members, self.items = {0: 10, 1: 11}, {0, 1}, [0, 1]
        self.record = SimpleNamespace(value=1)

    def change(self, log, name, *arguments):
        if name == "drop" and arguments[0] not in self.table:
            return
        target = {"put": self.table, "drop": self.table, "extend": self.items}.get(name, self.members)
        if name == "assign":
            log.assign(self.record, "value", *arguments)
        else:
            getattr(log, name)(target, *arguments)

    def content(self):
        return dict(self.table), set(self.members), list(self.items), self.record.value


@given(CHANGES)
def test_rolled_back_changes_leave_everything_as_it_was(changes):
    tables, log = Tables(), UndoLog()
    before = tables.content()
    for change in changes:
        tables.change(log, *change)
    log.roll_back()
    assert tables.content() == before


@given(CHANGES, CHANGES)
def test_only_changes_since_the_last_commit_are_rolled_back(kept, undone):
    tables, log = Tables(), UndoLog()
    for change in kept:
        tables.change(log, *change)
    log.commit()
    before = tables.content()
    for change in undone:
        tables.change(log, *change)
    log.roll_back()
    assert tables.content() == before


def test_changes_are_made_at_once():
    table, log = {}, UndoLog()
    log.put(table, 1, 2)
    assert table == {1: 2}
    assert log.drop(table, 1) == 2
    assert table == {}


def test_an_entry_that_is_not_there_cannot_be_dropped_and_leaves_no_trace():
    log = UndoLog()
    with pytest.raises(KeyError):
        log.drop({}, 1)
    log.roll_back()
