"""Environment variables and addresses: accepted values, refused values, and error messages."""

import logging
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt.core.errors import GTError, SettingsError, nearest
from gt.core.settings import Settings, check_host, parse_address, read_settings
from gt.core.tables import CALLS, CODE, COMMANDS, PLANS
from gt.wire.stderr_logging import configure_logging


def test_without_variables_settings_are_the_defaults():
    assert read_settings({}) == Settings()
    assert Settings() == Settings(workers=0, server="", backend="pytorch", mode="", transport="", timeout=60.0)
    assert (Settings().config, Settings().auto_shard) == ("", None)


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("GT_WORKERS", "4", "workers", 4),
        ("GT_SERVER", "localhost:12345", "server", "localhost:12345"),
        ("GT_MIN_WORKERS", "4", "min_workers", 4),
        ("GT_BACKEND", "numpy", "backend", "numpy"),
        ("GT_INSTRUCTION_LOG", "/tmp/log", "instruction_log", "/tmp/log"),
        ("GT_INSTRUCTION_LOG_FORMAT", "jsonl", "instruction_log_format", "jsonl"),
        ("GT_INSTRUCTION_LOG_BYTES", "10M", "instruction_log_bytes", 10 << 20),
        ("GT_CONFIG", "plans/tp.yaml", "config", "plans/tp.yaml"),
        ("GT_CONFIG", "", "config", ""),
        ("GT_AUTO_SHARD", "0", "auto_shard", False),
        ("GT_AUTO_SHARD", "1", "auto_shard", True),
        ("GT_AUTO_SHARD", "", "auto_shard", None),
        ("GT_COPY_LIMIT", "1000", "copy_limit", 1000),
        ("GT_COPY_LIMIT", "3k", "copy_limit", 3 << 10),
        ("GT_COPY_LIMIT", "2G", "copy_limit", 2 << 30),
        ("GT_COPY_LIMIT", "0", "copy_limit", 0),
        ("GT_COPY_LIMIT", "", "copy_limit", None),
        ("GT_VERBOSE", "1", "verbose", True),
        ("GT_DEBUG_CLIENT", "true", "debug_client", True),
        ("GT_DEBUG_DISPATCHER", "YES", "debug_dispatcher", True),
        ("GT_DEBUG_WORKER", "on", "debug_worker", True),
        ("GT_DEBUG_WORKER", "0", "debug_worker", False),
        ("GT_DEBUG_WORKER", "False", "debug_worker", False),
        ("GT_DEBUG_WORKER", "no", "debug_worker", False),
        ("GT_DEBUG_WORKER", "off", "debug_worker", False),
        ("GT_TRANSPORT", "shared", "transport", "shared"),
        ("GT_TRANSPORT", "gloo", "transport", "gloo"),
        ("GT_TRANSPORT", "nccl", "transport", "nccl"),
        ("GT_TRANSPORT", "", "transport", ""),
        ("GT_VERBOSE", "", "verbose", False),
        ("GT_TIMEOUT", "2.5", "timeout", 2.5),
        ("GT_HEARTBEAT_TIMEOUT", "5", "heartbeat_timeout", 5.0),
        ("GT_LEASE", "0", "lease", 0.0),
        ("GT_DRAIN", "60", "drain", 60.0),
        ("GT_KEYS", "/home/me/keys", "keys", "/home/me/keys"),
    ],
)
def test_a_variable_is_read(name, text, field, value):
    settings = read_settings({name: text})
    assert getattr(settings, field) == value
    assert type(getattr(settings, field)) is type(value)


@pytest.mark.parametrize(("transport", "shares"), [("", True), ("shared", True), ("gloo", False), ("nccl", False)])
def test_tensors_are_passed_in_shared_memory_unless_another_transport_is_forced(transport, shares):
    assert Settings(transport=transport).shares_memory == shares


