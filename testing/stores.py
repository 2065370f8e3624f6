"""Whether a generated wrapper, for the CPU or CUDA, fills what it sends. That holds for any graph:

* what a collective sends is written, every element of it, before the launch;
* no kernel reads what nothing has written; one that works in place fills nothing;
* a name that stands for a place in another's memory goes on to stand for it.

A kernel is taken to write all of the place that it is given, if it stores there at all.
"""

from __future__ import annotations

import ast
import bisect
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from testing.codegen import read_signatures
from testing.cuda_calls import pointers, read_kernels

_LAUNCHES: Final = (
    "torch.ops._c10d_functional.all_reduce_.default",
    "torch.ops._c10d_functional.all_reduce_coalesced_.default",
)
_READY: Final = "torch.ops.fusion_passes.mark_ready_.default"
"""Behind it, a reducer launches what it is given."""

_BUCKET: Final = "torch.ops.fusion_passes.bucket.default"
_STORE: Final = "torch.ops.fusion_passes.store_.default"
_REUSED: Final = "# reuse"


@dataclass(frozen=True)
class Place:
    """Where a value lies.

    Attributes:
        memory: the name of what was allocated.
        size: in elements, by dimension.
        stride: in elements.
        offset: of the first element.
    """

    memory: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    def runs(self) -> Iterator[tuple[int, int]]:
        """The elements, as ranges without their ends."""
        if 0 in self.size:
            return
        dims = sorted((s, n) for n, s in zip(self.size, self.stride, strict=True) if n > 1 and s)
        length = 1
        while dims and dims[0][0] == length:
            length *= dims.pop(0)[1]
        steps = [range(0, stride * size, stride) for stride, size in dims]
        for start in itertools.product(*steps):
            yield self.offset + sum(start), self.offset + sum(start) + length


