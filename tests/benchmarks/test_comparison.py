"""The benchmark against the peers: its catalog, ratios, tables, pictures and runs."""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import benchmarks.comparison.peers as peers_package
from benchmarks.comparison import sizes
from benchmarks.comparison.__main__ import BUILD, PAGE, read_arguments, section
from benchmarks.comparison.catalog import DOES_NOT_APPLY, PEERS, VARIANTS, WORKLOADS, Variant, Workload, variants
from benchmarks.comparison.environments import Unavailable
from benchmarks.comparison.figures import Cell, Row, find_rows
from benchmarks.comparison.machine import Machine, describe_machine
from benchmarks.comparison.peers.command import Request
from benchmarks.comparison.peers.dispatcher import measure_workers
from benchmarks.comparison.peers.process_memory import PeakMemory
from benchmarks.comparison.pictures import draw
from benchmarks.comparison.rounds import Result, last_line, run_limited, run_rounds
from benchmarks.comparison.tables import replace_between_markers, skipped, table
from tests.subprocesses import finish, start

WORKLOAD = Workload("W1", "Small ops", "us an op", 1e6, ("numbers", "tensors"))
TORCH, OURS = Variant("torch", "torch"), Variant("GT, embedded", "gt")
MACHINE = Machine("a processor", 2, 8.0, "Linux", "3.11", 0.1)
PEER_FILES = Path(peers_package.__file__).parent


def found(*samples, **extras):
    return {"samples": list(samples), "extras": extras}


def result(variant, *rounds):
    return Result(variant, [{"numbers": each} for each in rounds], {"torch": "1"})


def test_ratios_are_medians_over_rounds_of_the_ratio_in_a_round():
    torch = result(TORCH, found(1e-6, 2e-6, 9e-6), found(20e-6), found(2e-6))
    ours = result(OURS, found(4e-6), found(60e-6), found(8e-6))
    _, row = find_rows(WORKLOAD, [torch, ours])
    assert row.cells["numbers"] == Cell(pytest.approx(8.0), pytest.approx(3.0))


def test_without_the_baseline_there_are_no_ratios():
    (row,) = find_rows(WORKLOAD, [result(OURS, found(4e-6))])
    assert row.cells["numbers"].ratio is None


def test_extras_are_medians_over_rounds():
    rounds = [{"step": {"samples": [1.0], "extras": {"exchanges": count}}} for count in (7, 8, 100)]
    (row,) = find_rows(WORKLOADS["W4"], [Result(OURS, rounds)])
    assert row.extras == {"exchanges": 8}


def test_a_table_has_a_column_for_each_case_that_ran_and_each_extra():
    rows = [Row("torch", {"numbers": Cell(3.5, 1.0)}), Row("GT", {"numbers": Cell(1234.5, 12.345)}, {"MB": 0.5})]
    assert table(WORKLOAD, rows).splitlines() == [
        "|  | us an op | MB |",
        "| --- | --- | --- |",
        "| torch | 3.50 (1) |  |",
        "| GT | 1,234 (12.3) | 0.50 |",
    ]


def test_what_has_no_row_is_named_with_its_reason():
    failed = Result(OURS, reason="it failed: OSError")
    assert skipped([failed], {"ddp": "wraps modules"}) == (
        "Without a row: GT, embedded (it failed: OSError); ddp (wraps modules)."
    )
    assert skipped([result(TORCH, found(1.0))], {}) == ""


def test_text_replaces_what_is_between_its_markers_only():
    page = "a\n<!-- W1: begin -->\nold\n<!-- W1: end -->\nb\n<!-- W2: begin -->\n<!-- W2: end -->\n"
    assert replace_between_markers(page, "W1", "new") == page.replace("\nold\n", "\n\nnew\n\n")
    with pytest.raises(ValueError, match="W3: begin"):
        replace_between_markers(page, "W3", "new")


def test_the_page_has_markers_for_every_workload():
    page = PAGE.read_text()
    for name in WORKLOADS:
        assert f"<!-- {name}: begin -->" in replace_between_markers(page, name, "figures")


def test_a_picture_has_a_bar_for_each_ratio_and_is_valid():
    rows = [
        Row(label, {"numbers": Cell(1.0, ratio)}) for label, ratio in (("torch", 1.0), ("GT & co", 5.0), ("c", 0.1))
    ]
    picture = ElementTree.fromstring(draw(WORKLOAD, rows))
    widths = [float(each.get("width")) for each in picture.findall("{*}rect")][1:]
    assert len(widths) == 3
    assert widths[2] > widths[1] > widths[0]


def test_without_ratios_there_is_no_picture():
    assert draw(WORKLOADS["W9"], [Row("1 client", {"1 worker": Cell(1.0)})]) == ""


def test_rounds_take_turns_and_a_failure_is_not_tried_again():
    tried = []

    def run(workload, variant):
        tried.append(variant.label)
        if variant is OURS:
            raise Unavailable("it failed")
        return {"cases": {"numbers": found(1.0)}, "versions": {}}

    torch, ours = run_rounds("W1", [TORCH, OURS], 2, run)
    assert tried == ["torch", "GT, embedded", "torch"]
    assert (len(torch.rounds), ours.rounds, ours.reason) == (2, [], "it failed")