def test_variables_are_read_together_and_others_are_left_alone():
    environ = {"GT_WORKERS": "2", "GT_TIMEOUT": "5", "PATH": "/bin", "GTK_THEME": "dark", "MY_GT_WORKERS": "x"}
    assert read_settings(environ) == Settings(workers=2, timeout=5.0)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("GT_WORKERS", "four", "four"),
        ("GT_WORKERS", "0", "at least 1"),
        ("GT_WORKERS", "-2", "at least 1"),
        ("GT_WORKERS", "1.5", "1.5"),
        ("GT_WORKERS", "", "cannot be used"),
        ("GT_BACKEND", "jax", "pytorch, numpy"),
        ("GT_BACKEND", "", "pytorch, numpy"),
        ("GT_AUTO_SHARD", "2", "expected 1 or 0"),
        ("GT_VERBOSE", "maybe", "expected 1 or 0"),
        ("GT_DEBUG_CLIENT", "2", "expected 1 or 0"),
        ("GT_DEBUG_DISPATCHER", "2", "expected 1 or 0"),
        ("GT_DEBUG_WORKER", "2", "expected 1 or 0"),
        ("GT_TRANSPORT", "mpi", "expected one of shared, gloo, nccl"),
        ("GT_COPY_LIMIT", "-1", "a number of bytes such as 1000, 512M or 8G"),
        ("GT_COPY_LIMIT", "half", "a number of bytes"),
        ("GT_COPY_LIMIT", "G", "a number of bytes"),
        ("GT_INSTRUCTION_LOG_FORMAT", "xml", "expected one of text, jsonl"),
        ("GT_INSTRUCTION_LOG_BYTES", "0", "at least 1 byte"),
        ("GT_INSTRUCTION_LOG_BYTES", "10 MB", "a number of bytes"),
        ("GT_TIMEOUT", "soon", "soon"),
        ("GT_TIMEOUT", "0", "positive number of seconds"),
        ("GT_TIMEOUT", "-1", "positive number of seconds"),
        ("GT_TIMEOUT", "inf", "positive number of seconds"),
        ("GT_TIMEOUT", "nan", "positive number of seconds"),
        ("GT_HEARTBEAT_TIMEOUT", "0", "positive number of seconds"),
        ("GT_LEASE", "-1", "expected seconds from 0 to 604800"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_name(name, text, expected):
    with pytest.raises(SettingsError, match=expected) as refused:
        read_settings({name: text})
    assert str(refused.value).startswith(f"{name}={text!r} cannot be used")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("GT_WORKER", "did you mean 'GT_WORKERS'"),
        ("GT_BACKENDS", "did you mean 'GT_BACKEND'"),
        ("GT_INSTRUCTIONS_LOG", "did you mean 'GT_INSTRUCTION_LOG'"),
        ("GT_debug_worker", "GT_DEBUG_WORKER"),
        ("GT_SHARED_MEMORY", "use GT_TRANSPORT"),
        ("GT_XYZZY", "known: GT_AUTO_COMPILE, GT_AUTO_SHARD, .*GT_WORKERS"),
    ],
)
def test_an_unknown_variable_is_warned_of_with_the_nearest_name(name, hint):
    with pytest.warns(UserWarning, match=f"{name} is not a setting of GT and is ignored; .*{hint}"):
        assert read_settings({name: "1"}) == Settings()


def test_an_unknown_name_gets_the_closest_known_one_or_all():
    assert nearest("forwrad", ["forward", "backward"]) == "did you mean 'forward'?"
    assert nearest("zzz", ["b", "a"]) == "known: a, b"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:12345", ("127.0.0.1", 12345)),
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        ("localhost:65535", ("127.0.0.1", 65535)),
    ],
)
def test_an_address_is_parsed(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["", "localhost", "localhost:", ":", "localhost:x", "localhost:0", "localhost:65536", "localhost:-1", "12345",
     "localhost:1.5", "localhost: 80", "localhost:²", "localhost:" + "9" * 5000],
    ids=lambda text: f"{text:.20}",
)  # fmt: skip
def test_an_invalid_address_is_refused_with_an_example(text):
    with pytest.raises(
        SettingsError, match=r"is not an address of a server; write host:port, for example localhost:12345"
    ):
        parse_address(text)


