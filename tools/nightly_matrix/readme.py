"""README's table, between its marks."""

from __future__ import annotations

BEGIN = "<!-- works: made by tools/nightly.py --readme from docs/works.json -->"
END = "<!-- works: end -->"


def with_table(readme: str, table: str) -> str:
    """README with the table in it.

    Args:
        readme: the whole text.
        table: lines of Markdown.

    Raises:
        ValueError: README does not hold each mark once, in order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in before + after:
        raise ValueError(f"README must hold {BEGIN!r} and then {END!r}, each once. Add them.")
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"
