"""Tables for notebooks, as HTML. All texts are escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence


def html_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], colours: Sequence[str] = ()) -> str:
    """A table. `colours` are the backgrounds of its rows, on which black text is readable."""
    head = f"<tr>{_cells('th', header)}</tr>" if header else ""
    styles = [f' style="background:{colour};color:black"' for colour in colours] or [""] * len(rows)
    body = "".join(f"<tr{style}>{_cells('td', row)}</tr>" for row, style in zip(rows, styles, strict=True))
    return f"<table><caption>{html.escape(caption)}</caption>{head}{body}</table>"


def html_text(text: str) -> str:
    """Text as it is, with its spaces and newlines."""
    return f"<pre>{html.escape(text)}</pre>"


def _cells(tag: str, texts: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)
