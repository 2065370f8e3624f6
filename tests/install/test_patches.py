"""Compares the changes of torch that docs/patches.md lists with the actual changes."""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes import FusionConfig, FusionWarning
from fusion_passes.ddp.module import hand_over
from fusion_passes.torch_private import owner_of_name
from testing.processes import RankPool
from tests.install.torch_state import (
    changed,
    changed_for_good,
    contents,
    different,
    hook_modules,
    listed,
    value_of,
)
from tests.support.fake_world import fake_world, two_layers, without_kernels

UNTIL_HANDED_OVER = "In a managed module, until DDP's own reducer takes it over"


@pytest.fixture
def one_rank(one_rank: None) -> None:
    """The process group of the other tests, without garbage of theirs."""
    gc.collect()


# --- What changes with the flag ----------------------------------------------------------------


def _canonical(what: str) -> str:
    """The name of a changed attribute by the class that defines it, of several names of the
    class."""
    owner, name = owner_of_name(what)
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}.{name}"
    return what


OF_THE_FLAG = "While the flag is set"
OF_MODULES = "While the flag is set, or a managed module is there"
OF_SHARDED = "While a module with `shard_optimizer` is there"
OF_OVERLAPPED = 'While a module with `shard_optimizer="overlap"` is there'


def test_what_the_flag_changes_is_what_is_listed() -> None:
    with inductor_config.patch(_fuse_ddp_communication=True):
        inductor_config.ddp_fusion = "concat"  # Imports its own dependencies.
        inductor_config.ddp_fusion = None
        before = contents()
        inductor_config.ddp_fusion = "concat"
        during = contents()
        inductor_config.ddp_fusion = None
        assert changed(before, contents()) == set()
    known = {_canonical(what) for what in listed(OF_THE_FLAG) | listed(OF_MODULES)}
    assert changed(before, during, known) == known | {"torch._inductor.config.ddp_fusion"}


DYNAMOS_MODULES = "torch._dynamo.mutation_guard.GenerationTracker.generation_values"
"""The attribute in which Dynamo records each new module, once it has compiled something."""

ALWAYS = {DYNAMOS_MODULES, "torch.utils.hooks.RemovableHandle.next_id"}
"""Attributes that any module changes."""


def _managed(model: nn.Module, flag: object = "concat") -> DistributedDataParallel:
    """A module that was constructed under the flag, which is unset now."""
    with inductor_config.patch(ddp_fusion=flag):
        return DistributedDataParallel(model)


def _freed(modules: list[DistributedDataParallel]) -> None:
    modules.clear()
    gc.collect()


def _handed_over(modules: list[DistributedDataParallel]) -> None:
    for ddp in modules:
        hand_over(ddp, "this is tested")


@pytest.mark.filterwarnings("ignore::fusion_passes.FusionWarning")
@pytest.mark.parametrize("end", [_freed, _handed_over])
def test_what_modules_need_is_there_until_the_last_one_is_gone(
    one_rank: None, end: Callable[[list[DistributedDataParallel]], None]
) -> None:
    end([_managed(two_layers())])  # Imports its own dependencies.
    models = two_layers(), two_layers()
    before = contents()
    first, modules = ([_managed(model)] for model in models)
    known = {_canonical(what) for what in listed(OF_MODULES)}
    assert changed(before, contents(), known) - ALWAYS == known
    end(first)
    assert changed(before, contents(), known) - ALWAYS == known, "the second needs it"
    inductor_config.ddp_fusion = "concat"
    inductor_config.ddp_fusion = None
    assert changed(before, contents(), known) - ALWAYS == known, "the flag has gone, not the module"
    end(modules)
    assert changed(before, contents()) - ALWAYS == set()


@pytest.mark.parametrize(
    ("option", "headings"), [(True, [OF_SHARDED]), ("overlap", [OF_SHARDED, OF_OVERLAPPED])]
)
def test_what_sharded_optimizers_need_is_there_with_such_a_module(
    option: Any, headings: list[str]
) -> None:
    flag = FusionConfig(shard_optimizer=option)
    with fake_world(2):
        _freed([_managed(two_layers(), flag)])  # Imports its own dependencies.
        model = two_layers()
        before = contents()
        modules = [_managed(model, flag)]
        known = {
            _canonical(what) for heading in (OF_MODULES, *headings) for what in listed(heading)
        }
        assert changed(before, contents(), known) - ALWAYS == known
        _freed(modules)
        assert changed(before, contents()) - ALWAYS == set()


def test_a_module_on_another_group_keeps_what_modules_need(one_rank: None) -> None:
    ddp = _managed(two_layers())
    backward = torch.autograd._engine_run_backward
    ddp._update_process_group(dist.new_group())
    assert torch.autograd._engine_run_backward is not _torchs(backward)
    del ddp
    gc.collect()
    assert torch.autograd._engine_run_backward is _torchs(backward)


def _torchs(function: Any) -> Any:
    """The function of torch that a function of the package wraps."""
    return inspect.unwrap(function)


def test_constructing_a_module_changes_nothing_beside_it(one_rank: None) -> None:
    inductor_config.ddp_fusion = "concat"
    DistributedDataParallel(two_layers())  # Imports its own dependencies.
    model = two_layers()
    before = contents()
    ddp = DistributedDataParallel(model, bucket_cap_mb=7)
    found = changed(before, contents()) - {DYNAMOS_MODULES}
    assert found == ALWAYS - {DYNAMOS_MODULES}
    del ddp
    inductor_config.ddp_fusion = None


