"""Reads generated wrappers, for the CPU and for CUDA: the calls of a compiled graph in order, and
the places in memory that each of them reads and writes.

If a kernel reads or writes a place that it is given, it counts as reading or writing all of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

Kind = Literal[
    "allocate", "reuse", "kernel", "fused", "copy", "launch", "wait", "operator", "return"
]

MARK_READY: Final = "fusion_passes.mark_ready_"
"""After this call, a reducer launches and waits for the gradients that it is given."""

_KIND_OF: Final[dict[str, Kind]] = {
    "_c10d_functional.all_reduce_": "launch",
    "_c10d_functional.all_reduce_coalesced_": "launch",
    "_c10d_functional.wait_tensor": "wait",
    MARK_READY: "launch",
    "fusion_passes.store_": "copy",
    "fusion_passes.bucket": "allocate",
}
"""Kinds of operators; operators of libraries are kernels."""

_SAYS_SIZE: Final = ("assert_size_stride", "assert_tensor_metadata")
"""Checks of the size of an input or a library's result; the second one from torch 2.14 on."""

_LIBRARIES: Final = ("extern_kernels.", "torch.ops.aten.", "torch.ops.mkldnn.", "torch.ops.mkl.")

_TRITON: Final = re.compile(
    r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", re.MULTILINE | re.DOTALL
)
_TRITON_SIGNATURE: Final = re.compile(r"'signature': \{(.*?)\}")
_CPP_SIGNATURE: Final = re.compile(
    r"^(\w+) = async_compile\.cpp_pybinding\(\[(.*?)\]", re.MULTILINE
)


@dataclass(frozen=True)
class Place:
    """A place in memory of a value.

    Attributes:
        memory: name of the allocation, or of the graph's input or a library's result.
        size: size in elements, by dimension; empty if the wrapper does not contain it.
        stride: in elements.
        offset: offset of the first element.
        is_view: whether the wrapper says where in the memory it lies.
    """

    memory: str
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    is_view: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Call:
    """A statement of the generated code.

    Attributes:
        kind: ``allocate``: memory that is allocated; ``reuse``: memory that had another name
            before; ``kernel``: a library's (a matrix product, attention); ``fused``: a generated
            one; ``copy``: for example the package's own copy of several gradients; ``launch`` and
            ``wait`` of a collective; ``operator``: any other one; ``return`` of the graph.
        name: name of the kernel or operator, such as ``extern_kernels.mm`` or
            ``aten.convolution_backward``; empty if memory is only given another name.
        reads: places that it reads, sends or waits for.
        writes: places that it writes or allocates.
        texts: string arguments, such as a group's name.
        line: the statement's text.
    """

    kind: Kind
    name: str
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    texts: tuple[str, ...]
    line: str


def read_calls(code: str) -> list[Call]:
    """The calls of the last graph in generated code.

    Raises:
        AssertionError: a name that stands for a place in another's memory is bound anew, or the
            graph has no end.
    """
    reader = _Reader(code)
    for raw in code[code.rindex("def call(") :].splitlines():
        line = raw.strip()
        try:
            # A second statement on a line deletes a name.
            statement = next(iter(ast.parse(line).body), None)
        except SyntaxError:
            continue  # The head of a block.
        reader.read(statement, line)
        if isinstance(statement, ast.Return):
            return reader.calls
    raise AssertionError("the code has no end")


def read_kernels(code: str) -> dict[str, str]:
    """The sources of the Triton kernels in generated code, by name."""
    return dict(_TRITON.findall(code))


