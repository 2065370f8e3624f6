"""Reads generated wrapper code: the calls that a compiled graph makes, in order, and the memory
that each of them reads and writes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["kernel", "fused", "launch", "wait", "return"]

_NAME: Final = re.compile(r"\b(?:buf|arg|primals_|tangents_)\d\w*")
_SIGNATURE: Final = re.compile(r"^(\w+) = async_compile\.cpp_pybinding\(\[(.*?)\]", re.MULTILINE)
_ASSIGNED: Final = re.compile(r"^(\w+) = (.*)$")
_CALLS: Final[tuple[tuple[Kind, re.Pattern[str]], ...]] = (
    (
        "launch",
        re.compile(r"_c10d_functional\.all_reduce(?:_coalesced)?_\.default\((.*?), '(?:sum|avg)'"),
    ),
    ("wait", re.compile(r"_c10d_functional\.wait_tensor\.default\((.*)\)")),
    ("kernel", re.compile(r"(?:extern_kernels\.\w+|torch\.ops\.(?:aten|mkldnn|mkl)\S+?)\((.*)\)")),
    ("fused", re.compile(r"^(?:cpp_fused\w*)\((.*)\)")),
    ("return", re.compile(r"^return \((.*)\)")),
)


@dataclass(frozen=True)
class Call:
    """One call of the generated code.

    Attributes:
        kind: a library kernel (a matrix product, attention), a generated kernel (``fused``), a
            collective's ``launch``, a ``wait``, or the graph's ``return``.
        reads: the memory that it reads: buffers that share memory have one name.
        writes: the memory that it writes.
        after: indices of the calls that it depends on, directly or through others. One too many
            where memory is used again, never one too few.
        text: its line.
    """

    kind: Kind
    reads: frozenset[str]
    writes: frozenset[str]
    after: frozenset[int]
    text: str


def read_calls(code: str) -> list[Call]:
    """The calls of the last graph in ``code``."""
    signatures = read_signatures(code)
    memory: dict[str, str] = {}
    writers: dict[str, set[int]] = {}
    calls: list[Call] = []
    for raw in code[code.rindex("def call(") :].splitlines():
        line = raw.strip()
        found = _match(line)
        if found is None:
            _follow_alias(line, memory)
            continue
        kind, arguments = found
        reads, writes = _access(kind, line, arguments, signatures)
        reads, writes = ({memory.get(name, name) for name in names} for names in (reads, writes))
        after: set[int] = set()
        for name in reads:
            for writer in writers.get(name, ()):
                after |= {writer, *calls[writer].after}
        for name in writes:
            writers.setdefault(name, set()).add(len(calls))
        calls.append(Call(kind, frozenset(reads), frozenset(writes), frozenset(after), line))
        if kind == "return":
            break
    return calls


def read_signatures(code: str) -> dict[str, list[str]]:
    """The types that the C++ kernels in a generated code take, by the kernels' names."""
    return {name: types.split(", ") for name, types in _SIGNATURE.findall(code)}


def indices(calls: Sequence[Call], kind: Kind) -> list[int]:
    """Where the calls of a kind are."""
    return [index for index, call in enumerate(calls) if call.kind == kind]


def _match(line: str) -> tuple[Kind, str] | None:
    for kind, pattern in _CALLS:
        match = pattern.search(line)
        if match and not line.startswith(("#", "assert")):
            return kind, match.group(1)
    return None


def _follow_alias(line: str, memory: dict[str, str]) -> None:
    """``buf1 = buf0``, ``buf1 = buf0[2]``, ``buf1 = reinterpret_tensor(buf0, ...)``."""
    assigned = _ASSIGNED.match(line)
    if assigned and not line.startswith("arg"):
        names = _NAME.findall(assigned.group(2).partition(";")[0])
        if names:
            memory[assigned.group(1)] = memory.get(names[0], names[0])


def _access(
    kind: Kind, line: str, arguments: str, signatures: dict[str, list[str]]
) -> tuple[set[str], set[str]]:
    """The names that a call reads and writes."""
    names = _NAME.findall(arguments)
    if kind == "fused":
        types = signatures[line.partition("(")[0]]
        assert len(types) == len(names), f"{line}: its signature is {types}"
        # What is not constant is written, and may be read before.
        written = {name for name, kind in zip(names, types, strict=True) if "const" not in kind}
        return set(names), written
    if kind in ("launch", "wait"):
        return set(names), set(names)
    assigned = _ASSIGNED.match(line)
    out = _NAME.findall(arguments.rpartition("out=")[2]) if "out=" in arguments else []
    if assigned:
        out.append(assigned.group(1))
    return set(names), set(out)
