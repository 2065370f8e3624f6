"""Collectives that are not DDP's on a module's process group: they pair up in the same order."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement import history, participant
from fusion_passes.agreement.comparing import compare_statements, statement_of
from fusion_passes.agreement.launches import LATE, Collective, LaunchList
from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.rendezvous import RanksDisagreeError
from fusion_passes.agreement.sharing import end_sharing
from fusion_passes.agreement.usage import Usage
from fusion_passes.ddp.unused import beside_foreign
from fusion_passes.torch_private import inductor_config
from testing.models import WIDTH
from testing.scenarios.features.foreign import Synced

RUN = Callable[..., list[Any]]


def _list(
    *buckets: tuple[int, tuple[int, ...]], foreign: int = 0, mode: str = "concat"
) -> LaunchList:
    """Of what the graph launches before each, and parameters."""
    items = tuple(
        Collective("by", "float32", numbers, place, behind)
        for place, (behind, numbers) in enumerate(buckets)
    )
    return LaunchList(mode, items, (), foreign)


BETWEEN = _list((0, (3, 2)), (1, (1, 0)), foreign=2)
OTHERWISE = _list((0, (2, 3)), (1, (1, 0)), foreign=2)
BEHIND = _list((2, (3, 2)), (2, (1, 0)), foreign=2)


def _said(*lists: LaunchList) -> dict[int, str]:
    return {
        rank: statement_of("", item, sorted(item.parameters)) for rank, item in enumerate(lists)
    }


def test_the_text_of_a_list() -> None:
    assert BETWEEN.encode() == "concat; avg float32 3-2; +1 avg float32 1-0; foreign 2"
    assert LaunchList.decode(BETWEEN.encode()).foreign == 2


def test_all_ranks_follow_the_backward_where_one_cannot_follow_in_its_graph() -> None:
    verdict = json.loads(compare_statements(_said(BETWEEN, OTHERWISE), may_lack=False))
    assert verdict == ["run", _list((0, (3, 2)), (1, (1, 0)), foreign=2, mode=LATE).encode()]
    verdict = json.loads(compare_statements(_said(BETWEEN, BETWEEN), may_lack=False))
    assert verdict == ["run", BETWEEN.encode()]


def test_the_same_buckets_behind_others_are_other_collectives() -> None:
    verdict = json.loads(compare_statements(_said(BETWEEN, BEHIND), may_lack=False))
    assert verdict[1].startswith(LATE)


@pytest.fixture
def issued(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many collectives the process group has been given. There are other ranks."""
    count = [0]
    monkeypatch.setattr(participant, "meeting_of", lambda _: object())
    monkeypatch.setattr(history, "meeting_of", lambda _: None)
    monkeypatch.setattr(participant, "resolve_process_group", lambda _: _Two())
    monkeypatch.setattr(history, "collectives_issued", lambda _: count[0])
    yield count
    end_sharing("queue")


