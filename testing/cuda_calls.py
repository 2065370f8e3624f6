"""Reads a generated wrapper for CUDA: its calls as short lines that can be compared.

A buffer has the name of its memory: ``bucket`` where a collective reduces it, an input's name, or
``t`` with a number. A place is ``bucket[offset: shape]``. What follows ``->`` is written::

    triton_per(x, bias) -> t0, bucket[0: 256]
    mm(t0.T, x) -> bucket[256: 256, 64]
    all_reduce_(bucket, 'avg', 'cards')
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Final, TypeGuard

_KERNEL: Final = re.compile(
    r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", re.MULTILINE | re.DOTALL
)
_SIGNATURE: Final = re.compile(r"'signature': \{(.*?)\}")
_REDUCED: Final = re.compile(r"\.all_reduce_\.default\((\w+),")


def read_kernels(code: str) -> dict[str, str]:
    """The sources of the Triton kernels in a generated code, by name."""
    return dict(_KERNEL.findall(code))


def launched_kernels(code: str) -> list[str]:
    """The names of the Triton kernels in the order in which the last graph launches them."""
    return re.findall(r"(\w+)\.run\(", code[code.rindex("def call(") :])


def read_calls(code: str, inputs: Sequence[str] = ()) -> list[str]:
    """The calls of the last graph in a generated code, and what it allocates for buckets.

    Args:
        code: a module as Inductor writes it.
        inputs: names for the graph's inputs.
    """
    reader = _Reader(code, inputs)
    for line in code[code.rindex("def call(") :].splitlines():
        try:
            # Where there is a second statement, it deletes a name.
            statement = next(iter(ast.parse(line.strip()).body), None)
        except SyntaxError:
            continue  # The head of a block.
        if isinstance(statement, ast.Return):
            reader.finish(statement)
            break
        if isinstance(statement, ast.Assign | ast.Expr):
            reader.read(statement)
    return reader.lines


class _Reader:
    """Follows the statements of a wrapper."""

    def __init__(self, code: str, inputs: Sequence[str]) -> None:
        self.lines: list[str] = []
        self._written = {name: pointers(source) for name, source in read_kernels(code).items()}
        buckets = dict.fromkeys(_REDUCED.findall(code))
        self._names = {name: name.removesuffix("_1") for name in re.findall(r"arg\d+_1", code)}
        self._names |= {f"arg{index}_1": name for index, name in enumerate(inputs)}
        self._names |= {
            name: "bucket" if len(buckets) == 1 else f"bucket{index}"
            for index, name in enumerate(buckets)
        }
        self._buckets = frozenset(self._names[name] for name in buckets)

    def read(self, statement: ast.Assign | ast.Expr) -> None:
        value = statement.value
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if not isinstance(target, ast.Name | None):
            return
        if not isinstance(value, ast.Call):
            if target is not None:
                self._names[target.id] = self._render(value)
            return
        called = ast.unparse(value.func)
        if called == "empty_strided_cuda":
            assert target is not None
            self._allocate(target, value)
        elif called == "reinterpret_tensor":
            assert target is not None
            self._names[target.id] = self._render(value)
        elif called.endswith(".run"):
            self._launch(called.removesuffix(".run"), value)
        elif called.startswith(("extern_kernels.", "torch.ops.")):
            self._call_library(target, called, value)

    def finish(self, statement: ast.Return) -> None:
        assert isinstance(statement.value, ast.Tuple)
        results = [self._render(value) for value in statement.value.elts]
        self.lines.append(f"return {', '.join(results)}")

    def _allocate(self, target: ast.Name, call: ast.Call) -> None:
        name = self._names.setdefault(target.id, "")
        if name in self._buckets:
            shape, _, dtype = call.args
            assert isinstance(shape, ast.Tuple)
            numbers = ", ".join(ast.unparse(size) for size in shape.elts)
            self.lines.append(f"{name} = empty({numbers}, {ast.unparse(dtype)})")

    def _launch(self, kernel: str, call: ast.Call) -> None:
        reads, writes = [], []
        # What follows the pointers are sizes.
        for parameter, argument in zip(self._written[kernel], call.args, strict=False):
            if "in" in parameter:
                reads.append(self._render(argument))
            if "out" in parameter:
                writes.append(self._write(argument))
        self._add("_".join(kernel.split("_")[:2]), reads, writes)

    def _call_library(self, target: ast.Name | None, called: str, call: ast.Call) -> None:
        *_, name = called.removesuffix(".default").split(".")
        reads = [self._render(value) for value in call.args if _is_tensor(value)]
        reads += [repr(value.value) for value in call.args if _is_text(value)]
        writes = [self._write(item.value) for item in call.keywords if item.arg == "out"]
        if target is not None:
            writes.append(self._write(target))
        self._add(name, reads, writes)

    def _add(self, name: str, reads: Sequence[str], writes: Sequence[str]) -> None:
        written = f" -> {', '.join(writes)}" if writes else ""
        self.lines.append(f"{name}({', '.join(reads)}){written}")

    def _write(self, value: ast.expr) -> str:
        if isinstance(value, ast.Name) and not self._names.get(value.id):
            temporaries = {name for name in self._names.values() if re.fullmatch(r"t\d+", name)}
            self._names[value.id] = f"t{len(temporaries)}"
        return self._render(value)

    def _render(self, value: ast.expr) -> str:
        if isinstance(value, ast.Call):
            base, shape, strides, offset = (ast.unparse(item) for item in value.args)
            name = self._names.get(base, base)
            if name in self._buckets:
                return f"{name}[{offset}: {shape.strip('(,)')}]"
            return f"{name}.T" if strides.startswith("(1, ") else f"{name}.view{shape}"
        if isinstance(value, ast.Subscript):
            return f"{self._render(value.value)}[{ast.unparse(value.slice)}]"
        text = ast.unparse(value)
        return self._names.get(text, text)


def pointers(source: str) -> list[str]:
    """The pointers that a kernel takes: those that it reads have ``in`` in their name, those that
    it writes ``out``. Templates call theirs ``arg_A``."""
    signature = _SIGNATURE.search(source)
    assert signature is not None, "a kernel without a signature"
    pairs = re.findall(r"'(\w+)': '(\*?)", signature.group(1))
    return [f"in_{name}" if name.startswith("arg") else name for name, star in pairs if star]


def _is_tensor(value: ast.expr) -> bool:
    return isinstance(value, ast.Name | ast.Call | ast.Subscript)


def _is_text(value: ast.expr) -> TypeGuard[ast.Constant]:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
