"""The state of a sharded optimizer is saved and loaded, beside that of plain DDP."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import fusion_passes
from fusion_passes import FusionConfig
from fusion_passes.sharded.checkpoints import PART
from testing.processes import RUN
from tests.sharded.trainings import (
    PLAIN,
    SHARDED,
    largest_difference,
    network,
    one_thread,
    parameters_of,
    steps,
    wrapped,
)


def optimizer_of(ddp: nn.Module, kind: str = "AdamW") -> torch.optim.Optimizer:
    matrices = [p for p in ddp.parameters() if p.ndim > 1]
    others = [p for p in ddp.parameters() if p.ndim < 2]
    groups: list[Any] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, lr=0.01)
    return made


class Half:
    """A training with a flag: three steps, and a copy of what a checkpoint of it has."""

    def __init__(self, flag: FusionConfig, kind: str = "AdamW") -> None:
        self.flag, self.kind = flag, kind
        self.ddp = wrapped(flag, network())
        self.optimizer = optimizer_of(self.ddp, kind)
        steps(self.ddp, self.optimizer, 0, 3)
        self.weights = copy.deepcopy(self.ddp.module.state_dict())
        self.own = copy.deepcopy(self.optimizer.state_dict())
        self.whole = copy.deepcopy(fusion_passes.full_optimizer_state_dict(self.optimizer))

    def end(self) -> list[Tensor]:
        """The parameters after three more steps."""
        steps(self.ddp, self.optimizer, 3, 6)
        return parameters_of(self.ddp)

    def resumed(self, flag: FusionConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A new module with the weights, and an optimizer without a state."""
        ddp = wrapped(flag, network())
        ddp.module.load_state_dict(self.weights)
        return ddp, optimizer_of(ddp, self.kind)


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare nested values, tensors by their bits; and the order of keys."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key, value in ours.items():
            assert_same(value, theirs[key])
    elif isinstance(ours, Tensor):
        assert ours.device == theirs.device
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    else:
        assert ours == theirs


def saves_and_loads(kind: str) -> None:
    with one_thread():
        theirs, ours = Half(PLAIN, kind), Half(SHARDED, kind)
        assert_same(ours.whole, theirs.own)
        assert PART not in ours.whole
        expected = theirs.end()
        assert largest_difference(ours.end(), expected) == 0
        for flag, state in ((SHARDED, theirs.own), (PLAIN, ours.whole), (SHARDED, ours.own)):
            ddp, optimizer = ours.resumed(flag)
            optimizer.load_state_dict(copy.deepcopy(state))
            if flag is SHARDED:
                assert len(optimizer.state) == len(ours.own["state"])
            steps(ddp, optimizer, 3, 6)
            assert largest_difference(parameters_of(ddp), expected) == 0


@pytest.mark.parametrize("kind", ["AdamW", pytest.param("Adafactor", marks=pytest.mark.nightly)])
def test_states_are_those_of_plain_ddp_and_can_be_exchanged(run_on_ranks: RUN, kind: str) -> None:
    run_on_ranks(2, saves_and_loads, kind=kind)


def saves_on_the_first_rank() -> tuple[int, int, str]:
    """The number of parameters in a state that only rank 0 is to have, the number in its own, and
    the error of loading rank 0's own state."""
    half = Half(SHARDED)
    whole = fusion_passes.full_optimizer_state_dict(half.optimizer, rank0_only=True)
    sent = [half.own]
    dist.broadcast_object_list(sent, 0)
    _, optimizer = half.resumed(SHARDED)
    try:
        optimizer.load_state_dict(sent[0])
    except ValueError as error:
        return len(whole["state"]), len(half.own["state"]), str(error)
    return len(whole["state"]), len(half.own["state"]), ""


def test_the_state_of_one_rank_is_refused_on_another(run_on_ranks: RUN) -> None:
    (all_there, _, first), (kept, own, second) = run_on_ranks(2, saves_on_the_first_rank)
    assert (all_there, kept) == (10, own)
    assert first == ""
    assert "that of rank 0 of 2 ranks" in second
    assert "full_optimizer_state_dict" in second


