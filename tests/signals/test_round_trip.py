"""A configuration written as YAML and read again is the same one."""

import math
import re

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gt.core.errors import SignalError
from gt.signals.config import Config, ModelConfig, ShardConfig, SignalConfig
from gt.signals.parser import parse_config

axis_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)
names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=8)
signal_names = names.filter(lambda name: name != "model")
patterns = names.filter(lambda name: name not in ("mesh", "workers"))
meshes = st.dictionaries(axis_names, st.integers(1, 3), min_size=1, max_size=3)
worker_lists = st.lists(st.integers(0, 500), min_size=1, max_size=6, unique=True)


@st.composite
def layouts(draw, mesh):
    """Layouts in which each axis is used at most once."""
    axes = draw(st.permutations(list(mesh)))
    dims = []
    for _ in range(draw(st.integers(0, 4))):
        taken = draw(st.integers(0, len(axes)))
        dims.append(draw(st.sampled_from(["-", None, []])) if not taken else axes[:taken] if taken > 1 else axes[0])
        axes = axes[taken:]
    if draw(st.booleans()):
        dims.insert(draw(st.integers(0, len(dims))), "...")
    return dims


@st.composite
def places(draw, mesh):
    count = math.prod(mesh.values())
    return draw(st.none() | st.permutations(range(count)).map(list))


@st.composite
def shards(draw):
    kind = draw(st.sampled_from(["axis", "dims", "replicate"]))
    if kind == "dims":
        mesh = draw(meshes)
        return {"mesh": mesh, "dims": draw(layouts(mesh)), "workers": draw(places(mesh))}
    value = draw(st.integers(-64, 63)) if kind == "axis" else True
    return {kind: value, "workers": draw(st.none() | worker_lists)}


@st.composite
def models(draw, signals):
    mesh = draw(meshes)
    entries = draw(st.dictionaries(patterns, st.booleans(), max_size=4))
    parameters = {pattern: draw(layouts(mesh)) for pattern, is_layout in entries.items() if is_layout or not signals}
    modules = {pattern: draw(st.sampled_from(signals)) for pattern in entries if pattern not in parameters}
    return {"mesh": mesh, "workers": draw(places(mesh)), "parameters": parameters, "modules": modules}


@st.composite
def documents(draw):
    """A configuration, and the plain values of a YAML file with the same content."""
    keys = draw(st.lists(signal_names, max_size=4, unique=True))
    signals, plain = {}, {}
    for place, key in enumerate(keys):
        shard = draw(st.none() | shards())
        backward = draw(st.none() | st.sampled_from(keys[place + 1 :])) if keys[place + 1 :] else None
        compile = draw(st.booleans())
        reshards = draw(st.none() | st.booleans())
        signals[key] = SignalConfig(
            None if shard is None else ShardConfig(**shard), backward, compile, reshard_after_forward=reshards
        )
        said = {
            "shard": shard and without_none(shard),
            "backward": backward,
            "compile": compile,
            "reshard_after_forward": reshards,
        }
        plain[key] = without_none(said)
    model = draw(st.none() | models(keys))
    if model is not None:
        entries = {**model["parameters"], **model["modules"]}
        plain["model"] = without_none({"mesh": model["mesh"], "workers": model["workers"], **entries})
    return Config(signals, None if model is None else ModelConfig(**model)), plain


def without_none(mapping):
    return {key: value for key, value in mapping.items() if value is not None}


@settings(max_examples=60, deadline=None)
@given(documents(), st.sampled_from([True, False, None]))
def test_a_configuration_survives_yaml(document, style):
    config, plain = document
    text = yaml.safe_dump(plain, default_flow_style=style, sort_keys=False, allow_unicode=True)
    assert parse_config(text) == config


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60) | st.text("ab:-[]{}*&!'\" \n0.,", max_size=60))
def test_any_text_is_a_configuration_or_refused_with_its_line(text):
    said = ""
    try:
        parse_config(text, "file")
    except SignalError as error:
        said = str(error)
    assert all(re.match("file:[0-9]+: ", line) for line in said.splitlines())
