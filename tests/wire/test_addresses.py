"""Names, addresses and interfaces of this machine."""

import socket

import pytest

from gt.core.errors import SettingsError
from gt.wire import addresses
from gt.wire.addresses import (
    NotResolved,
    address_towards,
    interface_address,
    interface_of,
    interfaces,
    public_addresses,
    reaching_address,
    resolve,
)


def test_names_are_resolved_or_refused(monkeypatch):
    assert resolve("localhost") == resolve("127.0.0.1") == "127.0.0.1"
    for number, error in ((socket.EAI_NONAME, SettingsError), (socket.EAI_AGAIN, NotResolved)):

        def fail(*_, number=number):
            raise socket.gaierror(number, "no luck")

        monkeypatch.setattr(addresses.socket, "getaddrinfo", fail)
        with pytest.raises(error, match="'nowhere'"):
            resolve("nowhere")


def test_the_interface_is_chosen_by_route_or_by_the_user():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert ("lo", "127.0.0.1") in interfaces()
    assert interface_address("lo") == interface_address("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.1") == ""
    assert reaching_address("", "127.0.0.1") == reaching_address("lo", "192.0.2.1") == "127.0.0.1"
    with pytest.raises(SettingsError, match=r"GT_INTERFACE='eth99' is not an interface .* lo \(127.0.0.1\)"):
        interface_address("eth99")


@pytest.mark.parametrize(
    ("own", "public"),
    [(["127.0.0.1", "10.1.2.3", "192.168.1.1", "172.17.0.1"], []), (["10.0.0.1", "8.8.8.8"], ["8.8.8.8"])],
)
def test_public_addresses_of_a_machine(monkeypatch, own, public):
    monkeypatch.setattr(addresses, "interfaces", lambda: [(f"eth{n}", address) for n, address in enumerate(own)])
    assert public_addresses("0.0.0.0") == public
    assert public_addresses("8.8.4.4") == ["8.8.4.4"] and public_addresses("10.0.0.1") == []
