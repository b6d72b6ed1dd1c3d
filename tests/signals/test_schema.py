"""The schema for editors agrees with the parser."""

import jsonschema
import pytest
import yaml

from gt.core.errors import SignalError
from gt.signals.parser import SHARD_KEYS, SIGNAL_KEYS, parse_config
from gt.signals.schema import SCHEMA
from tests.signals.test_parser import WHOLE
from tests.signals.without_leak_check import nothing_left_behind  # noqa: F401

validator = jsonschema.Draft202012Validator(SCHEMA)

GOOD = [
    "{}",
    WHOLE,
    "a: {}",
    "a: {replicate: true, compile: false}",
    "a: {replicate: false}",
    "a: {reshard_after_forward: false}",
    "a: {shard: {axis: -64}}",
    "a: {shard: {axis: 63, replicate: false, workers: [7]}}",
    "a: {shard: {replicate: true}}",
    "a: {shard: {mesh: {dp: 1}, dims: []}}",
    "a: {shard: {mesh: {dp: 1, tp: 3}, dims: [~, [tp, dp], '-', ..., []], replicate: false}}",
    "a: {backward: b}\nb: {}",
    "model: {}",
    "model: {mesh: {tp: 2}, workers: [3, 4], a: [tp], b: [[tp], ...], c: [~]}",
    "model: {workers: [0]}",
    "model: {mesh: {tp: 2}, eager_memory: 1000}",
    "model: {mesh: {dp: 2, tp: 2}, workers: all}",
    "a: {shard: {axis: 0, workers: all}}",
    "model: {'mesh*': s, '[m]esh': []}\ns: {}",
]

BAD = [
    "[]",
    "3",
    "a: ",
    "a: 3",
    "a: []",
    "'': {}",
    f"{'x' * 513}: {{}}",
    "a: {shards: {}}",
    "a: {shard: }",
    "a: {shard: {}}",
    "a: {shard: []}",
    "a: {shard: {workers: [0]}}",
    "a: {shard: {axis: 0, extra: 1}}",
    "a: {shard: {axis: true}}",
    "a: {shard: {axis: '0'}}",
    "a: {shard: {axis: 1.5}}",
    "a: {shard: {axis: 64}}",
    "a: {shard: {axis: -65}}",
    "a: {shard: {axis: }}",
    "a: {shard: {axis: 0, replicate: true}}",
    "a: {shard: {axis: 0, mesh: {a: 2}}}",
    "a: {shard: {axis: 0, mesh: {a: 2}, dims: [a]}}",
    "a: {shard: {replicate: false}}",
    "a: {shard: {replicate: 1}}",
    "a: {shard: {replicate: true, mesh: {a: 2}}}",
    "a: {shard: {axis: 0, workers: []}}",
    "a: {shard: {axis: 0, workers: 0}}",
    "a: {shard: {axis: 0, workers: some}}",
    "a: {shard: {axis: 0, workers: [all]}}",
    "a: {shard: {axis: 0, workers: [0, 0]}}",
    "a: {shard: {axis: 0, workers: [-1]}}",
    "a: {shard: {axis: 0, workers: [true]}}",
    "a: {shard: {axis: 0, workers: }}",
    "a: {shard: {dims: [a]}}",
    "a: {shard: {mesh: {a: 2}}}",
    "a: {shard: {mesh: {}, dims: []}}",
    "a: {shard: {mesh: [a], dims: []}}",
    "a: {shard: {mesh: {a: 0}, dims: [a]}}",
    "a: {shard: {mesh: {a: true}, dims: [a]}}",
    "a: {shard: {mesh: {'a b': 2}, dims: []}}",
    "a: {shard: {mesh: {2a: 2}, dims: []}}",
    "a: {shard: {mesh: {a: 2}, dims: a}}",
    "a: {shard: {mesh: {a: 2}, dims: [0]}}",
    "a: {shard: {mesh: {a: 2}, dims: ['']}}",
    "a: {shard: {mesh: {a: 2}, dims: [[-]]}}",
    "a: {shard: {mesh: {a: 2}, dims: [[...]]}}",
    "a: {shard: {mesh: {a: 2}, dims: [[~]]}}",
    "a: {shard: {mesh: {a: 2}, dims: [[a, a]]}}",
    "a: {shard: {mesh: {a: 2}, dims: [..., ...]}}",
    f"a: {{shard: {{mesh: {{a: 2}}, dims: [{'~, ' * 65}]}}}}",
    "a: {shard: {axis: 0}, replicate: true}",
    "a: {replicate: 1}",
    "model: {eager_memory: 0}",
    "model: {eager_memory: 1 GB}",
    "model: {eager_memory: true}",
    "model: {eager_memory: }",
    "a: {replicate: }",
    "a: {compile: 1}",
    "a: {compile: 'true'}",
    "a: {reshard_after_forward: 1}",
    "a: {reshard_after_forward: }",
    "a: {backward: 3}",
    "a: {backward: ''}",
    "a: {backward: model}",
    "a: {backward: }",
    "model: ",
    "model: []",
    "model: {mesh: }",
    "model: {mesh: {}}",
    "model: {workers: []}",
    "model: {workers: s}\ns: {}",
    "model: {a: 3}",
    "model: {a: }",
    "model: {a: {axis: 0}}",
    "model: {a: model}",
    "model: {a: ''}",
    "model: {'': []}",
    "model: {a: [3]}",
]

# A schema cannot express relations between two values of a file.
BEYOND = [
    "a: {shard: {mesh: {a: 2}, dims: [b]}}",
    "a: {shard: {mesh: {a: 2, b: 2}, dims: [a, [b, a]]}}",
    "a: {shard: {mesh: {a: 2}, dims: [a], workers: [0]}}",
    "a: {backward: a}",
    "model: {a: [tp]}",
    "model: {a: s}",
]


def is_parsed(text):
    try:
        parse_config(text)
    except SignalError:
        return False
    return True


def is_valid(text):
    return validator.is_valid(yaml.safe_load(text))


def test_the_schema_is_a_valid_json_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("text", GOOD)
def test_schema_and_parser_accept(text):
    assert is_parsed(text)
    assert is_valid(text)


@pytest.mark.parametrize("text", BAD)
def test_schema_and_parser_refuse(text):
    assert not is_parsed(text)
    assert not is_valid(text)


@pytest.mark.parametrize("text", BEYOND)
def test_mistakes_that_only_the_parser_finds(text):
    assert is_valid(text)
    assert not is_parsed(text)


def test_the_schema_has_the_keys_of_the_parser():
    assert tuple(SCHEMA["$defs"]["signal"]["properties"]) == SIGNAL_KEYS
    assert tuple(SCHEMA["$defs"]["shard"]["properties"]) == SHARD_KEYS
