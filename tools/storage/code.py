"""Reads generated C++ and wrapper code: which gradients the kernels that compute them have stored
where they are sent, and which are copied.

A store copies if its value comes from one load and has been no more than cast, or multiplied or
divided by a constant, on the way. Triton kernels are not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

_SIZES: Final = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int64": 8, "bool": 1}

_EMPTY: Final = re.compile(r"^(\w+) = empty_strided_cpu\(\((.*?),?\), \(.*?\), torch\.(\w+)\)")
_ALIAS: Final = re.compile(
    r"^(\w+) = (?:reinterpret_tensor\()?(\w+)\b(?:, \((.*?),?\), \(.*?\), \d+\))?(.*# reuse)?"
)
_KERNEL: Final = re.compile(
    r"^(\w+) = async_compile\.cpp_pybinding\(\[(.*?)\], r?'''(.*?)'''\)", re.MULTILINE | re.DOTALL
)
_FUSED: Final = re.compile(r"^(cpp_fused\w*)\((.*)\)")
_LIBRARY: Final = re.compile(r"extern_kernels\.\w+\(.*\bout=(?:reinterpret_tensor\()?(\w+)")
_LAUNCH: Final = re.compile(
    r"_c10d_functional\.all_reduce(?:_coalesced)?_\.default\((.*?), '(?:sum|avg)'"
)
_BUCKET: Final = re.compile(
    r"^(\w+) = torch\.ops\.fusion_passes\.bucket\.default\(\[.*?\], \[.*?\], (\d+), torch\.(\w+), "
)
_READY: Final = re.compile(r"fusion_passes\.mark_ready_\.default\((\w+), ")
_STORE: Final = re.compile(r"fusion_passes\.(?:store|copy_in)_\.default\((\w+), \[(.*?)\], ")
_FALLBACK: Final = re.compile(r"^(\w+) = torch\.ops\.aten\.flatten\S*\((\w+)")
_CALL: Final = re.compile(
    r"^(?:\w+ = )?"
    r"(?:cpp_fused\w*\(|extern_kernels\.\w+\(|torch\.ops\.(?!_c10d_functional\.|fusion_passes\.(?:bucket|mark_ready_)\.))"
)
_NAME: Final = re.compile(r"\b(?:buf|arg)\w+")
_PARAMETER: Final = re.compile(r"(?:const )?\w+\*\s+(\w+)")
_STORED: Final = re.compile(r"(?:(\w+)\.store\((\w+)|(\w+)\[[^\]]*\] = (\w+);)")
_TRANSPOSED: Final = re.compile(
    r"transpose_mxn<.*?,(?:true|false)>\((\w+)(?: \+ .*?)?, static_cast<int64_t>\(\w+\), (\w+)"
)
_DEFINED: Final = re.compile(r"auto (\w+) = (.*?);\n")
_LOAD: Final = re.compile(r"\(.*?_ptr.*?\)")
_POINTER: Final = re.compile(r"\b\w+_ptr\d+")
_ARITHMETIC: Final = re.compile(r" [-+] |max|min|select|exp|atomic|blend|where")


@dataclass
class Traffic:
    """What a backward does with its gradients, in bytes.

    Attributes:
        reduced: gradients.
        stored: of them, those that the kernels that compute them have stored where they are sent.
        copied: read and written by kernels and calls that only copy, cast or scale gradients.
        buckets: collectives, or pieces of a reducer's buckets, of which it is told.
        calls: of kernels and fallbacks, for whatever purpose; but not collectives and their waits,
            and what gives memory of a reducer and tells it that a piece is there.
    """

    reduced: int = 0
    stored: int = 0
    copied: int = 0
    buckets: int = 0
    calls: int = 0


@dataclass
class _Region:
    """Memory that a name stands for: ``count`` bytes of ``base``."""

    base: str
    count: int


@dataclass
class _Reader:
    kernels: dict[str, list[str | None]]
    regions: dict[str, _Region] = field(default_factory=dict)
    writes: dict[str, list[tuple[int, bool]]] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    itemsizes: dict[str, int] = field(default_factory=dict)
    before: dict[str, list[tuple[int, bool]]] = field(default_factory=dict)
    """What was written to a buffer's memory while it was another one's."""

    def region(self, name: str) -> _Region:
        return self.regions.setdefault(name, _Region(name, 0))

    def write(self, name: str, is_copy: bool) -> None:
        region = self.region(name)
        self.writes.setdefault(region.base, []).append((region.count, is_copy))


def read_traffic(code: str) -> Traffic:
    """The traffic of the last graph in ``code``, as Inductor generates it for the CPU."""
    kernels = {name: _copied_parameters(body) for name, _, body in _KERNEL.findall(code)}
    reader = _Reader(kernels)
    for line in code[code.rindex("def call(") :].splitlines():
        reader.traffic.calls += _CALL.match(line.strip()) is not None
        _read_line(reader, line.strip())
    return reader.traffic


def _read_line(reader: _Reader, line: str) -> None:
    if match := _LAUNCH.search(line):
        _launch(reader, _NAME.findall(match.group(1)))
    elif match := _READY.search(line):
        _launch(reader, [match.group(1)])
    elif match := _STORE.search(line):
        _store(reader, match.group(1), _NAME.findall(match.group(2)))
    elif match := _FUSED.match(line):
        _fused(reader, match.group(1), match.group(2).split(", "))
    elif match := _LIBRARY.search(line):
        reader.write(match.group(1), is_copy=False)
    elif match := _FALLBACK.match(line):
        reader.regions[match.group(1)] = reader.region(match.group(2))
    elif match := _BUCKET.match(line):
        _allocate(reader, match.group(1), int(match.group(2)), match.group(3))
    elif match := _EMPTY.match(line):
        name, sizes, dtype = match.groups()
        count = math.prod(int(size) for size in sizes.split(",") if size.strip())
        _allocate(reader, name, count, dtype)
    elif match := _ALIAS.match(line):
        _alias(reader, *match.groups())


def _allocate(reader: _Reader, name: str, numel: int, dtype: str) -> None:
    reader.itemsizes[name] = _SIZES[dtype]
    reader.regions[name] = _Region(name, numel * _SIZES[dtype])


def _alias(
    reader: _Reader, name: str, source: str, sizes: str | None, is_reused: str | None
) -> None:
    """Another name of a buffer or of a part of it, or a new buffer in its memory."""
    if not source.startswith(("buf", "arg")):
        return
    region = reader.region(source)
    itemsize = reader.itemsizes.get(region.base, 4)
    count = region.count
    if sizes is not None:
        count = itemsize * math.prod(int(size) for size in sizes.split(",") if size.strip())
    reader.itemsizes[name] = itemsize
    if is_reused:
        reader.before[name] = reader.writes.get(region.base, [])
    reader.regions[name] = _Region(name if is_reused else region.base, count)


def _launch(reader: _Reader, names: Iterable[str]) -> None:
    reader.traffic.buckets += 1
    for name in names:
        region = reader.region(name)
        reader.traffic.reduced += region.count
        for count, is_copy in reader.writes.get(region.base, []):
            if not is_copy:
                reader.traffic.stored += count


def _store(reader: _Reader, bucket: str, sources: list[str]) -> None:
    count = sum(reader.region(source).count for source in sources)
    reader.traffic.copied += 2 * count
    reader.writes.setdefault(reader.region(bucket).base, []).append((count, True))


def _fused(reader: _Reader, kernel: str, names: list[str]) -> None:
    """A generated kernel: some of its arguments are stored to, by a copy or a computation."""
    for name, kind in zip(names, reader.kernels[kernel], strict=True):
        if kind is None:
            continue
        region = reader.region(name)
        if kind == "compute":
            reader.write(name, is_copy=False)
            continue
        reader.traffic.copied += 2 * region.count
        if kind == "pass":  # What was stored there stays there.
            reader.writes.setdefault(region.base, reader.before.get(name, []))
        elif names.count(name) == 1:
            reader.write(name, is_copy=True)


def _copied_parameters(body: str) -> list[str | None]:
    """For each parameter of a kernel: ``"compute"``, ``"copy"`` of another one, a ``"pass"`` that
    copies it onto itself, or ``None`` if it is only read."""
    start = body.index("kernel(")
    header = body[start : body.index("{", start)]
    kinds: dict[str, str] = {}
    # A kernel is one loop after another, and each gives the same names to its own values.
    for loop in body.split("\n    {\n")[1:]:
        defined = dict(_DEFINED.findall(loop))
        stores = [
            (target, value) if target else (indexed, stored)
            for value, target, indexed, stored in _STORED.findall(loop)
        ]
        stores += [(target, source) for source, target in _TRANSPOSED.findall(loop)]
        # A tile is turned in an array between its load and its store.
        defined |= {target: source for target, source in stores if target.startswith("tmp")}
        for parameter, name in stores:
            if parameter.startswith("tmp"):
                continue
            source = _copied_from(name, defined)
            kind = "compute" if source is None else "pass" if source == parameter else "copy"
            if kinds.get(parameter) != "compute":
                kinds[parameter] = kind
    return [kinds.get(parameter) for parameter in _PARAMETER.findall(header)]


def _copied_from(name: str, defined: dict[str, str]) -> str | None:
    """The parameter whose value a stored one is, but for a cast or a constant factor."""
    loads: list[str] = []
    pending, seen = [name], set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        text = defined.get(current)
        if text is None or _ARITHMETIC.search(_LOAD.sub("", text)):
            return None  # An accumulator of a reduction, or more than a factor.
        loads += _POINTER.findall(text)
        pending += re.findall(r"\btmp\w*", text)
    return loads[0] if len(loads) == 1 else None
