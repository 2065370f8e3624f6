"""Which option or module determines the size of a bucket."""

from __future__ import annotations

from typing import Any

import pytest

from fusion_passes.config import FusionConfig
from fusion_passes.layout.caps import (
    MIB,
    BucketCaps,
    bucket_caps,
    default_caps,
    given_caps,
    mib_to_bytes,
)


@pytest.mark.parametrize(
    ("gradient_bytes", "cap_bytes"),
    [
        (0, MIB),
        (8 * MIB + 7, MIB),
        (8 * MIB + 8, MIB + 1),
        (8 * 25 * MIB - 1, 25 * MIB - 1),
        (8 * 25 * MIB, 25 * MIB),
        (10**12, 25 * MIB),
    ],
)
def test_the_default_cap_is_an_eighth_of_the_gradients(gradient_bytes: int, cap_bytes: int) -> None:
    assert default_caps(gradient_bytes, MIB, 25 * MIB) == BucketCaps(MIB, cap_bytes)


def test_a_cap_that_the_module_was_given_is_that_of_its_first_bucket_too() -> None:
    assert given_caps(25 * MIB) == BucketCaps(25 * MIB, 25 * MIB, are_given=True)
    assert given_caps(3, [1, 3]) == BucketCaps(3, 3, (1, 3), are_given=True)


@pytest.mark.parametrize(
    ("size_mb", "num_bytes"), [(1, MIB), (0.5, MIB // 2), (1.9 / MIB, 1), (2 / MIB, 2)]
)
def test_a_size_is_rounded_down_to_whole_bytes(size_mb: float, num_bytes: int) -> None:
    assert mib_to_bytes(size_mb) == num_bytes


def test_a_module_says_its_caps_in_mib() -> None:
    assert BucketCaps(MIB, 2 * MIB, (MIB // 2,)).in_mib() == [1, 2, 0.5]


DEFAULT = BucketCaps(MIB, 3 * MIB)
LISTED = BucketCaps(3 * MIB, 3 * MIB, (MIB, 3 * MIB, 2 * MIB))


@pytest.mark.parametrize(
    ("options", "module", "sizes_mb"),
    [
        pytest.param({}, DEFAULT, [1, 3, 3, 3], id="the module's own"),
        pytest.param({"bucket_cap_mb": 2}, DEFAULT, [2, 2, 2, 2], id="of all buckets"),
        pytest.param({"first_bucket_cap_mb": 2}, DEFAULT, [2, 3, 3, 3], id="of the first bucket"),
        pytest.param(
            {"bucket_cap_mb": 5, "first_bucket_cap_mb": 2}, DEFAULT, [2, 5, 5, 5], id="both"
        ),
        pytest.param({}, LISTED, [1, 3, 2, 2], id="as listed"),
        pytest.param({"bucket_cap_mb": 5}, LISTED, [5, 5, 5, 5], id="instead of a list"),
        pytest.param({"first_bucket_cap_mb": 4}, LISTED, [4, 3, 2, 2], id="another first"),
        pytest.param(
            {"first_bucket_cap_mb": 4}, BucketCaps(MIB, MIB, (MIB,)), [4, 1, 1, 1], id="list of one"
        ),
        pytest.param(
            {"bucket_cap_mb": 5, "first_bucket_cap_mb": 4}, LISTED, [4, 5, 5, 5], id="no list"
        ),
    ],
)
def test_options_go_before_the_module(
    options: dict[str, Any], module: BucketCaps, sizes_mb: list[int]
) -> None:
    caps = bucket_caps(FusionConfig(**options), module)
    assert [caps.of_bucket(index) for index in range(4)] == [size * MIB for size in sizes_mb]


@pytest.mark.parametrize(
    ("options", "module", "are_given"),
    [
        pytest.param({}, DEFAULT, False, id="nothing is set"),
        pytest.param({}, given_caps(5 * MIB), True, id="the module was given one"),
        pytest.param({"bucket_cap_mb": 7}, DEFAULT, True, id="an option"),
        pytest.param({"first_bucket_cap_mb": 1}, DEFAULT, False, id="of the first alone"),
    ],
)
def test_caps_tell_whether_the_user_has_set_them(
    options: dict[str, Any], module: BucketCaps, are_given: bool
) -> None:
    caps = bucket_caps(FusionConfig(mode="auto", **options), module)
    assert caps.are_given == are_given
