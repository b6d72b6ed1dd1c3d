"""`python -m gt.signals`."""

import json
import subprocess
import sys

import pytest

from gt.signals.__main__ import main
from gt.signals.schema import SCHEMA
from tests.signals.test_parser import WHOLE


@pytest.fixture
def run(tmp_path, capsys):
    """Check a text: the exit code, and stdout and stderr with the file's name shortened."""

    def run(text, *options):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        code = main(["check", str(path), *options])
        out, err = capsys.readouterr()
        return code, out.replace(str(path), "config.yaml"), err.replace(str(path), "config.yaml")

    return run


def test_the_schema_is_printed(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA


def words(text):
    return [line.split() for line in text.strip().splitlines()]


def test_a_configuration_is_shown_as_tables(run):
    code, out, err = run(WHOLE, "--workers", "4")
    assert (code, err) == (0, "")
    assert words(out) == words(
        """
        signal           layout                  workers  backward         compile  copies  line
        forward_layer1   axis 0                  0 1 2 3  backward_layer1  yes      1
        backward_layer1  axis 0                  0 1 2 3                            7
        grid             [dp, tp] of dp=2, tp=2  0 1 2 3                            9
        updates          replicated              0 1                                11
        everywhere       replicated              all                                13
        stage_1                                                            kept     15
        pattern              layout   signal   line
        *.c_fc.weight        [-, tp]           19
        *.ln_*               []                20
        transformer.h.[0-5]           stage_1  21
        model over mesh tp=2 of workers 0 1
        """
    )


def test_long_names_are_not_cut_in_a_pipe(run):
    name = "[red]" + "x" * 300
    assert name in run(f'"{name}": {{}}')[1]


def test_a_layout_is_shown_as_a_spec_is(run):
    text = "a: {shard: {mesh: {a: 2, b: 2}, dims: [[a, b], ..., -]}}"
    assert "[a b, ..., -] of a=2, b=2" in run(text)[1]


def test_an_empty_configuration_is_reported(run):
    assert run("{}") == (0, "nothing is configured\n", "")


def test_mistakes_go_to_stderr(run):
    code, out, err = run("a: {compile: 3}\nc: 3\n")
    assert (code, out) == (1, "")
    assert [line.partition(": ")[0] for line in err.splitlines()] == ["config.yaml:1", "config.yaml:2"]


def test_a_misspelt_backward_is_a_mistake_and_one_that_python_may_register_is_not(run):
    assert "'backwrd', which is not configured" in run("a: {backward: backwrd}\nbackward: {}")[2]
    assert run("a: {backward: gradients}")[::2] == (0, "")


@pytest.mark.parametrize(
    ("entered", "code", "said"),
    [
        ("forwrd", 1, "signal 'forwrd' is entered and not configured; did you mean 'forward'?"),
        ("forward", 0, "entered, not configured: elsewhere\nconfigured, not entered: other"),
    ],
)
def test_the_names_that_a_program_enters_are_checked(tmp_path, entered, code, said):
    config, program = tmp_path / "config.yaml", tmp_path / "train.py"
    config.write_text("forward: {shard: {axis: 0}, backward: back}\nback: {}\nother: {}")
    program.write_text(
        "import sys\nimport gt\nprint('to stderr')\n"
        "with gt.signal.context(sys.argv[1]), gt.signal.context('elsewhere'):\n    gt.ones(2)\n"
    )
    command = [sys.executable, "-m", "gt.signals", "check", str(config), "--run", str(program), entered]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == code
    assert said in (found.stderr if code else found.stdout)
    assert "to stderr" in found.stderr


def test_a_missing_file_is_reported(capsys):
    assert main(["check", "/nowhere/config.yaml"]) == 1
    assert capsys.readouterr().err.startswith("/nowhere/config.yaml: cannot be read: No such file")


@pytest.mark.parametrize(
    ("text", "workers", "needed"),
    [
        ("a: {shard: {axis: 0, workers: [0, 5]}}", 4, 6),
        ("a: {shard: {mesh: {x: 2, y: 3}, dims: [x]}}", 4, 6),
        ("model: {mesh: {x: 2}, workers: [0, 5]}", 4, 6),
        ("a: {shard: {axis: 0, workers: [0, 5]}}", 6, None),
        ("a: {shard: {mesh: {x: 2, y: 3}, dims: [x]}}", 6, None),
        ("a: {shard: {axis: 0}}", 1, None),
        ("a: {shard: {axis: 0, workers: [0, 5]}}", None, None),
    ],
)
def test_missing_workers_are_reported_with_how_to_start_them(run, text, workers, needed):
    code, _, err = run(text, *(["--workers", str(workers)] if workers else []))
    assert code == (0 if needed is None else 1)
    assert (f"GT_WORKERS={needed} or gt.init(workers={needed})" in err) == (needed is not None)
    assert err.startswith("config.yaml:1: ") == (needed is not None)


@pytest.mark.parametrize(
    "arguments", [[], ["check"], ["check", "x", "--workers", "0"], ["check", "x", "--workers", "²"]]
)
def test_wrong_use_is_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m gt.signals" in capsys.readouterr().err


def test_the_command_runs_as_a_module(tmp_path):
    command = [sys.executable, "-m", "gt.signals", "check", str(tmp_path / "none.yaml")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout) == (1, "")
    assert "cannot be read" in found.stderr