def test_a_run_that_takes_too_long_is_ended():
    code, _, _ = run_limited([sys.executable, "-c", "import time; time.sleep(60)"], {}, 0.2)
    assert code is None


def test_the_reason_of_a_failure_is_its_error():
    assert last_line("Traceback\nOSError: no disk\n  [W: a warning]\n") == "OSError: no disk"
    assert last_line("") == "no message"


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_begins_with_its_baseline(name):
    assert WORKLOADS[name].baseline in ("", VARIANTS[name][0].label)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_peer_runs_a_workload_or_says_why_not(name):
    running, reasons = {variant.peer for variant in VARIANTS[name]}, set(DOES_NOT_APPLY.get(name, {}))
    assert not running & reasons
    if name not in ("W4-growth", "W9"):  # the growth of some peers; the dispatcher, which is a peer of W9 only
        assert running | reasons == set(PEERS) - {"dispatcher"}


@pytest.mark.parametrize("peer", PEERS)
def test_the_program_of_a_peer_measures_what_the_catalog_asks_of_it(peer):
    tree = ast.parse((PEER_FILES / f"{PEERS[peer].module}.py").read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    (measures,) = [node.value for node in assigned if ast.unparse(node.targets[0]) == "MEASURES"]
    asked = {name for name, rows in VARIANTS.items() for row in rows if row.peer == peer}
    assert {key.value for key in measures.keys} == asked


def test_modules_of_all_environments_need_the_standard_library_only():
    for name in ("sizes", "peers.command", "peers.process_memory"):
        source = Path(importlib.import_module(f"benchmarks.comparison.{name}").__file__).read_text()
        imported = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
        modules = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imported]
        assert {module.split(".")[0] for module in modules} <= {*sys.stdlib_module_names, "benchmarks"}


def test_quick_leaves_long_variants_out():
    assert "GT, 8 processes" not in [each.label for each in variants("W1", {"gt"}, quick=True)]
    assert "GT, 8 processes" in [each.label for each in variants("W1", {"gt"}, quick=False)]


def test_options_choose_workloads_and_peers():
    options = read_arguments(["--only", "W1,W4", "--peers", "torch,gt"])
    assert (options.only, options.peers, options.build) == (["W1", "W4"], ["torch", "gt"], BUILD)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--only", "W99"], "W99"), (["--peers", "numpy"], "numpy"), (["--quick", "--write-docs"], "full sizes")],
)
def test_wrong_options_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        read_arguments(arguments)
    assert message in capsys.readouterr().err


def test_a_section_tells_the_machine_and_the_versions():
    text = section("W1", [result(TORCH, found(1e-6))], MACHINE, ["torch"])
    assert "torch 1; a processor, 2 cores" in text
    assert "ddp" not in text


def test_this_machine_is_described():
    machine = describe_machine()
    assert machine.cores >= 1 and machine.processor


def test_changing_lengths_are_all_different():
    lengths = sizes.changing_lengths()
    assert len(set(lengths)) == len(lengths) > 60


GROWING = "print(flush=True); input(); block = bytearray(50 << 20); print(flush=True); input()"


@pytest.fixture
def growing_process():
    """A process that takes 50 MB when it reads a line, and ends at the next one."""
    command = [sys.executable, "-c", GROWING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_the_memory_of_a_process_is_its_growth_at_its_peak(growing_process):
    peak = PeakMemory([growing_process.pid])
    growing_process.stdin.write("\n")
    growing_process.stdout.readline()
    assert 50 << 20 <= peak.largest() < 60 << 20


@pytest.mark.parametrize("is_reaped", [False, True])
def test_processes_that_have_ended_do_not_count(growing_process, is_reaped):
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as other:
        other.stdout.read()
        os.waitid(os.P_PID, other.pid, os.WEXITED | (0 if is_reaped else os.WNOWAIT))
        before = PeakMemory([growing_process.pid, other.pid])
        assert 0 <= before.largest() < 1 << 20


def test_a_process_that_ends_while_it_is_measured_does_not_count(growing_process):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        peak = PeakMemory([growing_process.pid, other.pid])
        other.communicate(b"\n")
    assert 0 <= peak.largest() < 1 << 20


@pytest.mark.parametrize("way", ["", "in segments"])
def test_the_dispatcher_serves_null_workers_and_clients(way):
    samples, rate = measure_workers(2, Request("W9", workers=3, way=way, quick=True))
    assert len(samples) == 2
    assert all(0 < sample < 1e-2 for sample in samples)
    assert rate > 0


@pytest.mark.slow
def test_a_quick_run_of_torch_and_gt(tmp_path):
    raw = tmp_path / "raw.json"
    arguments = ["--quick", "--only", "W1", "--peers", "torch,gt", "--build", str(tmp_path), "--json", str(raw)]
    code, out, err = finish(start("-m", "benchmarks.comparison", *arguments), timeout=120)
    assert code == 0, err
    assert "| GT, 2 processes |" in out
    labels = [each["variant"]["label"] for each in json.loads(raw.read_text())["W1"]]
    assert labels == ["torch", "GT, embedded", "GT, 2 processes", "GT, 2 processes, gt.compile"]
