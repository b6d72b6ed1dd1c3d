"""The records that the page and `/api/*.json` get, besides those of `gt.core.program_view`."""

from __future__ import annotations

import msgspec

from gt.core.program_view import FailureState, LineMemory, LostWorker, PairTraffic, SessionState, TensorState
from gt.monitor.activity import WorkerActivity


class KindOfOp(msgspec.Struct, frozen=True):
    """A colour of the timeline."""

    kind: str
    meaning: str
    color: str


class Program(msgspec.Struct, frozen=True):
    """The program that is looked at: what does not change while it runs. `kinds` is the legend of the timeline."""

    pid: int
    command: str
    version: str
    kinds: tuple[KindOfOp, ...]


class CodeOfLine(msgspec.Struct, frozen=True):
    """A line of the program with its text; empty if the file cannot be read here."""

    line: str
    code: str


class Status(msgspec.Struct, frozen=True):
    """The workers of a moment, how many look at the page, and how long a look took, in seconds. `code` has the text of
    the lines that workers are at, and `refused` the number of refusals by kind."""

    time: int
    workers: tuple[WorkerActivity, ...]
    viewers: int
    look_seconds: float
    code: tuple[CodeOfLine, ...]
    refused: dict[str, int] = {}


class Sessions(msgspec.Struct, frozen=True):
    sessions: tuple[SessionState, ...]


class Memory(msgspec.Struct, frozen=True):
    """As MemoryState, with the text of the lines."""

    nbytes: int
    tensors: int
    copied: int
    lines: tuple[LineMemory, ...]
    dropped: int
    code: tuple[CodeOfLine, ...]


class Tensors(msgspec.Struct, frozen=True):
    """The largest tensors."""

    tensors: tuple[TensorState, ...]


class Traffic(msgspec.Struct, frozen=True):
    pairs: tuple[PairTraffic, ...]


class Failures(msgspec.Struct, frozen=True):
    """As FailuresState, with the text of the lines."""

    count: int
    failures: tuple[FailureState, ...]
    lost: tuple[LostWorker, ...]
    code: tuple[CodeOfLine, ...]
