"""Constructs DDP modules under the flag, and warns about those that were constructed before it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch.nn.parallel import DistributedDataParallel

from fusion_passes.ddp.module import manage_by_reducer
from fusion_passes.ddp.own_reducer import (
    check_supported,
    own_reducers,
    reason_for_own_reducer,
    wait_for_delayed,
    warn_own_reducer,
    warn_without_effect,
)
from fusion_passes.flag import active_config
from fusion_passes.install.changes import patched_setting, value_of
from fusion_passes.install.conflicts import check_conflicts, check_reducer_mode, check_tracing
from fusion_passes.plan.caps import mib_to_bytes
from fusion_passes.reporting.warnings import warn_once
from fusion_passes.torch_private.dynamo import trace_rules

_REDUCER: Final = "torch._dynamo.config.optimize_ddp"


def construct(
    original: Callable[..., None],
    ddp: DistributedDataParallel,
    /,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Do what ``DistributedDataParallel.__init__`` does, and manage the module.

    Args:
        original: DDP's constructor.
        ddp: the module.
        args: for DDP's constructor.
        kwargs: for DDP's constructor.

    Raises:
        ValueError: settings or arguments contradict the flag; the text names the remedy.
    """
    config = active_config()
    if config is None:
        original(ddp, *args, **kwargs)
        return
    bound = inspect.signature(original).bind(ddp, *args, **kwargs)
    given = dict(bound.arguments)
    check_reducer_mode()
    check_conflicts()
    check_tracing(config)
    check_supported(given)
    reason = reason_for_own_reducer(given)
    if reason is not None:
        with patched_setting(_REDUCER, True):
            original(ddp, *args, **kwargs)
        wait_for_delayed(ddp, given.get("param_to_hook_all_reduce"))
        warn_own_reducer(ddp, reason)
        return
    # DDP takes no list with the Python reducer, which has no buckets of its own.
    caps_mb = bound.arguments.pop("bucket_cap_mb_list", None) or ()
    if caps_mb:
        bound.arguments["bucket_cap_mb"] = max(caps_mb)
    with _python_reducer():
        original(*bound.args, **bound.kwargs)
    ddp.bucket_bytes_cap_list = [mib_to_bytes(cap_mb) for cap_mb in caps_mb]
    manage_by_reducer(ddp, config)
    warn_without_effect(given)


@contextlib.contextmanager
def _python_reducer() -> Iterator[None]:
    """DDP's constructor chooses the Python reducer, and what else it does to torch is undone: it
    switches torch's own fusion on, and makes Dynamo inline the forward of every DDP module, with
    what only its own reducer does in it."""
    size = "torch._inductor.config._fuse_ddp_bucket_size"
    inlined: set[str] = value_of("torch._dynamo.trace_rules.LEGACY_MOD_INLINELIST")
    before = set(inlined)
    with (
        patched_setting(_REDUCER, "python_reducer"),
        patched_setting("torch._inductor.config._fuse_ddp_communication", False),
        patched_setting(size, value_of(size)),
    ):
        try:
            yield
        finally:
            inlined.intersection_update(before)
            trace_rules().get_legacy_mod_inlinelist.cache_clear()


def enter_forward(original: Callable[..., Any], ddp: DistributedDataParallel) -> Any:
    """Do what ``DistributedDataParallel._inside_ddp_forward`` does, in each forward with DDP's own
    reducer; warn if the module was to be managed."""
    if active_config() is not None and ddp not in own_reducers:
        warn_once(
            "late",
            f"DistributedDataParallel({type(ddp.module).__name__}) was constructed before "
            "torch._inductor.config.ddp_fusion was set, so its gradients are not fused: DDP's own "
            "reducer sends them. Set ddp_fusion before you construct it.",
            about=ddp,
        )
    return original(ddp)
