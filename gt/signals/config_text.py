"""A `model` section as YAML text, which `parser.py` reads back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from gt.signals.checks import ALL
from gt.signals.config import AxesPerDim, ModelConfig


def model_text(config: ModelConfig, heading: str = "", notes: Mapping[str, str] | None = None) -> str:
    """The text of a file with this section. `heading` and `notes`, by pattern, become comments."""
    notes = notes or {}
    return "\n".join([*[f"# {line}".rstrip() for line in heading.splitlines()], *_lines(config, notes), ""])


def _lines(config: ModelConfig, notes: Mapping[str, str]) -> Iterator[str]:
    yield "model:"
    if config.mesh is not None:
        yield f"  mesh: {{{', '.join(f'{name}: {size}' for name, size in config.mesh)}}}"
    if config.workers is not None:
        yield f"  workers: {config.workers if config.workers == ALL else list(config.workers)}"
    for parameter in config.parameters:
        yield _entry("  ", parameter.pattern, dims_text(parameter.dims), notes)
    for module in config.modules:
        yield _entry("  ", module.pattern, json.dumps(module.signal), notes)
    if config.inputs is not None:
        yield f"  inputs: {dims_text(config.inputs)}"
    if config.outputs:
        yield "  outputs:"
        for output in config.outputs:
            yield _entry("    ", output.pattern, dims_text(output.dims), notes)


def _entry(indent: str, pattern: str, value: str, notes: Mapping[str, str]) -> str:
    line = f"{indent}{json.dumps(pattern)}: {value}"
    return f"{line:<60} # {notes[pattern]}" if pattern in notes else line


def dims_text(dims: AxesPerDim) -> str:
    """A layout as a list: `[dp, -, [dp, tp]]`."""
    return f"[{', '.join(_dim_text(dim) for dim in dims)}]"


def _dim_text(dim: tuple[str, ...] | str) -> str:
    if isinstance(dim, str):
        return dim
    if len(dim) > 1:
        return f"[{', '.join(dim)}]"
    return dim[0] if dim else "-"
