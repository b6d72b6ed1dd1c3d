"""Exceptions for instructions that are not carried out. `rejection.py` turns each of them into an answer to the client.

    InvalidInstruction   the client made an error
    ├── UnknownId        it names something that does not exist
    └── IdInUse          it gives a new thing an id that is taken
    NoValue              an input has no value
    LimitExceeded        the session may not hold so much
    NoWorkers            every worker is lost

Any other exception is an internal error of GT.
"""

from __future__ import annotations

from typing import TypeAlias

from gt.core.errors import RefusalKind
from gt.core.ids import short_id
from gt.core.messages import Failure

Cause: TypeAlias = int | Failure
"""Why a tensor has no value: the id of a lost worker, or the failure of an op."""


class InvalidInstruction(Exception):
    """An instruction that cannot be carried out. A server counts these by `kind`."""

    def __init__(self, text: str = "", kind: RefusalKind = "instruction") -> None:
        super().__init__(text)
        self.kind = kind


class UnknownId(InvalidInstruction):
    def __init__(self, what: str, ident: int) -> None:
        super().__init__(f"there is no {what} {short_id(ident)}")


class IdInUse(InvalidInstruction):
    def __init__(self, what: str, ident: int) -> None:
        super().__init__(f"{what} {short_id(ident)} is there already; each one needs an id of its own")


class NoValue(Exception):
    def __init__(self, cause: Cause, what: str) -> None:
        super().__init__(f"{what} has no value because of {cause}")
        self.cause = cause


class LimitExceeded(Exception):
    pass


class NoWorkers(Exception):
    pass
