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

SOCKETS_ALONE: Final = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
"""Environment variables: else NCCL would pass by the network, within the machine or the GPU."""

UNSHAPED: Final = "unshaped"
"""In the place of a rate: the network as it is."""

RATES: Final = ("200mbit", "1gbit", "2.5gbit", "10gbit")
UNITS: Final = {"mbit": 10**6, "gbit": 10**9}

BURST_S: Final = 0.0005
MIN_BURST_BYTES: Final = 256 * 1024
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


def words_of(rate: str) -> str:
    """A rate, or :data:`UNSHAPED`, for people: ``2.5 Gbit/s``."""
    return rate.replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")


def run_command(command: Command) -> str:
    """Run a command; what it says on standard error is part of the error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        words = f"{' '.join(command)}: {done.stderr.strip()}"
        raise subprocess.CalledProcessError(done.returncode, words, done.stdout, done.stderr)
    return done.stdout


@dataclass
class Network:
    """Where ranks find each other.

    Attributes:
        words: what it is, for people.
        prefixes: for each rank, the command that starts another there.
        interface: of each rank's sockets.
        host: address of rank 0.
        devices: namespace and name of each device that is bounded; none where it cannot be.
        passes: how often a device is passed by what one rank sends.
        run: runs a command.
    """

    words: str
    prefixes: tuple[tuple[str, ...], ...]
    interface: str = "lo"
    host: str = "127.0.0.1"
    devices: tuple[tuple[str, str], ...] = ()
    passes: int = 1
    run: Runner = run_command
    _rate: str = UNSHAPED

    def set_rate(self, rate: str) -> None:
        """Bound what each rank sends, whatever it was bounded to; :data:`UNSHAPED` to nothing."""
        for namespace, device in self.devices:
            queue = ["tc", "-n", namespace, "qdisc"]
            if rate != UNSHAPED:
                queue += ["replace", "dev", device, "root", *self._shape(rate)]
                self.run(queue)
            elif self._rate != UNSHAPED:
                self.run([*queue, "del", "dev", device, "root"])
        self._rate = rate

    def _shape(self, rate: str) -> Command:
        """The queue that bounds a device, as ``tc`` reads it."""
        bits = self.passes * bits_per_s(rate)
        burst = max(MIN_BURST_BYTES, int(bits / 8 * BURST_S))
        bound = ["tbf", "rate", f"{bits / 1e6:.0f}mbit"]
        return [*bound, "burst", str(burst), "latency", LATENCY]


def local_network(ranks: int, why: str = "") -> Network:
    """This machine's loopback device, unshaped.

    Args:
        ranks: how many.
        why: it is not shaped.
    """
    return Network(f"network not shaped: {why}" if why else UNSHAPED, ((),) * ranks)


@contextlib.contextmanager
def shaped_network(
    ranks: int, run: Runner = run_command, owner: int | None = None
) -> Iterator[Network]:
    """Namespaces of ranks, deleted at the end whatever happens, after those of benches that were
    killed.

    Raises:
        subprocess.CalledProcessError: the system refuses; nothing is left of it.
    """
    made = _Namespaces(os.getpid() if owner is None else owner, ranks)
    with made.cleaned(run):
        for command in made.setup():
            run(command)
        yield Network(
            f"{'a pair of' if ranks == 2 else 'bridged'} veth devices with tbf",
            tuple(made.prefix(rank) for rank in range(ranks)),
            DEVICE,
            made.address(0),
            tuple(made.devices),
            run=run,
        )


@contextlib.contextmanager
def shaped_loopback(ranks: int, run: Runner = run_command) -> Iterator[Network]:
    """A namespace's own loopback device: what is shaped there slows nothing else."""
    made = _Namespaces(os.getpid(), ranks)
    with made.cleaned(run):
        name = made.name(0)
        run(["ip", "netns", "add", name])
        run(["ip", "-n", name, "link", "set", "lo", "up"])
        words = "the loopback device of a namespace with tbf, which all ranks' bytes pass"
        prefixes = (made.prefix(0),) * ranks
        yield Network(words, prefixes, devices=((name, "lo"),), passes=ranks, run=run)


