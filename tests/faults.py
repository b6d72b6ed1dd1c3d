"""The table of faults in docs/reliability.md, which the tests of these faults write and compare."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "reliability.md"
BEGIN, END = "<!-- made by `make faults` -->", "<!-- end of the table -->"
HEAD = ["| fault | what happened |", "|---|---|"]


def outcome_of(happened: object) -> str:
    """An error with its type, or a text, in one line and without pids, ports and paths, which differ between runs."""
    text = f"`{type(happened).__name__}`: {happened}" if isinstance(happened, BaseException) else str(happened)
    text = re.sub(r"[.;]? ?(its last op was|it had not run an op|it said:).*", "", text, flags=re.DOTALL)
    text = re.sub(r"pid \d+", "pid N", text)
    text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", text)
    text = re.sub(r"gt-\d+-\d+-\d+-[0-9a-f]{16}", "gt-N-N-NAME", text)
    text = re.sub(r"(/[\w.-]+){2,}/", "", text)
    return " ".join(text.replace("|", "\\|").split())


def read_table(document: str) -> dict[str, str]:
    table = document.partition(BEGIN)[2].partition(END)[0]
    rows = [line.strip("| ").split(" | ", 1) for line in table.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in rows[1:]}


def with_table(document: str, table: Mapping[str, str]) -> str:
    before, begin, rest = document.partition(BEGIN)
    rows = [f"| {fault} | {happened} |" for fault, happened in sorted(table.items())]
    return "\n".join([before + begin, *HEAD, *rows, ""]) + END + rest.partition(END)[2]
