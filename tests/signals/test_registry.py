"""The current configuration, from files and Python; the later one counts."""

import sys
import threading

import pytest

from gt.core.errors import SignalError
from gt.signals import registry as module
from gt.signals.config import Config, ModelConfig, ShardConfig, SignalConfig
from gt.signals.registry import Registry, get_config, get_signal_config, load_config, register_config
from tests.subprocesses import finish, start

ROWS = SignalConfig(ShardConfig(axis=0))
COLUMNS = SignalConfig(ShardConfig(axis=1))


@pytest.fixture
def registry():
    return Registry({})


@pytest.fixture
def write(tmp_path):
    def write(text, name="config.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_nothing_is_configured_at_first(registry):
    assert registry.current() == Config()
    assert registry.get("forward") is None
    assert registry.version == 0


def test_the_later_configuration_of_a_name_wins(registry, write):
    registry.register("a", ROWS)
    registry.register("b", ROWS)
    registry.load(write("b: {shard: {axis: 1}}\nc: {}\n"))
    registry.register("c", COLUMNS)
    assert registry.current().signals == {"a": ROWS, "b": COLUMNS, "c": COLUMNS}


def test_a_later_model_section_replaces_the_earlier(registry, write):
    registry.load(write("model: {mesh: {tp: 2}, '*': [tp]}"))
    registry.load(write("a: {}"))
    assert registry.current().model == ModelConfig({"tp": 2}, parameters={"*": ["tp"]})
    registry.load(write("model: {'*': []}"))
    assert registry.current().model == ModelConfig(parameters={"*": []})


def test_loading_returns_what_the_file_says(registry, write):
    registry.register("a", ROWS)
    assert list(registry.load(write("b: {backward: a}")).signals) == ["b"]


def test_a_file_with_a_mistake_changes_nothing(registry, write):
    registry.register("a", ROWS)
    before = registry.version
    with pytest.raises(SignalError, match="config.yaml:2: "):
        registry.load(write("a: {}\nb: 3\n"))
    assert registry.current().signals == {"a": ROWS}
    assert registry.version == before


def test_the_version_grows_with_every_change_and_no_other(registry, write):
    path = write("b: {}")
    seen = [registry.version]
    for act in (
        lambda: registry.register("a", ROWS),
        lambda: registry.register("a", COLUMNS),
        lambda: registry.load(path),
        registry.clear,
    ):
        act()
        seen.append(registry.version)
    assert seen == sorted(set(seen))
    registry.register("a", ROWS)
    before = registry.version
    registry.register("a", SignalConfig(ShardConfig(axis=0)))
    registry.current()
    assert registry.version == before


def test_a_configuration_that_was_read_stays_as_it_was(registry):
    registry.register("a", ROWS)
    config = registry.current()
    registry.register("a", COLUMNS)
    assert config.signals == {"a": ROWS}


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("", ROWS, "the name of a signal has 0 characters"),
        (3, ROWS, "the name of a signal has to be text, not 3"),
        ("model", ROWS, "the name of a signal cannot be 'model'"),
        ("a", {"axis": 0}, r"signal 'a' has to be a SignalConfig\(shard=ShardConfig\(...\)\), not {'axis': 0}"),
        ("a", ROWS.shard, "signal 'a' has to be a SignalConfig"),
    ],
)
def test_invalid_registrations_are_refused(registry, name, config, expected):
    with pytest.raises(SignalError, match=expected):
        registry.register(name, config)


def test_gt_config_is_read_once_at_the_first_use(write):
    path = write("a: {shard: {axis: 0}}")
    registry = Registry({"GT_CONFIG": str(path), "GT_TYPO": "1"})
    path.write_text("a: {shard: {axis: 1}}")
    assert registry.get("a") == COLUMNS
    path.write_text("a: {}")
    assert registry.get("a") == COLUMNS
    assert registry.version == 1


@pytest.mark.parametrize("act", [lambda r: r.register("a", ROWS), lambda r: r.version, lambda r: r.load(r.other)])
def test_gt_config_is_read_before_the_first_change(write, act):
    registry = Registry({"GT_CONFIG": str(write("a: {}\nb: {}\n"))})
    registry.other = write("a: {shard: {axis: 0}, backward: b}", "other.yaml")
    act(registry)
    assert "b" in registry.current().signals
    assert registry.get("a") in (SignalConfig(), ROWS, SignalConfig(ROWS.shard, "b"))


