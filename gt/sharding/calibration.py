"""What a machine can do: the speeds of its workers and of the links between them, measured once or assumed."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gt.core.errors import SettingsError
from gt.core.tracebacks import ends_on_users_line
from gt.sharding.cost import LinkSpeed, seconds
from gt.sharding.host_order import host_share, widest_spread
from gt.sharding.spec import DeviceMesh

ASSUMED = "assumed"
MAX_BYTES = 1 << 16
HOST_MESSAGE_SECONDS, HOST_BANDWIDTH = 200e-6, 1.25e9  # a data centre's Ethernet of 10 Gbit/s


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The speeds of each worker and of the links between them.

    - `flops`: floating-point operations a second, of products
    - `memory_bandwidth`: bytes that a worker reads and writes in a second
    - `op_seconds`: the time that an op takes even if it is small
    - `message_seconds`, `link_bandwidth`: the time of a message between workers of one host, and bytes a second that a
      worker receives
    - `host_message_seconds`, `host_bandwidth`: the time of a message between hosts, and bytes a second that a host
      receives from others, for all its workers together. Assumed is an Ethernet of 10 Gbit/s in a data centre
    - `axes`: the first two for mesh axes with other links, by name, whatever hosts their workers are on
    - `overlap`: the share of an exchange's time in which a worker can compute, where GT lets exchanges go on by
      themselves: 0 for CPU workers that share memory, since they copy, and 1 for links that need no worker
    - `source`: where the numbers come from

    >>> print(gt.Calibration(flops=1e12, link_bandwidth=10e9))
    1000.0 GFLOP/s, memory 10.0 GB/s, 20 us an op; links 10.00 GB/s, 50 us a message (assumed)
    """

    flops: float = 50e9
    memory_bandwidth: float = 10e9
    op_seconds: float = 20e-6
    message_seconds: float = 50e-6
    link_bandwidth: float = 2e9
    host_message_seconds: float = HOST_MESSAGE_SECONDS
    host_bandwidth: float = HOST_BANDWIDTH
    axes: dict[str, tuple[float, float]] = {}
    overlap: float = 0.0
    source: str = ASSUMED

    @ends_on_users_line
    def __post_init__(self) -> None:
        for name in ("flops", "memory_bandwidth", "link_bandwidth", "host_bandwidth"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} of a calibration has to be more than 0, not {getattr(self, name)!r}")
        if not 0 <= self.overlap <= 1:
            raise SettingsError(f"overlap of a calibration is a share from 0 to 1, not {self.overlap!r}")

    def link(self, axes: tuple[str, ...]) -> LinkSpeed:
        """The slowest link along some axes within a host."""
        found = [self.axes[axis] for axis in axes if axis in self.axes] or [(self.message_seconds, self.link_bandwidth)]
        return LinkSpeed(max(alpha for alpha, _ in found), 1 / min(bandwidth for _, bandwidth in found))

    @property
    def host_link(self) -> LinkSpeed:
        """The link between hosts."""
        return LinkSpeed(self.host_message_seconds, 1 / self.host_bandwidth)

    def __str__(self) -> str:
        is_assumed = (self.host_message_seconds, self.host_bandwidth) == (HOST_MESSAGE_SECONDS, HOST_BANDWIDTH)
        return self.describe(has_hosts=not is_assumed)

    def describe(self, *, has_hosts: bool) -> str:
        """The speeds as text, with those between hosts or without them."""
        overlap = f", {self.overlap:.0%} overlap" if self.overlap else ""
        between = (
            f"; between hosts {self.host_bandwidth / 1e9:.2f} GB/s, {self.host_message_seconds * 1e6:.0f} us a message"
        )
        return (
            f"{self.flops / 1e9:.1f} GFLOP/s, memory {self.memory_bandwidth / 1e9:.1f} GB/s, "
            f"{self.op_seconds * 1e6:.0f} us an op; links {self.link_bandwidth / 1e9:.2f} GB/s, "
            f"{self.message_seconds * 1e6:.0f} us a message{between if has_hosts else ''}{overlap} ({self.source})"
        )


def calibration_path() -> Path:
    """The file of the stored calibration: private to the user."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(cache) / "gt" / "calibration.json"


def stored_calibration() -> Calibration | None:
    """The calibration that `gt.calibrate()` has stored; None if there is none."""
    return read_calibration(calibration_path())


def read_calibration(path: Path) -> Calibration | None:
    """The calibration in a file; None if there is no file. Raises SettingsError for a file that is none."""
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(content, type=Calibration)
    except msgspec.DecodeError as error:
        raise SettingsError(f"{path} is no calibration: {error}; delete it and call gt.calibrate() again") from None


def format_calibration(calibration: Calibration) -> bytes:
    return msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n"


def step_seconds(kind: str, axes: Sequence[str], nbytes: int, mesh: DeviceMesh, machine: Calibration) -> float:
    """The time of one collective in which all workers of a mesh together receive `nbytes`. If it crosses hosts, its
    messages are those between hosts."""
    if not nbytes:
        return 0.0
    known = _known(axes, mesh)
    group = max(math.prod([mesh.axis_size(axis) for axis in known]), 2)
    if not _crosses(known, mesh, machine):
        return seconds(kind, nbytes / mesh.size, group, machine.link(known))
    return seconds(kind, 0, group, machine.host_link) + transfer_seconds(kind, axes, nbytes, mesh, machine)


def transfer_seconds(kind: str, axes: Sequence[str], nbytes: int, mesh: DeviceMesh, machine: Calibration) -> float:
    """The time of the bytes alone: of those that each worker receives and, between hosts, of those that all workers of
    a host receive by its one link."""
    known = _known(axes, mesh)
    each = nbytes / mesh.size
    if not _crosses(known, mesh, machine):
        return each * machine.link(known).beta
    crossing = host_share(kind, known, mesh)
    sharing = max(Counter(mesh.hosts).values())
    return each * ((1 - crossing) * machine.link(()).beta + crossing * sharing * machine.host_link.beta)


def _known(axes: Sequence[str], mesh: DeviceMesh) -> tuple[str, ...]:
    """The axes of an exchange; all of the mesh if it is between meshes."""
    return tuple([axis for axis in axes if axis in mesh.axis_names]) or mesh.axis_names


def _crosses(axes: tuple[str, ...], mesh: DeviceMesh, machine: Calibration) -> bool:
    """Whether the speeds between hosts count: not along axes whose speeds the user has given."""
    return bool(mesh.hosts) and machine.axes.keys().isdisjoint(axes) and widest_spread(mesh, axes).hosts > 1