def test_a_constructor_that_fails_leaves_nothing_changed(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def set_attribute(ddp: nn.Module, name: str, value: Any) -> None:
        if name == "_ddp_sink_clone":  # The last one that the constructor sets.
            inside.update(during_a_call())
            raise ArithmeticError
        nn.Module.__setattr__(ddp, name, value)

    # Constructing a module without the flag leaves DDP's file in it.
    inlined = torch._dynamo.trace_rules.LEGACY_MOD_INLINELIST - {DistributedDataParallel.__module__}
    monkeypatch.setattr(torch._dynamo.trace_rules, "LEGACY_MOD_INLINELIST", inlined)
    before, inside = during_a_call(), dict[str, object]()
    inductor_config.ddp_fusion = "concat"
    monkeypatch.setattr(DistributedDataParallel, "__setattr__", set_attribute)
    with pytest.raises(ArithmeticError):
        DistributedDataParallel(two_layers(), bucket_cap_mb=7)
    assert during_a_call() == before
    assert {what for what in before if before[what] != inside[what]} == {
        "torch._dynamo.config.optimize_ddp",
        "torch._dynamo.trace_rules.LEGACY_MOD_INLINELIST",
        "torch._inductor.config._fuse_ddp_bucket_size",
    }
    inductor_config.ddp_fusion = None


def during_a_call() -> dict[str, object]:
    """The values of attributes that are changed during calls."""
    return {what: value_of(what) for what in listed("During a call")}


# --- What changes in a module ------------------------------------------------------------------


class _Own(DistributedDataParallel):
    """A user's class with a method that the package has too."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return super().forward(*inputs, **kwargs)


def _pair(
    kind: type[DistributedDataParallel],
) -> tuple[DistributedDataParallel, DistributedDataParallel]:
    """A module with DDP's Python reducer and a managed one, otherwise equal."""
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


@without_kernels()
def _launches_of_torchs_own_fusion() -> int:
    """Collectives of a step of a module with torch's Python reducer and compiled autograd."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"optimize_ddp": "python_reducer", "compiled_autograd": True}
    with torch._dynamo.config.patch(**options), _undoing_what_ddp_sets():
        theirs = DistributedDataParallel(two_layers())
        assert inductor_config._fuse_ddp_communication
        step = torch.compile(lambda x: theirs(x).sum().backward())
        group: Any = theirs.process_group
        before: int = group._get_sequence_number_for_group()
        step(torch.ones(2, 4))
        return group._get_sequence_number_for_group() - before


def test_torchs_own_fusion_goes_on_beside_a_managed_module(one_rank: None) -> None:
    """The collectives equal those without a managed module: torch 2.14 launches four all-reduces,
    earlier versions a fused one."""
    alone = _launches_of_torchs_own_fusion()
    beside = _managed(two_layers())
    assert _launches_of_torchs_own_fusion() == alone
    del beside


def test_what_changes_in_a_module_is_what_is_listed(one_rank: None) -> None:
    theirs, ours = _pair(DistributedDataParallel)
    own_theirs, own_ours = _pair(_Own)
    for ddp in (theirs, ours):
        ddp.join(enable=False)
    found = different(theirs, ours) | different(own_theirs, own_ours)
    assert found == listed(UNTIL_HANDED_OVER) | listed(
        "In a managed module, as long as it is there"
    )


def test_a_module_that_is_handed_over_has_what_ddp_has(one_rank: None) -> None:
    for kind in (DistributedDataParallel, _Own):
        theirs, ours = _pair(kind)
        reason = f"it is a {kind.__name__}"
        with pytest.warns(FusionWarning, match=f"not fused: {reason}"):
            hand_over(ours, reason)
        undone = listed(UNTIL_HANDED_OVER)
        assert {"forward", "reducer", "__class__"} <= undone
        assert different(theirs, ours) & undone <= {"_accum_grad_hooks"}
        assert hook_modules(ours) == set(), "the C++ reducer has hooks of its own kind"


# --- What changes for good ---------------------------------------------------------------------

OPERATORS = "torch.ops.fusion_passes"

TORCHS_OWN = {
    "torch._logging.structured.INTERN_TABLE": None,  # Names in the output for tlparse.
    "torch.jit._builtins._builtin_table": None,  # Made when somebody reads it.
    "torch.library._defs": OPERATORS,
    "torch.library._impls": OPERATORS,
    "torch.ops._dir": OPERATORS,
    "torch.utils.hooks.RemovableHandle.next_id": None,  # Counts all hooks.
}
"""Values that torch keeps itself, and the row of the page that is responsible."""

BEFORE_2_13 = {"torch._inductor.lowering._maybe_layout_constraints"}
"""Attributes that are changed in older torch only."""


@pytest.mark.slow
@pytest.mark.each_torch
def test_what_changes_for_good_is_what_is_listed() -> None:
    with RankPool() as pool:
        (names,) = pool.run(1, changed_for_good)
    found = {TORCHS_OWN.get(name, name) for name in names} - {None}
    is_older = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
    assert found == listed("Until the process ends") - (set() if is_older else BEFORE_2_13)
