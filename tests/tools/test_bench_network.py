"""The network that the bench makes: its commands, and that nothing of it is left."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from benches import network as networks
from benches.network import (
    DEVICE,
    PREFIX,
    UNSHAPED,
    Network,
    best_network,
    check_allowed,
    leftovers,
    parse_rate,
    run_command,
    shaped_network,
    words_of,
)


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
            case ["ip", "netns", "list"]:
                return "\n".join(f"{name} (id: 3)" for name in self.namespaces)
            case ["ip", "netns", "add"]:
                self.namespaces.append(command[3])
            case ["ip", "netns", "delete"]:
                if command[3] not in self.namespaces:
                    raise subprocess.CalledProcessError(1, text)
                self.namespaces.remove(command[3])
        return ""


def test_two_ranks_are_joined_by_a_pair() -> None:
    system = FakeSystem()
    with shaped_network(2, system, owner=7) as network:
        assert system.commands[1:] == [
            "ip netns add fusion-bench-7-0",
            "ip netns add fusion-bench-7-1",
            "ip -n fusion-bench-7-0 link add eth0 type veth peer name eth0 netns fusion-bench-7-1",
            "ip -n fusion-bench-7-0 address add 198.18.0.1/16 dev eth0",
            "ip -n fusion-bench-7-0 link set eth0 up",
            "ip -n fusion-bench-7-0 link set lo up",
            "ip -n fusion-bench-7-1 address add 198.18.0.2/16 dev eth0",
            "ip -n fusion-bench-7-1 link set eth0 up",
            "ip -n fusion-bench-7-1 link set lo up",
        ]
        assert network.host == "198.18.0.1"
        assert network.prefixes[1] == ("ip", "netns", "exec", "fusion-bench-7-1")


def test_more_ranks_are_joined_by_a_bridge_that_is_shaped_too() -> None:
    system = FakeSystem()
    with shaped_network(3, system, owner=7) as network:
        assert "ip -n fusion-bench-7-switch link add bridge0 type bridge" in system.commands
        assert "ip -n fusion-bench-7-switch link set port2 master bridge0 up" in system.commands
        network.set_rate("1gbit")
    assert sum(command.startswith("tc") for command in system.commands) == 6


def test_rates_are_bounded_with_a_bucket_for_them_and_can_change_and_go() -> None:
    system = FakeSystem()
    with shaped_network(2, system, owner=7) as network:
        before = len(system.commands)
        network.set_rate(UNSHAPED)
        assert len(system.commands) == before, "there is nothing to take away"
        for rate in ("1gbit", "10gbit", UNSHAPED):
            network.set_rate(rate)
    shaped = [command for command in system.commands if command.startswith("tc")]
    assert shaped[0] == (
        "tc -n fusion-bench-7-0 qdisc replace dev eth0 root "
        "tbf rate 1000mbit burst 262144 latency 50ms"
    )
    assert "fusion-bench-7-1" in shaped[1]
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
    refused: str, words: str, interface: str, rate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = FakeSystem()

    def run(command: list[str]) -> str:
        if refused and refused in command:
            raise OSError(f"{refused} is refused")
        return system(command)

    monkeypatch.setattr(networks, "check_allowed", lambda: None)
    with best_network(2, run) as network:
        assert network.words.startswith(words)
        assert network.interface == interface
        network.set_rate("25gbit")
        assert bool(network.devices) == bool(rate)
        assert not rate or f"rate {rate}" in system.commands[-1]
    assert not system.namespaces, "nothing is left"


@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_is_left(ranks: int) -> None:
    system = FakeSystem()

    def interrupted() -> None:
        with shaped_network(ranks, system, owner=7):
            assert len(system.namespaces) == ranks + (ranks > 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert system.namespaces == []


@pytest.mark.parametrize("word", ["netns add fusion-bench-7-1", "veth", "lo up"])
def test_nothing_is_left_of_a_setup_that_failed(word: str) -> None:
    system = FakeSystem(fails_at=word)
    with pytest.raises(subprocess.CalledProcessError), shaped_network(2, system, owner=7):
        pytest.fail("it was not set up")
    assert system.namespaces == []


def test_what_a_killed_bench_left_is_removed_and_nothing_else() -> None:
    alive = f"{PREFIX}-{os.getppid()}-0"
    kept = ("mine", f"{PREFIX}-x-0", alive)
    # The highest number that Linux gives to a process is less.
    system = FakeSystem((*kept, f"{PREFIX}-99999999-0", f"{PREFIX}-99999999-switch"))
    with shaped_network(2, system, owner=7):
        pass
    assert tuple(system.namespaces) == kept


def test_leftovers_are_found_in_what_ip_prints() -> None:
    listed = f"{PREFIX}-1-0 (id: 1)\n{PREFIX}-2-switch\nother\n\n"
    assert leftovers(listed, lambda pid: pid == 1) == [f"{PREFIX}-2-switch"]
    assert leftovers("", lambda pid: False) == []


@pytest.mark.parametrize("text", ["", "1", "gbit", "0gbit", "-1gbit", "1 gbit", "1gbps", "1e3mbit"])
def test_another_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--rate must be a number of mbit or gbit"):
        parse_rate(text)


def test_rates_are_as_tc_reads_them() -> None:
    rates = [parse_rate(text) for text in ("2.5Gbit", "200mbit")]
    assert rates == ["2.5gbit", "200mbit"]
    assert [words_of(rate) for rate in rates] == ["2.5 Gbit/s", "200 Mbit/s"]


def test_who_is_not_root_is_warned() -> None:
    with pytest.raises(ValueError, match="--rate needs root"):
        check_allowed(user=1000)


@pytest.fixture
def real_network() -> Iterator[Network]:
    try:
        check_allowed()
        with shaped_network(2) as network:
            network.set_rate("200mbit")
            yield network
    except (ValueError, subprocess.CalledProcessError) as error:
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
