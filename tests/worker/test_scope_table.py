"""Scopes of sessions on a worker."""

from gt.core.messages import WorkerDefineScope
from gt.worker.scope_table import ScopeTable


def table():
    scopes = ScopeTable()
    scopes.define(WorkerDefineScope(1, 5, "forward", True))
    scopes.define(WorkerDefineScope(2, 5, "loss", False))
    return scopes


def test_a_scope_is_known_by_its_session_and_id():
    scopes = table()
    assert [scopes.name(session, 5) for session in (1, 2, 3)] == ["forward", "loss", ""]
    assert [scopes.compiles(session, 5) for session in (1, 2, 3)] == [True, False, False]


def test_the_scopes_of_an_ended_session_are_forgotten():
    scopes = table()
    scopes.forget(1)
    assert (scopes.name(1, 5), scopes.compiles(1, 5), scopes.name(2, 5)) == ("", False, "loss")
