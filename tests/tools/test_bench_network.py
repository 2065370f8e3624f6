"""The network that the bench makes: its commands, and that nothing of it is left."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from bench_steps.network import (
    DEVICE,
    PREFIX,
    ShapedNetwork,
    Topology,
    check_allowed,
    leftovers,
    parse_rate,
    rate_commands,
    run_command,
    setup_commands,
    shaped_network,
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


def texts(commands: list[list[str]]) -> list[str]:
    return [" ".join(command) for command in commands]


def test_two_ranks_are_joined_by_a_pair() -> None:
    assert texts(setup_commands(Topology(7, 2))) == [
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


def test_more_ranks_are_joined_by_a_bridge_that_is_shaped_too() -> None:
    topology = Topology(7, 3)
    commands = texts(setup_commands(topology))
    assert "ip -n fusion-bench-7-switch link add bridge0 type bridge" in commands
    assert "ip -n fusion-bench-7-switch link set port2 master bridge0 up" in commands
    assert len(rate_commands(topology, "1gbit")) == 6


def test_a_rate_is_bounded_with_a_bucket_for_it() -> None:
    first, second = texts(rate_commands(Topology(7, 2), "1gbit"))
    assert first == (
        "tc -n fusion-bench-7-0 qdisc replace dev eth0 root "
        "tbf rate 1gbit burst 262144 latency 50ms"
    )
    assert "fusion-bench-7-1" in second
    assert "burst 625000 " in texts(rate_commands(Topology(7, 2), "10gbit"))[0]


def test_rates_can_change_and_go() -> None:
    system = FakeSystem()
    with shaped_network(2, system, owner=7) as network:
        before = len(system.commands)
        network.set_rate(None)
        assert len(system.commands) == before, "there is nothing to take away"
        network.set_rate("1gbit")
        network.set_rate("10gbit")
        network.set_rate(None)
    words = [command.split()[4] for command in system.commands if command.startswith("tc")]
    assert words == ["replace"] * 4 + ["del"] * 2


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
    assert [parse_rate(text) for text in ("2.5Gbit", "200mbit")] == ["2.5gbit", "200mbit"]


def test_who_is_not_root_is_warned() -> None:
    with pytest.raises(ValueError, match="--rate needs root"):
        check_allowed(user=1000)


@pytest.fixture
def real_network() -> Iterator[ShapedNetwork]:
    try:
        check_allowed()
        with shaped_network(2) as network:
            network.set_rate("200mbit")
            yield network
    except (ValueError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network can be made here: {error}")


def test_a_real_network_is_shaped(real_network: ShapedNetwork) -> None:
    topology = real_network.topology
    shown = run_command(["tc", "-n", topology.namespace(1), "qdisc", "show", "dev", DEVICE])
    assert "tbf" in shown
    assert "rate 200Mbit" in shown
    real_network.set_rate(None)
    assert "tbf" not in run_command(["tc", "-n", topology.namespace(1), "qdisc", "show"])


def test_a_command_that_fails_says_what_it_said() -> None:
    with pytest.raises(subprocess.CalledProcessError, match="ls /no/such"):
        run_command(["ls", "/no/such"])
