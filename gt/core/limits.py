"""Limits of a session: what one client of a server may hold and have in flight."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import msgspec

from gt.core.errors import nearest

MIN_INSTRUCTIONS = 1 << 9  # a client sends instructions in batches of half of that
MIN_TENSORS = 256  # a client frees small tensors in groups of a quarter of that, and these count until then


class Limits(msgspec.Struct, frozen=True):
    """The limits of a session: `bytes` of tensors and their copies on each worker, `tensors` that it may hold, and
    `instructions` that it may have sent before earlier ones are done. None: as many as there is room for."""

    bytes: int | None = None
    tensors: int | None = None
    instructions: int | None = None

    @property
    def counts_tensors(self) -> bool:
        """Whether the tensors of each session have to be counted."""
        return self.bytes is not None or self.tensors is not None


def parse_bytes(text: str) -> int:
    """A number of bytes, such as 1000, 512M or 8GiB: units are powers of 1024."""
    found = re.fullmatch("([0-9]{1,15})([KMGT]?)(I?B)?", text.strip().upper())
    if found is None:
        raise ValueError("expected a number of bytes such as 1000, 512M or 8GiB")
    return int(found[1]) << 10 * " KMGT".index(found[2] or " ")


def _parse_count(text: str, least: int) -> int:
    if not re.fullmatch("[0-9]{1,15}", text.strip()) or int(text) < least:
        raise ValueError(f"expected a whole number of at least {least}, since clients send and free in groups")
    return int(text)


def _parse_held_bytes(text: str) -> int:
    nbytes = parse_bytes(text)
    if not 0 < nbytes < 1 << 63:
        raise ValueError("expected at least 1 byte, and less than 8 EiB; without bytes= there is no limit")
    return nbytes


_PARSERS: dict[str, Callable[[str], int]] = {
    "bytes": _parse_held_bytes,
    "tensors": partial(_parse_count, least=MIN_TENSORS),
    "instructions": partial(_parse_count, least=MIN_INSTRUCTIONS),
}


def parse_limits(text: str) -> Limits:
    """Limits such as `bytes=4GiB,tensors=10000,instructions=5000`; each may be left out."""
    found: dict[str, int] = {}
    for item in filter(None, map(str.strip, text.split(","))):
        name, equals, value = item.partition("=")
        name = name.strip()
        if not equals or name not in _PARSERS:
            hint = nearest(name, _PARSERS) if equals else "for example bytes=4GiB,tensors=10000,instructions=5000"
            raise ValueError(f"{item!r} is not a limit; {hint}")
        if name in found:
            raise ValueError(f"{name} is given twice")
        try:
            found[name] = _PARSERS[name](value)
        except ValueError as error:
            raise ValueError(f"{item}: {error}") from None
    return Limits(**found)
