"""Files of profiles and of ready times: one for each place and module, always whole."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Final

from fusion_passes.tuning.records import Place, Profile

log = logging.getLogger(__name__)

DIRECTORY_VARIABLE: Final = "FUSION_PASSES_PROFILE_DIR"
"""Names the directory of profiles; by default ``fusion_passes`` in the user's cache directory."""


def directory() -> Path:
    """Where profiles are kept."""
    given = os.environ.get(DIRECTORY_VARIABLE)
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else _cache_of_user()) / "fusion_passes"


def _cache_of_user() -> Path:
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # A user without a home, as some containers have.
        return Path(tempfile.gettempdir())


def path_of(place: Place) -> Path:
    """The file of a place's profile."""
    return directory() / f"{place.digest()}.json"


def ready_path(place: Place, key: str) -> Path:
    """The file of the ready times of a module with this ``parameters_key``."""
    return directory() / f"{place.digest()}-{key}.ready.json"


def look_up(place: Place) -> Profile:
    """The profile of a place.

    Raises:
        OSError: there is none, or it cannot be read.
        ValueError: it is not whole, or of another place.
    """
    profile = Profile.from_json(path_of(place).read_text())
    if profile.place != place:
        raise ValueError(f"it is one of {profile.place}")
    return profile


def keep(path: Path, text: str, what: str) -> bool:
    """Write a file of what was measured (``what``, for people), and return whether that could be;
    the log says if not. Others may read or write it at the same time, on other hosts too: it
    appears whole, or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        log.warning(
            "%s cannot be kept in %s, so each start measures again: %s. Set %s to a directory that "
            "can be written.",
            what,
            path.parent,
            error,
            DIRECTORY_VARIABLE,
        )
        return False
    return True
