"""A slow network between two processes of one machine, each in its own network namespace.

A pair of veth devices joins the namespaces, and ``tbf`` on each device limits its sending rate.
Both belong to the namespaces, so deleting these leaves nothing behind. The namespaces have fixed
names, and belong to the holder of the lock, which first deletes those that a killed bench left.
"""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PREFIX: Final = "fusion-bench"
NAMES: Final = (f"{PREFIX}-0", f"{PREFIX}-1")
"""Network namespaces of the ranks."""

ADDRESSES: Final = ("198.18.0.1", "198.18.0.2")
"""From the range for tests of network devices, which a machine's own networks do not use."""

LOCK: Final = Path(tempfile.gettempdir()) / f"{PREFIX}.lock"
DEVICE: Final = "eth0"
"""Device of a rank in its namespace."""

SOCKETS_ALONE: Final = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
"""Environment variables without which NCCL would bypass the network, within the machine or the
GPU."""

UNSHAPED: Final = "unshaped"
"""Used in place of a rate: the network without a limit."""

UNIT: Final = "gbit"
"""Unit of rates: ``2.5gbit``."""

BURST_S: Final = 0.0005
MIN_BURST_BYTES: Final = 256 * 1024
"""Minimum size of a token bucket, which holds the bytes that the rate sends in that time. A smaller
one could not pass a segment that TCP hands to the device at once."""

LATENCY: Final = "50ms"
"""Longest time that packets wait for tokens; later packets are dropped."""


def words_of(rate: str) -> str:
    """A rate, or :data:`UNSHAPED`, in words: ``2.5 Gbit/s``."""
    return rate.replace(UNIT, " Gbit/s")


def run_command(command: list[str]) -> str:
    """The output of a command; its standard error is part of the raised error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        words = f"{' '.join(command)}: {done.stderr.strip()}"
        raise subprocess.CalledProcessError(done.returncode, words, done.stdout, done.stderr)
    return done.stdout


@dataclass
class Network:
    """The network that ranks meet on.

    Attributes:
        words: description for people.
        prefixes: for each rank, the command that starts another command in its namespace.
        interface: network interface of each rank's sockets.
        host: address of rank 0.
        devices: namespace and name of each device with a limit; empty if none can be set.
        passes: how often data that one rank sends passes a device.
    """

    words: str
    prefixes: tuple[tuple[str, ...], ...]
    interface: str = "lo"
    host: str = "127.0.0.1"
    devices: tuple[tuple[str, str], ...] = ()
    passes: int = 1
    _rate: str = UNSHAPED

    def set_rate(self, rate: str) -> None:
        """Limit the sending rate of each rank, replacing any earlier limit; :data:`UNSHAPED`
        removes it."""
        for namespace, device in self.devices:
            queue = ["tc", "-n", namespace, "qdisc"]
            if rate != UNSHAPED:
                queue += ["replace", "dev", device, "root", *self._shape(rate)]
                run_command(queue)
            elif self._rate != UNSHAPED:
                run_command([*queue, "del", "dev", device, "root"])
        self._rate = rate

    def _shape(self, rate: str) -> list[str]:
        """The queue that limits a device, in the syntax of ``tc``."""
        bits = self.passes * float(rate.removesuffix(UNIT)) * 1e9
        burst = max(MIN_BURST_BYTES, int(bits / 8 * BURST_S))
        bound = ["tbf", "rate", f"{bits / 1e6:.0f}mbit"]
        return [*bound, "burst", str(burst), "latency", LATENCY]


def local_network(ranks: int, why: str = "") -> Network:
    """This machine's loopback device without a limit, and the reason for it."""
    return Network(f"network not shaped: {why}" if why else UNSHAPED, ((),) * ranks)


@contextlib.contextmanager
def shaped_network() -> Iterator[Network]:
    """A namespace for each of two ranks, joined by a pair of devices; always deleted at the end.

    Raises:
        OSError: another bench has them, or a command is not there.
        subprocess.CalledProcessError: the system refuses, as it does to who is not root.
    """
    with _namespaces(NAMES):
        first, second = NAMES
        peer = ["peer", "name", DEVICE, "netns", second]
        run_command(["ip", "-n", first, "link", "add", DEVICE, "type", "veth", *peer])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            run_command(["ip", "-n", name, "address", "add", f"{address}/16", "dev", DEVICE])
            for device in (DEVICE, "lo"):
                run_command(["ip", "-n", name, "link", "set", device, "up"])
        prefixes = (_prefix(first), _prefix(second))
        devices = tuple((name, DEVICE) for name in NAMES)
        words = "a pair of veth devices with tbf"
        yield Network(words, prefixes, DEVICE, ADDRESSES[0], devices)


@contextlib.contextmanager
def shaped_loopback() -> Iterator[Network]:
    """A namespace's own loopback device for two ranks: its limit slows nothing else."""
    name = NAMES[0]
    with _namespaces((name,)):
        run_command(["ip", "-n", name, "link", "set", "lo", "up"])
        words = "the loopback device of a namespace with tbf, which all ranks' bytes pass"
        yield Network(words, (_prefix(name),) * 2, devices=((name, "lo"),), passes=2)


@contextlib.contextmanager
def best_network() -> Iterator[Network]:
    """The best available network for two ranks: a pair of devices, otherwise a namespace's
    loopback, otherwise this machine's without a limit."""
    reasons = []
    with contextlib.ExitStack() as stack:
        for kind in (shaped_network, shaped_loopback):
            try:
                network = stack.enter_context(kind())
                # Whether the system has the queue that limits rates, and lets processes in.
                network.set_rate("100gbit")
                for prefix in network.prefixes:
                    run_command([*prefix, "true"])
            except (OSError, subprocess.SubprocessError) as error:
                stack.close()
                reasons.append(str(error).strip())
            else:
                yield network
                return
        yield local_network(2, "; ".join(dict.fromkeys(reasons)))


def _prefix(name: str) -> tuple[str, ...]:
    """The command that starts another command in a namespace."""
    return ("ip", "netns", "exec", name)


@contextlib.contextmanager
def _namespaces(names: tuple[str, ...]) -> Iterator[None]:
    """Create these namespaces, and remove every trace of them before and after."""
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OSError(f"another bench has its network here, and {LOCK}") from error
        _delete_all()
        try:
            for name in names:
                run_command(["ip", "netns", "add", name])
            yield
        finally:
            _delete_all()


def _delete_all() -> None:
    """Delete the namespaces, and with them their devices; missing ones are ignored."""
    for name in NAMES:
        with contextlib.suppress(subprocess.CalledProcessError):
            run_command(["ip", "netns", "delete", name])
