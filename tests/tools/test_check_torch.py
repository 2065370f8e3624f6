"""The tool that asks torch for the private names that the package uses."""

from __future__ import annotations

from pathlib import Path

import check_torch
import pytest
import torch
import torch._dynamo.compiled_autograd
import torch._inductor.ir
from check_torch import GONE, NOT_HERE, OK, PACKAGE, STALE, UNKNOWN, check, is_private

from fusion_passes.install.patch import Span
from fusion_passes.install.patches import PATCHES
from torch_names.declared import VERSIONS, WRITTEN_IN
from torch_names.lookups import Found
from torch_names.package import read_package
from torch_names.page import page
from torch_names.reading import read

ROOT = Path(__file__).parent.parent.parent


def found_in(folder: Path, **sources: str) -> Found:
    """What is found in a package with these files."""
    for name, source in sources.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    return read(read_package(folder))


# --- The package -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines() -> list[tuple[str, str]]:
    return list(check(PACKAGE, torch.__version__))


def test_nothing_is_gone(lines: list[tuple[str, str]]) -> None:
    assert [line for line in lines if line[0] not in (OK, NOT_HERE)] == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("torch._C._AutoDispatchBelowAutograd", id="of torch_private"),
        pytest.param("torch._inductor.ir.ConcatKernel.realize_into", id="of the IR"),
        pytest.param("torch._inductor.ir.get_stride", id="of a value in the IR"),
        pytest.param("torch._inductor.graph.GraphLowering.no_fuse_buffer_names", id="of a graph"),
        pytest.param(
            "torch.nn.parallel.DistributedDataParallel.parameters_to_ignore", id="of a DDP module"
        ),
        pytest.param("torch.nn.parallel.distributed: bucket_cap_mb_list", id="argument by name"),
        pytest.param("torch._dynamo.compiled_autograd._enable(dynamic=)", id="keyword"),
        pytest.param("torch.distributed.Reducer._rebuild_buckets", id="overridden"),
        pytest.param("torch._dynamo.trace_rules.LEGACY_MOD_INLINELIST", id="patched"),
    ],
)
def test_names_of_each_kind_are_asked_for(lines: list[tuple[str, str]], name: str) -> None:
    assert (OK, name) in lines


def test_every_name_that_is_patched_for_the_process_is_asked_for() -> None:
    names = read(read_package(PACKAGE)).names
    patched = {patch.what for patch in PATCHES if patch.span is not Span.OBJECT}
    assert patched - names.keys() == {"atexit.register", "torch.ops.fusion_passes"}


