"""YAML text as plain values, with the line of each.

Only values that JSON has too are read: text, integers, booleans, null, lists, and mappings with text as keys. Any other
value becomes an `UnsupportedValue`, which no check accepts: the check of the setting then reports it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import yaml

from gt.core.errors import SignalError
from gt.signals.checks import ALL, KeyPath, show
from gt.signals.config import AxesPerDim, ModelConfig

MAX_DEPTH = 32
MAX_ALIASES = 1000

Plain: TypeAlias = Any
"""str, int, bool, None, UnsupportedValue, and lists and dicts of these. Untyped, since checks take any value."""

_TAG = "tag:yaml.org,2002:"
_DECIMAL = re.compile("0|-?[1-9][0-9]{0,17}")


@dataclass(frozen=True)
class UnsupportedValue:
    """A value of a type that no setting has, as written in the file."""

    text: str

    def __repr__(self) -> str:
        return self.text


class LineProblem(NamedTuple):
    """An error in a file, and its line."""

    line: int
    text: str


class Document:
    """A YAML file as a plain value, the problems of its keys, and the line of each value."""

    def __init__(self, root: yaml.Node) -> None:
        self.problems: list[LineProblem] = []
        self._entries: dict[int, dict[str, tuple[yaml.Node, yaml.Node]]] = {}  # key and value by mapping and key
        self._values: dict[int, Plain] = {}  # values by node: an aliased one is read once, and may contain itself
        self._root = root
        self.value = self._read(root)

    def line(self, path: KeyPath) -> int:
        """The line of a key or list item; if it does not exist, that of the nearest enclosing value."""
        node, line = self._root, self._root.start_mark.line
        for step in path:
            entries = self._entries.get(id(node), {})
            if isinstance(step, str) and step in entries:
                key, node = entries[step]
                line = key.start_mark.line
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
                node = node.value[step]
                line = node.start_mark.line
            else:
                break
        return line + 1

    def _read(self, node: yaml.Node) -> Plain:
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        if id(node) in self._values:
            return self._values[id(node)]
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            items: list[Plain] = []
            self._values[id(node)] = items
            items.extend([self._read(item) for item in node.value])
            return items
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            mapping: dict[str, Plain] = {}
            self._values[id(node)] = mapping
            mapping.update({key: self._read(value) for key, (_, value) in self._read_keys(node).items()})
            return mapping
        return UnsupportedValue(node.tag.replace(_TAG, "!!"))

    def _read_keys(self, node: yaml.MappingNode) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """The entries of a mapping, by key; adds problems of keys."""
        entries = self._entries[id(node)] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            name = self._read(key)
            if key.tag == f"{_TAG}merge":
                self.problems.append(
                    LineProblem(line, "merge keys (<<) are not read; repeat the keys, or alias a whole value")
                )
            elif not isinstance(name, str):
                self.problems.append(LineProblem(line, f"key {show(name)} is not text; put it in quotes"))
            elif name in entries:
                first = entries[name][0].start_mark.line + 1
                self.problems.append(
                    LineProblem(line, f"key {show(name)} is there already, in line {first}; remove one")
                )
            else:
                entries[name] = (key, value)
        return entries


def _scalar(node: yaml.ScalarNode) -> Plain:
    kind, text = node.tag.removeprefix(_TAG), node.value
    if kind == "str":
        return text
    if kind == "null":
        return None
    if kind == "bool" and text.lower() in yaml.SafeLoader.bool_values:
        return yaml.SafeLoader.bool_values[text.lower()]
    if kind == "int" and _DECIMAL.fullmatch(text):
        return int(text)
    return UnsupportedValue(show(text).strip("'\""))


class _NodeLoader(yaml.SafeLoader):
    """Composes nodes only, so that no tag constructs an object. Limits nesting and aliases."""

    depth = 0
    aliases = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        self.depth += 1
        self.aliases += self.check_event(yaml.AliasEvent)
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"it is nested over {MAX_DEPTH} levels deep", problem_mark=mark)
        if self.aliases > MAX_ALIASES:
            raise yaml.MarkedYAMLError(problem=f"it has over {MAX_ALIASES} aliases", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def parse_document(text: str, file: str) -> Document:
    """The document in a YAML text. Raises SignalError with the line of the error."""
    try:
        root = yaml.compose(text, Loader=_NodeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        what = ": ".join(text for text in (error.context, error.problem) if text)
        hint = '; write a dim that is not cut as "-", in quotes' if "found '-'" in str(error.problem) else ""
        raise SignalError(f"{file}:{line}: this is not YAML that can be read: {what}{hint}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SignalError(f"{file}:{line}: character {error.character:#x} is not allowed in YAML") from None
    if root is None:
        raise SignalError(f"{file}:1: the file is empty; give it a signal, or {{}} if there is nothing to configure")
    return Document(root)


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
    if config.eager_memory is not None:
        yield f"  eager_memory: {config.eager_memory}"


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
