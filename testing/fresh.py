"""Resets the package, so that a test, a job or a training starts as in a new process."""

from __future__ import annotations

from typing import Any

from testing.state import GLOBALS, Lifetime, value_of


def forget() -> None:
    """Reset the package's state to that after import, undo the changes of the flag and of managed
    modules in torch, and reset Dynamo. Managed modules that still exist are no longer averaged.
    Entries about a process group are kept, because the group's store has their counterparts, and so
    are the results of functions that run once in a process."""
    import torch._dynamo

    from fusion_passes.reducer.backward import reducers
    from fusion_passes.reporting.recording import last_recording
    from fusion_passes.torch_private import inductor_config
    from fusion_passes.torch_private.dynamo import clear_backward_cache

    torch._dynamo.reset()
    inductor_config.ddp_fusion = None
    _renew(reducers)
    reducers.slices.on_change()
    for recording in last_recording:
        recording.abandon()
    for name, lives in GLOBALS.items():
        value = value_of(name)
        if isinstance(value, list | dict) and lives is not Lifetime.GROUP:
            value.clear()
        elif type(value).__module__.startswith("fusion_passes."):
            _renew(value)
    clear_backward_cache()  # Its keys contain names of modules, which are given again.


def _renew(value: Any) -> None:
    """Initialize an object again, except for callbacks."""
    from fusion_passes.reducer.backward import Slices

    kept = {n: v for n, v in vars(value).items() if callable(v) or isinstance(v, Slices)}
    type(value).__init__(value)
    vars(value).update(kept)
