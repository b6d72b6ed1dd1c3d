"""GT beside its peers: every workload, every peer, in one run.

python -m benchmarks.comparison [--only W1,W4] [--peers torch,gt] [--quick] [--json FILE] [--write-docs]
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.comparison.catalog import DOES_NOT_APPLY, PEERS, WORKLOADS, variants
from benchmarks.comparison.figures import find_rows
from benchmarks.comparison.machine import Machine, describe_machine
from benchmarks.comparison.pictures import draw
from benchmarks.comparison.rounds import ROOT, PeerRunner, Result, run_rounds
from benchmarks.comparison.tables import replace_between_markers, skipped, table

BUILD = ROOT / "build" / "bench"
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURES = ROOT / "docs" / "benchmarks"


def names(text: str, known: dict[str, object]) -> list[str]:
    """The names of a list with commas, all of them known; all if the text is empty."""
    chosen = [name.strip() for name in text.split(",")] if text else list(known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
    return chosen


def read_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comparison", description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=lambda text: names(text, {**WORKLOADS}), default=list(WORKLOADS))
    parser.add_argument("--peers", type=lambda text: names(text, {**PEERS}), default=list(PEERS))
    parser.add_argument("--quick", action="store_true", help="one round of small sizes")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of each workload (default: 2 or 3)")
    parser.add_argument("--build", type=Path, default=BUILD, help="directory for the environments of the peers")
    parser.add_argument("--json", type=Path, help="file for the raw figures (default: results.json in --build)")
    parser.add_argument("--write-docs", action="store_true", help="write the tables and pictures of docs/benchmarks.md")
    options = parser.parse_args(arguments)
    if options.write_docs and (options.quick or set(options.peers) != set(PEERS)):
        parser.error("--write-docs needs all peers and full sizes: leave --quick and --peers out")
    return options


def section(name: str, results: list[Result], machine: Machine, peers: list[str]) -> str:
    """The table of a workload, what has no row, and what it was measured on."""
    workload = WORKLOADS[name]
    reasons = {peer: why for peer, why in DOES_NOT_APPLY.get(name, {}).items() if peer in peers}
    versions = {key: value for result in results for key, value in result.versions.items()}
    measured = f"{', '.join(f'{key} {value}' for key, value in versions.items())}; {machine}."
    parts = [table(workload, find_rows(workload, results)), skipped(results, reasons), f"Measured with {measured}"]
    return "\n\n".join(part for part in parts if part)


def write_docs(name: str, text: str, picture: str) -> None:
    if picture:
        PICTURES.mkdir(exist_ok=True)
        (PICTURES / f"{name.lower()}.svg").write_text(picture)
        text += f"\n\n![{WORKLOADS[name].title}: times {WORKLOADS[name].baseline}](benchmarks/{name.lower()}.svg)"
    PAGE.write_text(replace_between_markers(PAGE.read_text(), name, text))


def main() -> int:
    options = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the peer that runs
    machine = describe_machine()
    if machine.is_busy:
        print(f"the load of this machine is {machine.load:.1f}: the figures will be noisy", file=sys.stderr)
    options.build.mkdir(parents=True, exist_ok=True)
    runner = PeerRunner(options.build, quick=options.quick)
    raw: dict[str, object] = {"machine": asdict(machine), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    for name in options.only:
        chosen = variants(name, set(options.peers), quick=options.quick)
        if not chosen:
            continue
        rounds = options.rounds or (1 if options.quick else WORKLOADS[name].rounds)
        results = run_rounds(name, chosen, rounds, runner.run)
        raw[name] = [asdict(result) for result in results]
        text = section(name, results, machine, options.peers)
        print(f"\n## {name}: {WORKLOADS[name].title}\n\n{text}", flush=True)
        if options.write_docs:
            write_docs(name, text, draw(WORKLOADS[name], find_rows(WORKLOADS[name], results)))
    path = options.json or options.build / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(raw, indent=1))
    print(f"\nraw figures: {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
