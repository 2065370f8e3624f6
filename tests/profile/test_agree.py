"""Ranks agree on one profile: threads stand for ranks, over a real store, without a network."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusion_passes.agreement.exchange import Meeting
from fusion_passes.profile import agree, files, site
from fusion_passes.profile.agree import Wanted, Where, agree_on_profile
from fusion_passes.profile.records import Kind
from tests.profile.test_records import FLOAT, PROFILE

OTHER = Kind("bfloat16", "avg")


class Group:
    """Ranks whose files are their own; what they measure is counted."""

    def __init__(self, tmp_path, monkeypatch) -> None:
        self.store = dist.HashStore()
        self.measured: list[tuple[Kind, ...]] = []
        self.kept = [tmp_path / str(rank) for rank in range(3)]
        self.local = threading.local()
        monkeypatch.setattr(files, "directory", lambda: self.local.directory)
        monkeypatch.setattr(agree, "measure", self.measure)
        monkeypatch.setattr(socket, "gethostname", lambda: self.local.host)
        self.number = 0

    def measure(self, _, place, kinds, __):
        self.measured.append(tuple(kinds))
        (_, table), *_ = PROFILE.tables
        return replace(PROFILE, place=place, tables=tuple((kind, table) for kind in kinds))

    def run(self, wanted=lambda rank: [FLOAT], backend=lambda rank: "gloo", absent=(), timeout=20):
        """What each rank gets, or the error."""
        self.number += 1
        results: dict[int, object] = {}

        def rank_runs(rank: int) -> None:
            self.local.directory, self.local.host = self.kept[rank], f"host{rank}"
            meeting = Meeting(rank, 3, timedelta(seconds=timeout), self.store, self.store)
            nobody: Any = None
            where = Where(nobody, torch.device("cpu"))
            try:
                wants = Wanted(backend(rank), tuple(wanted(rank)))
                results[rank] = agree_on_profile(meeting, where, wants, str(self.number))
            except RuntimeError as error:
                results[rank] = error

        threads = [
            threading.Thread(target=rank_runs, args=(n,)) for n in range(3) if n not in absent
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return results

    def same(self, **kwargs):
        results = self.run(**kwargs)
        assert len({profile.digest() for profile in results.values()}) == 1, results
        return results[0]

    def profiles(self):
        return [[path.read_text() for path in sorted(kept.glob("*"))] for kept in self.kept]


@pytest.fixture
def group(tmp_path, monkeypatch) -> Group:
    return Group(tmp_path, monkeypatch)


def test_what_was_measured_once_is_found_at_the_next_start(group) -> None:
    first = group.same()
    assert group.measured == [(FLOAT,)] * 3
    assert first.place.hosts == ("host0", "host1", "host2")
    assert group.same() == first
    assert len(group.measured) == 3
    assert group.profiles() == [[first.to_json()]] * 3


@pytest.mark.parametrize("cold", [{0}, {1, 2}, {0, 1}])
def test_a_rank_without_a_profile_takes_the_others(group, cold) -> None:
    first = group.same()
    for rank in cold:
        next(group.kept[rank].iterdir()).write_text("{")
    assert group.same() == first
    assert len(group.measured) == 3
    assert group.profiles() == [[first.to_json()]] * 3


def test_ranks_with_different_profiles_take_that_of_the_lowest(group) -> None:
    first = group.same()
    group.local.directory = group.kept[2]
    files.store(replace(first, rates=replace(first.rates, kernel_ns=7)))
    assert group.same() == first
    assert group.profiles() == [[first.to_json()]] * 3


def test_what_is_missing_is_measured_and_the_rest_kept(group) -> None:
    group.same()
    both = group.same(wanted=lambda rank: [OTHER] if rank == 1 else [FLOAT])
    assert both.missing([FLOAT, OTHER]) == ()
    assert group.measured[3:] == [(OTHER, FLOAT)] * 3
    assert group.same() == both, "nothing is forgotten"


def test_a_profile_that_is_enough_goes_before_one_of_a_lower_rank(group) -> None:
    first = group.same()
    group.local.directory = group.kept[2]
    enough = replace(first, tables=(*first.tables, (OTHER, first.tables[0][1])))
    files.store(enough.with_tables_of(enough))
    assert group.same(wanted=lambda _: [FLOAT, OTHER]).missing([OTHER]) == ()
    assert len(group.measured) == 3


def test_ranks_that_differ_are_refused_on_all(group) -> None:
    results = group.run(backend=lambda rank: "nccl" if rank == 1 else "gloo")
    for error in results.values():
        assert "backend is 'gloo' on rank 0, and 'nccl' on rank 1" in str(error)
    assert group.measured == []


def test_hosts_may_have_other_cards_and_names_for_their_interfaces(group, monkeypatch) -> None:
    monkeypatch.setattr(site, "device_name", lambda _: f"card of {group.local.host[:-1]}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert group.same().place.device == "card of host"
    assert group.same().place.interfaces == "GLOO_SOCKET_IFNAME=eth0"
    monkeypatch.setattr(site, "device_name", lambda _: f"card of {group.local.host}")
    assert group.same().place.device == "card of host0, card of host1, card of host2"


def test_a_rank_that_does_not_come_is_named(group) -> None:
    results = group.run(absent={1}, timeout=1)
    assert len(results) == 2
    for error in results.values():
        assert "ranks [1] have not come within 1 s" in str(error)


def test_a_rank_that_fails_while_measuring_is_named_on_all(group, monkeypatch) -> None:
    def fail(*arguments):
        if group.local.host == "host1":
            raise RuntimeError("out of memory")
        return group.measure(*arguments)

    monkeypatch.setattr(agree, "measure", fail)
    results = group.run()
    assert len(results) == 3
    for error in results.values():
        assert "that has failed on rank 1: out of memory." in str(error)
