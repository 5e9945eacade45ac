"""Several hosts on one machine: network namespaces behind a switch, each with a limited link.

    with limited_hosts([100, 100, 50]) as hosts:      # Mbit/s, each direction
        subprocess.Popen(hosts.command(0, [sys.executable, "server.py", hosts.address(0)]))
        before = hosts.traffic()
        ...

A token bucket at both ends of a virtual cable limits a program on a host as a network card of that
rate would, full duplex, and `traffic` counts what such a card would count: frames, with all
headers. Needs root and Linux; `why_not` says if it does not work here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

PREFIX = "khet"
SUBNET = "10.199.0"
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
# Long queues: otherwise TCP would lose packets and resend them when several hosts send to one.
QUEUE_BYTES = 8_000_000


class Hosts:
    """Hosts in namespaces, numbered from 0.

    Args:
        switch: name of the namespace that connects them.
        names: name of each host's namespace.
    """

    def __init__(self, switch: str, names: Sequence[str]) -> None:
        self._switch = switch
        self.names = tuple(names)

    def address(self, index: int) -> str:
        """Return the IP address of a host."""
        return f"{SUBNET}.{index + 1}"

    def command(self, index: int, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs `arguments` on a host."""
        return ["ip", "netns", "exec", self.names[index], *arguments]

    def enter(self, index: int) -> None:
        """Move this process to a host; for a fresh fork, before it starts threads."""
        with (Path("/run/netns") / self.names[index]).open() as handle:
            library = ctypes.CDLL(None, use_errno=True)
            if library.setns(handle.fileno(), NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "cannot enter the network namespace")

    def set_rate(self, index: int, mbit: float) -> None:
        """Change the rate of a host's link, in Mbit/s per direction."""
        for place, device in ((self.names[index], "eth0"), (self._switch, f"port{index}")):
            _limit(place, device, mbit, "replace")

    def set_link(self, index: int, up: bool) -> None:
        """Plug in or unplug a host's cable; packets sent meanwhile are lost."""
        _ip("-n", self._switch, "link", "set", f"port{index}", "up" if up else "down")

    def traffic(self) -> list[tuple[int, int]]:
        """Return the bytes that every host has received and sent so far, headers included."""
        links = json.loads(_ip("-n", self._switch, "-s", "-j", "link", "show"))
        counts = {link["ifname"]: link["stats64"] for link in links if link}
        ports = [counts[f"port{index}"] for index in range(len(self.names))]
        # What the switch sends, the host receives.
        return [(port["tx"]["bytes"], port["rx"]["bytes"]) for port in ports]


@contextlib.contextmanager
def limited_hosts(rates_mbit: Sequence[float], mtu: int = 1500) -> Iterator[Hosts]:
    """Make one host for each rate and remove them at the end.

    Args:
        rates_mbit: rate of each host's link, in Mbit/s per direction.
        mtu: largest packet in bytes; 9000 if the network has jumbo frames.
    """
    _remove_forgotten()
    switch = f"{PREFIX}{os.getpid()}s"
    names = [f"{PREFIX}{os.getpid()}h{index}" for index in range(len(rates_mbit))]
    try:
        _make_switch(switch, mtu)
        for index, (name, rate) in enumerate(zip(names, rates_mbit, strict=True)):
            _make_host(switch, name, index, rate, mtu)
        yield Hosts(switch, names)
    finally:
        for name in (*names, switch):
            with contextlib.suppress(OSError):
                _ip("netns", "del", name)


def why_not() -> str | None:
    """Return why hosts with limited links cannot be made here, or None."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need the programs {missing} (package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with limited_hosts([100.0]):
            return None
    except OSError as error:
        return f"network namespaces are not permitted: {error}"


def _make_switch(name: str, mtu: int) -> None:
    _ip("netns", "add", name)
    _ip("-n", name, "link", "add", "switch", "mtu", str(mtu), "type", "bridge")
    _ip("-n", name, "link", "set", "switch", "up")


def _make_host(switch: str, name: str, index: int, mbit: float, mtu: int) -> None:
    _ip("netns", "add", name)
    port = f"port{index}"
    both = ["mtu", str(mtu)]
    peer = ["peer", "name", "eth0", *both, "netns", name]
    _ip("-n", switch, "link", "add", port, *both, "type", "veth", *peer)
    # One packet at a time: a card's counter sees the headers of each.
    _ip("-n", name, "link", "set", "eth0", "gso_max_segs", "1")
    _ip("-n", switch, "link", "set", port, "master", "switch", "up")
    _ip("-n", name, "address", "add", f"{SUBNET}.{index + 1}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip("-n", name, "link", "set", device, "up")
    for place, device in ((name, "eth0"), (switch, port)):
        _limit(place, device, mbit, "add")


def _limit(place: str, device: str, mbit: float, verb: str) -> None:
    burst = max(16_000, int(mbit * 1e6 / 8 / 500))  # 2 ms of the link, at least one packet
    limits = ["rate", f"{int(mbit * 1e6)}bit", "burst", str(burst), "limit", str(QUEUE_BYTES)]
    _call("tc", "-n", place, "qdisc", verb, "dev", device, "root", "tbf", *limits)


def _remove_forgotten() -> None:
    """Remove the remains of a killed process."""
    for entry in json.loads(_ip("-j", "netns", "list") or "[]"):
        match = re.fullmatch(rf"{PREFIX}(\d+)(s|h\d+)", entry["name"])
        if match and not Path(f"/proc/{match[1]}").exists():
            _ip("netns", "del", entry["name"])


def _ip(*arguments: str) -> str:
    return _call("ip", *arguments)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