def test_a_mistake_in_gt_config_is_reported_until_it_is_repaired(write):
    path = write("a: 3")
    registry = Registry({"GT_CONFIG": str(path)})
    for ask in (registry.current, lambda: registry.get("a"), lambda: registry.version):
        with pytest.raises(SignalError, match=r"config.yaml:1: .*\n\(this file is named by GT_CONFIG\)"):
            ask()
    path.write_text("a: {}")
    assert registry.get("a") == SignalConfig()


def test_an_empty_gt_config_is_none():
    assert Registry({"GT_CONFIG": ""}).current() == Config()


def test_clearing_forgets_gt_config_too(write):
    registry = Registry({"GT_CONFIG": str(write("a: {}"))})
    registry.clear()
    assert registry.current() == Config()


def test_a_backward_may_be_registered_later_or_never(registry):
    registry.register("a", SignalConfig(backward_signal="b"))
    assert registry.enter("a") == [
        "signal 'a': backward names signal 'b', which is not configured and changes nothing; register it to lay "
        "gradients out"
    ]
    registry.register("b", ROWS)
    assert registry.enter("a") == []


@pytest.mark.parametrize(
    ("following", "name", "expected"),
    [
        ({"a": None}, "a", ""),
        ({"a": "b", "b": "c", "c": None}, "a", ""),
        ({}, "a", ""),  # a signal without a configuration is ignored
        ({"a": "forwrad", "forward": None}, "a", "did you mean 'forward'?"),
        ({"a": "b", "b": "x"}, "a", "signal 'b': backward names signal 'x'"),
        ({"forward": None}, "forwrd", "signal 'forwrd' is not configured and changes nothing; did you mean 'forward'?"),
    ],
)
def test_a_program_is_warned_of_names_once(registry, following, name, expected):
    for key, backward in following.items():
        registry.register(key, SignalConfig(backward_signal=backward))
    warnings = registry.enter(name)
    assert len(warnings) == bool(expected)
    assert all(expected in warning for warning in warnings)
    registry.register("another", SignalConfig())
    assert registry.enter(name) == []
    assert name in registry.entered


@pytest.mark.parametrize(
    ("following", "name", "expected"),
    [
        ({"a": "a"}, "a", "circle: a -> a;"),
        ({"a": "b", "b": "a"}, "a", "circle: a -> b -> a;"),
        ({"a": "b", "b": "a"}, "b", "circle: b -> a -> b;"),
        ({"a": "b", "b": "c", "c": "b"}, "a", "signal 'c': .*circle: b -> c -> b;"),
    ],
)
def test_a_circle_is_reported_whenever_it_is_entered(registry, following, name, expected):
    for key, backward in following.items():
        registry.register(key, SignalConfig(backward_signal=backward))
    for _ in range(2):
        with pytest.raises(SignalError, match=expected):
            registry.enter(name)


def test_the_end_of_a_program_does_not_read_a_wrong_file_again(write):
    Registry({"GT_CONFIG": str(write("a: 3"))}).set_defaults("")


def test_a_circle_that_python_closes_is_reported_with_the_line_of_the_file(registry, write):
    registry.register("b", SignalConfig())
    registry.load(write("a: {backward: b}"))
    registry.register("b", SignalConfig(backward_signal="a"))
    with pytest.raises(SignalError, match="config.yaml:1: signal 'a': .*circle: b -> a -> b"):
        registry.enter("b")


@pytest.fixture
def hasty_threads():
    """Threads that switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
def test_no_change_from_several_threads_is_lost(registry):
    def register(first):
        for number in range(first, first + 50):
            registry.register(f"s{number}", ROWS)

    threads = [threading.Thread(target=register, args=(first,)) for first in (0, 50, 100, 150)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registry.current().signals) == registry.version == 200


def test_the_public_functions_ask_the_one_registry(monkeypatch, registry, write):
    monkeypatch.setattr(module, "registry", registry)
    register_config("a", ROWS)
    assert load_config(str(write("b: {backward: a}"))) == Config({"b": SignalConfig(backward_signal="a")})
    assert get_signal_config("a") == ROWS and get_signal_config("x") is None
    assert list(get_config().signals) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"), [(None, "cannot be read"), ("a: {shard: {axs: 0}}", "did you mean 'axis'")]
)
def test_a_configuration_that_cannot_be_used_is_reported_when_gt_starts(tmp_path, text, message):
    """Also in a program that enters no scope."""
    path = tmp_path / "signals.yaml"
    if text is not None:
        path.write_text(text)
    code, _, err = finish(start("-c", "import gt; gt.ones(2)", GT_CONFIG=str(path)))
    assert code == 1
    assert message in err
    assert "GT_CONFIG" in err