class _Reader:
    """Follows the statements of a wrapper."""

    def __init__(self, code: str) -> None:
        self.calls: list[Call] = []
        self._accesses = _accesses(code)
        self._places: dict[str, Place] = {}

    def read(self, statement: ast.stmt | None, line: str) -> None:
        if isinstance(statement, ast.Return):
            assert isinstance(statement.value, ast.Tuple)
            reads = tuple(map(self._place, statement.value.elts))
            self.calls.append(Call("return", "", reads, (), (), line))
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            if ast.unparse(statement.value.func) in _SAYS_SIZE:
                self._note_size(*statement.value.args[:3])
            self._call(None, statement.value, line)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            target, value = statement.targets[0].id, statement.value
            if _is_view(value):
                self._bind(target, value, line)
            elif not (isinstance(value, ast.Call) and self._call(target, value, line)):
                if target in self._places:  # The allocation with this name is not used.
                    self.calls.append(Call("operator", "", (), (Place(target),), (), line))
                self._let(target, Place(target), line)

    def _let(self, name: str, place: Place, line: str) -> None:
        """Bind a name to a place."""
        before = self._places.get(name)
        anew = f"{name} is {before}, and bound anew: {line.partition(' = ')[2]}"
        assert before is None or before.memory == name, anew
        self._places[name] = place

    def _bind(self, name: str, value: ast.expr, line: str) -> None:
        place = self._place(value)
        if line.endswith("# reuse"):
            new = replace(place, memory=name, offset=0, is_view=False)
            self.calls.append(Call("reuse", "", (place,), (new,), (), line))
            place = new
        self._let(name, place, line)

    def _note_size(self, name: ast.expr, size: ast.expr, stride: ast.expr) -> None:
        """Record the size of an input, or of a library's allocation."""
        place = self._place(name)
        if not place.size:
            sized = replace(place, size=_numbers(size), stride=_numbers(stride))
            self._places[ast.unparse(name)] = sized

    def _place(self, value: ast.expr) -> Place:
        if isinstance(value, ast.Name):
            return self._places.get(value.id, Place(value.id))
        if isinstance(value, ast.Subscript):
            return self._place(value.value)  # One of several results of a library.
        if isinstance(value, ast.Call) and _is_view(value):
            base, size, stride, offset = value.args
            place = self._place(base)
            start = place.offset + ast.literal_eval(offset)
            return replace(
                place, size=_numbers(size), stride=_numbers(stride), offset=start, is_view=True
            )
        return Place(ast.unparse(value))

    def _call(self, target: str | None, call: ast.Call, line: str) -> bool:
        """Record a call. Return whether its kind is known."""
        called = ast.unparse(call.func)
        name = called.removesuffix(".run").removesuffix(".default").removeprefix("torch.ops.")
        kind = self._kind_of(called, name)
        if kind is None:
            return False
        reads = [self._place(item) for item in _flat(call.args) if _is_tensor(item)]
        writes = [self._place(item.value) for item in call.keywords if item.arg == "out"]
        texts = [
            item.value
            for item in call.args
            if isinstance(item, ast.Constant) and isinstance(item.value, str)
        ]
        if kind == "allocate":
            reads = []
        elif kind == "fused":
            accesses = self._accesses[name]
            # The arguments after the pointers are sizes.
            pairs = list(zip(accesses, call.args[: len(accesses)], strict=True))
            reads = [self._place(item) for access, item in pairs if "in" in access]
            writes = [self._place(item) for access, item in pairs if "out" in access]
        elif kind == "copy":
            writes = self._copied_to(call)
        if target is not None:
            place = _allocated(target, name, call) if kind == "allocate" else Place(target)
            self._let(target, place, line)
            writes.append(place)
        self.calls.append(Call(kind, name, tuple(reads), tuple(writes), tuple(texts), line))
        return True

    def _kind_of(self, called: str, name: str) -> Kind | None:
        if name in self._accesses:
            return "fused"
        if called.startswith("empty_strided_"):
            return "allocate"
        if called.startswith(_LIBRARIES):
            return "kernel"
        if called.startswith("torch.ops."):
            return _KIND_OF.get(name, "operator")
        return "copy" if called.endswith(".copy_") else None

    def _copied_to(self, call: ast.Call) -> list[Place]:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "copy_":
            return [self._place(call.func.value)]
        bucket, gradients, offsets, strides = call.args[:4]
        whole, left, places = self._place(bucket), list(_numbers(strides)), []
        assert isinstance(gradients, ast.List)
        for gradient, offset in zip(gradients.elts, _numbers(offsets), strict=True):
            size = self._place(gradient).size
            stride = tuple(left.pop(0) for _ in size)
            places.append(Place(whole.memory, size, stride, whole.offset + offset))
        return places


def _allocated(target: str, name: str, call: ast.Call) -> Place:
    if name == "fusion_passes.bucket":
        return Place(target, (ast.literal_eval(call.args[2]),), (1,))
    return Place(target, _numbers(call.args[0]), _numbers(call.args[1]))


def _is_view(value: ast.expr) -> bool:
    is_call = isinstance(value, ast.Call) and ast.unparse(value.func) == "reinterpret_tensor"
    return is_call or isinstance(value, ast.Name | ast.Subscript)


def _is_tensor(value: ast.expr) -> bool:
    return isinstance(value, ast.Name | ast.Call | ast.Subscript)


def _flat(values: Sequence[ast.expr]) -> Iterator[ast.expr]:
    for value in values:
        yield from value.elts if isinstance(value, ast.List) else [value]


def _numbers(value: ast.expr) -> tuple[int, ...]:
    return tuple(ast.literal_eval(value))


# --- What kernels do with their pointers ---------------------------------------------------------


def _accesses(code: str) -> dict[str, list[str]]:
    """For each kernel, the use of its pointers in their order: ``in``, ``out``, or both."""
    on_card = {name: _accesses_of(source) for name, source in read_kernels(code).items()}
    on_cpu = {
        name: ["in" if "const" in kind else "out" for kind in types.split(", ")]
        for name, types in _CPP_SIGNATURE.findall(code)
    }
    return on_card | on_cpu


def _accesses_of(source: str) -> list[str]:
    """The use of a Triton kernel's pointers, which have such names; a template's ``arg_A`` is
    read."""
    signature = _TRITON_SIGNATURE.search(source)
    assert signature is not None, "a kernel without a signature"
    pointers = re.findall(r"'(\w+)': '\*", signature.group(1))
    reads = ["in" if "in" in name or name.startswith("arg") else "" for name in pointers]
    writes = ["out" if _stores_to(name, source) else "" for name in pointers]
    return [read + write for read, write in zip(reads, writes, strict=True)]


def _stores_to(pointer: str, source: str) -> bool:
    # A kernel for tensors of several sizes uses one name for all pointers that it stores to.
    names = [pointer, *re.findall(rf"(\w+) = {pointer}$", source, re.MULTILINE)]
    # A block of memory is made from the pointer, and stored to under its own name.
    called = r"(?:store|atomic_\w+|make_block_ptr|make_tensor_descriptor)"
    pattern = rf"{called}\((?:{'|'.join(names)})\b"
    return "out" in pointer and re.search(pattern, source) is not None
