"""Shows the progress of long waits: as a line of a terminal, or as an output of a notebook's cell.

The line of a terminal is the one below the cursor, and the cursor stays where it was. So the user's own output is never
touched: a line that is not finished, or the bar of another library.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from typing import Any

from rich.console import Console
from rich.text import Text

from gt.core.progress import ProgressDisplay

_MAKE_ROOM = "\x1bD\x1bM"  # down, which scrolls at the end of the screen, and up: the column stays
_GO_BELOW = "\x1b7\x1bD\r\x1b[J"  # keep the position, go to the start of the next line, and erase all from there
_GO_BACK = "\x1b8"

_numbers = itertools.count(1)


def open_display(is_wanted: bool) -> ProgressDisplay | None:
    """The display of this process: in a notebook, or in the terminal that stderr is; None if it is neither, or if
    nothing is wanted (GT_PROGRESS=0)."""
    if not is_wanted:
        return None
    shell = notebook_shell()
    if shell is not None:
        return NotebookDisplay(shell)
    stream = sys.stderr
    if stream is None or not stream.isatty():
        return None
    console = Console(stderr=True)
    return None if console.is_dumb_terminal else TerminalDisplay(console)


def notebook_shell() -> Any:
    """IPython's shell, if a kernel runs this process: then a notebook shows its outputs. None otherwise."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None


class TerminalDisplay:
    """The line below the cursor of a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()

    def show(self, text: str) -> None:
        self._write(f"{_MAKE_ROOM}{_GO_BELOW}{self._render(text)}{_GO_BACK}")

    def clear(self) -> None:
        self._write(f"{_GO_BELOW}{_GO_BACK}")

    def _render(self, text: str) -> str:
        """One line of text, dimmed unless NO_COLOR asks for plain text."""
        printable = "".join([character if character.isprintable() else "?" for character in text])
        line = Text(printable, style="" if self._console.no_color else "dim", no_wrap=True)
        line.truncate(self._columns() - 1, overflow="ellipsis")
        with self._lock, self._console.capture() as captured:
            self._console.print(line, end="", soft_wrap=True)
        return captured.get()

    def _columns(self) -> int:
        """The width of the terminal now. rich would believe the variable COLUMNS, and a line that is too long wraps."""
        try:
            return os.get_terminal_size(self._console.file.fileno()).columns or self._console.width
        except (OSError, ValueError):
            return self._console.width

    def _write(self, data: str) -> None:
        """A terminal that has gone is no reason to fail."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._console.file.write(data)
            self._console.file.flush()


class NotebookDisplay:
    """An output of the cell that runs, which is replaced by the next text. A cell has one of them."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._cell = -1
        self._ident = ""

    def show(self, text: str) -> None:
        is_new = self._cell != self._shell.execution_count
        if is_new:
            self._cell = self._shell.execution_count
            self._ident = f"gt-progress-{os.getpid()}-{next(_numbers)}"
        self._publish(text, is_update=not is_new)

    def clear(self) -> None:
        self._publish("", is_update=True)

    def _publish(self, text: str, *, is_update: bool) -> None:
        transient = {"display_id": self._ident}
        self._shell.display_pub.publish({"text/plain": text}, {}, transient=transient, update=is_update)
