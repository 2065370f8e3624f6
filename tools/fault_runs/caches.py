"""What can be wrong with the directory of Inductor's cache. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

Prepare = Callable[[Path], Callable[[], None] | None]
"""Changes a cache; returns what undoes it, where that is needed."""

GRAPHS: Final = ("fxgraph", "aotautograd")
REPORTS: Final = "fusion_passes"
"""Of the package, about cached graphs."""

GARBAGE: Final = b"\x80\xffnot what was written here\x00"
FOREIGN: Final = itertools.cycle((b"[]", b'{"buckets": 3}', b"null", b'"text"'))
"""JSON of another form, as another version may have written."""

TMPFS_BYTES: Final = 64 * 1024**2
COLD_BYTES: Final = 64 * 1024


class CannotPrepareError(RuntimeError):
    """The machine does not permit what a scenario needs; its text says why."""


def _rewrite(folders: tuple[str, ...], change: Callable[[bytes], bytes], cache: Path) -> None:
    for path in itertools.chain(*((cache / folder).rglob("*") for folder in folders)):
        if path.is_file():
            path.write_bytes(change(path.read_bytes()))


def _empty_code(cache: Path) -> None:
    """Empty the generated code, which the cached graphs name."""
    for path in cache.rglob("*.py"):
        path.write_bytes(b"")


def _remove_reports(cache: Path) -> None:
    """Remove the reports, and leave a file where their directory was."""
    shutil.rmtree(cache / REPORTS, ignore_errors=True)
    (cache / REPORTS).write_bytes(b"")


def make_read_only(cache: Path) -> Callable[[], None]:
    """Let nothing be written, also by root."""
    return _mounted(cache, TMPFS_BYTES, lambda: _call("mount", "-o", "remount,ro", str(cache)))


def _make_full(cache: Path) -> Callable[[], None]:
    """Leave no room beside what is there."""
    return _mounted(cache, TMPFS_BYTES, lambda: _fill(cache))


def make_small(cache: Path) -> Callable[[], None]:
    """Leave room for a few small files only."""
    return _mounted(cache, COLD_BYTES, lambda: None)


BROKEN_REPORTS: Final[dict[str, Prepare]] = {
    "corrupt-reports": partial(_rewrite, (REPORTS,), lambda _: GARBAGE),
    "empty-reports": partial(_rewrite, (REPORTS,), lambda _: b""),
    "foreign-reports": partial(_rewrite, (REPORTS,), lambda _: next(FOREIGN)),
    "remove-reports": _remove_reports,
}
BROKEN: Final[dict[str, Prepare]] = {
    "corrupt-graphs": partial(_rewrite, GRAPHS, lambda _: GARBAGE),
    # As a full disk or a crash does.
    "truncate-graphs": partial(_rewrite, GRAPHS, lambda data: data[: len(data) // 2]),
    "corrupt-code": _empty_code,
    "cache-read-only": make_read_only,
    "cache-full": _make_full,
    "cache-small": make_small,
}
"""By the name of their scenarios: of the package's files, and of Inductor's."""


def _mounted(cache: Path, size: int, then: Callable[[], None]) -> Callable[[], None]:
    """Mount a file system of its own over the directory, with what was in it."""
    with tempfile.TemporaryDirectory(prefix="faults-") as copies:
        copy = Path(copies) / "cache"
        shutil.copytree(cache, copy)
        _call("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(cache))
        try:
            shutil.copytree(copy, cache, dirs_exist_ok=True)
            then()
        except BaseException:
            _unmount(cache)
            raise
    return partial(_unmount, cache)


def _unmount(cache: Path) -> None:
    _call("umount", "-l", str(cache))


def _fill(directory: Path) -> None:
    with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _call(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise CannotPrepareError(f"{' '.join(command[:4])}: {result.stderr.strip()}")
