"""The keys that last: who makes them, who is let in, and which files are refused."""

import os
import shutil
import stat

import pytest
from zmq.utils import z85

from gt import keys
from gt.core.errors import SettingsError
from gt.wire.authentication import AcceptedKeys
from gt.wire.server_keys import (
    authorize,
    find_keys,
    keys_directory,
    make_client_key,
    make_keys,
    make_server_key,
    read_authorized,
    read_server_key,
    revoke,
    write_keys,
)

FAR = "tcp://10.0.0.7:12345"


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("GT_KEYS", str(tmp_path / "keys"))
    return tmp_path / "keys"


def accepted(directory):
    server = make_keys(read_server_key(directory), directory)[0]
    return AcceptedKeys(server.member, server.directory)


def public(key):
    return z85.decode(key.public.encode())


def test_three_commands_make_keys_that_let_a_client_in(directory, tmp_path, capsys):
    assert keys.main(["server"]) == 0
    assert keys.main(["client", "team", "--out", str(tmp_path / "team.key")]) == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / "team.key").rename(elsewhere / "client.key")
    found = find_keys(elsewhere, FAR)
    assert found.server == read_server_key(directory).public
    assert accepted(directory).name(z85.decode(found.public.encode())) == "team"
    assert found.secret not in capsys.readouterr().out


def test_files_of_keys_are_private(directory, tmp_path):
    make_server_key(directory)
    keys.main(["client", "team", "--out", str(tmp_path / "team.key")])
    places = [directory, *directory.rglob("*"), tmp_path / "team.key"]
    modes = {stat.S_IMODE(place.stat().st_mode) for place in places}
    assert modes == {0o700, 0o600}


def test_a_key_is_let_in_until_it_is_revoked(directory):
    make_server_key(directory)
    key = make_client_key(directory, "guest")
    server = accepted(directory)
    assert server.name(public(key)) == "guest"
    revoke(directory, "guest")
    assert server.name(public(key)) is None
    authorize(directory, "again", key.public)
    assert server.name(public(key)) == "again"
    assert server.name(bytes(32)) is None


@pytest.mark.parametrize("what", ["server.key", "authorized", "authorized/team"])
def test_files_that_others_can_read_are_refused(directory, what):
    make_server_key(directory)
    key = make_client_key(directory, "team")
    (directory / what).chmod(0o755)
    with pytest.raises(SettingsError, match="keys must be out of reach of others"):
        read_server_key(directory) and read_authorized(directory)
    if what != "server.key":
        assert accepted(directory).name(public(key)) is None


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-x", "x" * 65, "a\nb", "é"])
def test_a_name_that_is_a_path_is_refused(directory, name):
    make_server_key(directory)
    for act in (lambda: make_client_key(directory, name), lambda: revoke(directory, name)):
        with pytest.raises(SettingsError, match="is not a name of a key"):
            act()


@pytest.mark.parametrize("text", ["", "x" * 39, "x" * 41, "~" * 40, "é" * 40])
def test_text_that_is_no_public_key_is_refused(directory, text):
    make_server_key(directory)
    with pytest.raises(SettingsError, match="is not a public key"):
        authorize(directory, "me", text)


def test_nothing_is_overwritten(directory, tmp_path, capsys):
    make_server_key(directory)
    first = read_server_key(directory)
    assert keys.main(["server"]) == 1
    out = tmp_path / "me.key"
    out.write_text("mine")
    assert keys.main(["client", "me", "--out", str(out)]) == 1
    assert out.read_text() == "mine" and read_server_key(directory) == first and read_authorized(directory) == {}
    assert keys.main(["server", "--replace"]) == 0 and read_server_key(directory) != first
    make_client_key(directory, "me")
    assert keys.main(["client", "me", "--out", str(tmp_path / "other.key")]) == 1
    assert "there is a client key 'me' already" in capsys.readouterr().err


def test_a_client_key_is_used_for_other_machines_and_the_servers_own_for_this_one(directory):
    make_server_key(directory)
    client = make_client_key(directory, "me")
    keys.write_client_key(directory / "client.key", client)
    _, members = make_keys()
    write_keys(directory, "tcp://127.0.0.1:12345", members)
    assert find_keys(directory, "tcp://127.0.0.1:12345") == members
    assert find_keys(directory, FAR).public == client.public
    (directory / "client.key").unlink()
    assert find_keys(directory, FAR) == members  # this machine may be meant by its own name
    assert find_keys(directory, "tcp://10.0.0.7:1") is None


def test_keys_are_listed(directory, capsys):
    make_server_key(directory)
    keys.main(["client", "me", "--out", os.devnull + "-no/such"])
    assert read_authorized(directory) == {}  # the file could not be written
    key = make_client_key(directory, "you")
    capsys.readouterr()
    assert keys.main(["list"]) == 0
    assert capsys.readouterr().out.split() == ["you", key.public]
    assert keys.main(["show"]) == 0
    assert capsys.readouterr().out.split() == ["server", read_server_key(directory).public]


def a_pipe(path):
    os.mkfifo(path, 0o600)


def a_directory(path):
    path.mkdir(mode=0o700)


def a_link(path):
    path.symlink_to("elsewhere")


def a_file(path):
    path.write_text("")
    path.chmod(0o600)


@pytest.mark.parametrize("planted", [a_pipe, a_directory, a_link, a_file])
@pytest.mark.parametrize("name", ["server.key", "client.key", "authorized", "authorized/team"])
@pytest.mark.parametrize("command", [["server"], ["show"], ["list"], ["client", "new"], ["revoke", "team"]])
def test_what_is_no_key_is_named_and_nothing_waits_for_it(
    directory, tmp_path, monkeypatch, capsys, planted, name, command
):
    monkeypatch.chdir(tmp_path)
    make_server_key(directory)
    make_client_key(directory, "other")
    place = directory / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    planted(place)
    if keys.main(command) == 1:
        assert str(directory) in capsys.readouterr().err
    assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == []


def test_a_key_that_cannot_replace_a_directory_leaves_no_draft(directory):
    make_server_key(directory)
    (directory / "server.key").unlink()
    (directory / "server.key").mkdir()
    with pytest.raises(SettingsError, match="cannot be written"):
        make_server_key(directory, replaces=True)
    assert sorted(path.name for path in directory.iterdir()) == ["authorized", "server.key"]


def test_a_key_is_let_in_by_one_name_only(directory):
    make_server_key(directory)
    key = make_client_key(directory, "team")
    with pytest.raises(SettingsError, match="admitted already, as 'team'"):
        authorize(directory, "again", key.public)


def test_the_home_in_gt_keys_is_that_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert keys_directory("~/keys") == tmp_path / "keys"


def test_a_key_that_is_revoked_in_the_moment_of_its_reading_is_let_in_no_more(directory):
    make_server_key(directory)
    key = make_client_key(directory, "guest")
    server = accepted(directory)
    place = directory / "authorized"
    read_at = place.stat().st_mtime_ns
    assert server.name(public(key)) == "guest"
    revoke(directory, "guest")
    os.utime(place, ns=(read_at, read_at))  # clocks of file systems tick every few milliseconds, or seconds
    assert server.name(public(key)) is None