class _Two:
    """A process group of two ranks."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


def _module(*agreed: LaunchList, usage: Usage | None = None, name: str = "one") -> Participant:
    module = Participant(name, name, process_group="queue", usage=usage)
    module.history[""] = list(agreed)
    return module


@pytest.mark.usefixtures("issued")
def test_a_rank_that_would_come_too_late_says_so() -> None:
    with pytest.raises(RanksDisagreeError) as error:
        _module(BETWEEN).announce(OTHERWISE)
    assert error.value.is_overtaken
    assert error.value.collectives == {1: OTHERWISE.encode()}, "it does not know of rank 0"
    assert error.value.agreed == BETWEEN.encode()


@pytest.mark.usefixtures("issued")
def test_what_comes_behind_all_others_can_be_done_by_hand() -> None:
    module = _module(BEHIND)
    module.announce(OTHERWISE)
    assert module.is_local
    module.count_foreign()
    assert module.next_late(lambda: replaced(OTHERWISE)) == BEHIND


def replaced(launches: LaunchList) -> LaunchList:
    return LaunchList(LATE, launches.collectives)


def test_what_followed_between_graphs_is_found_at_the_end(issued: list[int]) -> None:
    first = _list((0, (3, 2)))
    module = _module(first)
    module.announce(_list((0, (2, 3))))
    issued[0] += 1
    module.count_foreign()
    with pytest.raises(RanksDisagreeError) as error:
        module.next_late(lambda: replaced(first))
    assert error.value.is_overtaken


def test_a_hook_may_launch_anything(issued: list[int]) -> None:
    hooked = LaunchList("concat", (Collective("hook", "float32", (3, 2), 0),))
    module = _module(hooked)
    module.announce(_list((0, (2, 3))))
    issued[0] += 1
    module.count_foreign()
    assert module.foreign == []


@pytest.mark.usefixtures("issued")
@pytest.mark.parametrize("everywhere", [False, True])
def test_what_shares_the_process_group_is_withdrawn(everywhere: bool) -> None:
    """All ranks withdraw alike what follows a module that leaves all; else others launch it."""
    usage = Usage((0, 1, 2, 3), 4, lambda _: False, reached=frozenset(range(4)))
    items = [Collective("by", "float32", (number,), number, 1) for number in (0, 2)]
    first = _module(LaunchList("concat", tuple(items), (), 2), name="first")
    first.announce(first.agreed[0])
    own = LaunchList("concat", (Collective("by", "float32", (3, 2, 1, 0), 1, 1),), (), 2)
    second = _module(BEHIND, name="second", usage=usage if everywhere else None)
    if everywhere:
        second.announce(own)
        assert (first.is_local, len(first.unsent)) == (True, 1)
    else:
        with pytest.raises(RanksDisagreeError):
            second.announce(own)


def test_what_stays_on_all_ranks_is_no_error(issued: list[int]) -> None:
    """A module that leaves all, and one behind it in another graph, which was launched alone
    before."""
    usage = Usage((0, 1), 2, lambda _: False, reached=frozenset({0, 1}))
    first = _module(_list((0, (1, 0))), name="first", usage=usage)
    second = _module(_list((0, (3, 2))), name="second")
    first.announce(_list((0, (1, 0)), foreign=1))
    second.announce(_list((0, (3, 2)), foreign=1))
    issued[0] += 3
    for module in (first, second):
        assert module.is_local
        module.count_foreign()
        (own,) = module.agreed
        assert module.next_late(functools.partial(replaced, own)) == own


@pytest.mark.parametrize(
    ("foreign", "suspects", "known", "expected"),
    [
        (0, False, None, False),
        (1, False, False, True),
        (0, True, None, True),
        (0, True, False, False),
        (0, False, True, True),
    ],
)
def test_who_may_lack_gradients_launches_nothing_between_others(
    foreign: int, suspects: bool, known: bool | None, expected: bool
) -> None:
    usage = Usage((0, 1), 2, lambda _: False, suspects_foreign=suspects, has_foreign=known)
    assert usage.leaves_all(_list((0, (1, 0)), foreign=foreign)) == expected


def test_one_rank_that_has_them_is_enough() -> None:
    usage = Usage((0, 1), 2, lambda _: False, suspects_foreign=True)
    usage.learn_foreign([_list((0, (1, 0)))])
    assert usage.has_foreign is False
    usage.learn_foreign([_list((0, (1, 0))), _list((0, (1, 0)), foreign=1)])
    usage.learn_foreign([_list((0, (1, 0)))])
    assert usage.has_foreign is True
    said = _said(_list((0, (1, 0)), mode=LATE, foreign=1), _list((0, (1, 0)), mode=LATE))
    _, chosen = json.loads(compare_statements(said, may_lack=True))
    assert LaunchList.decode(chosen).foreign == 1


@pytest.mark.usefixtures("issued")
def test_they_are_known_of_where_all_launches_follow_them() -> None:
    """None is behind what stays, and it is reduced after the backward all the same: the warning
    and the report say why."""
    usage = Usage((0, 1), 2, lambda _: False, suspects_foreign=True, reached=frozenset({0, 1}))
    module = _module(usage=usage)
    module.announce(_list((2, (1, 0)), foreign=2))
    module.count_foreign()
    usage.learn_foreign([_list((0, (1, 0)), mode=LATE)])
    assert module.is_local
    assert beside_foreign([module]) == ["one"]


def _in_another_order(mode: str) -> tuple[str, bool]:
    """Rank 1 comes to use layers between two such in another order."""
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=10))
    with inductor_config.patch(ddp_fusion=mode):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Synced(group=group), process_group=group, bucket_cap_mb=3e-4)
        forward: Any = torch.compile(ddp)
        for step in range(3):
            takes = "cba" if step == 2 and rank else "abc"
            loss = forward(torch.ones(4, WIDTH), takes).sum()
            try:
                loss.backward()
            except RanksDisagreeError as error:
                return str(error), error.is_overtaken
    return "", False


@pytest.mark.nightly  # Most of it is waiting; what a rank does there is tested above.
def test_ranks_in_another_order_are_told_why(run_on_ranks: RUN) -> None:
    for text, is_overtaken in run_on_ranks(2, _in_another_order, mode="concat"):
        assert "Collectives that are not DDP's lie between them" in text
        assert is_overtaken
