"""Where the time of a start has gone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from types import MappingProxyType
from typing import Final

from fusion_passes.torch_private.profiling import seconds_by_name

_NAMES: Final = MappingProxyType(
    {
        "dynamo": (("_compile.compile_inner",), ("OutputGraph.call_user_compiler",)),
        "aot_autograd": (("create_aot_dispatcher_function",), ("compile_fx_inner",)),
        "inductor": (("compile_fx_inner",), ("async_compile.wait",)),
        "kernels": (("async_compile.wait",), ()),
    }
)
"""For each phase torch's names of what is counted, and of what is a part of that and is not."""


def startup_seconds(pass_names: Collection[str]) -> dict[str, float]:
    """Seconds that this process has spent compiling, by phase, as torch counts them.

    ``dynamo`` traces Python, ``aot_autograd`` traces forward and backward, ``inductor`` makes code
    of them, ``kernels`` is the wait for compilers; ``passes``, a part of ``inductor``, is this
    package. What comes from a cache takes no time where it was made.

    Args:
        pass_names: the names of the package's passes.
    """
    known = seconds_by_name()

    def total(names: Iterable[str]) -> float:
        return sum(known.get(name, 0.0) for name in names)

    phases = {
        phase: max(0.0, total(names) - total(parts)) for phase, (names, parts) in _NAMES.items()
    }
    return phases | {"passes": total(f"pass.post_grad_passes.{name}" for name in pass_names)}
