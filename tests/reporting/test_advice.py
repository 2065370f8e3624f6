"""The advice of the report: one line, from the measurements."""

from __future__ import annotations

import dataclasses

from fusion_passes import BucketReport
from fusion_passes.reporting.report import advice
from fusion_passes.reporting.timeline import BucketTimes, StepTimes

STEPS = StepTimes(step_s=1.0, compute_s=0.8, network_s=0.5, hidden_s=0.3, exposed_s=0.2)


def bucket(number: int, exposed_s: float, *parameters: str, **changes: object) -> BucketReport:
    report = BucketReport("DDP 0 (Net)", "0", "float32", 2**20, 2**20, "collective", parameters)
    times = BucketTimes(0.0, 0.0, 0.0, exposed_s)
    name = f"DDP 0 (Net) bucket {number}"
    return dataclasses.replace(report, name=name, times=times, **changes)  # type: ignore[arg-type]


def test_nothing_is_said_where_nothing_was_measured_or_is_to_be_gained() -> None:
    assert advice(None, ()) == ""
    assert advice(dataclasses.replace(STEPS, exposed_s=0.049), ()) == ""
    assert advice(dataclasses.replace(STEPS, exposed_s=0.051), ()) != ""


def test_a_network_that_is_busy_for_longer_than_the_rank_computes_needs_less_to_send() -> None:
    said = advice(dataclasses.replace(STEPS, network_s=0.9), [bucket(0, 0.2, "w")])
    assert said.startswith("20% of a step is exposed communication: the network is busy for 900.0")
    assert 'reduce_dtype="bf16"' in said


def test_a_bucket_that_is_waited_for_early_is_named_with_what_reads_it() -> None:
    early = bucket(1, 0.2, "w", waited="early, because norm reads it", overlapped=1, following=2)
    said = advice(STEPS, [bucket(1, 0.2, "w")], [early])
    assert "the bucket of w is waited for early, because norm reads it" in said


def test_the_bucket_that_is_most_of_the_exposed_time_is_named_with_what_it_holds() -> None:
    said = advice(STEPS, [bucket(0, 0.076, "head"), bucket(1, 0.124, "embedding")])
    assert "the last bucket causes 62% of that: it holds embedding. It is a single gradient" in said
    said = advice(STEPS, [bucket(0, 0.124, "head", "bias"), bucket(1, 0.076, "embedding")])
    assert "bucket 0 causes 62% of that: it holds head and 1 more. A lower bucket_cap_mb" in said


def test_a_small_bucket_takes_what_a_message_takes() -> None:
    said = advice(STEPS, [bucket(0, 0.2, "head", "bias", num_bytes=2**19 - 1)])
    assert "the latency of a message" in said
    assert "the latency" not in advice(STEPS, [bucket(0, 0.2, "head", "bias", num_bytes=2**19)])


def test_where_no_bucket_stands_out_it_is_the_choice_of_buckets() -> None:
    even = [bucket(number, 0.05, f"w{number}") for number in range(4)]
    assert 'Try ddp_fusion = "auto"' in advice(STEPS, even)
