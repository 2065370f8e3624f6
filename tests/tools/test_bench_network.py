"""The network that the bench makes: its commands, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import fcntl
import re
import subprocess
from pathlib import Path

import pytest

from benches import network as networks
from benches.network import DEVICE, NAMES, UNSHAPED, best_network, run_command, shaped_network


class System:
    """A system that keeps a list of namespaces, and refuses a command that contains certain
    words."""

    def __init__(self) -> None:
        self.namespaces: list[str] = []
        self.commands: list[str] = []
        self.refuses = ""

    def run(self, command: list[str]) -> str:
        text = " ".join(command)
        self.commands.append(text)
        if self.refuses and self.refuses in text:
            raise OSError(f"{self.refuses} is refused")
        match command[:3]:
            case ["ip", "netns", "add"]:
                self.namespaces.append(command[3])
            case ["ip", "netns", "delete"]:
                if command[3] not in self.namespaces:
                    raise subprocess.CalledProcessError(1, text)
                self.namespaces.remove(command[3])
        return ""


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    """Replaces this machine's network, which others may use."""
    system = System()
    monkeypatch.setattr(networks, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(networks, "run_command", system.run)
    return system


def test_rates_are_bounded_with_a_bucket_for_them_and_can_change_and_go(system: System) -> None:
    with shaped_network() as network:
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
    system: System, refused: str, words: str, interface: str, rate: str
) -> None:
    system.refuses = refused
    with best_network() as network:
        assert network.words.startswith(words)
        assert network.interface == interface
        network.set_rate("25gbit")
        assert bool(network.devices) == bool(rate)
        assert not rate or f"rate {rate}" in system.commands[-1]
    assert not system.namespaces, "nothing is left"


@pytest.mark.parametrize("refused", ["", "netns add fusion-bench-1", "veth", "lo up"])
def test_nothing_is_left(system: System, refused: str) -> None:
    """Nothing is left of a setup that fails, or of a killed bench; others' namespaces stay."""
    system.namespaces, system.refuses = ["mine", NAMES[1]], refused

    def interrupted() -> None:
        with shaped_network():
            assert system.namespaces == ["mine", *NAMES]
            raise KeyboardInterrupt

    with pytest.raises(OSError if refused else KeyboardInterrupt):
        interrupted()
    assert system.namespaces == ["mine"]


def test_what_another_bench_has_is_left_alone(system: System) -> None:
    with networks.LOCK.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another bench"), shaped_network():
            pytest.fail("it is another's")
        with best_network() as network:
            assert network.words.startswith("network not shaped: another bench")
    assert system.commands == []


def test_a_real_network_is_shaped() -> None:
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(shaped_network())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network can be made here: {error}")
        network.set_rate("0.2gbit")
        there = [*network.prefixes[1], "ip"]
        assert f"dev {DEVICE}" in run_command([*there, "route", "get", network.host])
        assert "state DOWN" not in run_command([*there, "link"])
        namespace, device = network.devices[1]
        queue = ["tc", "-n", namespace, "qdisc", "show", "dev", device]
        assert re.search("tbf .* rate 200Mbit ", run_command(queue))
        network.set_rate(UNSHAPED)
        assert "tbf" not in run_command(queue)


def test_a_command_that_fails_says_what_it_said() -> None:
    with pytest.raises(subprocess.CalledProcessError, match="ls /no/such"):
        run_command(["ls", "/no/such"])
