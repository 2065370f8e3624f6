"""Asks the installed torch for every private name of it that the package uses, in seconds.

The names are read from the package's code (imports, attributes, arguments, and the dotted names of
fusion_passes/install/patches.py), so a name that is new in the code is checked without being listed
anywhere. Undocumented attributes of DDP modules, of Inductor's IR and of its graphs count as
private. One line each: "ok"; "-" where a name is neither there nor needed on this version;
"GONE" and who needs it. The exit status is 1 if a name is gone, or if the tool cannot know what has
it (tools/torch_names/declared.py says what the code does not).

    python tools/check_torch.py
    python tools/check_torch.py --quiet             # prints what is wrong, and nothing else
    python tools/check_torch.py --page              # docs/patches.md, from the registry of patches
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from command_line import parser_of
from torch_names import declared
from torch_names.lookups import Found
from torch_names.package import read_package
from torch_names.page import page
from torch_names.reading import read

PACKAGE = Path(__file__).parent.parent / "fusion_passes"

_DDP = "torch.nn.parallel.DistributedDataParallel."

OK, NOT_HERE, GONE, UNKNOWN, STALE = "ok", "-", "GONE", "UNKNOWN", "STALE"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was found; 1 if a name is gone."""
    parser = parser_of(__doc__)
    parser.add_argument("--quiet", action="store_true", help="print only what is wrong")
    parser.add_argument("--page", action="store_true", help="print docs/patches.md, check nothing")
    options = parser.parse_args(arguments)
    if options.page:
        from fusion_passes.install.patches import PATCHES

        print(page(PATCHES), end="")
        return 0
    lines = list(check(PACKAGE, str(torch.__version__)))
    wrong = [text for kind, text in lines if kind not in (OK, NOT_HERE)]
    for kind, text in lines:
        if kind not in (OK, NOT_HERE) or not options.quiet:
            print(f"{kind:8}{text}")
    print(f"torch {torch.__version__}: {len(lines)} names, {len(wrong) or 'nothing'} wrong")
    return 1 if wrong else 0


def check(root: Path, version: str) -> Iterator[tuple[str, str]]:
    """Ask for all names.

    Args:
        root: the package's folder.
        version: of the installed torch.

    Yields:
        What was found of a name (``"ok"``, ``"GONE"``), and a line of text.
    """
    found = read(read_package(root))
    for name, (is_there, places) in sorted(found.names.items()):
        if not _is_needed(name, version):
            yield NOT_HERE, f"{name}   {_span(name)}"
        elif not is_there:
            yield GONE, f"{name}   needed by {', '.join(places)}"
        elif is_private(name):
            yield OK, name
    for name, places in sorted(found.unknown.items()):
        text = "annotate what has it, or declare it in tools/torch_names/declared.py"
        yield UNKNOWN, f"{name}   in {', '.join(sorted(set(places)))}: {text}"
    for row in _unused(found):
        yield STALE, f"{row} in tools/torch_names/declared.py: no code needs it"


def is_private(name: str) -> bool:
    """Whether a name of torch is not documented."""
    parts = name.split(".")
    return ": " in name or name.startswith(_DDP) or any(part.startswith("_") for part in parts)


def _is_needed(name: str, version: str) -> bool:
    first, end = declared.VERSIONS.get(name, ("", ""))
    return (not first or _numbers(version) >= _numbers(first)) and (
        not end or _numbers(version) < _numbers(end)
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _span(name: str) -> str:
    first, end = declared.VERSIONS[name]
    return f"from torch {first} on" if first else f"before torch {end}"


def _unused(found: Found) -> list[str]:
    rows = {
        *declared.ATTRIBUTES,
        *declared.STANDS_FOR,
        *declared.VALUES_OF_ROOM,
        *declared.WRITTEN_IN,
    }
    return sorted([*(rows - found.declared), *(declared.VERSIONS.keys() - found.names.keys())])


if __name__ == "__main__":
    sys.exit(main())
