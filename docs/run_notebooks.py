"""Runs the notebooks of `examples/` and stores their outputs; with `--check` it compares them with the stored ones.

The output of a cell with the tag `varies`, such as times, is stored and not compared.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))
VARIES = "varies"
SECONDS = 60  # that a cell may take


def main() -> int:
    parser = argparse.ArgumentParser(description="Run notebooks, and store their outputs.")
    parser.add_argument("notebooks", type=Path, nargs="*", default=NOTEBOOKS)
    parser.add_argument("--check", action="store_true", help="store nothing; fail if an output is not the stored one")
    options = parser.parse_args()
    differences = []
    for path in options.notebooks:
        stored = nbformat.read(path, as_version=4)
        ran = run(stored)
        if options.check:
            differences += [f"{path.name}: {difference}" for difference in compare(stored, ran)]
        else:
            nbformat.write(ran, path)
    print(*differences, sep="\n", end="\n" if differences else "", file=sys.stderr)  # noqa: T201
    return 1 if differences else 0


def run(notebook: NotebookNode) -> NotebookNode:
    """The notebook with the outputs of a new kernel, in a directory of its own."""
    ran = copy.deepcopy(notebook)
    with tempfile.TemporaryDirectory() as directory:
        NotebookClient(
            ran,
            timeout=SECONDS,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": directory}},
        ).execute()
    ran.metadata = notebook.metadata
    return ran


def compare(stored: NotebookNode, ran: NotebookNode) -> list[str]:
    """The cells whose outputs differ."""
    return [
        f"cell {number} prints\n{_shown(new)}\nand not\n{_shown(old)}"
        for number, (old, new) in enumerate(zip(stored.cells, ran.cells, strict=True), 1)
        if VARIES not in old.metadata.get("tags", []) and _shown(old) != _shown(new)
    ]


def _shown(cell: NotebookNode) -> list[object]:
    """What a reader sees: texts of streams, and data of results."""
    return [output.get("text", output.get("data")) for output in cell.get("outputs", [])]


if __name__ == "__main__":
    sys.exit(main())
