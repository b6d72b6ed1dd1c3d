"""The records of a configuration: accepted values, normalization, and error messages."""

import copy
import dataclasses
import enum
import pickle

import numpy as np
import pytest

from gt.core.errors import GTError, SignalError
from gt.signals.checks import misspelt_of
from gt.signals.config import Config, ModelConfig, ModuleEntry, ParameterEntry, ShardConfig, SignalConfig
from tests.signals.without_leak_check import nothing_left_behind  # noqa: F401

GRID = {"dp": 2, "tp": 2}


class Stage(enum.IntEnum):
    FIRST = 3


@pytest.mark.parametrize(
    ("written", "field", "kept"),
    [
        ({"axis": 0}, "axis", 0),
        ({"axis": -64}, "axis", -64),
        ({"axis": np.int64(1)}, "axis", 1),
        ({"axis": 0}, "workers", None),
        ({"axis": 0, "workers": [3, 1]}, "workers", (3, 1)),
        ({"axis": 0, "workers": "all"}, "workers", "all"),
        ({"axis": 0, "workers": range(3)}, "workers", (0, 1, 2)),
        ({"axis": 0, "workers": (np.int32(2), Stage.FIRST)}, "workers", (2, 3)),
        ({"dims": ["dp"], "mesh": GRID}, "mesh", (("dp", 2), ("tp", 2))),
        ({"dims": ["dp", "-", None, []], "mesh": GRID}, "dims", (("dp",), (), (), ())),
        ({"dims": [["dp", "tp"]], "mesh": GRID}, "dims", (("dp", "tp"),)),
        ({"dims": [("tp", "dp")], "mesh": GRID}, "dims", (("tp", "dp"),)),
        ({"dims": ["...", "tp"], "mesh": GRID}, "dims", ("...", ("tp",))),
        ({"dims": [], "mesh": GRID}, "dims", ()),
        ({"replicate": True}, "replicate", True),
    ],
)
def test_a_shard_is_kept_in_one_form(written, field, kept):
    found = getattr(ShardConfig(**written), field)
    assert found == kept
    assert type(found) is type(kept)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({}, "does not say how tensors are laid out; give one of axis, dims and replicate"),
        ({"workers": [0]}, "does not say how"),
        ({"mesh": GRID}, "does not say how"),
        ({"axis": 0, "replicate": True}, "axis and replicate exclude one another"),
        ({"axis": 0, "dims": ["dp"], "mesh": GRID}, "axis and dims exclude one another"),
        ({"axis": 0, "mesh": GRID}, "use dims in place of axis"),
        ({"replicate": True, "mesh": GRID}, "takes no mesh"),
        ({"dims": ["dp"]}, "names axes of a mesh and there is none"),
        ({"axis": 64}, "axis 64 is not a dim of any tensor"),
        ({"axis": -65}, "axis -65 is not a dim"),
        ({"axis": True}, "axis has to be a whole number, not True"),
        ({"axis": 1.0}, "axis has to be a whole number, not 1.0"),
        ({"axis": "0"}, "axis has to be a whole number, not '0'"),
        ({"axis": 0, "replicate": 1}, "replicate has to be true or false, not 1"),
        ({"axis": 0, "workers": 2}, r"workers has to be a list such as \[0, 1\], or all, not 2"),
        ({"axis": 0, "workers": "01"}, "workers has to be a list"),
        ({"axis": 0, "workers": {0: 1}}, "workers has to be a list"),
        ({"axis": 0, "workers": []}, "workers names 0; name 1 to"),
        ({"axis": 0, "workers": range(1 << 17)}, "workers names 131072"),
        ({"axis": 0, "workers": [0, -1]}, "-1 is not a worker"),
        ({"axis": 0, "workers": [True]}, "True is not a worker"),
        ({"axis": 0, "workers": [1.0]}, "1.0 is not a worker"),
        ({"axis": 0, "workers": [2, 2]}, "worker 2 is named twice"),
        ({"dims": ["dp"], "mesh": 4}, "mesh has to give axes their sizes"),
        ({"dims": ["dp"], "mesh": ["dp", "tp"]}, "mesh has to give axes their sizes"),
        ({"dims": ["dp"], "mesh": {}}, "a mesh has 1 to 16 axes, not 0"),
        ({"dims": [], "mesh": {f"a{n}": 1 for n in range(17)}}, "a mesh has 1 to 16 axes, not 17"),
        ({"dims": ["dp"], "mesh": {"dp": 0}}, "axis 'dp' of the mesh has size 0"),
        ({"dims": ["dp"], "mesh": {"dp": True}}, "axis 'dp' of the mesh has size True"),
        ({"dims": [], "mesh": {"d p": 2}}, "'d p' cannot name a mesh axis"),
        ({"dims": [], "mesh": {"a" * 65: 2}}, "cannot name a mesh axis"),
        ({"dims": [], "mesh": {1: 2}}, "1 cannot name a mesh axis"),
        ({"dims": [], "mesh": [("dp", 2), ("dp", 2)]}, "the mesh has axis 'dp' twice"),
        ({"dims": ["dp"], "mesh": GRID, "workers": [0, 1, 2]}, "mesh dp=2, tp=2 has 4 places and workers names 3"),
        ({"dims": "dp", "mesh": GRID}, "a layout has to be a list"),
        ({"dims": ["-"] * 65, "mesh": GRID}, "the layout has 65 dims"),
        ({"dims": ["dpp"], "mesh": GRID}, "axis 'dpp' is not in the mesh; did you mean 'dp'?"),
        ({"dims": ["x"], "mesh": GRID}, "axis 'x' is not in the mesh; known: dp, tp"),
        ({"dims": ["dp", "dp"], "mesh": GRID}, "axis 'dp' cuts two dims"),
        ({"dims": [["tp", "tp"]], "mesh": GRID}, "axis 'tp' cuts two dims"),
        ({"dims": ["...", "..."], "mesh": GRID}, "'...' stands for any number of dims; use it once"),
        ({"dims": [["..."]], "mesh": GRID}, "'...' is not an axis"),
        ({"dims": [["-"]], "mesh": GRID}, "'-' is not an axis"),
        ({"dims": [0], "mesh": GRID}, "0 is not an axis"),
        ({"dims": [np.zeros(2)], "mesh": GRID}, "is not an axis"),
        ({"dims": [""], "mesh": GRID}, "'' is not an axis"),
    ],
)
def test_a_shard_that_makes_no_sense_is_refused(written, expected):
    with pytest.raises(SignalError, match=expected) as refused:
        ShardConfig(**written)
    assert str(refused.value).startswith("ShardConfig: ")


