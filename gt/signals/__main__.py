"""`python -m gt.signals check config.yaml`: shows a configuration, or all problems in it; with `--run train.py` also
the names that a program enters."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gt.core.errors import SignalError
from gt.signals.checks import ALL, NOT_CUT, REST, misspelt_of, show_mesh
from gt.signals.config import AxesPerDim, Config, ModelConfig, ShardConfig, SignalConfig, Workers
from gt.signals.parser import read_config
from gt.signals.registry import registry
from gt.signals.resolution import backward_chain, resolve_mesh, sections_with_workers, unknown_backward
from gt.signals.schema import SCHEMA

_COPIES = {None: "", True: "dropped", False: "kept"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    options = _parser().parse_args(arguments)
    if options.command == "schema":
        print(json.dumps(SCHEMA, indent=2))
        return 0
    try:
        config = read_config(options.file)
    except SignalError as error:
        print(error, file=sys.stderr)
        return 1
    connected = dict.fromkeys(range(options.workers or 0), "")
    errors = [] if options.workers is None else list(_missing_workers(config, connected))
    errors += [] if options.run else list(_misspelt_backwards(config))
    entered = _entered_by(options.run, options.file) if options.run and not errors else None
    errors += _misspelt(entered or (), config)
    if errors:
        print("\n".join(errors), file=sys.stderr)
        return 1
    _print(config, entered)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gt.signals", description="Configuration files of GT.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("schema", help="print the JSON schema of a configuration, for editors")
    check = commands.add_parser("check", help="show what a configuration says, or what is wrong with it")
    check.add_argument("file", help="the YAML file")
    check.add_argument("--workers", type=_count, metavar="N", help="also check that N workers are enough")
    check.add_argument(
        "--run",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="run a program under the file, with the arguments that follow, and check the names that it enters",
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers: use 1, 2, ...")
    return int(text)


def _entered_by(program: Sequence[str], file: str) -> list[str]:
    """The names that a program enters, which runs here under the configuration of a file. What it prints goes to
    stderr."""
    os.environ["GT_CONFIG"] = file
    sys.argv[:] = program
    sys.path[0] = str(Path(program[0]).resolve().parent)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            runpy.run_path(program[0], run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise
    return list(registry.entered)


def _misspelt(entered: Iterable[str], config: Config) -> list[str]:
    """An error for each name that a program entered and that is like a configured one."""
    found = [(name, misspelt_of(name, config.signals)) for name in entered if registry.get(name) is None]
    return [f"signal {name!r} is entered and not configured; did you mean {close!r}?" for name, close in found if close]


def _misspelt_backwards(config: Config) -> Iterator[str]:
    """An error for each backward signal that is not in the file, and is like one that is."""
    for name, signal in config.signals.items():
        backward = signal.backward_signal
        if backward is not None and backward not in config.signals and misspelt_of(backward, config.signals):
            yield f"{signal.source}: signal {name!r}: {unknown_backward(backward, config.signals)}"


def _missing_workers(config: Config, connected: Mapping[int, str]) -> Iterator[str]:
    """An error for each section that names more workers than are connected."""
    for subject, section in sections_with_workers(config):
        try:
            resolve_mesh(section.mesh, section.workers, connected, subject)
        except SignalError as error:
            yield str(error)


def _print(config: Config, entered: Sequence[str] | None) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=1 << 16)  # a pipe has no edge to wrap at
    if config.signals:
        rows = [_signal_row(name, signal) for name, signal in config.signals.items()]
        console.print(_table("signal layout workers backward compile copies line", rows))
    if config.model:
        console.print(_table("pattern layout signal line", list(_model_rows(config.model))))
        console.print(Text(f"model over {_grid(config.model)}workers {_numbers(config.model.workers)}"))
    if not config.signals and not config.model:
        console.print("nothing is configured")
    for what, names in () if entered is None else _differences(entered, config):
        console.print(Text(f"{what}: {' '.join(names) or 'none'}"))


def _differences(entered: Sequence[str], config: Config) -> Iterator[tuple[str, list[str]]]:
    """The names that only the program has, and those that only the file has. Gradients enter backward signals."""
    signals = registry.current().signals
    used = {name for each in entered for name in backward_chain(each, lambda key: _backward_of(signals, key))}
    yield "entered, not configured", [name for name in entered if name not in signals]
    yield "configured, not entered", [name for name in config.signals if name not in used]


def _backward_of(signals: Mapping[str, SignalConfig], name: str) -> str | None:
    return signals[name].backward_signal if name in signals else None


def _table(columns: str, rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns.split():
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*[Text(cell) for cell in row])  # as text: a pattern such as [0-5] is not markup
    return table


def _signal_row(name: str, signal: SignalConfig) -> tuple[str, ...]:
    layout, workers = ("", "") if signal.shard is None else (_layout(signal.shard), _numbers(signal.shard.workers))
    compiles, copies = "yes" if signal.compile else "", _COPIES[signal.reshard_after_forward]
    return name, layout, workers, signal.backward_signal or "", compiles, copies, _line(signal.source)


def _model_rows(model: ModelConfig) -> Iterator[tuple[str, ...]]:
    for parameter in model.parameters:
        yield parameter.pattern, _dims(parameter.dims), "", _line(parameter.source)
    for module in model.modules:
        yield module.pattern, "", module.signal, _line(module.source)


def _layout(shard: ShardConfig) -> str:
    if shard.dims is not None:
        return f"{_dims(shard.dims)} of {show_mesh(shard.mesh or ())}"
    return "replicated" if shard.replicate else f"axis {shard.axis}"


def _dims(dims: AxesPerDim) -> str:
    """The text of a spec: `[dp, -]`, with the axes of one dim separated by spaces."""
    return f"[{', '.join(dim if dim == REST else ' '.join(dim) or NOT_CUT for dim in dims)}]"


def _grid(model: ModelConfig) -> str:
    return "" if model.mesh is None else f"mesh {show_mesh(model.mesh)} of "


def _numbers(workers: Workers) -> str:
    return ALL if workers in (None, ALL) else " ".join(map(str, workers))


def _line(source: str) -> str:
    return source.rpartition(":")[2]


if __name__ == "__main__":
    sys.exit(main())
