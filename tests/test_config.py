"""Values of the flag: the valid ones, and the errors for the others."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from fusion_passes.config import FusionConfig, parse_environment, parse_flag


def test_options_are_frozen_named_and_compared_by_value() -> None:
    config = FusionConfig(mode="coalesced", bucket_cap_mb=2.5)
    assert config == FusionConfig(mode="coalesced", bucket_cap_mb=2.5)
    assert hash(config) == hash(FusionConfig(mode="coalesced", bucket_cap_mb=2.5))
    assert config != FusionConfig(mode="coalesced")
    with pytest.raises(FrozenInstanceError):
        config.mode = "concat"  # type: ignore[misc]
    with pytest.raises(TypeError):
        FusionConfig("concat")  # type: ignore[call-arg]


@pytest.mark.parametrize("value", [None, FusionConfig(), FusionConfig(mode="coalesced")])
def test_values_that_are_taken_as_they_are(value: object) -> None:
    assert parse_flag(value) is value


@pytest.mark.parametrize("mode", ["concat", "coalesced", "auto"])
def test_a_modes_name_alone(mode: str) -> None:
    assert parse_flag(mode) == FusionConfig(mode=mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["Concat", "", "off", True, False, 0, 1, ["concat"], object()])
def test_other_values_are_refused_with_the_choices(value: object) -> None:
    with pytest.raises(ValueError, match=r"^this option must be one of 'concat', 'coa") as caught:
        parse_flag(value, "this option")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", ["bucket_cap_mb", "first_bucket_cap_mb"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "25", [1]])
def test_sizes_that_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"FusionConfig\.{name} must be .* MiB"):
        FusionConfig(**{name: value})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "wrong"}, r"FusionConfig\.mode must be one of"),
        ({"scaling": "store"}, "must be one of 'auto', 'collective', 'bucket', but is 'store'"),
        ({"backward_graph": "reducer"}, "one of 'auto', 'aot_autograd', 'compiled_autograd', but"),
        ({"reduce_dtype": "fp8"}, "FusionConfig.reduce_dtype must be one of 'bf16', 'fp16', but"),
        ({"memory": "registered", "reduce_dtype": "bf16"}, "'bf16' all-reduces a copy"),
        ({"memory": "registered", "backward_graph": "compiled_autograd"}, "graph allocates them"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FusionConfig(**options)


@pytest.mark.parametrize("text", [None, "", "0", "  "])
def test_environments_that_leave_it_off(text: str | None) -> None:
    assert parse_environment(text) is None


@pytest.mark.parametrize("text", ["concat", " coalesced ", "auto"])
def test_environments_that_set_a_mode(text: str) -> None:
    assert parse_environment(text) == text.strip()


@pytest.mark.parametrize("text", ["1", "on", "CONCAT"])
def test_environments_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="FUSION_PASSES_DDP_FUSION"):
        parse_environment(text)
