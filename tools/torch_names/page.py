"""docs/patches.md, from the registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fusion_passes.install.patch import Patch

_HEAD: Final = """\
# What is changed in torch

Made from `fusion_passes/install/patches.py` by `python tools/check_torch.py --page`. Nothing else
of torch is replaced, set or added to: `tests/install/test_patches.py` compares this with what
changes. What somebody has put around a replacement since stays when the flag is unset, and goes on
working. What a pass or a lowering writes into the one graph that it works on is not listed, nor are
modes, guards and locks that are held during a call.

`python tools/check_torch.py` asks the installed torch for each private name that the package uses.
"""


def page(patches: Sequence[Patch]) -> str:
    """The page as Markdown.

    Args:
        patches: the registry.
    """
    lines = [_HEAD]
    for span in dict.fromkeys(patch.span for patch in patches):
        lines += [f"## {span.value}\n", "| what | why | made | undone | torch |"]
        lines.append("| --- | --- | --- | --- | --- |")
        lines += [_row(patch) for patch in patches if patch.span is span]
        lines.append("")
    return "\n".join(lines)


def _row(patch: Patch) -> str:
    adds = f", to which is added: {patch.adds}" if patch.adds else ""
    what = f"`{patch.what}`{adds}"
    cells = (what, patch.why, patch.made, patch.undone, ", ".join(patch.checked_on))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