@dataclass
class _Memory:
    """What was allocated, and which of its elements have been written.

    Attributes:
        is_foreign: whether a library has allocated it, and filled it.
        is_reused: whether it was another's: what works in place may read what that one has left.
        written: ranges of elements, without their ends, that do not touch.
    """

    is_foreign: bool = False
    is_reused: bool = False
    written: list[tuple[int, int]] = field(default_factory=list)

    def write(self, place: Place) -> None:
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([*self.written, *place.runs()]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        self.written = merged

    def gaps(self, place: Place) -> list[tuple[int, int]]:
        """Ranges of a place that nothing has written."""
        if self.is_foreign:
            return []
        return [gap for run in place.runs() for gap in self._gaps_between(*run)]

    def _gaps_between(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        first = max(0, bisect.bisect_right(self.written, (start, math.inf)) - 1)
        for begin, end in self.written[first:]:
            if begin >= stop:
                break
            if start < begin:
                yield start, begin
            start = max(start, end)
        if start < stop:
            yield start, stop


def check_stores(code: str) -> int:
    """Check the last graph of a generated code.

    Args:
        code: a module as Inductor writes it, in Python.

    Returns:
        The number of elements that it sends, without what libraries have allocated.

    Raises:
        AssertionError: what it sends is not all written, or a name of it is bound anew.
    """
    reader = _Reader(code)
    for raw in code[code.rindex("def call(") :].splitlines():
        line = raw.strip()
        try:
            statements = ast.parse(line).body
        except SyntaxError:
            continue  # The head of a block.
        for statement in statements:
            if isinstance(statement, ast.Return):
                return reader.sent
            reader.read(statement, is_reused=line.endswith(_REUSED))
    raise AssertionError("the code has no end")


class _Reader:
    """Follows the statements of a wrapper."""

    def __init__(self, code: str) -> None:
        self.sent = 0
        self._accesses = _accesses(code)
        self._memory: dict[str, _Memory] = {}
        self._places: dict[str, Place] = {}

    def read(self, statement: ast.stmt, *, is_reused: bool) -> None:
        if isinstance(statement, ast.Expr):
            self._call(statement.value)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            self._call(statement.value)
            self._bind(statement.targets[0].id, statement.value, is_reused)

    def _bind(self, name: str, value: ast.expr, is_reused: bool) -> None:
        """Let a name stand for something."""
        before = self._places.get(name)
        assert before is None or before.memory == name, (
            f"{name} is {before}, and bound anew: {ast.unparse(value)}"
        )
        called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if called.startswith("empty_strided_"):
            assert isinstance(value, ast.Call)
            size, stride = (_numbers(item) for item in value.args[:2])
            self._allocate(Place(name, size, stride), _Memory())
            return
        if called == _BUCKET:
            assert isinstance(value, ast.Call)
            self._allocate(Place(name, (ast.literal_eval(value.args[2]),), (1,)), _Memory())
            return
        place = self._place(value)
        if place is None:
            self._allocate(Place(name, (), ()), _Memory(is_foreign=True))
        elif is_reused:
            self._allocate(replace(place, memory=name, offset=0), _Memory(is_reused=True))
        else:
            self._places[name] = place

    def _allocate(self, place: Place, memory: _Memory) -> None:
        self._places[place.memory], self._memory[place.memory] = place, memory

    def _place(self, value: ast.expr) -> Place | None:
        """Where a value lies; ``None`` for what is not followed."""
        if isinstance(value, ast.Name):
            return self._places.get(value.id)
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "reinterpret_tensor":
            base = self._place(value.args[0])
            if base is not None:
                size, stride = (_numbers(item) for item in value.args[1:3])
                offset = ast.literal_eval(value.args[3])
                return Place(base.memory, size, stride, base.offset + offset)
        return None

    def _call(self, value: ast.expr) -> None:
        """Note what a call writes, and check what it reads or launches."""
        if not isinstance(value, ast.Call):
            return
        called = ast.unparse(value.func)
        kernel = called.removesuffix(".run")
        if called in (*_LAUNCHES, _READY):
            first = value.args[0]
            for item in first.elts if isinstance(first, ast.List) else [first]:
                self._launch(item)
        elif kernel in self._accesses:
            self._run(kernel, value.args)
        elif called == _STORE:
            self._store(value)
        elif called.endswith(".copy_"):
            assert isinstance(value.func, ast.Attribute)
            self._write(value.func.value)
        elif called.startswith(("extern_kernels.", "torch.ops.aten.")):
            self._call_library(called, value)

    def _run(self, kernel: str, arguments: list[ast.expr]) -> None:
        # What follows the pointers are sizes.
        pairs = list(zip(self._accesses[kernel], arguments, strict=False))
        read = {self._place(item): item for access, item in pairs if access.reads}
        written = {self._place(item): item for access, item in pairs if access.writes}
        # A kernel may read what it has stored before, but for a place that it works on.
        for place in written.keys() - read.keys():
            self._write(written[place])
        for item in read.values():
            self._read(item, kernel)
        for item in written.values():
            self._write(item)

    def _call_library(self, called: str, call: ast.Call) -> None:
        for item in call.args:
            self._read(item, called)
        for keyword in call.keywords:
            if keyword.arg == "out":
                self._write(keyword.value)

    def _store(self, call: ast.Call) -> None:
        """The package's own copy of several gradients."""
        bucket, gradients, offsets, strides = call.args[:4]
        whole = self._place(bucket)
        assert whole is not None
        assert isinstance(gradients, ast.List)
        left = list(_numbers(strides))
        for gradient, offset in zip(gradients.elts, _numbers(offsets), strict=True):
            place = self._place(gradient)
            assert place is not None, f"{ast.unparse(gradient)} is of an unknown size"
            stride = tuple(left.pop(0) for _ in place.size)
            stored = Place(whole.memory, place.size, stride, whole.offset + offset)
            self._memory[whole.memory].write(stored)

    def _read(self, value: ast.expr, called: str) -> None:
        place = self._place(value)
        if place is None or self._memory[place.memory].is_reused:
            return
        gaps = self._memory[place.memory].gaps(place)
        assert not gaps, f"{called} reads elements {gaps} of {place}, which nothing has written"

    def _write(self, value: ast.expr) -> None:
        place = self._place(value)
        if place is not None:
            self._memory[place.memory].write(place)

    def _launch(self, sent: ast.expr) -> None:
        place = self._place(sent)
        if place is None:
            return  # An input of the graph.
        memory = self._memory[place.memory]
        gaps = memory.gaps(place)
        assert not gaps, f"nothing writes elements {gaps} of {place}, which is sent"
        if not memory.is_foreign:
            self.sent += math.prod(place.size)


@dataclass(frozen=True)
class _Access:
    """What a kernel does with one of its pointers."""

    reads: bool
    writes: bool


def _accesses(code: str) -> dict[str, list[_Access]]:
    """For each kernel what it does with its pointers, in their order."""
    on_card = {
        name: [
            _Access("in" in pointer, _stores_to(pointer, source)) for pointer in pointers(source)
        ]
        for name, source in read_kernels(code).items()
    }
    on_cpu = {
        name: [_Access("const" in kind, "const" not in kind) for kind in types]
        for name, types in read_signatures(code).items()
    }
    return on_card | on_cpu


def _stores_to(pointer: str, source: str) -> bool:
    # A kernel for tensors of several sizes calls what it stores to by one name for all of them.
    names = [pointer, *re.findall(rf"(\w+) = {pointer}$", source, re.MULTILINE)]
    # A block of memory is made of the pointer, and stored to by a name of its own.
    called = r"(?:store|atomic_\w+|make_block_ptr|make_tensor_descriptor)"
    pattern = rf"{called}\((?:{'|'.join(names)})\b"
    return "out" in pointer and re.search(pattern, source) is not None


def _numbers(value: ast.expr) -> tuple[int, ...]:
    return tuple(ast.literal_eval(value))
