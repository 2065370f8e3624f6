"""The package's place among the passes that users give Inductor."""

from __future__ import annotations

from typing import Any, Final

from fusion_passes.install.changes import value_of, write
from fusion_passes.torch_private import CustomGraphPass
from fusion_passes.torch_private.older_torch import PassChain, takes_one_pass

_SLOT: Final = "torch._inductor.config.post_grad_custom_post_pass"


class PassSlot:
    """Puts a pass after those of others, and takes it out again.

    Args:
        own: the pass.
    """

    def __init__(self, own: CustomGraphPass) -> None:
        self._own = own

    def fill(self) -> None:
        """Add the pass where it is missing. Torch keeps the setting for each thread: one may have
        none of it yet, or its user may have put other passes there instead."""
        passes = pass_list(value_of(_SLOT))
        if self._own not in passes:
            write(_SLOT, pass_value([*passes, self._own]))

    def clear(self) -> None:
        """Take the pass out, and leave those of others."""
        others = [item for item in pass_list(value_of(_SLOT)) if item is not self._own]
        write(_SLOT, pass_value(others))


def pass_list(value: Any) -> list[Any]:
    """The passes in the slot, in order.

    Args:
        value: what Inductor takes: a pass, several, or none.
    """
    if isinstance(value, PassChain):
        return list(value.passes)
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]


def pass_value(passes: list[Any]) -> Any:
    """What Inductor takes for several passes, one, or none."""
    if len(passes) <= 1:
        return passes[0] if passes else None
    return PassChain(passes) if takes_one_pass() else list(passes)
