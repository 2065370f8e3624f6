"""A slow network between processes of one machine: each rank in a network namespace of its own.

Two ranks are joined by a pair of veth devices, more by a bridge in one more namespace. ``tbf`` on
each device bounds what it sends. Everything is in namespaces whose names hold the number of the
process that made them, so that nothing of it is left when they are deleted, and those of a bench
that was killed are found by the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

Command = list[str]
Runner = Callable[[Command], str]
"""Runs a command; returns what it prints, raises ``CalledProcessError`` if it fails."""

PREFIX: Final = "fusion-bench"
DEVICE: Final = "eth0"
"""Of a rank, in its namespace."""

RATES: Final = ("200mbit", "1gbit", "2.5gbit", "10gbit")
UNITS: Final = {"mbit": 10**6, "gbit": 10**9}

BURST_S = 0.0005
MIN_BURST_BYTES = 256 * 1024
"""A token bucket holds what the rate sends in that time, at least so much: less than a segment that
TCP hands to the device at once could not pass at all."""

LATENCY: Final = "50ms"
"""Of packets that wait for tokens, at most; what comes then is dropped."""


def parse_rate(text: str) -> str:
    """A rate as ``tc`` reads it.

    Args:
        text: ``200mbit``, ``2.5gbit``.

    Raises:
        ValueError: it is something else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)", text.lower())
    if match is None or float(match[1]) <= 0:
        raise ValueError(
            f"--rate must be a number of mbit or gbit, such as {', '.join(RATES)}, but is {text!r}."
        )
    return text.lower()


def bits_per_s(rate: str) -> float:
    """Bits a second of a rate that :func:`parse_rate` lets pass."""
    return float(rate[:-4]) * UNITS[rate[-4:]]


@dataclass(frozen=True)
class Topology:
    """Names and addresses.

    Attributes:
        owner: number of the process that makes it.
        ranks: at least 2.
    """

    owner: int
    ranks: int

    def namespace(self, rank: int) -> str:
        return f"{PREFIX}-{self.owner}-{rank}"

    @property
    def switch(self) -> str:
        """Namespace of the bridge."""
        return f"{PREFIX}-{self.owner}-switch"

    @property
    def namespaces(self) -> list[str]:
        ranks = [self.namespace(rank) for rank in range(self.ranks)]
        return ranks if self.ranks == 2 else [*ranks, self.switch]

    def address(self, rank: int) -> str:
        # Of the range for tests of network devices: a machine's own networks are elsewhere.
        return f"198.18.{rank // 250}.{rank % 250 + 1}"

    def port(self, rank: int) -> str:
        """Of the bridge, to a rank."""
        return f"port{rank}"

    def prefix(self, rank: int) -> tuple[str, ...]:
        """Command that starts another in a rank's namespace."""
        return ("ip", "netns", "exec", self.namespace(rank))

    @property
    def devices(self) -> list[tuple[str, str]]:
        """Namespace and name of each device that sends."""
        own = [(self.namespace(rank), DEVICE) for rank in range(self.ranks)]
        if self.ranks == 2:
            return own
        return own + [(self.switch, self.port(rank)) for rank in range(self.ranks)]


def setup_commands(topology: Topology) -> list[Command]:
    """What makes the namespaces and joins them, unshaped."""
    commands = [["ip", "netns", "add", name] for name in topology.namespaces]
    first = topology.namespace(0)
    if topology.ranks == 2:
        pair = ["type", "veth", "peer", "name", DEVICE, "netns", topology.namespace(1)]
        commands.append(["ip", "-n", first, "link", "add", DEVICE, *pair])
    else:
        switch = ["ip", "-n", topology.switch, "link"]
        commands.append([*switch, "add", "bridge0", "type", "bridge"])
        commands.append([*switch, "set", "bridge0", "up"])
        for rank in range(topology.ranks):
            port = topology.port(rank)
            pair = ["type", "veth", "peer", "name", DEVICE, "netns", topology.namespace(rank)]
            commands.append([*switch, "add", port, *pair])
            commands.append([*switch, "set", port, "master", "bridge0", "up"])
    for rank in range(topology.ranks):
        inside = ["ip", "-n", topology.namespace(rank)]
        address = f"{topology.address(rank)}/16"
        commands.append([*inside, "address", "add", address, "dev", DEVICE])
        commands += [[*inside, "link", "set", device, "up"] for device in (DEVICE, "lo")]
    return commands


