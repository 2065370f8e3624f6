"""Profiles: their text, their files, and which of them can be used."""

from __future__ import annotations

import json
import os
import pwd
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusion_passes.tuning import files
from fusion_passes.tuning.records import Place, Profile, ReadyTimes
from fusion_passes.tuning.tables import CostTable

PLACE = Place(2, ("a", "b"), "gloo", "cpu", "", "2.13.0", "avg of float32")
PROFILE = Profile(PLACE, CostTable((1024, 2048), (10, 20)))


def store(profile: Profile) -> Path:
    path = files.path_of(profile.place)
    assert files.keep(path, profile.to_json(), "The profile")
    return path


@pytest.fixture(autouse=True)
def _directory(tmp_path, monkeypatch):
    monkeypatch.setenv(files.DIRECTORY_VARIABLE, str(tmp_path / "profiles"))


def test_a_profile_comes_back_as_it_was_stored() -> None:
    path = store(PROFILE)
    assert files.look_up(PLACE) == PROFILE
    assert list(path.parent.iterdir()) == [path], "nothing is left beside it"


@pytest.mark.parametrize(
    "field", ["world_size", "hosts", "backend", "device", "interfaces", "torch", "collective"]
)
def test_what_holds_elsewhere_is_another_file(field) -> None:
    store(PROFILE)
    values: dict[str, Any] = {"world_size": 3, "hosts": ("a",)}
    with pytest.raises(FileNotFoundError):
        files.look_up(replace(PLACE, **{field: values.get(field, "other")}))


def test_a_file_of_another_place_is_not_used() -> None:
    store(PROFILE)
    other = replace(PLACE, hosts=("c",))
    files.path_of(PLACE).rename(files.path_of(other))
    with pytest.raises(ValueError, match="it is one of avg of float32 over 2 ranks"):
        files.look_up(other)


def damaged(edit) -> str:
    data = json.loads(PROFILE.to_json())
    edit(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        PROFILE.to_json()[:-20],
        damaged(lambda data: data.update(format=1)),
        damaged(lambda data: data.update(table=[])),
        damaged(lambda data: data["table"].update(times_ns=[20, 10])),
        damaged(lambda data: data["place"].pop("hosts")),
        damaged(lambda data: data["table"].update(times_ns=[10, float("inf")])),
        damaged(lambda data: data["table"].update(times_ns=[10, 2**62])),
        "[" * 100_000,
    ],
)
def test_what_is_not_whole_cannot_be_used(text) -> None:
    store(PROFILE).write_text(text)
    with pytest.raises(ValueError, match=r".+"):
        files.look_up(PLACE)


@pytest.mark.parametrize(
    "edit",
    [
        {"format": 0},
        {"rounds": "x"},
        {"numbers": [1, 1]},
        {"ready_ns": []},
        {"ready_ns": [10, 5]},
        {"ready_ns": [10, float("inf")]},
        {"ready_ns": [10, 2**62]},
    ],
    ids=str,
)
def test_ready_times_that_nobody_can_have_measured(edit) -> None:
    times = ReadyTimes(5, (1, 0), (10, 20), "today")
    assert ReadyTimes.from_json(times.to_json()) == times
    with pytest.raises(ValueError, match=r".+"):
        ReadyTimes.from_json(json.dumps({**json.loads(times.to_json()), **edit}))


def test_two_writers_leave_one_whole_profile() -> None:
    big = replace(PROFILE, table=CostTable(tuple(range(1, 2001)), tuple(range(2000))))
    both = [PROFILE, big]

    def write(profile: Profile) -> None:
        for _ in range(50):
            store(profile)

    threads = [threading.Thread(target=write, args=(profile,)) for profile in both]
    for thread in threads:
        thread.start()
    store(PROFILE)
    while any(thread.is_alive() for thread in threads):
        assert files.look_up(PLACE) in both
    for thread in threads:
        thread.join()


def test_a_directory_that_cannot_be_written_is_said(tmp_path, monkeypatch, caplog) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(files.DIRECTORY_VARIABLE, str(tmp_path / "file"))
    assert not files.keep(files.path_of(PLACE), PROFILE.to_json(), "The profile")
    assert files.DIRECTORY_VARIABLE in caplog.text


def test_profiles_lie_in_the_users_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv(files.DIRECTORY_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.directory() == tmp_path / "fusion_passes"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.directory() == Path(os.environ["HOME"]) / ".cache" / "fusion_passes"


def test_a_user_without_a_home_has_profiles_beside_temporary_files(tmp_path, monkeypatch) -> None:
    """An error on rank 0 alone would leave the others in the broadcast of what it has found."""
    for name in (files.DIRECTORY_VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert files.directory() == tmp_path / "fusion_passes"
