"""`python -m gt.scripts.sessions`: lists the sessions of a server, and ends them."""

import json

import pytest

from gt.core.messages import Hello
from gt.core.tables import SessionList
from gt.dispatcher.client_messages import SessionAdministration
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.peers import Peer, PeerTable
from gt.scripts.sessions import main
from tests.subprocesses import finish, running, serving, start, wait_until

PROGRAM = """
import gt, time
kept = gt.ones(1024)
kept.sum().item()
try:
    while True:
        STEP
except gt.SessionLost as error:
    print("lost:", error)
"""
STEPS = {"reads": "(kept + 1).sum().item(); time.sleep(0.01)", "only sends": "kept = kept * 1"}


def listed(port):
    code, out, err = finish(start("-m", "gt.scripts.sessions", "--server", f"localhost:{port}", "--json"))
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("step", STEPS)
def test_a_session_is_listed_and_ended_and_the_other_goes_on(step):
    program = PROGRAM.replace("STEP", STEPS[step])
    with serving(1) as port:
        server = f"localhost:{port}"
        ended = start("-c", program, GT_SERVER=server)
        other = start("-c", program, GT_SERVER=server)
        with running(ended, other):
            wait_until(lambda: len([each for each in listed(port) if each["tensors"]]) == 2, what="both sessions")
            first, second = listed(port)
            assert {first["pid"], second["pid"]} == {ended.pid, other.pid}
            assert first["held"]["0"] >= 4096 and first["key"] == "this machine" and first["seconds"] < 600
            target = next(each["session"] for each in (first, second) if each["pid"] == ended.pid)
            code, out, err = finish(
                start("-m", "gt.scripts.sessions", "--server", server, "--end", str(target), "--reason", "maintenance")
            )
            assert (code, out.startswith(f"session {target} (pid {ended.pid}")) == (0, True), err
            code, out, err = finish(ended)
            assert code == 0, err
            assert "lost: the session was ended by this machine" in out and ": maintenance;" in out
            assert [each["pid"] for each in listed(port)] == [other.pid]
            code, _, err = finish(start("-m", "gt.scripts.sessions", "--server", server, "--end", "99"))
            assert code == 1 and "there is no session 99" in err


def peers_with(*keys):
    dispatcher, peers = Dispatcher(), PeerTable()
    for number, key in enumerate(keys):
        ident = dispatcher.open_session("here", 1, key)
        hello = Hello("1", "client", "here", 100 + number, hostname=f"host{number}", program="train.py")
        peers.add(bytes([number]), Peer(hello, ident, "", key=key))
    return SessionAdministration(dispatcher, peers), list(peers.by_identity.values())


@pytest.mark.parametrize(
    ("asker", "owner", "may"),
    [
        ("team", "team", True),
        ("team", "other", False),
        ("this machine", "other", True),
        ("team", "this machine", False),
        ("", "", True),
    ],
)
def test_who_may_end_a_session(asker, owner, may):
    administration, (asking, owning) = peers_with(asker, owner)
    found = administration.find(asking, owning.ident)
    assert (found is owning) == may
    assert may or f"the key {owner!r}, and this is the key {asker!r}" in found


def test_the_list_as_a_table():
    administration, (asking, *_) = peers_with("team", "other", "team")
    head, *rows = str(SessionList(administration.list_for(asking))).splitlines()
    assert head.split() == ["id", "key", "host", "pid", "program", "since", "tensors", "held", "in", "flight", "state"]
    assert [row.split()[:5] for row in rows] == [
        ["2", "other", "host1", "101", "train.py"],
        ["3", "team", "host2", "102", "train.py"],
    ]
    assert rows[0].endswith("idle")


@pytest.mark.parametrize("ident", ["-1", str(10**30), "x"])
def test_what_is_no_id_of_a_session_is_a_mistake_of_usage(monkeypatch, capsys, ident):
    monkeypatch.setattr("sys.argv", ["sessions", "--end", ident])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "--end" in capsys.readouterr().err
