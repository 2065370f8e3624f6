"""What was measured where, as plain values that JSON keeps and ranks compare: what collectives cost
on some hosts, and when the gradients of a module are ready there."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from fusion_passes.tuning.tables import MOST_NS, CostTable

FORMAT: Final = 8
"""Of the file of a profile. Another one is measured anew."""

READY_FORMAT: Final = 1
"""Of the file of ready times; likewise."""


@dataclass(frozen=True)
class Place:
    """The ranks, hosts, device, backend, torch and collective for which a profile holds.

    Attributes:
        world_size: ranks of the process group.
        hosts: of these ranks, sorted; each once.
        backend: of the process group for the device: ``"gloo"``.
        device: ``"cpu"``, or the card's name; of several, each once.
        interfaces: what the environment says about the network's interfaces; of several, each.
        torch: its version.
        collective: what sends a bucket: ``"avg of float32"``.
    """

    world_size: int
    hosts: tuple[str, ...]
    backend: str
    device: str
    interfaces: str
    torch: str
    collective: str

    def digest(self) -> str:
        """Equal for equal places; 16 hexadecimal digits."""
        return _digest(json.dumps(asdict(self), sort_keys=True))

    def __str__(self) -> str:
        hosts = self.hosts[0] if len(self.hosts) == 1 else f"{len(self.hosts)} hosts"
        ranks = f"{self.world_size} ranks on {hosts}"
        return f"{self.collective} over {ranks}, {self.backend} on {self.device}"


@dataclass(frozen=True)
class Profile:
    """What the collective of a place costs there."""

    place: Place
    table: CostTable

    def to_json(self) -> str:
        """The profile as text; :meth:`from_json` reads it."""
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, indent=1)

    @staticmethod
    def from_json(text: str) -> Profile:
        """The profile that :meth:`to_json` wrote.

        Raises:
            ValueError: the text is none, or not whole, or of another format; it says what is wrong.
        """
        with _read_format(text, FORMAT) as data:
            place = {**data["place"], "hosts": tuple(data["place"]["hosts"])}
            sizes, times = (map(int, data["table"][name]) for name in ("num_bytes", "times_ns"))
            return Profile(Place(**place), CostTable(tuple(sizes), tuple(times)))


# --- Ready times ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadyTimes:
    """When the gradients of a module were ready in rounds of a run.

    Attributes:
        rounds: how many were measured.
        numbers: of the parameters, in the order in which their gradients come.
        ready_ns: when each is ready on all ranks, in nanoseconds from the start of the backward,
            where nothing is sent meanwhile; never less than for the one before.
        measured: when, for people.

    Raises:
        ValueError: there is no round or parameter, one twice, or a time that falls.
    """

    rounds: int
    numbers: tuple[int, ...]
    ready_ns: tuple[int, ...]
    measured: str

    def __post_init__(self) -> None:
        if self.rounds < 1 or not self.numbers or len(self.numbers) != len(self.ready_ns):
            raise ValueError("there is no round, or not one time for each parameter")
        if len(set(self.numbers)) < len(self.numbers):
            raise ValueError("a parameter has two times")
        if list(self.ready_ns) != sorted(self.ready_ns) or self.ready_ns[0] < 0:
            raise ValueError("a gradient is ready before the one before it")
        if self.ready_ns[-1] > MOST_NS:
            raise ValueError("a gradient is ready after more than a day")

    def to_json(self) -> str:
        """As text; :meth:`from_json` reads it."""
        return json.dumps({"format": READY_FORMAT, **asdict(self)}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> ReadyTimes:
        """What :meth:`to_json` wrote.

        Raises:
            ValueError: the text is none, or not whole, or of another format; it says what is wrong.
        """
        with _read_format(text, READY_FORMAT) as data:
            return ReadyTimes(
                int(data["rounds"]),
                tuple(map(int, data["numbers"])),
                tuple(map(int, data["ready_ns"])),
                str(data["measured"]),
            )


def parameters_key(parameters: Sequence[tuple[int, str, Sequence[int], str]]) -> str:
    """Equal for modules of equal trained parameters: number, name, shape and dtype of each."""
    listed = [[number, name, list(shape), dtype] for number, name, shape, dtype in parameters]
    return _digest(json.dumps(listed))


@contextlib.contextmanager
def _read_format(text: str, wanted: int) -> Iterator[dict[str, Any]]:
    """A context with the object in a file of this format; what is wrong with the text, or with what
    is read of it there, becomes a ``ValueError``."""
    try:
        data: dict[str, Any] = json.loads(text)
        if data["format"] != wanted:
            raise ValueError(f"its format is {data['format']}, not {wanted}")
        yield data
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"it is none: {type(error).__name__} {error}") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
