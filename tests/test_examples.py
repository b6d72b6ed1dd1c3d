"""Every example runs, agrees with torch and shows its point: on the worker of its process, on virtual workers, and on
worker processes behind one server. Examples of a mode share a process, because importing torch takes longer than they
do."""

import importlib
import json
import re

import pytest

from gt.signals.parser import read_config
from tests.subprocesses import ROOT, finish, serving, start

EXAMPLES = ROOT / "examples"
GPT2 = EXAMPLES / "signals" / "gpt2_by_yaml.py"
SHARED = ("running.py",)
BY_NUMBER = "any_number_of_workers.py"  # run by tests/distributed
OWN_PROCESS = ("hello.py", "train_transformer.py", GPT2.name, BY_NUMBER)  # the second is run by tests of the documents
SCRIPTS = sorted(
    str(path.relative_to(EXAMPLES))
    for path in EXAMPLES.rglob("*.py")
    if path.name not in (*SHARED, *OWN_PROCESS)
    and path.parent.name != "peers"  # those use no GT: test_peer_programs.py
)
AUTO = "simple_auto_shard.py"
_ANSI = "\x1b["

DRIVER = """
import contextlib, io, json, runpy, sys, traceback
import gt
from gt.signals.registry import registry
sys.path.insert(0, "examples/signals")
results = {}
for script, arguments in json.loads(sys.argv[1]):
    sys.argv = [script, *arguments]
    registry.clear()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(f"examples/{script}", run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code
        except BaseException:
            code = traceback.format_exc()
    gt.shutdown()
    results[script] = (code, out.getvalue())
print(json.dumps(results))
"""


def run_all(arguments, **environment):
    """Code and output by script. The one that starts GT by making a tensor comes first: that happens once in a
    process."""
    calls = sorted(arguments.items(), key=lambda call: call[0] != AUTO)
    code, out, err = finish(start("-c", DRIVER, json.dumps(calls), **environment), 180)
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def server():
    with serving(4) as port:
        yield f"localhost:{port}"


@pytest.fixture(scope="module")
def on_processes(server):
    joins = {AUTO: ["--distributed", "--address", server]}
    return run_all({script: ["--quick", *joins.get(script, [])] for script in SCRIPTS}, GT_SERVER=server)


@pytest.fixture(scope="module")
def on_virtual_workers():
    return run_all({script: ["--quick", "--virtual"] for script in SCRIPTS if script != AUTO})


@pytest.fixture(scope="module")
def embedded():
    return run_all({script: ["--quick"] for script in SCRIPTS})


@pytest.fixture(scope="module", params=["on_processes", "on_virtual_workers"])
def spread(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module", params=["on_processes", "on_virtual_workers", "embedded"])
def anywhere(request):
    return request.getfixturevalue(request.param)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_agrees_with_torch(script, anywhere):
    if script not in anywhere:
        pytest.skip("it starts no workers of its own")
    code, out = anywhere[script]
    assert not code, code
    assert "agree with torch" in out and "DISAGREE" not in out
    assert _ANSI not in out


SHOWN = {
    "signals/data_parallel.py": ["Weights are broadcast in the first step only", "Each gradient is reduced once"],
    "signals/model_parallel.py": ["512 of the 1024 features: {0: 512, 1: 512}", "1 all-reduce (16384 B)"],
    "signals/pipeline.py": ["Each stage is where the signals say", "{(0, 2): 1024, (1, 3): 1024} bytes"],
    "signals/hybrid.py": ["cut along both axes: [dp, tp]"],
    "signals/distributed_matmul.py": ["left cut: 0 bytes", "inner dim cut: 0 bytes", "[3, 3, 2, 2] rows"],
    "signals/dynamic_configuration.py": ["64 rows is on 4 of", "2 rows is on 1 of"],
    "config_from_python.py": ["-, tp on 0 1", "-, - on 1"],
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("script", SHOWN)
def test_an_example_shows_its_point(script, spread):
    _, out = spread[script]
    assert [text for text in SHOWN[script] if text not in out] == []


def test_every_example_has_a_check():
    assert {*SHOWN, AUTO} == set(SCRIPTS)


@pytest.mark.timeout(240)
def test_what_is_created_is_cut_over_a_running_server(on_processes):
    _, out = on_processes[AUTO]
    rows = {cells[1].strip(): cells[2].strip() for line in out.splitlines() if len(cells := line.split("│")) > 4}
    assert rows["gt.randn(8, 16)"] == "w, -"
    assert rows["gt.randn(9, 16)"] == rows["gt.to(torch.ones(8, 16))"] == "-, -"


@pytest.mark.timeout(240)
def test_gpt2_under_a_plan_that_one_variable_names(server):
    plan = GPT2.with_name("gpt2_tensor_parallel.yaml")
    code, out, err = finish(start(str(GPT2), "--quick", GT_SERVER=server, GT_CONFIG=str(plan)), 180)
    assert code == 0, err
    assert plan.name in out and "The losses of 2 steps agree to 1e-05" in out


@pytest.mark.timeout(240)
@pytest.mark.parametrize("environment", [{}, {"GT_WORKERS": "2"}], ids=["one worker", "two workers"])
def test_the_smallest_program_runs_on_any_number_of_workers(environment):
    code, out, err = finish(start("examples/hello.py", **environment), 180)
    assert code == 0, err
    assert out.startswith("gt.Tensor([[")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_gpt2_with_the_worker_of_its_process():
    code, out, err = finish(start(str(GPT2), "--quick"), 180)
    assert code == 0, err
    assert "The losses of 2 steps agree to 1e-05" in out


def test_gpt2_uses_one_name_of_gt():
    code = GPT2.read_text().split('"""', 2)[2]
    assert set(re.findall(r"\bgt\.\w+", code)) == {"gt.to"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: path.name)
def test_a_configuration_is_right_and_commented(path):
    config = read_config(path)
    assert config.signals or config.model
    assert path.read_text().startswith("#")


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_names_its_command_and_is_listed(script):
    text = (EXAMPLES / script).read_text()
    assert f"python examples/{script}" in text.split('"""')[1]
    page = "README_SIGNALS.md" if script.startswith("signals/") else "README.md"
    assert f"({script})" in (EXAMPLES / page).read_text()


def test_a_comparison_that_fails_ends_an_example(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES / "signals"))
    running = importlib.import_module("running")
    running.compare("Values", [1.0], [1.0])
    for wrong in (2.0, float("nan")):
        with pytest.raises(SystemExit, match="Values DISAGREE with torch"):
            running.compare("Values", [wrong], [1.0])
    with pytest.raises(SystemExit, match="NOT TRUE: Bytes are few"):
        running.expect(False, "Bytes are few.")
    assert capsys.readouterr().out == "Values agree with torch to 0.0001.\n"
