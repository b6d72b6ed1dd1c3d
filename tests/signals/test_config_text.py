"""A `model` section written as text, and what the parser says about `inputs` and `outputs`."""

import pytest

from gt.core.errors import SignalError
from gt.signals.config import ModelConfig
from gt.signals.document import model_text
from gt.signals.parser import parse_config

CONFIG = ModelConfig(
    {"dp": 2, "tp": 4},
    [0, 1, 2, 3, 4, 5, 6, 7],
    {"h.*.weight": ["-", ["dp", "tp"]], 'a "quoted" name': ["tp"]},
    inputs=["dp", "..."],
    outputs={"*": ["dp", "-", "-"], "h.0": ["-", "-", "tp"]},
)


def test_the_text_of_a_section_is_read_back_equal():
    text = model_text(CONFIG, "a heading\nof two lines", {"h.*.weight": "what it costs"})
    assert text.startswith("# a heading\n# of two lines\nmodel:\n  mesh: {dp: 2, tp: 4}\n")
    assert "# what it costs" in text
    assert parse_config(text).model == CONFIG


def test_all_workers_are_written_as_a_word():
    config = ModelConfig({"dp": 2}, "all", inputs=["dp"])
    assert "  workers: all\n" in model_text(config) and parse_config(model_text(config)).model == config


def test_the_last_pattern_of_outputs_counts():
    assert CONFIG.output_for("h.1").dims == (("dp",), (), ())
    assert CONFIG.output_for("h.0").dims == ((), (), ("tp",))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model: {mesh: {dp: 2}, inputs: dp}", "a layout has to be a list"),
        ("model: {mesh: {dp: 2}, inputs: [tp]}", "axis 'tp' is not in the mesh"),
        ("model: {mesh: {dp: 2}, outputs: [dp]}", "outputs has to be a mapping of patterns to layouts"),
        ("model:\n  mesh: {dp: 2}\n  outputs:\n    h: [dq]", "config:4: model: axis 'dq' is not in the mesh"),
        ("model: {mesh: {dp: 2}, outputs: {h: stage}}", "a layout has to be a list"),
        ("model: {outputs: {h: [dp]}}", "there is no mesh"),
        ("model: {mesh: {dp: 2}, inputs: }", "inputs has no value"),
        ("model: {mesh: {dp: 2}, output: {h: [dp]}}", "did you mean 'outputs'?"),
    ],
)
def test_problems_of_inputs_and_outputs_are_told_with_their_line(text, problem):
    with pytest.raises(SignalError) as raised:
        parse_config(text)
    assert problem in str(raised.value)
