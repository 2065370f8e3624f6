"""Draws the rooms of a package as SVG: boxes on floors, arrows for imports."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from structure import Room

WIDTH, HEIGHT = 232, 76
"""Of a box."""
GAP, STOREY = 56, 128
"""Between boxes, and from floor to floor."""
MARGIN, LEGEND = 70, 150
LETTERS: Final = 36
"""That fit beside each other in a box."""

FILE: Final = re.compile(r"fusion_passes/(\w+)")
ROW: Final = re.compile(r"^\| (`fusion_passes/.*?) \| (.*) \|$", re.MULTILINE)

STYLE: Final = """\
  text { font-family: Helvetica, Arial, sans-serif; fill: #1c2733; }
  .name { font-size: 15px; font-weight: bold; }
  .what, .note { font-size: 11px; }
  .box { fill: #f4f7fa; stroke: #5b6b7b; stroke-width: 1.2; }
  .import { fill: none; stroke: #5b6b7b; stroke-width: 1.4; }
  .implied { fill: none; stroke: #c9d3dc; stroke-width: 1; }
"""

HEAD: Final = """\
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" \
orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="context-stroke"/></marker></defs>"""


@dataclass(frozen=True)
class Box:
    """Where a room is drawn: its upper left corner, in pixels."""

    x: float
    y: float

    @property
    def middle(self) -> float:
        return self.x + WIDTH / 2


def purposes_of(page: str) -> dict[str, str]:
    """What each room does, from the page's table of rooms; rooms that share a row share its
    sentence in their order, one part each."""
    purposes: dict[str, str] = {}
    for row in ROW.finditer(page):
        rooms = FILE.findall(row[1])
        parts = row[2].replace("`", "").split("; ", len(rooms) - 1)
        purposes |= zip(rooms, parts, strict=False)
    return purposes


def floors_of(rooms: Sequence[Room]) -> dict[str, int]:
    """The floor of each room: above all that it imports, 0 for what imports nothing.

    Args:
        rooms: each after those that it imports; an import of a later one counts for nothing.
    """
    floors: dict[str, int] = {}
    for room in rooms:
        below = [floors[name] for name in room.imports if name in floors]
        floors[room.name] = max(below, default=-1) + 1
    return floors


def implied_imports(rooms: Sequence[Room]) -> set[tuple[str, str]]:
    """The imports of what other imports bring along, by whatever way."""
    reached: dict[str, set[str]] = {}
    implied = set()
    for room in rooms:
        known = [name for name in room.imports if name in reached]
        by_others = {other for name in known for other in reached[name]}
        implied |= {(room.name, name) for name in room.imports if name in by_others}
        reached[room.name] = by_others | set(room.imports)
    return implied


def draw(rooms: Sequence[Room], page: str) -> str:
    """The rooms as SVG.

    Args:
        rooms: each after those that it imports.
        page: ``docs/architecture.md``, which says what they do; empty for a package without
            one.
    """
    boxes, width, height = _boxes(floors_of(rooms))
    purposes = purposes_of(page)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}">',
            f"<style>\n{STYLE}</style>",
            HEAD,
            f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
            *_arrows(rooms, boxes),
            *(line for name, box in boxes.items() for line in _box(name, box, purposes)),
            *_legend(height),
            "</svg>",
            "",
        ]
    )


def _boxes(floors: Mapping[str, int]) -> tuple[dict[str, Box], float, float]:
    """The boxes, and the size of the picture."""
    by_floor = [
        [n for n in floors if floors[n] == level] for level in range(max(floors.values()) + 1)
    ]
    widest = max(map(len, by_floor)) * (WIDTH + GAP) - GAP
    boxes = {}
    for level, names in enumerate(by_floor):
        start = LEGEND + MARGIN + (widest - len(names) * (WIDTH + GAP) + GAP) / 2
        for place, name in enumerate(names):
            y = MARGIN / 2 + (len(by_floor) - 1 - level) * STOREY
            boxes[name] = Box(start + place * (WIDTH + GAP), y)
    height = MARGIN + (len(by_floor) - 1) * STOREY + HEIGHT
    return boxes, LEGEND + 2 * MARGIN + widest, height


def _arrows(rooms: Sequence[Room], boxes: Mapping[str, Box]) -> Iterator[str]:
    """Faint ones first, since the others are drawn over them."""
    implied = implied_imports(rooms)
    pairs = [(room.name, other) for room in rooms for other in room.imports]
    for pair in sorted(pairs, key=lambda pair: pair not in implied):
        kind = "implied" if pair in implied else "import"
        path = _curve(boxes[pair[0]], boxes[pair[1]])
        title = f"<title>{escape(pair[0])} imports {escape(pair[1])}</title>"
        yield f'<path class="{kind}" d="{path}" marker-end="url(#head)">{title}</path>'


def _curve(start: Box, end: Box) -> str:
    """From a box down to another; past the boxes of the floors between, on the right."""
    x, y = start.middle, start.y + HEIGHT
    floors = abs(end.y - start.y) / STOREY
    if floors <= 1:
        return f"M{x:g},{y:g} L{end.middle:g},{end.y:g}"
    x, y = start.x + WIDTH, start.y + HEIGHT / 2
    out = max(x, end.x + WIDTH) + 12 * floors
    target = end.x + WIDTH - 30
    return f"M{x:g},{y:g} C{out:g},{y + 20:g} {out:g},{end.y - 70:g} {target:g},{end.y:g}"


def _box(name: str, box: Box, purposes: Mapping[str, str]) -> Iterator[str]:
    yield (
        f'<rect class="box" x="{box.x:g}" y="{box.y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
    )
    x = box.x + 22
    yield f'<text class="name" x="{x:g}" y="{box.y + 20:g}">{escape(name)}</text>'
    for number, line in enumerate(textwrap.wrap(purposes.get(name, ""), LETTERS)):
        y = box.y + 36 + 14 * number
        yield f'<text class="what" x="{x:g}" y="{y:g}">{escape(line)}</text>'


def _legend(height: float) -> Iterator[str]:
    lines = ("An arrow is an import; a faint", "one is implied by the others.")
    for number, line in enumerate(lines):
        y = height - MARGIN / 2 - 15 * (len(lines) - 1 - number)
        yield f'<text class="note" x="16" y="{y:g}">{escape(line)}</text>'
