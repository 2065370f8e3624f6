"""The profiles of this process's groups, as far as their ranks have agreed on them."""

from __future__ import annotations

import weakref
from typing import Final

from fusion_passes.profile.records import Profile
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import ProcessGroup

_profiles: Final = process_state.keep(
    weakref.WeakKeyDictionary[ProcessGroup, Profile](),
    "what collectives cost on each process group",
    Lifetime.GROUP,
    reset=weakref.WeakKeyDictionary.clear,
)


def known_profile(group: ProcessGroup) -> Profile | None:
    """What collectives cost on a group; ``None`` where its ranks have not agreed on that."""
    return _profiles.get(group)


def remember_profile(group: ProcessGroup, profile: Profile) -> None:
    """Note what the ranks of a group have agreed on."""
    _profiles[group] = profile
