"""Names and addresses of machines: which one a name means, which interface reaches it, and which are public. IPv4."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterable

from gt.core.errors import SettingsError

LOOPBACK = "127.0.0.1"
ANY = "0.0.0.0"
_LIST_INTERFACES = 0x8912  # SIOCGIFCONF
_INTERFACE_BYTES = 40  # size of an entry: 16 bytes of the name, then the address
_MAX_INTERFACES = 1024
_DISCARD_PORT = 9  # no packet is sent to it


class NotResolved(Exception):
    """A name that could not be looked up, and may be later."""


def resolve(host: str) -> str:
    """The IPv4 address of a host. Raises SettingsError if there is no such name, and NotResolved if the lookup fails
    for another reason."""
    if host == "localhost":
        return LOOPBACK
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
            raise NotResolved(f"the name {host!r} cannot be looked up now: {error.strerror}") from None
        raise SettingsError(
            f"there is no host {host!r} with an IPv4 address: {error}; check the name, or use the address itself"
        ) from None
    return str(found[0][4][0])


def is_loopback(address: str) -> bool:
    return ipaddress.IPv4Address(address).is_loopback


def is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def address_towards(address: str) -> str:
    """The address of this machine on its route to another one. Raises OSError if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, _DISCARD_PORT))
        return str(probe.getsockname()[0])


def interfaces() -> list[tuple[str, str]]:
    """Names and addresses of the interfaces of this machine; empty where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return []
    entries = array.array("B", bytes(_MAX_INTERFACES * _INTERFACE_BYTES))
    start, _ = entries.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _LIST_INTERFACES, struct.pack("iL", len(entries), start))
    data = entries.tobytes()[: struct.unpack("iL", answer)[0]]
    found = [data[at : at + _INTERFACE_BYTES] for at in range(0, len(data), _INTERFACE_BYTES)]
    return [(entry[:16].partition(b"\0")[0].decode(), socket.inet_ntoa(entry[20:24])) for entry in found]


def is_own_address(address: str) -> bool:
    """Whether packets with this address as their source come from this machine; True where the system does not tell."""
    known = [own for _, own in interfaces()]
    return not known or address in known or is_loopback(address)


def interface_address(setting: str) -> str:
    """The address that GT_INTERFACE means, which is the name or the address of an interface."""
    known = interfaces()
    for name, address in known:
        if setting in (name, address):
            return address
    if is_ipv4(setting) and not known:
        return setting
    shown = ", ".join(f"{name} ({address})" for name, address in known)
    raise SettingsError(f"GT_INTERFACE={setting!r} is not an interface of this machine; it has {shown or 'none'}")


def interface_of(address: str) -> str:
    """The name of the interface with an address; "" if there is none."""
    return next((name for name, own in interfaces() if own == address), "")


def reaching_address(setting: str, server: str) -> str:
    """The address at which other workers reach this one: that of GT_INTERFACE, or else the one on the route to the
    server at the address `server`."""
    if setting:
        return interface_address(setting)
    with contextlib.suppress(OSError):
        return address_towards(server)
    return LOOPBACK


def public_addresses(address: str) -> list[str]:
    """Those addresses of a listening socket that the whole internet may reach; a socket that listens at 0.0.0.0 has all
    addresses of the machine."""
    if address != ANY:
        return _public([address])
    known = [own for _, own in interfaces()]
    return _public(known) if known else [ANY]


def _public(addresses: Iterable[str]) -> list[str]:
    return [address for address in addresses if ipaddress.IPv4Address(address).is_global]
