"""Values of options of the command lines of servers, workers and launchers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TypeVar

_Value = TypeVar("_Value")


def option(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """A `type=` of argparse that shows the text of a ValueError. Argparse shows the name of the function otherwise."""

    def parse_option(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return parse_option


@option
def listening_port(text: str) -> int:
    """A port to listen at; 0: any free one. ZeroMQ would take others modulo 65536."""
    return _port(text, 0)


@option
def server_port(text: str) -> int:
    """The port of a server that runs already."""
    return _port(text, 1)


@option
def count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", text):
        raise ValueError("expected a whole number of at least 0")
    return int(text)


def positive(text: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _port(text: str, least: int) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or not least <= int(text) < 65536:
        raise ValueError(f"expected a port from {least} to 65535")
    return int(text)