def test_all_problems_are_reported_at_once():
    with pytest.raises(SignalError) as refused:
        ShardConfig(axis=99, workers=[0, 0, -1])
    assert len(str(refused.value).splitlines()) == 3


def test_a_signal_error_is_one_of_gt():
    assert issubclass(SignalError, GTError) and issubclass(SignalError, ValueError)


def test_a_message_stays_short():
    with pytest.raises(SignalError) as refused:
        ShardConfig(axis="x" * 100_000)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"shard": {"axis": 0}}, r"shard has to be a ShardConfig such as ShardConfig\(axis=0\)"),
        ({"backward_signal": 3}, "backward_signal has to be text, not 3"),
        ({"backward_signal": ""}, "backward_signal has 0 characters"),
        ({"backward_signal": "model"}, "backward_signal cannot be 'model'"),
        ({"backward_signal": "x" * 513}, "backward_signal has 513 characters"),
        ({"compile": 1}, "compile has to be True or False, not 1"),
        ({"compile": None}, "compile has to be True or False"),
        ({"reshard_after_forward": 1}, "reshard_after_forward has to be True, False or None, not 1"),
    ],
)
def test_a_signal_that_makes_no_sense_is_refused(written, expected):
    with pytest.raises(SignalError, match=expected) as refused:
        SignalConfig(**written)
    assert str(refused.value).startswith("SignalConfig: ")


def test_comparisons_ignore_the_source_line():
    shard = ShardConfig(axis=0, workers=[0, 1])
    assert SignalConfig(shard, source="a.yaml:3") == SignalConfig(ShardConfig(0, (0, 1)))
    assert SignalConfig(shard) != SignalConfig(ShardConfig(axis=1, workers=[0, 1]))
    assert ParameterEntry("*", (), "a.yaml:3") == ParameterEntry("*", ())
    assert ModelConfig(source="a.yaml:3") == ModelConfig()


