"""Lets a test, a job or a training begin as in a new process."""

from __future__ import annotations

from typing import Any

from testing.state import GLOBALS, Lifetime, value_of


def forget() -> None:
    """Set the package's state back to what it was after import, undo what the flag and modules have
    changed in torch, and forget what was compiled. Modules that still exist average no gradients
    any more. State of a process group is kept, because the group's store has it too, and so is the
    record of actions that a process takes once."""
    import torch._dynamo

    from fusion_passes.reducer.backward import reducers
    from fusion_passes.reporting.recording import last_recording
    from fusion_passes.torch_private import inductor_config
    from fusion_passes.torch_private.dynamo import clear_backward_cache

    torch._dynamo.reset()
    inductor_config.ddp_fusion = None
    renew(reducers)
    reducers.on_change()
    for recording in last_recording:
        recording.abandon()
    for name, lives in GLOBALS.items():
        value = value_of(name)
        if isinstance(value, list | dict) and lives is not Lifetime.GROUP:
            value.clear()
        elif type(value).__module__.startswith("fusion_passes."):
            renew(value)
    clear_backward_cache()  # Its graphs are known by names that modules get anew.


def renew(value: Any) -> None:
    """Set the attributes of an object back, but for the functions that it was given to call."""
    fresh = vars(type(value)())
    vars(value).update({name: new for name, new in fresh.items() if not callable(new)})
