"""The supported versions of torch, and the code that exists only for older ones."""

from __future__ import annotations

import re

from fusion_passes import torch_private
from tests.support.imports import FILES, PACKAGE

SETUP = PACKAGE.parent / "setup.py"

SUPPORTED = 5
"""Number of supported minor releases of torch, the newest ones."""


NEEDED_UP_TO = {
    "PlainEntry": "2.11",
    "has_plain_entries": "2.11",
    "PassChain": "2.12",
    "takes_one_pass": "2.12",
    "LAYOUT_CONSTRAINTS": "2.12",
    "fix_strides_of_lists": "2.12",
    "first_of_list": "2.12",
}
"""The newest torch that needs each of the names in ``older_torch.py``."""


def _range() -> tuple[int, int]:
    """The oldest supported minor release of torch 2, and the first unsupported one after it."""
    found = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', SETUP.read_text())
    assert found is not None, "setup.py says which torch it needs"
    return int(found[1]), int(found[2])


def test_five_releases_are_supported() -> None:
    oldest, end = _range()
    assert end - oldest == SUPPORTED, "raise the lower bound in setup.py with the upper one"
    checked = re.findall(r"2\.\d+\.0", torch_private.__doc__ or "")
    assert checked[0] == f"2.{oldest}.0"
    assert checked[-1] == f"2.{end - 1}.0"


def test_what_only_older_torch_needed_is_gone() -> None:
    path = PACKAGE / "torch_private" / "older_torch.py"
    if not path.exists():
        return
    oldest = _range()[0]
    gone = [name for name, last in NEEDED_UP_TO.items() if int(last.split(".")[1]) < oldest]
    assert not gone, f"no supported torch needs {', '.join(gone)} of {path.name}: delete them"
    assert NEEDED_UP_TO, f"nothing is left in {path.name}: delete it"


def test_each_name_for_older_torch_says_how_long_it_stays() -> None:
    from fusion_passes.torch_private import older_torch

    own = {
        name
        for name, value in vars(older_torch).items()
        if getattr(value, "__module__", "") == older_torch.__name__
    }
    public = {name for name in own if not name.startswith("_")}
    assert public <= NEEDED_UP_TO.keys() <= vars(older_torch).keys()


TELLING = ("measure.py", "registered_memory.py", "report.py")
"""Files that record the version of torch (of a profile, a report, an error), and decide nothing by
it."""


def test_other_code_asks_for_no_version_of_torch() -> None:
    asking = [
        path.name
        for path in FILES
        if "torch.__version__" in path.read_text() and path.name not in ("older_torch.py", *TELLING)
    ]
    assert asking == []