# --- Another number of ranks ----------------------------------------------------------------------


def saves(folder: str) -> None:
    half = Half(SHARDED)
    if dist.get_rank() == 0:
        torch.save((half.weights, half.whole), Path(folder, "whole.pt"))
    weights, state = get_state_dict(half.ddp, half.optimizer)
    dcp.save({"weights": weights, "state": state}, checkpoint_id=Path(folder, "dcp"))


def resumes(folder: str) -> list[float]:
    """Differences from plain DDP, which resumes from the same file: where the sharded optimizer
    loads the whole state, and where it loads what is its own."""
    weights, whole = torch.load(Path(folder, "whole.pt"))
    ends = []
    for flag, is_dcp in ((PLAIN, False), (SHARDED, False), (SHARDED, True)):
        ddp = wrapped(flag, network())
        optimizer = optimizer_of(ddp)
        if is_dcp:
            named, state = get_state_dict(ddp, optimizer)
            kept = {"weights": named, "state": state}
            dcp.load(kept, checkpoint_id=Path(folder, "dcp"))
            set_state_dict(ddp, optimizer, model_state_dict=named, optim_state_dict=state)
        else:
            ddp.module.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(whole))
        steps(ddp, optimizer, 3, 6)
        ends.append(parameters_of(ddp))
    return [largest_difference(end, ends[0]) for end in ends[1:]]


ROUNDING: Final = {1: 0.0, 3: 2.0**12}


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(3, marks=pytest.mark.xdist_group("three ranks"))]
)
def test_another_number_of_ranks_can_resume(run_on_ranks: RUN, tmp_path: Path, ranks: int) -> None:
    run_on_ranks(2, saves, folder=str(tmp_path))
    for differences in run_on_ranks(ranks, resumes, folder=str(tmp_path)):
        assert max(differences) <= ROUNDING[ranks]


# --- torch.distributed.checkpoint.state_dict ------------------------------------------------------


def begins() -> tuple[int, int]:
    """The number of states that a new optimizer gets, which no step has made, and of parameters."""
    ddp = wrapped(SHARDED, network())
    optimizer = optimizer_of(ddp)
    got = get_optimizer_state_dict(ddp, optimizer)
    return len(got["state"]), len(list(ddp.parameters()))


def test_states_that_are_made_for_loading_are_those_of_a_rank(run_on_ranks: RUN) -> None:
    (first, every), (second, _) = run_on_ranks(2, begins)
    assert first + second == every


def exchanges(options: dict[str, Any]) -> int:
    """Get and set a state by these functions. Return the number of entries that this rank got."""
    with one_thread():
        theirs, ours = Half(PLAIN), Half(SHARDED)
        got = get_optimizer_state_dict(
            ours.ddp, ours.optimizer, options=StateDictOptions(**options)
        )
        got = copy.deepcopy(got)
        number = len(got.get("state", got))
        ddp, optimizer = ours.resumed(SHARDED)
        before = parameters_of(ddp)
        if options.pop("cpu_offload", False):
            options["broadcast_from_rank0"] = True  # Only rank 0 has it.
        set_optimizer_state_dict(ddp, optimizer, got, options=StateDictOptions(**options))
        assert largest_difference(parameters_of(ddp), before) == 0
        assert len(optimizer.state) == len(ours.own["state"])
        steps(ddp, optimizer, 3, 6)
        assert largest_difference(parameters_of(ddp), theirs.end()) == 0
        return number


FULL: Final = {"full_state_dict": True}


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({}, [5, 5]),
        (FULL, [10, 10]),
        ({**FULL, "cpu_offload": True}, [10, 0]),
        ({**FULL, "broadcast_from_rank0": True}, [10, 10]),
        ({"flatten_optimizer_state_dict": True}, None),
    ],
)
def test_states_by_name_are_those_of_plain_ddp(
    run_on_ranks: RUN, options: dict[str, Any], numbers: list[int] | None
) -> None:
    found = run_on_ranks(2, exchanges, options=options)
    if options == {}:
        assert sum(found) == 10, "each rank has its own"
    elif numbers is not None:
        assert found == numbers
