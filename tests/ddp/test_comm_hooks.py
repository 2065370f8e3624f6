"""Which communication hooks a module takes under the flag, and what is said about the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from fusion_passes import FusionWarning
from fusion_passes.ddp.comm_hooks import sent_as
from tests.support.fake_world import fake_world, two_layers

pytestmark = pytest.mark.each_torch


@pytest.fixture
def ddp() -> Iterator[DistributedDataParallel]:
    with fake_world(), inductor_config.patch(ddp_fusion="concat"):
        yield DistributedDataParallel(two_layers())


@pytest.mark.parametrize(
    ("hook", "dtype"),
    [
        (default_hooks.allreduce_hook, None),
        (default_hooks.bf16_compress_hook, torch.bfloat16),
        (default_hooks.fp16_compress_hook, torch.float16),
    ],
)
@pytest.mark.parametrize("names_group", [True, False])
def test_known_hooks(
    ddp: DistributedDataParallel, hook: Any, dtype: torch.dtype | None, names_group: bool
) -> None:
    ddp.register_comm_hook(ddp.process_group if names_group else None, hook)
    assert sent_as(ddp) == dtype


@pytest.mark.parametrize(("kind", "dtype"), [("ALLREDUCE", None), ("FP16_COMPRESS", torch.float16)])
def test_builtin_hooks(ddp: DistributedDataParallel, kind: str, dtype: torch.dtype | None) -> None:
    ddp._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
    assert sent_as(ddp) == dtype


def users_hook(state, bucket):  # DDP compares annotations, which must be no strings.
    return default_hooks.allreduce_hook(state, bucket)


@pytest.mark.parametrize(
    "hook",
    [
        users_hook,
        powerSGD_hook.powerSGD_hook,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ],
)
def test_other_hooks_are_ddps_reducers(ddp: DistributedDataParallel, hook: Any) -> None:
    with pytest.warns(FusionWarning, match=r"communication hook \S+ is not one that averages over"):
        ddp.register_comm_hook(None, hook)
    assert not ddp._use_python_reducer
    assert [hook for hook, _ in ddp._comm_hooks] == [hook]


def test_what_is_no_hook_changes_nothing(ddp: DistributedDataParallel) -> None:
    with pytest.raises(TypeError, match="must be callable"):
        ddp.register_comm_hook(None, [])
    assert ddp._use_python_reducer
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    assert sent_as(ddp) == torch.float16


def test_a_hook_over_another_group_is_ddps_reducers(ddp: DistributedDataParallel) -> None:
    other = dist.new_group([0, 1])
    on_other = DistributedDataParallel(two_layers(), process_group=other)
    on_other.register_comm_hook(other, default_hooks.fp16_compress_hook)
    assert sent_as(on_other) == torch.float16
    with pytest.warns(FusionWarning, match="communication hook fp16_compress_hook is not one"):
        ddp.register_comm_hook(other, default_hooks.fp16_compress_hook)
    assert not ddp._use_python_reducer
    # In DDP's hooks, no state is the default group, whatever the module's is.
    on_other = DistributedDataParallel(two_layers(), process_group=other)
    with pytest.warns(FusionWarning, match="communication hook allreduce_hook is not one"):
        on_other.register_comm_hook(None, default_hooks.allreduce_hook)
    assert not on_other._use_python_reducer


def test_takes_one_hook_as_ddp_does(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    assert sent_as(ddp) == torch.bfloat16


def test_a_hook_that_comes_late_is_not_missed(ddp: DistributedDataParallel) -> None:
    """The first backward was compiled without it."""

    @torch.compile
    def step() -> None:
        ddp(torch.ones(2, 4)).sum().backward()

    import fusion_passes

    step()
    ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    step()
    first, second = (report.buckets for report in fusion_passes.reports()[-2:])
    assert [b.sent_bytes for b in first] == [2 * b.sent_bytes for b in second]
