"""Reads torch's own tests of ``torch.distributed``: which of them test DDP, and how they run
without a GPU.

Most of torch's DDP tests require two GPUs although DDP does the same on the CPU. Their source is
rewritten while it is imported: ``.cuda(rank)`` is removed, ``device=rank`` becomes
``device="cpu"``, ``device_ids=[rank]`` becomes ``device_ids=None``, and decorators that skip a test
without GPUs are removed. The checks of a test and its line numbers do not change.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MODULE = "torch.testing._internal.distributed.distributed_test"
BASE = "_DistTestBase"
DDP = frozenset({"DistributedDataParallel", "DDP"})

MIN_RANKS = 2
COMPILED = "_compiled"
"""Name, in the rewritten module, of the function that gets each new DDP module."""

_NEEDS_RANKS = frozenset({"require_world_size", "require_exact_world_size", "skip_if_lt_x_gpu"})
_NEEDS_GPU = frozenset({"skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "skip_if_no_gpu"})
_DEVICES = frozenset({"rank", "device", "device_id"})
"""Names that torch's tests use for the index of their GPU in ``.to(...)``."""

_NOTHING_ON_CPU = frozenset({"set_device", "synchronize"})
"""Functions of ``torch.cuda`` that need no counterpart."""


@dataclass(frozen=True)
class TorchTest:
    """One of torch's tests.

    Attributes:
        name: name of the method.
        ranks: number of processes that it needs.
    """

    name: str
    ranks: int


def source_path() -> Path:
    """Find the file in the installed torch, without importing torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "torch is installed"
    assert spec.origin is not None, "torch is a package with a file"
    return Path(spec.origin).parent.joinpath(*MODULE.split(".")[1:]).with_suffix(".py")


def ddp_tests(source: str) -> list[TorchTest]:
    """Return the tests that construct DDP, themselves or through a helper of their class."""
    methods = {
        method.name: method
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == BASE
        for method in node.body
        if isinstance(method, ast.FunctionDef)
    }
    named = {name: _names(method.body) for name, method in methods.items()}
    reaching, found = set[str](), set(DDP)
    while found:
        found = {name for name in named if name not in reaching and named[name] & found}
        reaching |= found
    return [
        TorchTest(name, _ranks(method))
        for name, method in methods.items()
        if name in reaching and name.startswith("test")
    ]


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    """Return each mentioned name and attribute."""
    return {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for root in nodes
        for node in ast.walk(root)
        if isinstance(node, (ast.Attribute, ast.Name))
    }


def _ranks(test: ast.FunctionDef) -> int:
    wanted = [
        argument.value
        for decorator in test.decorator_list
        if isinstance(decorator, ast.Call) and _last_name(decorator.func) in _NEEDS_RANKS
        for argument in decorator.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, int)
    ]
    return max([MIN_RANKS, *wanted])


def _last_name(node: ast.AST) -> str:
    """Return ``c`` of ``a.b.c``, and ``""`` for any other expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def rewritten(source: str, *, compiled: bool) -> ast.Module:
    """Return the module for the CPU, in which each new DDP module is passed to :data:`COMPILED` if
    it is to be compiled."""
    tree = _OnCpu(compiled=compiled).visit(ast.parse(source))
    assert isinstance(tree, ast.Module), "the root stays what it is"
    return ast.fix_missing_locations(tree)


class _OnCpu(ast.NodeTransformer):
    def __init__(self, *, compiled: bool) -> None:
        self._compiled = compiled

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [it for it in node.decorator_list if not _skips_here(it)]
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return _constant("cpu", node) if _is_cuda(node) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        if node.values and _is_cuda(node.values[0]):
            return _constant("cpu", node)
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        # A table of the features of each backend, with the key "cuda", that is defined elsewhere.
        is_table = _last_name(node.value) == "backend_feature"
        return node if is_table else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        owner, name = "", _last_name(node.func)
        if isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if name == "cuda" and owner != "torch":
                replaced: ast.AST = self.visit(node.func.value)
                return replaced
        if owner == "torch.cuda" and name in _NOTHING_ON_CPU:
            return _constant(None, node)
        if owner == "torch.cuda" and name == "current_device":
            return _constant("cpu", node)
        self.generic_visit(node)
        if owner == "torch" and name == "device":
            node.args = [_constant("cpu", node)]
        if name == "to" and len(node.args) == 1 and _last_name(node.args[0]) in _DEVICES:
            node.args = [_constant("cpu", node)]
        for keyword in node.keywords:
            _move_keyword(keyword)
        if self._compiled and name in DDP:
            function = ast.Name(COMPILED, ast.Load())
            return ast.copy_location(ast.Call(function, [node], []), node)
        return node


def _skips_here(decorator: ast.expr) -> bool:
    """Return whether a decorator skips a test without GPUs, or on every Linux.

    The latter marks a test as flaky on torch's own machines. Here it counts if it passes without
    the flag.
    """
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    if _last_name(function) in _NEEDS_GPU:
        return True
    return _last_name(function) == "skipIf" and "IS_LINUX" in _names([decorator])


def _is_cuda(node: ast.AST) -> bool:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    return node.value == "cuda" or node.value.startswith("cuda:")


def _move_keyword(keyword: ast.keyword) -> None:
    is_none = isinstance(keyword.value, ast.Constant) and keyword.value.value is None
    if keyword.arg == "device" and not is_none:
        keyword.value = _constant("cpu", keyword.value)
    elif keyword.arg in {"device_ids", "output_device"}:
        keyword.value = _constant(None, keyword.value)


def _constant(value: str | None, place: ast.AST) -> ast.expr:
    return ast.copy_location(ast.Constant(value), place)
