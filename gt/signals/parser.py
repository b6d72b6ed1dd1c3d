"""Parses a configuration from YAML. All problems of a file are reported in one error, each with its line."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from gt.core.errors import SignalError, nearest
from gt.signals.checks import (
    EAGER_MEMORY,
    INPUTS,
    MODEL,
    OUTPUTS,
    RESERVED,
    KeyPath,
    Problem,
    mesh_axes,
    name_problem,
    shard_problems,
    show,
)
from gt.signals.config import (
    Config,
    ModelConfig,
    ModuleEntry,
    OutputEntry,
    ParameterEntry,
    ShardConfig,
    SignalConfig,
    model_problems,
    normalise_dims,
)
from gt.signals.document import Document, LineProblem, Plain, parse_document
from gt.signals.resolution import backward_cycles, cycle_text

MAX_BYTES = 1 << 20
SIGNAL_KEYS = ("shard", "replicate", "backward", "compile", "reshard_after_forward")
SHARD_KEYS = ("axis", "workers", "mesh", "dims", "replicate")

Known = Mapping[str, SignalConfig]


def read_config(path: str | os.PathLike[str], known: Known | None = None) -> Config:
    """The configuration in a file. Its signals may name each other and the `known` ones."""
    file = os.fspath(path)
    try:
        with Path(file).open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SignalError(f"{file}: cannot be read: {why}; give the path of a YAML file") from None
    if len(content) > MAX_BYTES:
        raise SignalError(f"{file}:1: the file is larger than {MAX_BYTES} bytes; is it a configuration?")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SignalError(f"{file}:{line}: this is not UTF-8 text: {error.reason}") from None
    return parse_config(text, file, known)


def parse_config(text: str, file: str = "config", known: Known | None = None) -> Config:
    """The configuration in a text; `file` is its name in error messages."""
    document = parse_document(text, file)
    if not isinstance(document.value, dict):
        line = document.line(())
        raise SignalError(f"{file}:{line}: a configuration is a mapping of signals, not {show(document.value)}")
    problems = [*document.problems, *_line_problems(document, known or {})]
    if problems:
        raise SignalError(
            "\n".join(f"{file}:{line}: {text}" for line, text in sorted(dict.fromkeys(problems), key=_line))
        )
    return _build(document, file)


def _line(problem: LineProblem) -> int:
    return problem.line


def _line_problems(document: Document, known: Known) -> Iterator[LineProblem]:
    """The problems of signals, of the model section, and of cycles of backward signals."""
    signals = {name: value for name, value in document.value.items() if name != MODEL}
    names = {*signals, *known}
    for name, value in signals.items():
        for path, text in _signal_problems(name, value):
            yield LineProblem(document.line((name, *path)), f"signal {show(name)}: {text}")
    if MODEL in document.value:
        for path, text in _model_problems(document.value[MODEL], names):
            yield LineProblem(document.line((MODEL, *path)), f"model: {text}")
    named = {name: value.get("backward") for name, value in signals.items() if isinstance(value, dict)}
    following = {name: config.backward_signal for name, config in known.items() if name not in signals} | named
    texts = {name: backward for name, backward in following.items() if isinstance(backward, str)}
    for cycle in backward_cycles({name: texts[name] for name in [*named, *following] if name in texts}):
        if cycle[0] in named:
            yield LineProblem(document.line((cycle[0], "backward")), f"signal {show(cycle[0])}: {cycle_text(cycle)}")


def _section_problems(value: Plain, what: str, keys: Collection[str]) -> Iterator[Problem]:
    """The problems of a mapping's keys, of which only `keys` are allowed."""
    if not isinstance(value, dict):
        yield Problem((), f"{what} has to be a mapping of {', '.join(keys)}, not {show(value)}")
        return
    for key in value:
        if key not in keys:
            yield Problem((key,), f"{what} has no key {show(key)}; {nearest(key, keys)}")
        elif value[key] is None:
            yield Problem((key,), f"{key} has no value; give it one or leave the key out")


def _within(key: str, problems: Iterable[Problem]) -> Iterator[Problem]:
    return (Problem((key, *path), text) for path, text in problems)


def _signal_problems(name: str, value: Plain) -> Iterator[Problem]:
    if text := name_problem(name, "its name"):
        yield Problem((), text)
    yield from _section_problems(value, "a signal", SIGNAL_KEYS)
    if not isinstance(value, dict):
        return
    if "shard" in value and "replicate" in value:
        yield Problem(("replicate",), "shard and replicate exclude one another; write replicate inside of shard")
    for key in ("replicate", "compile", "reshard_after_forward"):
        if value.get(key) is not None and not isinstance(value[key], bool):
            yield Problem((key,), f"{key} has to be true or false, not {show(value[key])}")
    if value.get("shard") is not None:
        yield from _within("shard", _shard_problems(value["shard"]))
    if value.get("backward") is not None and (text := name_problem(value["backward"], "backward")):
        yield Problem(("backward",), text)


