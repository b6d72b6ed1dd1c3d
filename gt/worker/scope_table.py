"""The scopes that clients have defined on a worker."""

from __future__ import annotations

from gt.core.messages import WorkerDefineScope


class ScopeTable:
    """Scopes by session and scope id. An id that is not defined is that of no scope."""

    def __init__(self) -> None:
        self._scopes: dict[tuple[int, int], WorkerDefineScope] = {}

    def define(self, scope: WorkerDefineScope) -> None:
        self._scopes[scope.session, scope.scope_id] = scope

    def defined(self) -> list[WorkerDefineScope]:
        """All scopes."""
        return list(self._scopes.values())

    def name(self, session: int, scope_id: int) -> str:
        """The name of a scope; "" outside of any scope."""
        scope = self._scopes.get((session, scope_id))
        return scope.name if scope is not None else ""

    def compiles(self, session: int, scope_id: int) -> bool:
        """Whether the ops of a scope are to be compiled."""
        scope = self._scopes.get((session, scope_id))
        return scope is not None and scope.compile

    def forget(self, session: int) -> None:
        self._scopes = {key: scope for key, scope in self._scopes.items() if key[0] != session}
