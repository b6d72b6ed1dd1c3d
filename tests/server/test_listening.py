"""Where a server listens, and what it refuses to do there."""

import pytest

from gt.core.errors import SettingsError
from gt.server import listening
from gt.server.listening import choose_listening
from gt.wire.server_keys import make_client_key, make_server_key


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "keys"


def test_a_server_of_one_machine_makes_its_keys_itself(directory):
    chosen = choose_listening("localhost", 1234, 0, str(directory))
    assert chosen.endpoint == "tcp://127.0.0.1:1234" and chosen.keys.directory is None
    assert chosen.describe(1234).endswith("python -m gt.worker -p 1234")


def test_a_server_that_others_reach_has_the_key_of_its_directory_and_says_who_may_join(directory):
    with pytest.raises(SettingsError, match="python -m gt.keys server"):
        choose_listening("0.0.0.0", 1234, 0, str(directory))
    key = make_server_key(directory)
    chosen = choose_listening("0.0.0.0", 1234, 0, str(directory))
    assert chosen.keys.secret == key.secret and "no client key is admitted yet" in chosen.describe(1234)
    make_client_key(directory, "team")
    assert "it admits the client keys team" in chosen.describe(1234)
    (directory / "authorized").chmod(0o777)
    with pytest.raises(SettingsError, match="out of reach of others"):
        choose_listening("0.0.0.0", 1234, 0, str(directory))


def test_a_server_of_one_machine_lets_in_client_keys_if_it_has_a_key(directory):
    """They come by a tunnel, or from a process of the machine with keys of its own."""
    key = make_server_key(directory)
    chosen = choose_listening("localhost", 1234, 0, str(directory))
    assert chosen.keys.secret == key.secret and chosen.keys.directory == directory
    assert chosen.describe(1234).endswith("python -m gt.worker -p 1234")


def test_insecure_warns_and_is_said_twice_at_a_public_address(directory, monkeypatch):
    monkeypatch.setattr(listening, "public_addresses", lambda address: ["8.8.8.8"])
    with pytest.raises(SettingsError, match=r"refused at 8.8.8.8, which the whole internet may reach"):
        choose_listening("0.0.0.0", 1234, 1, str(directory))
    chosen = choose_listening("0.0.0.0", 1234, 2, str(directory))
    assert chosen.keys is None
    assert "WARNING" in chosen.describe(1234) and "-p 1234 --insecure" in chosen.describe(1234)
    monkeypatch.setattr(listening, "public_addresses", lambda address: [])
    assert choose_listening("0.0.0.0", 1234, 1, str(directory)).keys is None