def _shard_problems(value: Plain) -> Iterator[Problem]:
    found = list(_section_problems(value, "shard", SHARD_KEYS))
    yield from found
    if not isinstance(value, dict):
        return
    given = {"replicate": False} | {key: value[key] for key in SHARD_KEYS if value.get(key) is not None}
    problems = shard_problems(*[given.get(key) for key in SHARD_KEYS])
    # a misspelt key or one without a value explains why no layout is given
    yield from [problem for problem in problems if problem.path or not found]


def _model_problems(value: Plain, names: Collection[str]) -> Iterator[Problem]:
    if not isinstance(value, dict):
        yield Problem((), f"this section has to be a mapping of patterns, mesh and workers, not {show(value)}")
        return
    for key, entry in value.items():
        if key in RESERVED and entry is None:
            yield Problem((key,), f"{key} has no value; give it one or leave the key out")
        elif key not in RESERVED and not isinstance(entry, str | list):
            yield Problem(
                (key,), f"{show(key)} has to be a layout such as [-, tp] or a signal, not {show(entry)}{_hint(key)}"
            )
    parameters, modules = _entries(value)
    outputs = value.get(OUTPUTS)
    if outputs is not None and not isinstance(outputs, dict):
        yield Problem((OUTPUTS,), f"{OUTPUTS} has to be a mapping of patterns to layouts, not {show(outputs)}")
    given = value.get("mesh"), value.get("workers"), parameters, modules, value.get(INPUTS), _outputs(value)
    for path, text in model_problems(*given, value.get(EAGER_MEMORY)):
        yield Problem(path, text + (_hint(path[0]) if path and path[0] not in RESERVED else ""))
    for module in modules:
        if module.signal not in names and not name_problem(module.signal, ""):
            yield Problem((module.pattern,), _unknown_scope(module, names, mesh_axes(value.get("mesh")) or ()))


def _hint(key: KeyPath | str | int) -> str:
    """A hint for a pattern that looks like a misplaced or misspelt key."""
    if key in SIGNAL_KEYS:
        return f"; {MODEL!r} is not a signal: use another name for one"
    close = nearest(str(key), RESERVED)
    return f"; {close}" if close.startswith("did you mean") else ""


def _unknown_scope(module: ModuleEntry, names: Collection[str], axes: Collection[str]) -> str:
    if module.signal in axes:
        return f"{module.signal!r} is an axis of the mesh and no signal; a layout is a list: [{module.signal}]"
    hint = nearest(module.signal, names) if names else "none is configured"
    return f"modules {show(module.pattern)} run in signal {show(module.signal)}, which is not configured; {hint}"


def _entries(model: Mapping[str, Plain]) -> tuple[list[ParameterEntry], list[ModuleEntry]]:
    """The entries of a model section, not checked and without lines."""
    patterns = {key: value for key, value in model.items() if key not in RESERVED}
    parameters = [ParameterEntry(key, value) for key, value in patterns.items() if isinstance(value, list)]  # type: ignore[arg-type]
    return parameters, [ModuleEntry(key, value) for key, value in patterns.items() if isinstance(value, str)]


def _outputs(model: Mapping[str, Plain]) -> list[OutputEntry]:
    """The entries of the mapping `outputs` of a model section, not checked and without lines."""
    outputs = model.get(OUTPUTS)
    return [OutputEntry(key, value) for key, value in outputs.items()] if isinstance(outputs, dict) else []  # type: ignore[arg-type]


def _build(document: Document, file: str) -> Config:
    """The configuration of a document without problems."""

    def source(*path: str) -> str:
        return f"{file}:{document.line(path)}"

    signals = {name: _signal(value, source(name)) for name, value in document.value.items() if name != MODEL}
    if MODEL not in document.value:
        return Config(signals)
    value = document.value[MODEL]
    parameters, modules = _entries(value)
    model = ModelConfig(
        value.get("mesh"),
        value.get("workers"),
        [ParameterEntry(e.pattern, normalise_dims(e.dims), source(MODEL, e.pattern)) for e in parameters],
        [ModuleEntry(e.pattern, e.signal, source(MODEL, e.pattern)) for e in modules],
        source(MODEL),
        value.get(INPUTS),
        [OutputEntry(e.pattern, normalise_dims(e.dims), source(MODEL, OUTPUTS, e.pattern)) for e in _outputs(value)],
        value.get(EAGER_MEMORY),
    )
    return Config(signals, model)


def _signal(value: Mapping[str, Plain], source: str) -> SignalConfig:
    shard = ShardConfig(replicate=True) if value.get("replicate") else None
    if "shard" in value:
        shard = ShardConfig(**value["shard"])
    return SignalConfig(
        shard, value.get("backward"), value.get("compile", False), source, value.get("reshard_after_forward")
    )
