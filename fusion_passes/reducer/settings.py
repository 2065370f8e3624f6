"""Compares, when a module is constructed, what must be the same on all ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusion_passes.reducer.words import RanksDisagreeError
from fusion_passes.torch_private.process_groups import all_gather


class SettingsDifferError(RanksDisagreeError):
    """The ranks of a module have not been given the same settings. The text says which."""


def compare_settings(
    group: Any, label: str, settings: Mapping[str, Any], device: torch.device
) -> None:
    """Compare settings over the ranks of a process group: one all-gather of a digest. Where they
    differ, what they are comes over the group's store.

    Args:
        group: the ranks; all of them must call this.
        label: of the module, for people; the same on all ranks.
        settings: by name; what JSON can hold.
        device: of what the group sends.

    Raises:
        SettingsDifferError: on every rank; it names each setting that differs, and its values.
    """
    if group.size() == 1 or group.name() == "fake":
        return
    text = json.dumps(settings, sort_keys=True)
    # As a signed number of 64 bits.
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
    digests = all_gather(group, torch.tensor([number], device=device)).tolist()
    if len(set(digests)) == 1:
        return
    store = group.get_group_store()
    place = f"ddp_fusion/settings/{label}"
    store.set(f"{place}/{group.rank()}", text)
    first = {digest: digests.index(digest) for digest in digests}
    texts = {rank: store.get(f"{place}/{rank}").decode() for rank in first.values()}
    values = [json.loads(texts[first[digest]]) for digest in digests]
    raise SettingsDifferError(label, _in_words(label, values))


def _in_words(label: str, values: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"The ranks of {label} have not been given the same settings."]
    for name in values[0]:
        by_value: dict[str, list[str]] = {}
        for rank, named in enumerate(values):
            by_value.setdefault(json.dumps(named.get(name)), []).append(str(rank))
        if len(by_value) > 1:
            lines.append(f"{name} must be the same on all ranks, but is:")
            lines += [f"  {value} on rank {', '.join(r)}" for value, r in by_value.items()]
    return "\n".join([*lines, "Set it to one value on all ranks, before DistributedDataParallel."])
