"""The calls of a generated backward as a few lines: what is stored where in which bucket."""

from __future__ import annotations

import math
import re
from typing import Final

from testing.codegen import read_signatures

_LAUNCH: Final = re.compile(r"_c10d_functional\.all_reduce_\.default\((\w+), '(\w+)'")
_MEMORY: Final = re.compile(
    r"^assert_(?:size_stride|tensor_metadata)\((\w+), "
    r".*'torch\.ops\.fusion_passes\.bucket\.default'\)"
)
_WAIT: Final = re.compile(r"_c10d_functional\.wait_tensor\.default\((\w+)\)")
_ALIAS: Final = re.compile(
    r"^(\w+) = reinterpret_tensor\((\w+), \((.*?)\), \(.*?\), (\d+)\)  # alias"
)
_PLACE: Final = re.compile(r"reinterpret_tensor\((\w+), \((.*?)\), \(.*?\), (\d+)\)")
_LIBRARY: Final = re.compile(r"extern_kernels\.(\w+)\(.*out=(\w+)\)")
_FALLBACK: Final = re.compile(r"torch\.ops\.(aten\.\w+|fusion_passes\.\w+)\.default\((.*)\)")
_FUSED: Final = re.compile(r"^cpp_fused\w*\((.*)\)")


def call_sequence(code: str) -> str:
    """The calls of the last graph in ``code``, one a line, in order.

    Buckets are ``A``, ``B``, ... in the order of their launches, or in which a reducer is asked for
    their memory; ``A[16:32]`` are elements of one.
    Generated kernels that store in no bucket are left out: how many there are is Inductor's.
    """
    body = [line.strip() for line in code[code.rindex("def call(") :].splitlines()]
    body = body[: next(i for i, line in enumerate(body) if line.startswith("return (")) + 1]
    found = [_LAUNCH.search(line) or _MEMORY.match(line) for line in body]
    launched = [match.group(1) for match in found if match]
    reader = _Reader(
        {name: chr(ord("A") + index) for index, name in enumerate(dict.fromkeys(launched))},
        read_signatures(code),
    )
    return "".join(f"{text}\n" for line in body if (text := reader.read(line)))


class _Reader:
    def __init__(self, buckets: dict[str, str], signatures: dict[str, list[str]]) -> None:
        self._buckets = buckets
        self._signatures = signatures
        self._places: dict[str, str] = dict(buckets)

    def read(self, line: str) -> str | None:
        if match := _ALIAS.match(line):
            name, bucket, sizes, offset = match.groups()
            if bucket in self._buckets:
                self._places[name] = self._place(bucket, sizes, offset)
            return None
        if match := _LAUNCH.search(line):
            return f"launch {self._buckets[match.group(1)]}, {match.group(2)}"
        if match := _WAIT.search(line):
            return f"wait for {self._buckets[match.group(1)]}"
        if line.startswith("return ("):
            return self._returned(line)
        return self._call(line)

    def _call(self, line: str) -> str | None:
        if match := _LIBRARY.search(line):
            kernel, out = match.groups()
            return f"{kernel} -> {self._places[out]}" if out in self._places else kernel
        if match := _FALLBACK.search(line):
            name, arguments = match.groups()
            bucket = self._buckets.get(arguments.partition(",")[0])
            return f"{name} -> {bucket}" if bucket else name
        if match := _FUSED.match(line):
            names = match.group(1).split(", ")
            types = self._signatures[line.partition("(")[0]]
            written = [n for n, kind in zip(names, types, strict=True) if "const" not in kind]
            places = dict.fromkeys(self._places[n] for n in written if n in self._places)
            return f"generated -> {', '.join(places)}" if places else None
        return None

    def _returned(self, line: str) -> str:
        places = [
            self._place(bucket, sizes, offset)
            for bucket, sizes, offset in _PLACE.findall(line)
            if bucket in self._buckets
        ]
        return "return " + ", ".join(places or ["what was given"])

    def _place(self, bucket: str, sizes: str, offset: str) -> str:
        count = math.prod(int(size) for size in sizes.split(",") if size.strip())
        return f"{self._buckets[bucket]}[{offset}:{int(offset) + count}]"
