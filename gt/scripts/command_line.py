"""What the tools have in common: how they end, and the numbers that they take."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from gt.core.errors import GTError

LARGEST = 1_000_000


def run_tool(name: str, work: Callable[[], int]) -> int:
    """The exit code of a tool: that of its work, or 1 after a message if it fails or is interrupted. A reader that has
    seen enough (`| head -1`) is no failure."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except GTError as error:
        return _fail(name, str(error))
    except KeyboardInterrupt:
        return _fail(name, "interrupted")
    except BrokenPipeError:
        _forget_output()
        return 0
    except OSError as error:
        _forget_output()
        return _fail(name, f"the output cannot be written: {error}")


def positive_number(text: str) -> float:
    """A number of the command line that is more than 0, and small enough for a time or a size."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 < value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of at most {LARGEST:,}")
    return value


def _fail(name: str, reason: str) -> int:
    print(f"{name}: {reason}", file=sys.stderr)
    return 1


def _forget_output() -> None:
    """Let the interpreter not fail again when it writes the rest of stdout at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