def test_names_that_are_gone_are_found_with_who_needs_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = {
        "torch._C._current_graph_task_id": "torch_private/autograd.py",
        "torch._dynamo.compiled_autograd._enable": "torch_private/dynamo.py",
        "torch._inductor.ir.ConcatKernel.realize_into": "lowering/memory.py",
        "torch.nn.parallel.DistributedDataParallel._log_and_throw": "torch_private/ddp.py",
    }
    for name in gone:
        monkeypatch.delattr(name)
    assert check_torch.main(["--quiet"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in said[:-1]] == list(gone)
    for line, file in zip(said, gone.values(), strict=False):
        assert line.startswith("GONE ")
        assert f"needed by {file}:" in line
    assert "4 wrong" in said[-1]


def test_the_command_ends_with_0(
    lines: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The stages of a check that have another torch run it in a process of its own."""
    monkeypatch.setattr(check_torch, "check", lambda *_: lines)
    assert check_torch.main([]) == 0
    said = capsys.readouterr().out
    assert f"torch {torch.__version__}: {len(lines)} names, nothing wrong" in said
    assert said.count("\n") == len(lines) + 1


def test_the_page_of_patches_is_up_to_date() -> None:
    text = (ROOT / "docs" / "patches.md").read_text()
    assert text == page(PATCHES), "python tools/check_torch.py --page > docs/patches.md"


# --- Reading -----------------------------------------------------------------------------------


SOURCES = {
    "from torch._ops import OpOverload": "torch._ops.OpOverload",
    "import torch._dynamo.config": "torch._dynamo.config",
    "torch._C._current_graph_task_id()": "torch._C._current_graph_task_id",
    """
def rules():
    import torch._dynamo.trace_rules
    return torch._dynamo.trace_rules
def use():
    held = rules()
    held.never_was
""": "torch._dynamo.trace_rules.never_was",
    """
from typing import Annotated, Any
def f(x: Annotated[Any, "torch._inductor.graph.GraphLowering"]): x.never_was
""": "torch._inductor.graph.GraphLowering.never_was",
    "def f(x: torch.Tensor | None): getattr(x, '_never', None)": "torch.Tensor._never",
    """
import weakref
def f(r: weakref.ref[torch.nn.Module]): r()._never
""": "torch.nn.Module._never",
    """
def f(many: list[torch.fx.Node]):
    for n in many: n._never
""": "torch.fx.Node._never",
    """
def f(many: dict[int, torch.fx.Node]): [n._never for _, n in many.items()]
""": "torch.fx.Node._never",
    "def f(x): return isinstance(x, torch.fx.Node) and x._never": "torch.fx.Node._never",
    """
class A:
    def __init__(self): self.node = torch.fx.Node()
    def f(self): self.node._never
""": "torch.fx.node.Node._never",
    """
class A(torch.fx.Interpreter):
    def never_was(self): pass
""": "torch.fx.Interpreter.never_was",
    "torch.nn.Linear(never=1)": "torch.nn.Linear(never=)",
    "x = 'torch._inductor.config.never_was'": "torch._inductor.config.never_was",
}


@pytest.mark.parametrize(("source", "name"), SOURCES.items(), ids=SOURCES.values())
def test_what_is_read(tmp_path: Path, source: str, name: str) -> None:
    names = found_in(tmp_path, example=f"import torch\n{source}").names
    assert name in names
    assert names[name][0] == ("never" not in name)


def test_what_is_given_to_a_function_of_the_package_is_followed(tmp_path: Path) -> None:
    names = found_in(
        tmp_path,
        one="import torch\nfrom fusion_passes.two import use\nuse(torch.fx.Graph())",
        two="def use(graph): graph._never",
    ).names
    assert names["torch.fx.graph.Graph._never"] == (False, ["two.py:1 use"])


@pytest.mark.parametrize(
    "source",
    [
        "torch.ops.aten.add",
        "import os\nos._exit",
        "class A:\n    def __init__(self): self._x = 1\ndef f(a): a._x",
        "def f(ddp: torch.nn.parallel.DistributedDataParallel): ddp._ddp_fusion_x",
        "'torch._inductor.config.ddp_fusion'",
        "'torch._inductor is a module'",
    ],
)
def test_what_is_not_asked_for(tmp_path: Path, source: str) -> None:
    found = found_in(tmp_path, example=f"import torch\n{source}")
    assert {name for name in found.names if is_private(name)} <= {"torch._inductor"}
    assert found.unknown == {}


def test_a_private_attribute_of_something_unknown_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text("def f(x): x._held")
    kinds = {text: kind for kind, text in check(tmp_path, "2.13")}
    unknown = [text for text, kind in kinds.items() if kind == UNKNOWN]
    assert len(unknown) == 1
    assert unknown[0].startswith("_held   in example.py:1 f: annotate what has it")


def test_what_is_declared_and_needed_by_no_code_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text("x = 'bucket_cap_mb_list'")
    stale = [text.split()[0] for kind, text in check(tmp_path, "2.13") if kind == STALE]
    assert "bucket_cap_mb_list" not in stale
    assert {"_forward_cls", "ReducerOfManaged", "lowering"} <= set(stale)
    assert set(WRITTEN_IN) - {"bucket_cap_mb_list"} <= set(stale)


@pytest.mark.parametrize(("version", "kind"), [("2.11.0", NOT_HERE), ("2.13.0+cpu", GONE)])
def test_names_of_some_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, kind: str
) -> None:
    monkeypatch.setitem(VERSIONS, "torch._never", ("2.13", ""))
    (tmp_path / "example.py").write_text("import torch\ntorch._never")
    kinds = {text.split()[0]: kind for kind, text in check(tmp_path, version)}
    assert kinds["torch._never"] == kind
