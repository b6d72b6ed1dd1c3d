"""What pages are before Sphinx reads them: notebooks become Markdown, and the output of a program is marked as such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

_OUTPUT = "```{code-block} text\n:class: output\n"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", prepare, priority=400)  # before tables of contents are added
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def prepare(app: Sphinx, docname: str, source: list[str]) -> None:
    if Path(app.env.doc2path(docname)).suffix == ".ipynb":
        source[0] = markdown_of(json.loads(source[0]))
    source[0] = source[0].replace("```text output\n", _OUTPUT)


def markdown_of(notebook: dict[str, Any]) -> str:
    """A notebook as a page, with the outputs that are stored in it."""
    return "\n\n".join(part for cell in notebook["cells"] for part in _parts(cell)) + "\n"


def _parts(cell: dict[str, Any]) -> list[str]:
    text = _joined(cell["source"])
    if cell["cell_type"] != "code":
        return [text]
    return [f"```python\n{text}\n```", *map(_output, cell["outputs"])]


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"```text output\n{_joined(output['text']).rstrip()}\n```"
    data = output["data"]
    for kind in ("text/html", "image/svg+xml"):
        if kind in data:
            return f'```{{raw}} html\n<div class="notebook-picture">{_joined(data[kind])}</div>\n```'
    return f"```text output\n{_joined(data['text/plain'])}\n```"


def _joined(text: str | list[str]) -> str:
    return "".join(text)
