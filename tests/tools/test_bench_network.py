"""The network that the bench makes: its commands, and that nothing of it is left."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benches import network as networks
from benches.network import (
    DEVICE,
    LOCK,
    NAMES,
    UNSHAPED,
    Network,
    best_network,
    run_command,
    shaped_network,
)


@pytest.fixture(autouse=True)
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a fake system: others may run on this machine."""
    path = tmp_path / "lock"
    monkeypatch.setattr(networks, "LOCK", path)
    return path


class FakeSystem:
    """Keeps a list of namespaces; fails at a command that holds a word."""

    def __init__(self, namespaces: tuple[str, ...] = (), fails_at: str = "") -> None:
        self.namespaces = list(namespaces)
        self.commands: list[str] = []
        self._fails_at = fails_at

    def __call__(self, command: list[str]) -> str:
        text = " ".join(command)
        self.commands.append(text)
        if self._fails_at and self._fails_at in text:
            raise subprocess.CalledProcessError(1, text)
        match command[:3]:
            case ["ip", "netns", "add"]:
                self.namespaces.append(command[3])
            case ["ip", "netns", "delete"]:
                if command[3] not in self.namespaces:
                    raise subprocess.CalledProcessError(1, text)
                self.namespaces.remove(command[3])
        return ""


def test_two_ranks_are_joined_by_a_pair() -> None:
    system = FakeSystem()
    with shaped_network(system) as network:
        assert system.commands[2:] == [
            "ip netns add fusion-bench-0",
            "ip netns add fusion-bench-1",
            "ip -n fusion-bench-0 link add eth0 type veth peer name eth0 netns fusion-bench-1",
            "ip -n fusion-bench-0 address add 198.18.0.1/16 dev eth0",
            "ip -n fusion-bench-0 link set eth0 up",
            "ip -n fusion-bench-0 link set lo up",
            "ip -n fusion-bench-1 address add 198.18.0.2/16 dev eth0",
            "ip -n fusion-bench-1 link set eth0 up",
            "ip -n fusion-bench-1 link set lo up",
        ]
        assert network.host == "198.18.0.1"
        assert network.prefixes[1] == ("ip", "netns", "exec", "fusion-bench-1")


def test_rates_are_bounded_with_a_bucket_for_them_and_can_change_and_go() -> None:
    system = FakeSystem()
    with shaped_network(system) as network:
        before = len(system.commands)
        network.set_rate(UNSHAPED)
        assert len(system.commands) == before, "there is nothing to take away"
        for rate in ("1gbit", "10gbit", UNSHAPED):
            network.set_rate(rate)
    shaped = [command for command in system.commands if command.startswith("tc")]
    assert shaped[0] == (
        "tc -n fusion-bench-0 qdisc replace dev eth0 root "
        "tbf rate 1000mbit burst 262144 latency 50ms"
    )
    assert "fusion-bench-1" in shaped[1]
    assert "burst 625000 " in shaped[2]
    assert [command.split()[4] for command in shaped] == ["replace"] * 4 + ["del"] * 2


@pytest.mark.parametrize(
    ("refused", "words", "interface", "rate"),
    [
        ("", "a pair of veth devices", "eth0", "25000mbit"),
        ("veth", "the loopback device of a namespace", "lo", "50000mbit"),
        ("tbf", "network not shaped: tbf is refused", "lo", ""),
        ("netns", "network not shaped: netns is refused", "lo", ""),
    ],
)
def test_the_best_network_that_the_system_has_is_used(
    refused: str, words: str, interface: str, rate: str
) -> None:
    system = FakeSystem()

    def run(command: list[str]) -> str:
        if refused and refused in command:
            raise OSError(f"{refused} is refused")
        return system(command)

    with best_network(run) as network:
        assert network.words.startswith(words)
        assert network.interface == interface
        network.set_rate("25gbit")
        assert bool(network.devices) == bool(rate)
        assert not rate or f"rate {rate}" in system.commands[-1]
    assert not system.namespaces, "nothing is left"


@pytest.mark.parametrize("fails_at", ["", "netns add fusion-bench-1", "veth", "lo up"])
def test_nothing_is_left(fails_at: str) -> None:
    """Nor of a setup that fails, and of what a killed bench has left; what is another's stays."""
    system = FakeSystem(("mine", NAMES[1]), fails_at)

    def interrupted() -> None:
        with shaped_network(system):
            assert system.namespaces == ["mine", *NAMES]
            raise KeyboardInterrupt

    with pytest.raises(subprocess.CalledProcessError if fails_at else KeyboardInterrupt):
        interrupted()
    assert system.namespaces == ["mine"]


def test_what_another_bench_has_is_left_alone(lock: Path) -> None:
    system = FakeSystem(NAMES)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another bench"), shaped_network(system):
            pytest.fail("it is another's")
        with best_network(system) as network:
            assert network.words.startswith("network not shaped: another bench")
    assert system.commands == []


@pytest.fixture
def real_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    monkeypatch.setattr(networks, "LOCK", LOCK)
    try:
        with shaped_network() as network:
            network.set_rate("0.2gbit")
            yield network
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network can be made here: {error}")


def test_a_real_network_is_shaped(real_network: Network) -> None:
    namespace, device = real_network.devices[1]
    assert device == DEVICE
    shown = run_command(["tc", "-n", namespace, "qdisc", "show", "dev", device])
    assert "tbf" in shown
    assert "rate 200Mbit" in shown
    real_network.set_rate(UNSHAPED)
    assert "tbf" not in run_command(["tc", "-n", namespace, "qdisc", "show"])


def test_a_command_that_fails_says_what_it_said() -> None:
    with pytest.raises(subprocess.CalledProcessError, match="ls /no/such"):
        run_command(["ls", "/no/such"])