@contextlib.contextmanager
def best_network(ranks: int, run: Runner = run_command) -> Iterator[Network]:
    """The best network that can be had here: pairs of devices; else a namespace's loopback; else
    this machine's, unshaped."""
    reasons = []
    with contextlib.ExitStack() as stack:
        for kind in (shaped_network, shaped_loopback):
            try:
                check_allowed()
                network = stack.enter_context(kind(ranks, run))
                # Whether the system has the queue that bounds, and lets processes in.
                network.set_rate("100gbit")
                for prefix in network.prefixes:
                    run([*prefix, "true"])
            except (ValueError, OSError, subprocess.SubprocessError) as error:
                stack.close()
                reasons.append(str(error).strip())
            else:
                yield network
                return
        yield local_network(ranks, "; ".join(dict.fromkeys(reasons)))


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


@dataclass(frozen=True)
class _Namespaces:
    """Names and addresses of what process ``owner`` makes for ranks."""

    owner: int
    ranks: int

    def name(self, rank: int) -> str:
        return f"{PREFIX}-{self.owner}-{rank}"

    @property
    def switch(self) -> str:
        """Namespace of the bridge that joins more than two."""
        return f"{PREFIX}-{self.owner}-switch"

    def address(self, rank: int) -> str:
        # Of the range for tests of network devices: a machine's own networks are elsewhere.
        return f"198.18.{rank // 250}.{rank % 250 + 1}"

    def prefix(self, rank: int) -> tuple[str, ...]:
        """Command that starts another in a rank's namespace."""
        return ("ip", "netns", "exec", self.name(rank))

    @property
    def names(self) -> list[str]:
        ranks = [self.name(rank) for rank in range(self.ranks)]
        return ranks if self.ranks == 2 else [*ranks, self.switch]

    @property
    def devices(self) -> list[tuple[str, str]]:
        """Namespace and name of each device that sends."""
        own = [(self.name(rank), DEVICE) for rank in range(self.ranks)]
        if self.ranks == 2:
            return own
        return own + [(self.switch, f"port{rank}") for rank in range(self.ranks)]

    def setup(self) -> Iterator[Command]:
        """What makes the namespaces and joins them, unshaped."""
        yield from (["ip", "netns", "add", name] for name in self.names)
        if self.ranks == 2:
            peer = ["peer", "name", DEVICE, "netns", self.name(1)]
            yield ["ip", "-n", self.name(0), "link", "add", DEVICE, "type", "veth", *peer]
        else:
            switch = ["ip", "-n", self.switch, "link"]
            yield [*switch, "add", "bridge0", "type", "bridge"]
            yield [*switch, "set", "bridge0", "up"]
            for rank in range(self.ranks):
                peer = ["peer", "name", DEVICE, "netns", self.name(rank)]
                yield [*switch, "add", f"port{rank}", "type", "veth", *peer]
                yield [*switch, "set", f"port{rank}", "master", "bridge0", "up"]
        for rank in range(self.ranks):
            inside = ["ip", "-n", self.name(rank)]
            yield [*inside, "address", "add", f"{self.address(rank)}/16", "dev", DEVICE]
            yield from ([*inside, "link", "set", device, "up"] for device in (DEVICE, "lo"))

    @contextlib.contextmanager
    def cleaned(self, run: Runner) -> Iterator[None]:
        """Nothing of it is there before and after, nor of benches that are gone."""

        def is_running(pid: int) -> bool:
            # What has our number was left by one that had it before us.
            return pid != self.owner and Path(f"/proc/{pid}").exists()

        _delete(leftovers(run(["ip", "netns", "list"]), is_running), run)
        try:
            yield
        finally:
            _delete(self.names, run)


def leftovers(listed: str, is_running: Callable[[int], bool]) -> list[str]:
    """Namespaces of benches that are gone.

    Args:
        listed: their names, as ``ip netns list`` prints them.
        is_running: whether a process of that number runs.
    """
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    found = [(name, re.fullmatch(rf"{PREFIX}-(\d+)-\w+", name)) for name in names]
    return [name for name, match in found if match and not is_running(int(match[1]))]


def _delete(names: Sequence[str], run: Runner) -> None:
    """Delete namespaces, and with them their devices; one that is not there is no matter."""
    for name in names:
        with contextlib.suppress(subprocess.CalledProcessError):
            run(["ip", "netns", "delete", name])