def rate_commands(topology: Topology, rate: str) -> list[Command]:
    """What bounds each device to a rate, whatever it was bounded to."""
    return [
        ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape_of(rate)]
        for namespace, device in topology.devices
    ]


def shape_of(rate: str) -> Command:
    """The queue that bounds a device to a rate, as ``tc`` reads it."""
    burst = max(MIN_BURST_BYTES, int(bits_per_s(rate) / 8 * BURST_S))
    return ["tbf", "rate", rate, "burst", str(burst), "latency", LATENCY]


def unshape_commands(topology: Topology) -> list[Command]:
    """What takes the bounds away; fails for a device that has none."""
    return [
        ["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"]
        for namespace, device in topology.devices
    ]


def leftovers(listed: str, is_alive: Callable[[int], bool]) -> list[str]:
    """Namespaces, or directories, of benches that are gone.

    Args:
        listed: their names, as ``ip netns list`` prints them.
        is_alive: whether a process of that number runs.
    """
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    found = [(name, re.fullmatch(rf"{PREFIX}-(\d+)-\w+", name)) for name in names]
    return [name for name, match in found if match and not is_alive(int(match[1]))]


def run_command(command: Command) -> str:
    """Run a command; what it says on standard error is part of the error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        words = f"{' '.join(command)}: {done.stderr.strip()}"
        raise subprocess.CalledProcessError(done.returncode, words, done.stdout, done.stderr)
    return done.stdout


def check_allowed(user: int | None = None) -> None:
    """Whether networks can be made here.

    Args:
        user: number of the user; 0 is root. By default who runs this.

    Raises:
        ValueError: they cannot; it says what is missing.
    """
    if (os.geteuid() if user is None else user) != 0:
        raise ValueError(
            "--rate needs root: each rank gets a network namespace of its own. Run the command as "
            "root, or leave --rate out to measure on the network as it is."
        )
    for name in ("ip", "tc"):
        if shutil.which(name) is None:
            raise ValueError(f"--rate needs the command {name}: install the package iproute2.")


class ShapedNetwork:
    """The namespaces of a bench, while they are there.

    Args:
        topology: names and addresses.
        run: runs a command.
    """

    def __init__(self, topology: Topology, run: Runner = run_command) -> None:
        self.topology = topology
        self._run = run
        self._shaped = False

    def set_rate(self, rate: str | None) -> None:
        """Bound all devices to a rate; ``None`` to none."""
        if rate is not None:
            for command in rate_commands(self.topology, rate):
                self._run(command)
        elif self._shaped:
            for command in unshape_commands(self.topology):
                self._run(command)
        self._shaped = rate is not None


@contextlib.contextmanager
def shaped_network(
    ranks: int, run: Runner = run_command, owner: int | None = None
) -> Iterator[ShapedNetwork]:
    """The namespaces of ranks, deleted at the end whatever happens, after those of benches that
    were killed.

    Raises:
        subprocess.CalledProcessError: the system refuses; nothing is left of it.
    """
    topology = Topology(os.getpid() if owner is None else owner, ranks)
    # What has our number was left by one that had it before us.
    others = leftovers(
        run(["ip", "netns", "list"]), lambda pid: pid != topology.owner and is_alive(pid)
    )
    _delete(others, run)
    try:
        for command in setup_commands(topology):
            run(command)
        yield ShapedNetwork(topology, run)
    finally:
        _delete(topology.namespaces, run)


def _delete(names: Sequence[str], run: Runner) -> None:
    """Delete namespaces, and with them their devices; one that is not there is no matter."""
    for name in names:
        with contextlib.suppress(subprocess.CalledProcessError):
            run(["ip", "netns", "delete", name])


def is_alive(pid: int) -> bool:
    """Whether a process of that number runs."""
    return Path(f"/proc/{pid}").exists()
