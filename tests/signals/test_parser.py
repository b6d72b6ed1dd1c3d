"""Parsing of YAML files, and the line and text of each mistake."""

import pytest

from gt.core.errors import SignalError
from gt.signals.config import Config, ModelConfig, ShardConfig, SignalConfig
from gt.signals.document import MAX_ALIASES, MAX_DEPTH
from gt.signals.parser import MAX_BYTES, parse_config, read_config
from tests.signals.without_leak_check import nothing_left_behind  # noqa: F401

WHOLE = """\
forward_layer1:
  shard:
    axis: 0
    workers: [0, 1, 2, 3]
  backward: backward_layer1
  compile: true
backward_layer1:
  shard: {axis: 0, workers: [0, 1, 2, 3]}
grid:
  shard: {mesh: {dp: 2, tp: 2}, workers: [0, 1, 2, 3], dims: [dp, tp]}
updates:
  shard: {replicate: true, workers: [0, 1]}
everywhere:
  replicate: true
stage_1: {reshard_after_forward: false}
model:
  mesh: {tp: 2}
  workers: [0, 1]
  "*.c_fc.weight": [-, tp]
  "*.ln_*": []
  "transformer.h.[0-5]": stage_1
"""
FOUR = [0, 1, 2, 3]


def test_every_key_is_read():
    assert parse_config(WHOLE) == Config(
        {
            "forward_layer1": SignalConfig(ShardConfig(axis=0, workers=FOUR), "backward_layer1", compile=True),
            "backward_layer1": SignalConfig(ShardConfig(axis=0, workers=FOUR)),
            "grid": SignalConfig(ShardConfig(mesh={"dp": 2, "tp": 2}, workers=FOUR, dims=["dp", "tp"])),
            "updates": SignalConfig(ShardConfig(replicate=True, workers=[0, 1])),
            "everywhere": SignalConfig(ShardConfig(replicate=True)),
            "stage_1": SignalConfig(reshard_after_forward=False),
        },
        ModelConfig(
            {"tp": 2}, [0, 1], {"*.c_fc.weight": [None, "tp"], "*.ln_*": []}, {"transformer.h.[0-5]": "stage_1"}
        ),
    )


def test_signals_and_patterns_know_their_line():
    config = parse_config(WHOLE, "plans/tp.yaml")
    assert config.signals["forward_layer1"].source == "plans/tp.yaml:1"
    assert config.signals["grid"].source == "plans/tp.yaml:9"
    assert config.model.source == "plans/tp.yaml:16"
    assert config.model.spec_for("h.0.ln_1.weight").source == "plans/tp.yaml:20"
    assert config.model.scope_for("transformer.h.3").source == "plans/tp.yaml:21"


@pytest.mark.parametrize(
    ("written", "dims"),
    [
        ("[-, a]", ((), ("a",))),
        ("[a, -]", (("a",), ())),
        ("[~, a]", ((), ("a",))),
        ("[null, 'a']", ((), ("a",))),
        ("['-', a]", ((), ("a",))),
        ("[[a, b], -]", (("a", "b"), ())),
        ("[..., b]", ("...", ("b",))),
        ("[a, ...]", (("a",), "...")),
        ("[[], b]", ((), ("b",))),
        ("[]", ()),
    ],
)
def test_ways_to_write_a_layout(written, dims):
    config = parse_config(f"s: {{shard: {{mesh: {{a: 2, b: 2}}, dims: {written}}}}}")
    assert config.signals["s"].shard.dims == dims


def test_a_layout_may_have_a_line_for_each_dim():
    config = parse_config('s:\n  shard:\n    mesh: {a: 2}\n    dims:\n    - "-"\n    -\n    - a\n')
    assert config.signals["s"].shard.dims == ((), (), ("a",))


def test_an_alias_repeats_a_value():
    config = parse_config("a: {shard: &rows {axis: 0, workers: [0, 1]}}\nb: {shard: *rows}\n")
    assert config.signals["a"] == config.signals["b"]


def test_an_empty_configuration_is_accepted():
    assert parse_config("{}") == Config()
    assert parse_config("model: {}") == Config({}, ModelConfig())


