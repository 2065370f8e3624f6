"""The registry of what is changed in torch, against what changes."""

from __future__ import annotations

import ast
import contextlib
import copy
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes import FusionWarning
from fusion_passes.ddp.module import hand_over
from fusion_passes.install import changes
from fusion_passes.install.patch import CHECKED_ON, DDP, Patch, Span
from fusion_passes.install.patches import PATCHES, find
from fusion_passes.torch_private import owner_of_name
from testing import fake_world
from testing.fake_world import two_layers
from tests.install.torch_state import changed, different, everything, hook_modules

ROOT = Path(__file__).parent.parent.parent
INSTALL = ROOT / "fusion_passes" / "install"

RELU = "torch.nn.functional.relu"


@pytest.fixture
def one_rank() -> Iterator[None]:
    gc.collect()
    with fake_world.one_rank():
        yield


def listed(*spans: Span) -> list[Patch]:
    return [patch for patch in PATCHES if patch.span in spans]


# --- Entries -----------------------------------------------------------------------------------


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.what)
def test_each_entry_is_complete(patch: Patch) -> None:
    assert patch.why.endswith(".")
    assert patch.made.startswith("when ")
    assert patch.undone.startswith("never: ") == (patch.span is Span.PROCESS)
    assert set(patch.checked_on) <= set(CHECKED_ON)


def test_each_thing_is_listed_once() -> None:
    names = [patch.what for patch in PATCHES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.what)
def test_each_entry_is_of_something_that_torch_has(patch: Patch) -> None:
    if "_ddp_fusion" in patch.what or "CompiledFunction." in patch.what:
        return  # A new attribute; a class that a function of torch makes.
    owner, name = owner_of_name(patch.what)
    in_objects = {*getattr(owner, "__annotations__", ()), *_constructed(owner)}
    assert hasattr(owner, name) or (patch.span is Span.OBJECT and name in in_objects)


def _constructed(owner: object) -> list[str]:
    if owner is nn.Module:
        return list(vars(nn.Module()))
    return ["_accum_grad_hooks", "bucket_bytes_cap_list", "reducer"]  # See below.


# --- Nothing is changed without an entry -------------------------------------------------------


def test_what_is_not_listed_cannot_be_changed() -> None:
    before = torch.nn.functional.relu
    with contextlib.ExitStack() as undo:
        for change in (changes.replace, changes.wrap, changes.set_to):
            with pytest.raises(LookupError, match=r"functional\.relu is not in .*patches\.py"):
                change(undo, RELU, lambda *_: None)
        with pytest.raises(LookupError, match="relu"), changes.patched_setting(RELU, None):
            pass
    assert torch.nn.functional.relu is before


def test_what_is_listed_for_a_call_cannot_be_changed_with_the_flag() -> None:
    with contextlib.ExitStack() as undo, pytest.raises(LookupError, match="as FLAG: add it"):
        changes.replace(undo, "torch._dynamo.config.optimize_ddp", False)
    assert find("torch._dynamo.config.optimize_ddp", Span.CALL).span is Span.CALL


@pytest.mark.parametrize("path", sorted(INSTALL.glob("*.py")), ids=lambda path: path.name)
def test_only_one_file_changes_what_is_torchs(path: Path) -> None:
    changing = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Name) and node.id in ("setattr", "delattr"))
        or (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store | ast.Del)
            and ast.unparse(node.value) != "self"
        )
    ]
    allowed = {
        "constructor.py": ["ddp.bucket_bytes_cap_list"],
        "forward_compile.py": ["changed.config", "traced_backwards.options"],  # Of a copy.
        "switch.py": ["reducers.run_engine"],
    }
    if path.name != "changes.py":
        assert changing == allowed.get(path.name, [])


# --- What changes with the flag ----------------------------------------------------------------


def _canonical(what: str) -> str:
    """The name of what is changed by the class that has it, not by one of the class's names."""
    owner, name = owner_of_name(what)
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}.{name}"
    return what


def test_what_the_flag_changes_is_what_is_listed() -> None:
    with inductor_config.patch(_fuse_ddp_communication=True):
        inductor_config.ddp_fusion = "concat"  # Imports what it needs.
        inductor_config.ddp_fusion = None
        before = everything()
        inductor_config.ddp_fusion = "concat"
        during = everything()
        inductor_config.ddp_fusion = None
        assert changed(before, everything()) == set()
    found = changed(before, during) - {"torch._inductor.config.ddp_fusion"}
    assert found == {_canonical(patch.what) for patch in listed(Span.FLAG)}


def test_constructing_a_module_changes_nothing_beside_it(one_rank: None) -> None:
    inductor_config.ddp_fusion = "concat"
    DistributedDataParallel(two_layers())  # Imports what it needs.
    before = everything()
    ddp = DistributedDataParallel(two_layers())
    assert changed(before, everything()) == {"torch.utils.hooks.RemovableHandle.next_id"}
    del ddp
    inductor_config.ddp_fusion = None


