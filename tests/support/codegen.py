"""Reads the order of kernels, launches and waits off generated wrapper code."""

from __future__ import annotations

import re
from typing import Final

_CALLS: Final = (
    ("kernel", re.compile(r"extern_kernels\.\w*mm\(")),
    ("launch", re.compile(r"_c10d_functional\.all_reduce(?:_coalesced)?_\.default\((.*?), 'sum'")),
    ("wait", re.compile(r"_c10d_functional\.wait_tensor\.default\((\w+)\)")),
    ("copy", re.compile(r"cpp_fused_copy_\w*\((.*?)\)")),
    ("return", re.compile(r"^return \(")),
)


def call_sequence(code: str) -> list[tuple[str, str]]:
    """The calls that a compiled graph makes, in order: what kind, and the buffers it names.

    Kinds: a matrix product (``kernel``), ``launch``, ``wait``, a copy into an existing ``.grad``
    (``copy``), and ``return``.
    """
    body = code[code.rindex("def call(") :]
    sequence = []
    for line in body.splitlines():
        for kind, pattern in _CALLS:
            match = pattern.search(line.strip())
            if match:
                sequence.append((kind, match.group(1) if match.groups() else ""))
                break
        if sequence and sequence[-1][0] == "return":
            break
    return sequence


def indices(sequence: list[tuple[str, str]], kind: str) -> list[int]:
    return [index for index, call in enumerate(sequence) if call[0] == kind]