@given(st.text() | st.tuples(st.text(max_size=4), st.text("0123456789²٣:", max_size=7)).map(":".join))
def test_an_address_is_parsed_or_refused(text):
    try:
        host, port = parse_address(text)
    except GTError:
        return
    assert 0 < port < 65536 and host


@pytest.mark.parametrize("host", ["*", "a b", "a/b", "//x", "é", "x" * 254, "$(id)", "a;b"])
def test_text_that_is_no_host_is_refused(host):
    with pytest.raises(SettingsError, match="the name or IPv4 address"):
        check_host(host)


@pytest.mark.parametrize(
    ("host", "found"),
    [("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("server-7.example.com", "server-7.example.com")],
)
def test_a_server_is_named_by_host_and_port(host, found):
    assert parse_address(f"{host}:12345") == (found, 12345)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_addresses_of_ipv6_are_refused(host):
    with pytest.raises(SettingsError, match=r"'\[?::1\]?' is an address of IPv6.*use a name or IPv4 address"):
        parse_address(f"{host}:12345")


@pytest.fixture
def loggers():
    """GT's loggers, in the state of a new process; those of tables are put back too."""
    found = [logging.getLogger(name) for name in ("gt", "gt.client", "gt.dispatcher", "gt.worker")]
    tables = [logging.getLogger(name) for name in (PLANS, CALLS, COMMANDS, CODE)]
    before = [(logger, logger.level, logger.propagate, list(logger.handlers)) for logger in found + tables]
    for logger in found + tables:
        logger.setLevel(logging.NOTSET)
        logger.handlers.clear()
    yield {logger.name: logger for logger in found}
    for logger, level, propagate, handlers in before:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers


@pytest.mark.parametrize(
    ("settings", "levels"),
    [
        (Settings(verbose=True), {"gt": logging.INFO}),
        (Settings(debug_client=True), {"gt.client": logging.DEBUG}),
        (Settings(debug_dispatcher=True), {"gt.dispatcher": logging.DEBUG}),
        (Settings(debug_worker=True, verbose=True), {"gt": logging.INFO, "gt.worker": logging.DEBUG}),
        (Settings(), {}),
    ],
    ids=["verbose", "client", "dispatcher", "worker and verbose", "silent"],
)
def test_a_flag_sets_the_level_of_its_loggers(loggers, settings, levels):
    configure_logging(settings)
    assert {name: logger.level for name, logger in loggers.items() if logger.level} == levels


def test_configuring_logging_twice_adds_one_handler(loggers):
    configure_logging(Settings(verbose=True))
    configure_logging(Settings(verbose=True, debug_worker=True))
    shown = [handler for handler in loggers["gt"].handlers if isinstance(handler, logging.StreamHandler)]
    assert len(shown) == 1


TALK = """
import logging
from gt.core.settings import read_settings
from gt.wire.stderr_logging import configure_logging
configure_logging(read_settings())
for name in ("gt.client", "gt.dispatcher", "gt.worker"):
    for say in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger(name), say)("%s %s", name, say)
"""


def said(program=TALK, **variables):
    """The stderr of a program that logs at every level in every role."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("GT_")}
    environ |= {"PYTHONPATH": os.pathsep.join(sys.path), **variables}
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environ, check=True
    )
    assert run.stdout == ""
    return run.stderr


def test_by_default_only_warnings_are_shown():
    roles = ("gt.client", "gt.dispatcher", "gt.worker")
    assert said() == "".join([f"gt: {name} {level}\n" for name in roles for level in ("warning", "error")])


def test_a_signal_with_unavailable_workers_is_a_warning():
    program = TALK.replace("gt.client", "gt.signals")
    assert said(program=program).startswith("gt: gt.signals warning\ngt: gt.signals error\n")


def test_verbose_shows_the_main_events_of_every_role():
    text = said(GT_VERBOSE="1")
    assert all(f"{name} info" in text for name in ("gt.client", "gt.dispatcher", "gt.worker"))
    assert "debug" not in text


def test_debug_shows_everything_of_one_role():
    text = said(GT_DEBUG_WORKER="1")
    assert "gt.worker debug" in text
    assert "gt.client debug" not in text and "gt.client info" not in text