def test_a_constructor_that_fails_leaves_nothing_changed(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        inside.update(_in_a_call())
        raise ArithmeticError

    # Whoever has constructed a module without the flag has left DDP's file in it.
    inlined = torch._dynamo.trace_rules.LEGACY_MOD_INLINELIST - {DistributedDataParallel.__module__}
    monkeypatch.setattr(torch._dynamo.trace_rules, "LEGACY_MOD_INLINELIST", inlined)
    before, inside = _in_a_call(), dict[str, object]()
    inductor_config.ddp_fusion = "concat"
    monkeypatch.setattr(DistributedDataParallel, "_register_accum_grad_hook", fail)
    with pytest.raises(ArithmeticError):
        DistributedDataParallel(two_layers(), bucket_cap_mb=7)
    assert _in_a_call() == before
    assert {what for what in before if before[what] != inside[what]} == {
        patch.what for patch in listed(Span.CALL) if "constructor" in patch.made
    }
    inductor_config.ddp_fusion = None


def _in_a_call() -> dict[str, object]:
    return {patch.what: copy.copy(changes.value_of(patch.what)) for patch in listed(Span.CALL)}


# --- What changes in a module ------------------------------------------------------------------


class _Own(DistributedDataParallel):
    """A user's class with a method that the package has too."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return super().forward(*inputs, **kwargs)


def _pair(
    kind: type[DistributedDataParallel],
) -> tuple[DistributedDataParallel, DistributedDataParallel]:
    """A module with DDP's Python reducer, and a managed one, else alike."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"), _undoing_what_ddp_sets():
        theirs = kind(two_layers(), bucket_cap_mb=25)
    inductor_config.ddp_fusion = "concat"
    ours = kind(two_layers(), bucket_cap_mb_list=[25])
    inductor_config.ddp_fusion = None
    return theirs, ours


@contextlib.contextmanager
def _undoing_what_ddp_sets() -> Iterator[None]:
    rules = torch._dynamo.trace_rules
    inlined = set(rules.LEGACY_MOD_INLINELIST)
    size = inductor_config._fuse_ddp_bucket_size
    with inductor_config.patch(_fuse_ddp_communication=False, _fuse_ddp_bucket_size=size):
        yield
    rules.LEGACY_MOD_INLINELIST.intersection_update(inlined)
    rules.get_legacy_mod_inlinelist.cache_clear()


def test_what_changes_in_a_module_is_what_is_listed(one_rank: None) -> None:
    theirs, ours = _pair(DistributedDataParallel)
    own_theirs, own_ours = _pair(_Own)
    for ddp in (theirs, ours):
        ddp.join(enable=False)
    found = different(theirs, ours) | different(own_theirs, own_ours)
    entries = {
        patch.what.removeprefix(f"{DDP}.")
        for patch in listed(Span.OBJECT)
        if patch.what.startswith(DDP)
    }
    # That one is in the parameter's hooks, and only of a module that is not managed.
    assert found == entries - {"_delayed_all_reduce_hook"}


def test_a_module_that_is_handed_over_has_what_ddp_has(one_rank: None) -> None:
    for kind in (DistributedDataParallel, _Own):
        theirs, ours = _pair(kind)
        reason = f"it is a {kind.__name__}"
        with pytest.warns(FusionWarning, match=f"not fused: {reason}"):
            hand_over(ours, reason)
        undone = {
            patch.what.removeprefix(f"{DDP}.")
            for patch in listed(Span.OBJECT)
            if patch.undone.startswith("when DDP's own reducer takes the module over;")
        }
        assert {"forward", "reducer", "__class__"} <= undone
        assert different(theirs, ours) & undone <= {"_accum_grad_hooks"}
        assert hook_modules(ours) == set(), "the C++ reducer has hooks of its own kind"


# --- What changes for good ---------------------------------------------------------------------

OPERATORS = "torch.ops.fusion_passes"

TORCHS_OWN = {
    "torch._logging.structured.INTERN_TABLE": None,  # Names in what is written for tlparse.
    # What save_cache_artifacts() saves.
    "torch.compiler._cache.CacheArtifactManager._new_cache_artifacts": None,
    "torch.jit._builtins._builtin_table": None,  # Made when somebody looks.
    "torch.library._defs": OPERATORS,
    "torch.library._impls": OPERATORS,
    "torch.ops._dir": OPERATORS,
    "torch.utils.hooks.RemovableHandle.next_id": None,  # Counts all hooks.
}
"""What torch keeps itself, and the entry that this comes from."""


@pytest.mark.slow
@pytest.mark.each_torch
def test_what_changes_for_good_is_what_is_listed() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.install.torch_state"]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    found = {TORCHS_OWN.get(name, name) for name in json.loads(result.stdout)} - {None}
    version = ".".join(torch.__version__.split(".")[:2])
    assert found == {
        patch.what
        for patch in listed(Span.PROCESS)
        if patch.checked_on == CHECKED_ON or version in patch.checked_on
    }
