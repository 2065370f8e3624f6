"""The fuzzer: how it draws, compares and shrinks cases; and a few of its cases.

``tools/fuzz.py`` runs many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from fusion_passes import FusionConfig
from fuzzing import running
from fuzzing.blocks import BLOCKS, WIDTH
from fuzzing.case import Case, Clip, Joined, Loop, Optimizer, Part, from_json, to_json
from fuzzing.comparing import COARSE, FINE, Tolerance, differences, tolerance_of
from fuzzing.drawing import FAMILY, draw
from fuzzing.running import Outcome, Runner
from fuzzing.training import Record, train
from tests.support.launch import ROOT, launch

TOLERANCES = pytest.mark.parametrize("tolerance", [FINE, COARSE], ids=["fine", "coarse"])


@pytest.mark.slow
def test_a_seed_is_the_same_case_in_every_process() -> None:
    program = (
        "from fuzzing.drawing import draw; from fuzzing.case import to_json;"
        "print([to_json(draw(seed)) for seed in range(50)])"
    )
    done = launch("-c", program, PYTHONPATH=f"{ROOT}:{ROOT}/tools", PYTHONHASHSEED="7")
    assert done.stdout == f"{[to_json(draw(seed)) for seed in range(50)]}\n"


def test_a_case_survives_json() -> None:
    for seed in range(300):
        assert from_json(to_json(draw(seed))) == draw(seed)


def test_everything_is_drawn_at_times() -> None:
    cases = [draw(seed) for seed in range(3000)]
    parts = [part for case in cases for part in case.parts]
    assert {name for part in parts for name in part.blocks} == set(BLOCKS)
    assert {case.ranks for case in cases} == {2, 3, 4}
    assert {case.joined for case in cases} == set(get_args(Joined))
    assert all(case.groups for case in cases if case.joined == "threads")
    for option in ("style", "pattern", "zero", "clip", "optimizer", "dynamic", "fullgraph"):
        assert len({getattr(case.loop, option) for case in cases}) > 1, option
    sizes = [step for case in cases for step in case.loop.batches]
    assert any(len(set(step)) > 1 for step in sizes), "ranks differ in sizes"
    assert any(len({len(of_rank) for of_rank in step}) > 1 for step in sizes), "and in counts"
    family = cases[:FAMILY]
    assert len({part.blocks for case in family for part in case.parts}) == len(family[0].parts)
    assert len({repr(case.loop) for case in family}) > 1


def test_the_same_models_are_drawn_with_a_sharded_optimizer() -> None:
    cases = [draw(seed, shard_optimizer=True) for seed in range(300)]
    for case in cases:
        plain = draw(case.seed)
        assert case.shards_optimizer
        assert not plain.shards_optimizer
        assert (case.parts, case.ranks, case.joined) == (plain.parts, plain.ranks, plain.joined)
        assert from_json(to_json(case)) == case
        options: Any = case.flag
        assert FusionConfig(**options).shard_optimizer == options["shard_optimizer"]
    assert {case.loop.optimizer for case in cases} == set(get_args(Optimizer))
    assert {case.loop.clip for case in cases} == set(get_args(Clip))
    chosen = [case.flag["shard_optimizer"] for case in cases if isinstance(case.flag, dict)]
    assert set(chosen) == {True, "overlap"}


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_block(name: str) -> None:
    """Each block accepts batches down to one row, and each of its parameters gets a gradient."""
    for size in (1, 3):
        torch.manual_seed(0)
        made = BLOCKS[name]()
        rows = torch.randn(size, WIDTH, requires_grad=True)
        result = made(rows, torch.arange(size))
        assert (result.shape, result.dtype) == (rows.shape, rows.dtype)
        result.square().mean().backward()
        trained = [p for p in made.parameters() if p.requires_grad]
        assert all(parameter.grad is not None for parameter in trained)


# --- Comparing ----------------------------------------------------------------------------------


def record(gradient: torch.Tensor | None) -> Record:
    return Record(gradients=[{"a": gradient}])


@TOLERANCES
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_missing_average_is_different(tolerance: Tolerance, ranks: int) -> None:
    local = [torch.randn(16, generator=torch.Generator().manual_seed(n)) for n in range(ranks)]
    average = sum(local[1:], local[0]) / ranks
    for wrong in (average * ranks, average / ranks, local[0]):
        assert differences([record(wrong)], [record(average)], tolerance)
    assert not differences([record(average * (1 + 1e-6))], [record(average)], tolerance)


@TOLERANCES
@pytest.mark.parametrize("wrong", [None, torch.zeros(4), torch.ones(4).double(), torch.ones(2, 2)])
def test_another_gradient_is_different(tolerance: Tolerance, wrong: torch.Tensor | None) -> None:
    assert differences([record(wrong)], [record(torch.ones(4))], tolerance)
    assert differences([record(torch.ones(4))], [record(wrong)], tolerance)


def test_one_changed_element_is_different_but_for_what_rounds_to_bf16() -> None:
    right = torch.ones(100)
    wrong = right.clone()
    wrong[7] += 1e-3
    assert differences([record(wrong)], [record(right)], FINE)
    assert not differences([record(wrong)], [record(right)], COARSE)
    case = Case(0, (Part(("dense",)),))
    assert tolerance_of(case) is FINE
    assert tolerance_of(replace(case, loop=Loop(autocast=True))) is COARSE
    assert tolerance_of(replace(case, parts=(Part(("dense", "bf16")),))) is COARSE


def test_the_rank_the_parameter_and_the_buffer_are_named() -> None:
    right = Record(parameters={"w": torch.ones(2)}, buffers={"b": torch.ones(2)})
    wrong = Record(parameters={"w": torch.zeros(2)}, buffers={"b": torch.zeros(2)})
    found = differences([right, wrong], [right, right], FINE)
    assert [text.partition(": Tensor")[0] for text in found] == [
        "rank 1: parameter w",
        "rank 1: buffer b",
    ]


def test_averages_are_those_of_owners_alone() -> None:
    one, two = torch.ones(2), torch.zeros(2)
    right = Record(gradients=[{"a": one, "b": one}])
    owner_of_a = Record(gradients=[{"a": one, "b": None}], local=[set()], elsewhere={"b"})
    assert not differences([owner_of_a], [right], FINE)
    keeps_b = replace(owner_of_a, gradients=[{"a": one, "b": one}])
    lacks_a = replace(owner_of_a, gradients=[{"a": None, "b": None}])
    for wrong in (keeps_b, lacks_a):
        assert differences([wrong], [right], FINE)
    # Under no_sync, a rank may have its part of a sum whose other part is an average.
    local = replace(keeps_b, gradients=[{"a": one, "b": two}], local=[{"b"}])
    assert not differences([local], [right], FINE)
    assert differences([replace(local, gradients=[{"a": two, "b": two}])], [right], FINE)


# --- Outcomes -----------------------------------------------------------------------------------


class FakeRunner(Runner):
    """Answers from a function instead of training."""

    def __init__(self, answer: Callable[[Case, str], Any]) -> None:
        super().__init__()
        self.answer = answer

    def _train(self, case: Case, kind: Any) -> Any:
        result = self.answer(case, kind)
        return running._failure({0: result}) if isinstance(result, str) else [result] * case.ranks


def raised(stage: int, line: str) -> str:
    return f"a traceback\n{line}\n\nfuzzing.training.StageError: fuzz stage [{stage}]\n"


NO = raised(1, "RuntimeError: no")
COMPILE_ERROR = raised(1, "torch._inductor.exc.InductorError: AssertionError: 3")
RIGHT, WRONG = record(torch.ones(3)), record(torch.zeros(3))


@pytest.mark.parametrize(
    ("eager", "fused", "control", "kind"),
    [
        (RIGHT, RIGHT, None, "equal"),
        (RIGHT, WRONG, RIGHT, "different"),
        (RIGHT, WRONG, WRONG, "torch"),
        (RIGHT, WRONG, "no stage", "different"),
        (RIGHT, "cut off in _inductor/compile_fx.py", None, "slow"),
        (RIGHT, raised(-1, "ValueError: sets ddp_fusion"), None, "refused"),
        (RIGHT, raised(1, "ValueError: sets ddp_fusion"), RIGHT, "crashed"),
        (RIGHT, raised(1, "KeyError: 3"), RIGHT, "crashed"),
        (NO, RIGHT, raised(1, "AssertionError: caps"), "torch"),
        (RIGHT, "no stage", None, "hung"),
        (RIGHT, "died with exit code -11", RIGHT, "crashed"),
        (RIGHT, raised(1, "KeyError: 3"), raised(1, "KeyError: 3"), "torch"),
        (RIGHT, raised(1, "KeyError: 3"), raised(1, "TypeError: other"), "crashed"),
        (NO, RIGHT, NO, "silent"),
        (NO, RIGHT, RIGHT, "torch"),
        (NO, RIGHT, raised(2, "RuntimeError: no"), "torch"),
        (raised(1, "RuntimeError: INTERNAL ASSERT FAILED"), RIGHT, None, "reference broken"),
        (NO, raised(1, "KeyError: 3"), None, "both raise"),
        (NO, COMPILE_ERROR, RIGHT, "crashed"),
        (NO, COMPILE_ERROR, COMPILE_ERROR, "torch"),
        (NO, raised(2, "KeyError: 3"), RIGHT, "late"),
        ("no stage", RIGHT, None, "reference hung"),
    ],
)
def test_outcomes(eager: Any, fused: Any, control: Any, kind: str) -> None:
    undivided = RIGHT if "caps" in str(control) else control
    answers = {"eager": eager, "fused": fused, "control": control, "undivided": undivided}
    outcome = FakeRunner(lambda _, which: answers[which]).run(Case(0, (Part(("dense",)),)))
    assert outcome.kind == kind
    assert outcome.bad == (kind in running.BAD)


def test_what_a_sharded_optimizer_refuses_names_the_option() -> None:
    refusal = raised(1, "RuntimeError: FusionConfig.shard_optimizer = True of DDP 0: no")
    other = raised(1, "RuntimeError: an optimizer step has failed")
    for flag, error, kind in (
        ({"mode": "concat", "shard_optimizer": True}, refusal, "refused"),
        ({"mode": "concat", "shard_optimizer": True}, other, "crashed"),
        ("concat", refusal, "crashed"),
    ):
        answers = {"eager": RIGHT, "fused": error, "control": RIGHT, "undivided": RIGHT}
        runner = FakeRunner(lambda _, which, answers=answers: answers[which])  # type: ignore[misc]
        assert runner.run(Case(0, (Part(("dense",)),), flag=flag)).kind == kind


def test_an_owner_alone_may_raise_in_a_later_micro_batch() -> None:
    eager, fused = (NO.replace("[1]", f"[1, 0, {number}]") for number in (0, 1))
    answers = {"eager": eager, "fused": fused, "control": RIGHT, "undivided": RIGHT}
    runner = FakeRunner(lambda _, which: answers[which])
    case = Case(0, (Part(("dense",)),))
    sharded = replace(case, flag={"mode": "concat", "shard_optimizer": True})
    assert [runner.run(each).kind for each in (case, sharded)] == ["late", "both raise"]


def test_shrinking_keeps_what_the_outcome_needs() -> None:
    def answer(case: Case, kind: str) -> Any:
        bad = any("gru" in part.blocks for part in case.parts) and case.loop.zero == "kept"
        return WRONG if bad and kind == "fused" else RIGHT

    case = Case(
        seed=3,
        parts=(
            Part(("mlp", "gru", "conv1d"), heads=2, ddp={"static_graph": True}),
            Part(("lstm",)),
        ),
        loop=Loop(zero="kept", style="inside", batches=(((1, 2),) * 4,) * 3),
        ranks=4,
        joined="turns",
        flag={"mode": "coalesced", "bucket_cap_mb": 1.0},
    )
    small, outcome = FakeRunner(answer).shrink(case, Outcome("different"), seconds=60)
    assert outcome.kind == "different"
    assert small.parts == (Part(("gru",)),)
    assert small.loop == Loop(zero="kept", batches=(((4,), (4,)),))
    assert (small.ranks, small.joined, small.flag) == (2, "serial", "coalesced")


# --- On ranks -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_drawn_case_is_equal() -> None:
    with Runner() as runner:
        outcome = runner.run(draw(2008))
    assert outcome.kind in ("equal", "warned"), outcome.words


def test_a_rank_that_owns_nothing_clips_values(run_on_ranks: Callable[..., list[Any]]) -> None:
    """A small form of a case that once crashed."""
    flag = {"mode": "concat", "shard_optimizer": True}
    case = Case(32, (Part((), traits=("frozen",)),), Loop(clip="value"), flag=flag)
    eager, fused = (run_on_ranks(2, train, case=case, kind=kind) for kind in ("eager", "fused"))
    assert not differences(fused, eager, tolerance_of(case))
    assert fused[0].elsewhere ^ fused[1].elsewhere


@pytest.mark.newest_torch
def test_what_was_read_before_the_write_is_equal(run_on_ranks: Callable[..., list[Any]]) -> None:
    """A small form of a case that once differed, and has no other test."""
    case = Case(
        10020,
        (Part(("batch_norm_counting",), hook="fp16_compress_hook"),),
        Loop(batches=(((2,), (2,)),), dynamic=True, kernels=False),
        flag="coalesced",
    )
    eager, fused = (run_on_ranks(2, train, case=case, kind=kind) for kind in ("eager", "fused"))
    assert not differences(fused, eager, tolerance_of(case))


def test_threads_train_as_one_after_the_other(run_on_ranks: Callable[..., list[Any]]) -> None:
    parts = (Part(("mlp",)), Part(("conv1d",)))
    turns, threads = (
        run_on_ranks(2, train, case=Case(1, parts, joined=joined, groups=True), kind="eager")
        for joined in ("turns", "threads")
    )
    for one, other in zip(turns, threads, strict=True):
        assert not differences(
            [Record(parameters=other.parameters)], [Record(parameters=one.parameters)], FINE
        )
        assert len(other.gradients) == len(one.gradients) == 4
        assert [set(of_backward) for of_backward in other.gradients[::2]] == [
            {name for name in other.parameters if name.startswith(part)} for part in ("0.", "1.")
        ]


def test_training_is_compared_with_itself(run_on_ranks: Callable[..., list[Any]]) -> None:
    """Two eager trainings are equal; with different seeds they are not."""
    case = Case(1, (Part(("mlp",)),))
    first, second, other = (
        run_on_ranks(2, train, case=replace(case, seed=seed), kind="eager") for seed in (1, 1, 2)
    )
    assert not differences(first, second, FINE)
    assert differences(first, other, FINE)
