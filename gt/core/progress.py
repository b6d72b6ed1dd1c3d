"""The display of long waits: the interface between code that waits and a terminal or a notebook."""

from __future__ import annotations

from typing import Protocol


class ProgressDisplay(Protocol):
    """One line that replaces itself. `show` draws a text in place of the last one, `clear` removes it. Any thread may
    call them."""

    def show(self, text: str) -> None: ...
    def clear(self) -> None: ...