RECORDS = [
    ShardConfig(dims=["dp", "...", ["tp"]], mesh=GRID, workers=[3, 2, 1, 0]),
    SignalConfig(ShardConfig(replicate=True), "backward", True, "a.yaml:1"),
    ModelConfig({"tp": 2}, [0, 1], {"*.weight": ["-", "tp"]}, {"h.0": "stage"}),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_is_a_value(record):
    assert hash(record) == hash(copy.deepcopy(record))
    assert record == pickle.loads(pickle.dumps(record)) == dataclasses.replace(record)
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.workers = (7,)


def test_a_changed_copy_is_checked_too():
    with pytest.raises(SignalError, match="4 places and workers names 1"):
        dataclasses.replace(RECORDS[0], workers=[0])


MODEL = ModelConfig(
    mesh={"tp": 2},
    parameters={"*": [], "*.weight": ["-", "tp"], "h.[0-5].weight": ["tp", "..."], "*.ln.weight": []},
    modules={"h.*": "stage_1", "h.1": "stage_2", "H.?": "stage_3"},
)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("bias", "*"),
        ("wte.weight", "*.weight"),
        ("h.3.weight", "h.[0-5].weight"),
        ("h.7.weight", "*.weight"),
        ("h.3.ln.weight", "*.ln.weight"),
        ("H.3.weight", "*.weight"),
    ],
)
def test_the_last_pattern_that_matches_a_parameter_counts(name, pattern):
    assert MODEL.spec_for(name).pattern == pattern


@pytest.mark.parametrize(
    ("name", "signal"),
    [("h.0", "stage_1"), ("h.0.attn", "stage_1"), ("h.1", "stage_2"), ("H.1", "stage_3"), ("h", None), ("", None)],
)
def test_the_last_pattern_that_matches_a_module_counts(name, signal):
    assert getattr(MODEL.scope_for(name), "signal", None) == signal


def test_a_model_without_patterns_lays_out_nothing():
    assert ModelConfig().spec_for("weight") is None and ModelConfig().scope_for("h.0") is None


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"parameters": {"*": ["tp"]}}, "not in the mesh; there is no mesh: add one, such as mesh: {tp: 2}"),
        ({"mesh": {"tp": 2}, "parameters": {"*": ["tpp"]}}, "did you mean 'tp'?"),
        ({"mesh": {"tp": 2}, "workers": [0]}, "mesh tp=2 has 2 places and workers names 1"),
        ({"parameters": {"": []}}, "'' cannot be a pattern"),
        ({"parameters": {3: []}}, "3 cannot be a pattern"),
        ({"parameters": {"mesh": []}}, r"'mesh' is a key of the model section and no pattern; write '\[m\]esh'"),
        ({"modules": {"workers": "a"}}, r"write '\[w\]orkers'"),
        ({"modules": {"h": "model"}}, "the signal of modules 'h' cannot be 'model'"),
        ({"modules": {"h": 3}}, "the signal of modules 'h' has to be text, not 3"),
    ],
)
def test_a_model_that_makes_no_sense_is_refused(written, expected):
    with pytest.raises(SignalError, match=expected):
        ModelConfig(**written)


def test_entries_may_be_given_as_records():
    model = ModelConfig({"tp": 2}, parameters=[ParameterEntry("*", ("-", "tp"))], modules=[ModuleEntry("h", "a")])
    assert model == ModelConfig({"tp": 2}, parameters={"*": [None, ["tp"]]}, modules={"h": "a"})


def test_a_configuration_does_not_change_with_what_it_was_made_of():
    signals = {"a": SignalConfig()}
    config = Config(signals)
    signals["b"] = SignalConfig()
    assert config == Config({"a": SignalConfig()})
    with pytest.raises(TypeError):
        config.signals["b"] = SignalConfig()


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("forwrd", "forward", True),
        ("forwardd", "forward", True),
        ("forwird", "forward", True),
        ("forwrad", "forward", True),
        ("Forward", "forward", True),
        ("forward-pass", "forward_pass", True),
        ("forward_layr1", "forward_layer1", True),
        ("layer_1", "layer_2", False),
        ("layer12", "layer1", False),
        ("stage_a", "stage_b", False),
        ("encoder", "decoder", False),
        ("backward", "forward", False),
        ("wq", "wk", False),
    ],
)
def test_a_misspelt_name_differs_by_one_letter(name, known, expected):
    assert (misspelt_of(name, ["other", known]) == known) is expected
    assert (misspelt_of(known, [name]) == name) is expected
