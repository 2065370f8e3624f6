"""What ranks know of the parameters that they use, where these may be others in each step."""

from __future__ import annotations

import torch

from fusion_passes.agreement.launches import LATE, Collective, LaunchList
from fusion_passes.agreement.rendezvous import whole_list
from fusion_passes.agreement.usage import Usage

FLAGS = 9


def launches(*numbers: int, mode: str = "concat") -> LaunchList:
    return LaunchList(mode, (Collective("by", "float32", numbers, 0),))


def usage(reached: set[int], kept: tuple[int, ...] = ()) -> Usage:
    """Of a rank whose backward reaches these parameters, with gradients kept of others."""
    return Usage((0, 2, 3), FLAGS, kept.__contains__, frozenset(reached))


def test_a_graph_must_have_all_that_its_backward_reaches() -> None:
    assert not usage({0, 2}).refuses(launches(0, 2, FLAGS))
    assert usage({0, 2}).refuses(launches(0, FLAGS))


def test_zeros_are_wrong_for_a_gradient_that_was_kept() -> None:
    assert not usage({0}, kept=(0, 3)).refuses(launches(0, 2, FLAGS))
    assert usage({0}, kept=(2,)).refuses(launches(0, 2, FLAGS))


def test_a_graphs_flags_do_not_have_what_was_used_before() -> None:
    late = usage({0})
    late.pending = {0}
    assert not late.refuses(launches(0, 2, FLAGS))
    late.pending = {0, 3}
    assert late.refuses(launches(0, 2, FLAGS))


def test_flags_are_written_and_read() -> None:
    known = usage({0})
    assert known.flags_of({3, 0}) == [1.0, 0.0, 1.0]
    known.read(torch.tensor([0.5, 0.0, 0.25]))
    assert known.used == frozenset({0, 3})
    known.read(torch.tensor([True, False, False]))
    assert known.used == {0}


def test_flags_are_read_but_where_all_is_used_and_sent() -> None:
    known = usage({0})
    assert known.must_read("", frozenset({0, 2, 3}))
    known.learn("", [launches(0, 2).encode(), launches(3).encode()])
    assert known.sent[""] == {0, 2, 3, FLAGS}
    assert not known.must_read("", frozenset({0, 2, 3}))
    assert known.must_read("", frozenset({0, 2}))


def test_ranks_meet_again_once_they_send_something_else() -> None:
    known = usage({0})
    known.learn("", [launches(0, 2).encode()])
    known.pending = {2}
    assert known.end_round()
    assert not known.end_round()
    assert known.sent
    assert not known.pending


def test_the_list_of_all_ranks_has_what_any_has() -> None:
    a, ab, b = launches(0, FLAGS), launches(0, 2, FLAGS), launches(2, FLAGS)
    assert whole_list([a, ab, b]) == ab
    assert whole_list([a, b]) is None
    late = launches(0, 2, FLAGS, mode=LATE)
    assert whole_list([late, ab]) == ab
    assert whole_list([a, late]) == late
