"""The op that made the first NaN or infinity: `gt.debug.find_nan`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import NamedTuple

import torch

from gt.client import active_session
from gt.client.call_sites import Site
from gt.client.error_text import quote
from gt.client.session_reads import read_non_finite
from gt.core.errors import GTError, NonFiniteError, SessionError
from gt.core.messages import NonFiniteCall
from gt.sharding.spec_text import join_numbers


class NonFiniteOp(NamedTuple):
    """An op that made NaN or infinity (`made`) on some workers, the line that issued it, and its inputs on the first of
    these workers: shape, whether they are finite, and their smallest and largest elements.

    >>> try:
    ...     with gt.debug.find_nan() as search:
    ...         y = gt.zeros(2).log()
    ... except gt.NonFiniteError:
    ...     print(search.found.op, search.found.made, search.found.inputs)
    aten.log.default infinity ('float32[2] finite from 0 to 0',)
    """

    op: str
    line: str
    made: str
    workers: tuple[int, ...]
    inputs: tuple[str, ...]


class FindNan:
    """Workers check the results of all ops inside `with gt.debug.find_nan() as search:`. The first op that made NaN out
    of numbers, or infinity out of finite ones, is raised as NonFiniteError: by a read of a value that is not finite, or
    at the end of the block. It stays in `found`.

    >>> with gt.debug.find_nan() as search:
    ...     y = gt.ones(2).log()
    >>> print(search.found)
    None
    """

    def __init__(self, *, infinity: bool) -> None:
        self.found: NonFiniteOp | None = None
        self._infinity = infinity

    def __enter__(self) -> FindNan:
        session = self._session = active_session.current()
        if session.check_value is not None:
            raise SessionError("gt.debug.find_nan is on already; leave its block before entering another one")
        read_non_finite(session, True, self._infinity)
        session.check_value = self._check_value
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._session.check_value = None
        message = ""
        with contextlib.suppress(GTError) if error is not None else contextlib.nullcontext():
            message = self._search(watch=False)
        if error is None and message:
            raise NonFiniteError(message)
        if error is not None and not isinstance(error, NonFiniteError) and message:
            error.add_note(f"gt.debug.find_nan: {message}")

    def _check_value(self, value: torch.Tensor) -> None:
        """Raise if a value that the program reads is not finite, and an op has made it so."""
        if (value.is_floating_point() or value.is_complex()) and not bool(torch.isfinite(value).all()):
            message = self._search(watch=True)
            if message:
                raise NonFiniteError(message)

    def _search(self, watch: bool) -> str:
        """Ask the workers; returns the text of the error, empty if no op has made NaN or infinity."""
        answer = read_non_finite(self._session, watch, self._infinity)
        calls = [(worker, call) for worker, found in sorted(answer.workers) for call in found]
        origin = first_origin(calls)
        if not origin:
            return ""
        call = origin[0][1]
        site = self._session.sites.lookup(call.site)
        made = " and ".join(name for name, has in (("NaN", call.has_nan), ("infinity", call.has_inf)) if has)
        workers = tuple(worker for worker, _ in origin)
        self.found = NonFiniteOp(call.op, self._session.sites.text(call.site), made, workers, call.inputs)
        return _describe(self.found, site)


def find_nan(*, infinity: bool = True) -> FindNan:
    """Raise the first op inside that makes NaN out of numbers, or infinity out of finite ones: `with
    gt.debug.find_nan(): ...`. Without `infinity`, only NaN counts.

    >>> with gt.debug.find_nan(infinity=False):
    ...     y = gt.zeros(2).log()
    """
    return FindNan(infinity=infinity)


def first_origin(calls: Iterable[tuple[int, NonFiniteCall]]) -> list[tuple[int, NonFiniteCall]]:
    """The first command, in the order of the program, whose NaN or infinity its inputs on no worker explain: as seen by
    each worker that found it. Empty if there is none."""
    found = list(calls)
    explained = {call.output for _, call in found if call.exchanges and not call.is_origin}
    origins = [(worker, call) for worker, call in found if call.is_origin and call.output not in explained]
    first = min(origins, key=lambda each: (each[1].newest, each[0]), default=None)
    return [each for each in origins if first is not None and each[1].output == first[1].output]


def _describe(found: NonFiniteOp, site: Site) -> str:
    noun = "worker" if len(found.workers) == 1 else "workers"
    lines = [
        quote(site),
        f"  issued {found.op}, which made {found.made} on {noun} {join_numbers(found.workers)} out of:",
        *[f"    {each}" for each in found.inputs],
    ]
    return "\n".join(lines)
