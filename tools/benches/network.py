"""A slow network between two processes of one machine: each in a network namespace of its own.

They are joined by a pair of veth devices, and ``tbf`` on each bounds what it sends. All of it is in
the namespaces, so that nothing is left when they are deleted. Their names are always the same, and
who has the lock has them: what a bench that was killed has left, the next one deletes.
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
"""Of the ranks' namespaces."""

ADDRESSES: Final = ("198.18.0.1", "198.18.0.2")
"""Of the range for tests of network devices: a machine's own networks are elsewhere."""

LOCK: Final = Path(tempfile.gettempdir()) / f"{PREFIX}.lock"
DEVICE: Final = "eth0"
"""Of a rank, in its namespace."""

SOCKETS_ALONE: Final = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
"""Environment variables: else NCCL would pass by the network, within the machine or the GPU."""

UNSHAPED: Final = "unshaped"
"""In the place of a rate: the network as it is."""

UNIT: Final = "gbit"
"""Of rates: ``2.5gbit``."""

BURST_S: Final = 0.0005
MIN_BURST_BYTES: Final = 256 * 1024
"""A token bucket holds what the rate sends in that time, at least so much: less than a segment that
TCP hands to the device at once could not pass at all."""

LATENCY: Final = "50ms"
"""Of packets that wait for tokens, at most; what comes then is dropped."""


def words_of(rate: str) -> str:
    """A rate, or :data:`UNSHAPED`, for people: ``2.5 Gbit/s``."""
    return rate.replace(UNIT, " Gbit/s")


def run_command(command: list[str]) -> str:
    """What a command prints; what it says on standard error is part of the error."""
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
    """

    words: str
    prefixes: tuple[tuple[str, ...], ...]
    interface: str = "lo"
    host: str = "127.0.0.1"
    devices: tuple[tuple[str, str], ...] = ()
    passes: int = 1
    _rate: str = UNSHAPED

    def set_rate(self, rate: str) -> None:
        """Bound what each rank sends, whatever it was bounded to; :data:`UNSHAPED` to nothing."""
        for namespace, device in self.devices:
            queue = ["tc", "-n", namespace, "qdisc"]
            if rate != UNSHAPED:
                queue += ["replace", "dev", device, "root", *self._shape(rate)]
                run_command(queue)
            elif self._rate != UNSHAPED:
                run_command([*queue, "del", "dev", device, "root"])
        self._rate = rate

    def _shape(self, rate: str) -> list[str]:
        """The queue that bounds a device, as ``tc`` reads it."""
        bits = self.passes * float(rate.removesuffix(UNIT)) * 1e9
        burst = max(MIN_BURST_BYTES, int(bits / 8 * BURST_S))
        bound = ["tbf", "rate", f"{bits / 1e6:.0f}mbit"]
        return [*bound, "burst", str(burst), "latency", LATENCY]


def local_network(ranks: int, why: str = "") -> Network:
    """This machine's loopback device, unshaped; and why."""
    return Network(f"network not shaped: {why}" if why else UNSHAPED, ((),) * ranks)


@contextlib.contextmanager
def shaped_network() -> Iterator[Network]:
    """A namespace for each of two ranks, joined by a pair of devices; deleted at the end whatever
    happens.

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
    """A namespace's own loopback device for two ranks: what is shaped there slows nothing else."""
    name = NAMES[0]
    with _namespaces((name,)):
        run_command(["ip", "-n", name, "link", "set", "lo", "up"])
        words = "the loopback device of a namespace with tbf, which all ranks' bytes pass"
        yield Network(words, (_prefix(name),) * 2, devices=((name, "lo"),), passes=2)


@contextlib.contextmanager
def best_network() -> Iterator[Network]:
    """The best network that two ranks can have here: a pair of devices; else a namespace's
    loopback; else this machine's, unshaped."""
    reasons = []
    with contextlib.ExitStack() as stack:
        for kind in (shaped_network, shaped_loopback):
            try:
                network = stack.enter_context(kind())
                # Whether the system has the queue that bounds, and lets processes in.
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
    """Command that starts another in a namespace."""
    return ("ip", "netns", "exec", name)


@contextlib.contextmanager
def _namespaces(names: tuple[str, ...]) -> Iterator[None]:
    """Have these namespaces, new, and nothing of them before and after."""
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
    """Delete the namespaces, and with them their devices; one that is not there is no matter."""
    for name in NAMES:
        with contextlib.suppress(subprocess.CalledProcessError):
            run_command(["ip", "netns", "delete", name])
