"""Where Inductor takes passes of others, after its own on a post-grad graph."""

from __future__ import annotations

from typing import Any, Final

from fusion_passes.torch_private.older_torch import PassChain, takes_one_pass

SLOT: Final = "post_grad_custom_post_pass"
"""Name of the option of Inductor."""


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
