"""Every public name has a docstring with an example, and every example runs, each in a session of its own."""

import dataclasses
import doctest
import re

import pytest
import torch

import gt
from gt.core.settings import _VARIABLES
from gt.signals.registry import registry
from tests.public_names import COMMANDS, docstrings_of, main_module, public_names, value_of
from tests.subprocesses import ROOT

WITHOUT_EXAMPLE = {"gt.__version__"}  # a text
DOCSTRINGS = {
    where: text for name in public_names() if name not in WITHOUT_EXAMPLE for where, text in docstrings_of(name).items()
}
JOINING = {name for name, text in DOCSTRINGS.items() if '"localhost:12345"' in text and ">>> gt.connect" in text}
LAUNCHING = {name for name in DOCSTRINGS if name.startswith("gt.launch")}  # tests/launch runs their examples
_STARTS_GT = re.compile(r"gt\.(init|connect|gpu_workers)\(")
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture
def ended(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # examples write files
    yield
    gt.shutdown()
    registry.clear()


def run_example(name, text):
    """What doctest prints about examples that fail."""
    names = {"__name__": "__main__", "gt": gt, "torch": torch}
    example = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    printed = []
    doctest.DocTestRunner(optionflags=_FLAGS).run(example, out=printed.append)
    return "".join(printed)


@pytest.mark.parametrize("name", sorted(DOCSTRINGS))
def test_a_public_name_has_an_example(name):
    assert ">>> " in DOCSTRINGS[name]


@pytest.mark.parametrize("name", sorted(DOCSTRINGS.keys() - JOINING - LAUNCHING))
def test_an_example_of_a_public_name_runs(name, ended):
    if not _STARTS_GT.search(DOCSTRINGS[name]):
        gt.init()
    assert run_example(name, DOCSTRINGS[name]) == ""


@pytest.mark.parametrize("name", sorted(JOINING))
def test_an_example_that_joins_a_server_runs(name, server_of_two, ended):
    assert run_example(name, DOCSTRINGS[name].replace("12345", str(server_of_two))) == ""


def test_an_example_that_prints_something_else_fails(ended):
    gt.init()
    assert "Expected:\n    4.0\nGot:\n    3.0" in run_example("wrong", ">>> gt.ones(3).sum().item()\n4.0\n")


@pytest.mark.parametrize("name", ["gt.SignalConfig", "gt.ShardConfig", "gt.ModelConfig"])
def test_every_field_of_a_configuration_is_described(name):
    text = DOCSTRINGS[name]
    assert [field.name for field in dataclasses.fields(value_of(name)) if f"- `{field.name}`: " not in text] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_the_docstring_of_a_command_shows_how_it_is_called(command):
    assert f"`python -m {command}" in main_module(command).__doc__


def test_every_environment_variable_has_an_example_that_can_be_used():
    table = (ROOT / "docs" / "workers.md").read_text()
    examples = dict(re.findall(r"^\| `(GT_\w+)` \|.*\| `([^`]+)` \|$", table, re.MULTILINE))
    assert examples.keys() == _VARIABLES.keys()
    for name, text in examples.items():
        _, parse = _VARIABLES[name]
        parse(text)
