"""Profiles on disk: one file for each place, always whole."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Final

from fusion_passes.profile.records import Place, Profile

log = logging.getLogger(__name__)

DIRECTORY_VARIABLE: Final = "FUSION_PASSES_PROFILE_DIR"
"""Names the directory of profiles; by default ``fusion_passes`` in the user's cache directory."""


def directory() -> Path:
    """Where profiles are kept."""
    given = os.environ.get(DIRECTORY_VARIABLE)
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fusion_passes"


def path_of(place: Place) -> Path:
    """The file of a place's profile."""
    return directory() / f"{place.digest()}.json"


def load(place: Place) -> Profile | None:
    """The profile of a place; ``None`` where there is none that can be used: it is missing, not
    whole, or of another place. The log says which."""
    try:
        return look_up(place)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        path = path_of(place)
        log.warning("The profile %s cannot be used, and is measured anew: %s", path, error)
        return None


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


def store(profile: Profile) -> Path | None:
    """Write a profile.

    Returns:
        The file; ``None`` if it cannot be written, which the log says.
    """
    path = path_of(profile.place)
    return path if keep(path, profile.to_json(), "The profile") else None


def keep(path: Path, text: str, what: str) -> bool:
    """Write a file of what was measured; the log says if that cannot be.

    Args:
        path: of the file.
        text: all of it.
        what: is kept, for people.

    Returns:
        Whether it is written.
    """
    try:
        write_whole(path, text)
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


def write_whole(path: Path, text: str) -> None:
    """Write a file that others may read or write at the same time, on other hosts too: it appears
    whole, or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
