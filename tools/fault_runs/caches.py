"""What can be wrong with the directory of Inductor's cache. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from fault_runs.scenarios import CannotPrepareError

REPORTS = "fusion_passes"
GARBAGE = b"\x80\xffnot what was written here\x00"
TMPFS_BYTES = 64 * 1024**2
COLD_BYTES = 64 * 1024


def corrupt_graphs(cache: Path) -> None:
    """Overwrite each file of a cached graph."""
    for path in _files(cache, "fxgraph", "aotautograd"):
        path.write_bytes(GARBAGE)


def truncate_graphs(cache: Path) -> None:
    """Cut each file of a cached graph in the middle, as a full disk or a crash does."""
    for path in _files(cache, "fxgraph", "aotautograd"):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])


def corrupt_code(cache: Path) -> None:
    """Empty the generated code, which the cached graphs name."""
    for path in cache.rglob("*.py"):
        path.write_bytes(b"")


def corrupt_reports(cache: Path) -> None:
    """Overwrite the package's reports of cached graphs."""
    for path in _files(cache, REPORTS):
        path.write_bytes(GARBAGE)


def empty_reports(cache: Path) -> None:
    """Empty the reports."""
    for path in _files(cache, REPORTS):
        path.write_bytes(b"")


def foreign_reports(cache: Path) -> None:
    """Put JSON of another form into the reports, as another version may have written."""
    for number, path in enumerate(_files(cache, REPORTS)):
        path.write_text(["[]", '{"buckets": 3}', "null", '"text"'][number % 4])


def remove_reports(cache: Path) -> None:
    """Remove the reports, and leave a file where their directory was."""
    shutil.rmtree(cache / REPORTS, ignore_errors=True)
    (cache / REPORTS).write_bytes(b"")


def make_read_only(cache: Path) -> Callable[[], None]:
    """Let nothing be written, also by root."""
    return _mounted(cache, TMPFS_BYTES, lambda: _call("mount", "-o", "remount,ro", str(cache)))


def make_full(cache: Path) -> Callable[[], None]:
    """Leave no room beside what is there."""
    return _mounted(cache, TMPFS_BYTES, lambda: _fill(cache))


def make_small(cache: Path) -> Callable[[], None]:
    """Leave room for a few small files only."""
    return _mounted(cache, COLD_BYTES, lambda: None)


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
    return lambda: _unmount(cache)


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


def _files(cache: Path, *names: str) -> Iterator[Path]:
    for name in names:
        yield from sorted(path for path in (cache / name).rglob("*") if path.is_file())
