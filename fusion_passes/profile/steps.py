"""When gradients were ready in real steps of a module: plain values, and their files.

A file is one of a module on a place: its key is made of the module's parameters. It is replaced
where a later start has measured something else.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

from fusion_passes.profile.files import directory, write_whole
from fusion_passes.profile.records import Place, read_format

log = logging.getLogger(__name__)

FORMAT: Final = 2
"""Of the file. Another one is measured anew."""

_CHANGED: Final = 2
"""Ready times that differ by more than this factor are others: another batch, or another machine.
On a machine with other work those of equal steps differ by up to a half, and a file that is
replaced costs the next start its caches."""


@dataclass(frozen=True)
class MeasuredSteps:
    """When the gradients of a module were ready in real steps, bucket by bucket.

    Attributes:
        steps: how many were measured.
        buckets: the numbers of the parameters of each, in the order of their launches.
        ready_ns: when all gradients of each bucket were ready on all ranks, from the beginning of
            the backward, less what all-reduces took from the compute; never less than for the one
            before.
        serves: whether a start plans from it: not where buckets that were planned from it have run,
            and were slower than those before.
    """

    steps: int
    buckets: tuple[tuple[int, ...], ...]
    ready_ns: tuple[int, ...]
    serves: bool = True

    def __post_init__(self) -> None:
        if not self.buckets or len(self.buckets) != len(self.ready_ns) or self.steps < 1:
            raise ValueError("there is not one time for each bucket, or no step")
        if list(self.ready_ns) != sorted(self.ready_ns) or self.ready_ns[0] < 0:
            raise ValueError("a bucket is ready before the one before it")

    def agrees_with(self, other: MeasuredSteps) -> bool:
        """Whether another measurement, perhaps of other buckets, is the same but for noise: each of
        its buckets was ready in about the time in which this one has its last gradient."""
        of = {number: i for i, bucket in enumerate(self.buckets) for number in bucket}
        for bucket, ready in zip(other.buckets, other.ready_ns, strict=True):
            if not of.keys() >= set(bucket):
                return False
            last = max(of[number] for number in bucket)
            before = self.ready_ns[last - 1] if last else 0
            if not before <= ready * _CHANGED <= self.ready_ns[last] * _CHANGED**2:
                return False
        # A bucket that ends within one of these may be ready long before it, but not the last one.
        return other.ready_ns[-1] * _CHANGED >= self.ready_ns[-1]

    def to_json(self) -> str:
        """As text; :meth:`from_json` reads it."""
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> MeasuredSteps:
        """What :meth:`to_json` wrote.

        Raises:
            ValueError: the text is none, or not whole, or of another format; it says what is wrong.
        """
        with read_format(text, FORMAT) as data:
            buckets = tuple(tuple(map(int, bucket)) for bucket in data["buckets"])
            ready_ns = tuple(map(int, data["ready_ns"]))
            return MeasuredSteps(int(data["steps"]), buckets, ready_ns, bool(data["serves"]))


def slowest_ready(
    launched_ns: Sequence[Sequence[int]], costs_ns: Sequence[int], taken_ns: Sequence[int]
) -> tuple[int, ...]:
    """When the gradients of each bucket would be ready if all-reduces took nothing from compute.

    Args:
        launched_ns: when each bucket was launched, by rank; each collective begins with the last.
        costs_ns: what the collective of each costs.
        taken_ns: what it takes from the compute beside it, evenly while it runs.
    """
    ready: list[int] = []
    running: list[tuple[int, int, int]] = []
    launched = accumulate(map(max, zip(*launched_ns, strict=True)), max)
    for moment, cost, taken in zip(launched, costs_ns, taken_ns, strict=True):
        lost = sum(
            of_all * min(max(moment - begin, 0), length) // max(length, 1)
            for begin, length, of_all in running
        )
        ready.append(moment - lost)
        begin = max(moment, sum(running[-1][:2])) if running else moment
        running.append((begin, cost, taken))
    return tuple(accumulate(ready, max))


def module_key(parameters: Sequence[tuple[str, Sequence[int], str]]) -> str:
    """Equal for modules of equal parameters; 16 hexadecimal digits.

    Args:
        parameters: of each that is trained, its name, shape and dtype.
    """
    listed = [[name, list(shape), dtype] for name, shape, dtype in parameters]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]


def steps_path(place: Place, key: str) -> Path:
    """The file of a module's measured steps; see :func:`module_key`."""
    return directory() / f"{place.digest()}-{key}.steps.json"


def load_steps(path: Path) -> MeasuredSteps | None:
    """What was measured; ``None`` where there is nothing that can be used, of which the log says
    why."""
    try:
        return MeasuredSteps.from_json(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("The measured steps %s cannot be used: %s", path, error)
        return None


def store_steps(path: Path, measured: MeasuredSteps) -> None:
    """Keep what was measured; the log says if that cannot be."""
    try:
        write_whole(path, measured.to_json())
    except OSError as error:
        log.warning("Measured steps cannot be kept in %s: %s", path.parent, error)
