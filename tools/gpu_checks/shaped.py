"""A network of a chosen rate between two ranks of one machine, as far as the system has one."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from bench_steps.network import (
    DEVICE,
    Runner,
    Topology,
    bits_per_s,
    check_allowed,
    run_command,
    shape_of,
    shaped_network,
)

RANKS = 2


class Rated(Protocol):
    """What rates are set on."""

    def set_rate(self, rate: str) -> None:
        """Bound what each rank sends."""


@dataclass(frozen=True)
class Network:
    """Where two ranks find each other.

    Attributes:
        words: what it is, for people.
        interface: of each rank's sockets.
        host: address of rank 0.
        prefixes: for each rank, the command that starts another there.
        rated: ``None`` where it cannot be shaped.
    """

    words: str
    interface: str = "lo"
    host: str = "127.0.0.1"
    prefixes: tuple[tuple[str, ...], ...] = ((),) * RANKS
    rated: Rated | None = None


@contextlib.contextmanager
def best_network(run: Runner = run_command) -> Iterator[Network]:
    """The best network that can be had here: a pair of devices; else a namespace's loopback, which
    both ranks' bytes share; else this machine's, unshaped."""
    reasons = []
    with contextlib.ExitStack() as stack:
        for kind in (_pair, _loopback):
            try:
                network = stack.enter_context(kind(run))
                assert network.rated is not None
                # Whether the system has the queue that bounds, and lets processes in.
                network.rated.set_rate("100gbit")
                for prefix in network.prefixes:
                    run([*prefix, "true"])
            except (ValueError, OSError, subprocess.SubprocessError) as error:
                stack.close()
                reasons.append(str(error).strip())
            else:
                yield network
                return
        yield Network(f"network not shaped: {'; '.join(dict.fromkeys(reasons))}")


@contextlib.contextmanager
def _pair(run: Runner) -> Iterator[Network]:
    check_allowed()
    with shaped_network(RANKS, run) as made:
        topology = made.topology
        prefixes = tuple(topology.prefix(rank) for rank in range(RANKS))
        words = "a pair of veth devices with tbf"
        yield Network(words, DEVICE, topology.address(0), prefixes, made)


@contextlib.contextmanager
def _loopback(run: Runner) -> Iterator[Network]:
    check_allowed()
    # A namespace's own: what is shaped there slows nothing else, and ends with it.
    topology = Topology(os.getpid(), RANKS)
    name = topology.namespace(0)
    run(["ip", "netns", "add", name])
    try:
        run(["ip", "-n", name, "link", "set", "lo", "up"])
        words = "the loopback device of a namespace with tbf, at twice the rate for both ranks"
        yield Network(words, prefixes=(topology.prefix(0),) * RANKS, rated=_Loopback(name, run))
    finally:
        run(["ip", "netns", "delete", name])


@dataclass(frozen=True)
class _Loopback:
    namespace: str
    run: Runner

    def set_rate(self, rate: str) -> None:
        """Bound all that passes to what both ranks send."""
        both = f"{RANKS * bits_per_s(rate) / 1e6:.0f}mbit"
        queue = ["tc", "-n", self.namespace, "qdisc", "replace", "dev", "lo", "root"]
        self.run([*queue, *shape_of(both)])