def test_signals_may_name_those_that_are_known():
    known = {"backward": SignalConfig()}
    config = parse_config("a: {backward: backward}\nmodel: {h: backward}", known=known)
    assert list(config.signals) == ["a"]


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("", 1, "the file is empty"),
        ("# only this\n", 1, "the file is empty"),
        ("- a\n- b\n", 1, r"a configuration is a mapping of signals, not \['a', 'b'\]"),
        ("\njust text\n", 2, "a configuration is a mapping of signals, not 'just text'"),
        ("a: {}\nb: [1\n", 3, "this is not YAML that can be read: while parsing a flow sequence"),
        ("a: {}\n\tb: 1\n", 2, "this is not YAML"),
        ("a: {}\nb: *x\n", 2, "undefined alias 'x'"),
        ("a: {}\n---\nb: {}\n", 2, "expected a single document"),
        ("a: {}\nb: '\x01'\n", 2, "character 0x1 is not allowed"),
        ("a:\n  b: " + "[" * MAX_DEPTH, 2, f"nested over {MAX_DEPTH} levels deep"),
        ("a: &x {}\n" + f"b: [{'*x, ' * (MAX_ALIASES + 1)}]", 2, f"over {MAX_ALIASES} aliases"),
        ("a: {}\nb: {}\na: {}\n", 3, "key 'a' is there already, in line 1; remove one"),
        ("a:\n  compile: true\n  compile: true\n", 3, "key 'compile' is there already, in line 2"),
        ("a: {}\n7: {}\n", 2, "key 7 is not text; put it in quotes"),
        ("on: {}\n", 1, "key True is not text"),
        ("? [a]\n: {}\n", 1, "is not text"),
        ("a: &x {}\nb:\n  <<: *x\n", 3, "merge keys"),
        ("? !!python/object/apply:os.system ['true']\n: 1\n", 1, "!!python/object/apply:os.system is not text"),
        ("a: !!python/object/apply:os.system ['true']\n", 1, "not !!python/object/apply:os.system"),
        ("'': {}\n", 1, "its name has 0 characters"),
        (f"? {'x' * 513}\n: {{}}\n", 1, "its name has 513 characters"),
        ("a:\n", 1, "signal 'a': a signal has to be a mapping of shard, .*, not nothing"),
        ("a: 3\n", 1, "a signal has to be a mapping"),
        ("a:\n  shards: {axis: 0}\n", 2, "a signal has no key 'shards'; did you mean 'shard'?"),
        ("a:\n  shard:\n", 2, "shard has no value; give it one or leave the key out"),
        ("a:\n  shard: 0\n", 2, "shard has to be a mapping of axis, workers"),
        ("a:\n  shard:\n    axes: 0\n", 3, "shard has no key 'axes'; did you mean 'axis'?"),
        ("a:\n  shard:\n    axis:\n", 3, "axis has no value"),
        ("a:\n  shard:\n    workers: [0]\n", 2, "does not say how tensors are laid out"),
        ("a:\n  shard:\n    replicate: false\n", 2, "does not say how tensors are laid out"),
        ("a:\n  shard:\n    axis: true\n", 3, "axis has to be a whole number, not True"),
        ("a:\n  shard:\n    axis: '0'\n", 3, "axis has to be a whole number, not '0'"),
        ("a:\n  shard:\n    axis: 010\n", 3, "axis has to be a whole number, not 010"),
        ("a:\n  shard:\n    axis: 1.5\n", 3, "axis has to be a whole number, not 1.5"),
        ("a:\n  shard:\n    axis: 2024-01-01\n", 3, "axis has to be a whole number, not 2024-01-01"),
        ("a:\n  shard:\n    axis: " + "9" * 5000 + "\n", 3, "axis has to be a whole number, not 999"),
        ("a:\n  shard:\n    axis: 64\n", 3, "axis 64 is not a dim of any tensor"),
        ("a:\n  shard:\n    axis: 0\n    replicate: yes please\n", 4, "replicate has to be true or false"),
        ("a:\n  shard:\n    axis: 0\n    mesh: {a: 2}\n", 4, "use dims in place of axis"),
        ("a:\n  shard:\n    axis: 0\n    replicate: true\n", 4, "axis and replicate exclude one another"),
        ("a:\n  shard:\n    axis: 0\n    workers: 1.5\n", 4, "workers has to be a list such as .*, not 1.5"),
        ("a:\n  shard:\n    axis: 0\n    workers:\n    - 0\n    - -1\n", 6, "-1 is not a worker"),
        ("a:\n  shard:\n    axis: 0\n    workers:\n    - 0\n    - 0\n", 6, "worker 0 is named twice"),
        ("a:\n  shard:\n    axis: 0\n    workers: [true]\n", 4, "True is not a worker"),
        ("a:\n  shard:\n    dims: [a]\n", 3, "names axes of a mesh and there is none"),
        ("a:\n  shard:\n    dims: [a]\n    mesh:\n      a: 0\n", 5, "axis 'a' of the mesh has size 0"),
        ("a:\n  shard:\n    dims: [a]\n    mesh: [a]\n", 4, "mesh has to give axes their sizes"),
        ("a:\n  shard:\n    dims: 1.5\n    mesh: {a: 2}\n", 3, "a layout has to be a list .* not 1.5"),
        ("a:\n  shard:\n    dims:\n    - rows\n    mesh: {row: 2}\n", 4, "did you mean 'row'?"),
        ("a:\n  shard:\n    dims: [tp, - ]\n    mesh: {tp: 2}\n", 3, 'write a dim that is not cut as "-", in quotes'),
        ("a:\n  shard:\n    dims:\n    - -\n    mesh: {tp: 2}\n", 4, 'nothing is not an axis .* "-" for a dim'),
        ("a:\n  shard:\n    dims: [a]\n    mesh: {a: 2}\n    workers: [0]\n", 5, "mesh a=2 has 2 places"),
        ("a:\n  shard: {axis: 0}\n  replicate: true\n", 3, "shard and replicate exclude one another"),
        ("a:\n  replicate: 1\n", 2, "replicate has to be true or false, not 1"),
        ("a:\n  compile: 'true'\n", 2, "compile has to be true or false, not 'true'"),
        ("a:\n  reshard_after_forward: 1\n", 2, "reshard_after_forward has to be true or false, not 1"),
        ("a:\n  backward: 3\n", 2, "backward has to be text, not 3"),
        ("a:\n  backward: model\nmodel: {}\n", 2, "backward cannot be 'model'"),
        ("a:\n  backward: a\n", 2, "backward goes in a circle: a -> a;"),
        ("a: {}\nb:\n  backward: c\nc: {backward: b}\n", 3, "backward goes in a circle: b -> c -> b;"),
        ("model: 3\n", 1, "model: this section has to be a mapping"),
        ("model:\n", 1, "model: this section has to be a mapping"),
        ("model:\n  mesh:\n", 2, "mesh has no value"),
        ("model:\n  mesh: {tp: 2}\n  workers: [0]\n", 3, "mesh tp=2 has 2 places and workers names 1"),
        ("model:\n  '*.w': [tp]\n", 2, "axis 'tp' is not in the mesh; there is no mesh"),
        ("model:\n  mesh: {tp: 2}\n  '*.w': [-, tpp]\n", 3, "axis 'tpp' is not in the mesh; did you mean 'tp'?"),
        ("model:\n  mesh: {tp: 2}\n  '*.w': tp\n", 3, r"'tp' is an axis of the mesh and no signal; .* \[tp\]"),
        ("model:\n  h.*: stag\nstage: {}\n", 2, "modules 'h.\\*' run in signal 'stag', .* did you mean 'stage'?"),
        ("model:\n  h.*: stage\n", 2, "which is not configured; none is configured"),
        ("model:\n  h.*: model\n", 2, "cannot be 'model'"),
        ("model:\n  h.*: {axis: 0}\n", 2, r"'h.\*' has to be a layout such as \[-, tp\] or a signal"),
        ("model:\n  h.*:\n", 2, "not nothing"),
        ("model:\n  worker: [0, 1]\n", 2, "0 is not an axis .* did you mean 'workers'?"),
        ("model:\n  shard: {axis: 0}\n", 2, "'model' is not a signal: use another name for one"),
        ("model:\n  '': []\n", 2, "'' cannot be a pattern"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_a_mistake_is_reported_with_its_line(text, line, expected):
    with pytest.raises(SignalError, match=expected) as refused:
        parse_config(text, "config.yaml")
    assert str(refused.value).startswith(f"config.yaml:{line}: ")
    assert len(str(refused.value)) < 400


def test_all_mistakes_of_a_file_are_reported_at_once_in_the_order_of_lines():
    text = "a:\n  shard: {axis: 99, workers: [0, 0]}\nb: {backward: 3}\nmodel: {h: d}\na: {}\ne: {compile: 3}\n"
    with pytest.raises(SignalError) as refused:
        parse_config(text, "config.yaml")
    lines = [int(each.split(":")[1]) for each in str(refused.value).splitlines()]
    assert lines == [2, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "text",
    [
        "a: {shard: {axs: 0}}",  # not also: no layout is given
        "a: {shard: {axis: }}",
        "a: {shard: 3, backward: b}\nb: {}",
        "a: {shard: {dims: [a], mesh: 3}}",  # not also: the axis is not in the mesh
        "a: {shard: {dims: [b], mesh: {a: 2}, workers: [0, 1]}}",
        "a: {backward: b}\nb: {backward: c}\nc: {backward: a}",  # one cycle, not three
        "a: {shard: {axis: x}}\nb: {backward: a}",  # a signal with a mistake may still be named
        "model: {h: a}\na: 3",
    ],
)
def test_one_mistake_is_reported_once(text):
    with pytest.raises(SignalError) as refused:
        parse_config(text)
    assert len(str(refused.value).splitlines()) == 1


def test_a_circle_may_pass_through_what_is_known():
    known = {"python": SignalConfig(backward_signal="file")}
    with pytest.raises(SignalError, match="config:1: signal 'file': .*: file -> python -> file;"):
        parse_config("file: {backward: python}", known=known)


def test_a_file_may_break_a_circle_of_what_is_known():
    known = {"a": SignalConfig(backward_signal="b"), "b": SignalConfig(backward_signal="a")}
    assert parse_config("a: {}", known=known).signals["a"] == SignalConfig()


def test_recursive_yaml_aliases_are_refused():
    with pytest.raises(SignalError, match="is not an axis"):
        parse_config("a: {shard: &x {mesh: {a: 2}, dims: [*x, [*x]]}}")


def test_many_signals_are_read_in_time_that_grows_with_their_number():
    config = parse_config("".join(f"s{n}: {{backward: s{n + 1}}}\n" for n in range(2000)) + "s2000: {}\n")
    assert config.signals["s1999"].source == "config:2000"


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "config.yaml"
        path.write_bytes(content)
        return path

    return write


def test_a_file_is_read(write):
    path = write(b"\xef\xbb\xbfa: {compile: true}\n")
    assert read_config(path).signals == {"a": SignalConfig(compile=True)}
    assert read_config(str(path)).signals["a"].source == f"{path}:1"


def test_a_missing_file_is_named(tmp_path):
    for path in (tmp_path / "missing.yaml", tmp_path, f"{tmp_path}/\0"):
        with pytest.raises(SignalError, match="cannot be read: .*; give the path of a YAML file") as refused:
            read_config(path)
        assert str(refused.value).startswith(str(path))


@pytest.mark.parametrize(
    ("content", "line", "expected"),
    [
        (b"a: {}\nb: \xff\n", 2, "not UTF-8"),
        (b"#" * (MAX_BYTES + 1), 1, f"larger than {MAX_BYTES} bytes"),
    ],
    ids=["encoding", "size"],
)
def test_text_that_is_not_a_configuration_is_refused(write, content, line, expected):
    path = write(content)
    with pytest.raises(SignalError, match=expected) as refused:
        read_config(path)
    assert str(refused.value).startswith(f"{path}:{line}: ")
