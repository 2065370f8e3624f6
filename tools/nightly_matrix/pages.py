"""The table as Markdown, as HTML, and for JUnit."""

from __future__ import annotations

import html
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from xml.etree import ElementTree

from nightly_matrix.cells import Cell
from nightly_matrix.outcomes import KINDS, is_worse
from nightly_matrix.results import Result
from nightly_matrix.table import Entry, Table
from testing.scenarios.entries import MODES, Scenario

GROUPS: Final[Mapping[str, str]] = {
    "loops": "Training loops",
    "backwards": "Backwards and kept gradients",
    "parts": "Models in several graphs",
    "groups": "Several DDP modules",
    "instances": "Modules that share graphs, subclasses",
    "ranks": "Ranks that differ, and errors",
    "foreign": "Collectives of the model's own",
    "tensor": "Tensor parallelism",
    "pipeline": "Pipeline parallelism",
    "sharded": "FSDP and HSDP",
    "unused": "Parameters without a gradient",
    "shapes": "Models, shapes and recompilation",
    "reducer": "Options and copies of a DDP module",
    "joining": "Uneven inputs",
    "buffers": "Buffers",
    "precision": "Dtypes and mixed precision",
    "hooks": "Hooks",
    "bucket_hooks": "Communication hooks that are called with buckets",
    "optimizers": "Optimizers",
}
"""Titles of the kept page's groups, in order, by the module that trains."""


@dataclass(frozen=True)
class Row:
    """A scenario in one dtype: its cells in all modes."""

    scenario: Scenario
    dtype: str
    entries: Mapping[str, Entry]

    @property
    def is_same(self) -> bool:
        """Whether all modes come out alike, in the same words."""
        return len(set(self.entries.values())) == 1 and len(self.entries) == len(MODES)

    @property
    def words(self) -> str:
        """Each text once, with its mode where modes differ."""
        if self.is_same:
            return next(iter(self.entries.values())).words
        texts = [f"{mode}: {entry.words}" for mode, entry in self.entries.items() if entry.words]
        return " ".join(texts)


def rows_of(cells: Sequence[Cell], entries: Mapping[str, Entry]) -> list[Row]:
    """The rows of the table, in the order of the cells; those without any entry are left out."""
    found: dict[tuple[Scenario, str], dict[str, Entry]] = {}
    for cell in cells:
        if cell.name in entries:
            row = found.setdefault((cell.scenario, cell.dtype), {})
            row[cell.mode] = entries[cell.name]
    return [Row(scenario, dtype, row) for (scenario, dtype), row in found.items()]


def entries_of(results: Mapping[str, Result]) -> dict[str, Entry]:
    """What a table says of the results, by cell."""
    return {
        name: Entry(result.outcome.kind, result.outcome.words) for name, result in results.items()
    }


def counted(entries: Mapping[str, Entry]) -> str:
    """``3 equal, 1 refused``."""
    counts = Counter(entry.outcome for entry in entries.values())
    return "; ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]) or "nothing"


def as_markdown(cells: Sequence[Cell], entries: Mapping[str, Entry]) -> str:
    """A table with one line a scenario and dtype."""
    lines = [
        f"| parallelism | ranks | dtype | feature | {' | '.join(MODES)} | words |",
        f"| --- | ---: | --- | --- |{' --- |' * len(MODES)} --- |",
    ]
    for row in rows_of(cells, entries):
        kinds = [_kind(row, mode) for mode in MODES]
        scenario = row.scenario
        columns = [scenario.parallelism, str(scenario.ranks), row.dtype, scenario.title, *kinds]
        lines.append(f"| {' | '.join([*columns, escaped(row.words)])} |")
    return "\n".join(lines) + "\n"


def kept_page(cells: Sequence[Cell], table: Table) -> str:
    """``docs/works.md``: a table for each group, with notes below it."""
    text = (
        f"Made by `make nightly ARGS=--keep` on torch {table.torch}: {len(table.entries)} cells, "
        f"{counted(table.entries)}. Each cell trains the same model from the same seeds with eager "
        "DDP and under the flag, in its own processes, and compares gradients after each backward, "
        "parameters and buffers on every rank. A line holds for both modes unless it names one, "
        "and for fp32 unless it names other dtypes."
    )
    groups: dict[str, list[Row]] = {name: [] for name in GROUPS}
    for row in rows_of(cells, table.entries):
        groups.setdefault(_group(row.scenario), []).append(row)
    tables = "\n".join(_group_table(name, rows) for name, rows in groups.items() if rows)
    return f"""# What works

{_filled(text)}

* **equal**: as eager DDP, and fused.
* **equal, unfused**: as eager DDP; not all of it is fused, and a warning says so in these words.
* **refused**: every rank raised an error in these words, before the first step was done.
* **broken**: all else.

[support.md](support.md) has a summary.

{tables}"""


def _group(scenario: Scenario) -> str:
    """``loops`` of ``testing.scenarios.features.loops:plain``."""
    return scenario.target.partition(":")[0].rpartition(".")[2]


def _group_table(name: str, rows: Sequence[Row]) -> str:
    """One line for a scenario, and more where its dtypes differ; each text once, as a note."""
    dtypes: dict[tuple[Scenario, str, str], list[str]] = {}
    for row in rows:
        words = without_classes(row.words)
        dtypes.setdefault((row.scenario, _result(row), words), []).append(row.dtype)
    notes = list(dict.fromkeys(words for _, _, words in dtypes if words))
    lines = [
        f"## {GROUPS.get(name, name)}",
        "",
        "| what | ranks | dtypes | result | note |",
        "| --- | ---: | --- | --- | ---: |",
    ]
    for (scenario, result, words), names in dtypes.items():
        note = str(notes.index(words) + 1) if words else ""
        shown = "" if scenario.dtypes == ("fp32",) else ", ".join(names)
        columns = [scenario.title, str(scenario.ranks), shown, result, note]
        lines.append(f"| {' | '.join(columns)} |")
    lines += [""] if notes else []
    for number, words in enumerate(notes, start=1):
        lines.append(_filled(escaped(words), first=f"{number}. ", rest="   "))
    return "\n".join(lines) + "\n"


def _filled(text: str, first: str = "", rest: str = "") -> str:
    """A paragraph of Markdown.

    Args:
        text: one line.
        first: what the first line begins with.
        rest: what the others do.
    """
    return textwrap.fill(
        text,
        100,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _result(row: Row) -> str:
    """``equal``, or ``concat: equal; coalesced: refused``."""
    kinds = {mode: entry.outcome for mode, entry in row.entries.items()}
    if len(kinds) == len(MODES) and len(set(kinds.values())) == 1:
        return next(iter(kinds.values()))
    return "; ".join(f"{mode}: {kind}" for mode, kind in kinds.items())


def without_classes(words: str) -> str:
    """Without the classes of the models that the matrix trains: they tell a reader nothing."""
    ddp = r"DistributedDataParallel\(_?[A-Z]\w*\)"
    words = re.sub(ddp, "DistributedDataParallel(model)", words)
    return re.sub(r"\b(DDP \d+) \(_?[A-Z]\w*\)", r"\1", words)


def escaped(words: str) -> str:
    """Plain text for a cell of a Markdown table."""
    return re.sub(r"([|\\*_`<>\[\]])", r"\\\1", words)


def _kind(row: Row, mode: str) -> str:
    return row.entries[mode].outcome if mode in row.entries else ""


_STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse } td, th { border: 1px solid #ccc; padding: .3em .6em;
text-align: left; vertical-align: top } th { background: #eee }
.equal { background: #d9f2d9 } .unfused { background: #eef7c9 } .refused { background: #fdf0c4 }
.broken { background: #f8d0d0 } .worse { outline: 3px solid #c00 } pre { white-space: pre-wrap;
font-size: 12px; max-width: 120ch }
"""


def as_html(cells: Sequence[Cell], results: Mapping[str, Result], kept: Table, summary: str) -> str:
    """A page that needs nothing beside it.

    Args:
        cells: in the order of the table.
        results: of some of them.
        kept: what they were before.
        summary: a sentence for the top.
    """
    body = [f"<p>{html.escape(summary)}</p>", "<table>", "<tr>"]
    heads = ["parallelism", "ranks", "dtype", "feature", *MODES, "words"]
    body += [f"<th>{head}</th>" for head in heads] + ["</tr>"]
    by_row = {(cell.scenario, cell.dtype, cell.mode): cell for cell in cells}
    for row in rows_of(cells, entries_of(results)):
        scenario = row.scenario
        body.append("<tr>")
        for text in (scenario.parallelism, str(scenario.ranks), row.dtype, scenario.title):
            body.append(f"<td>{html.escape(text)}</td>")
        row_cells = [by_row.get((scenario, row.dtype, mode)) for mode in MODES]
        found = [results.get(cell.name) if cell else None for cell in row_cells]
        body += [_html_kind(result, kept) for result in found]
        details = "".join(_html_detail(result) for result in found if result)
        body.append(f"<td>{html.escape(row.words)}{details}</td></tr>")
    title = "ddp_fusion beside eager DDP"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1>\n"
        + "\n".join([*body, "</table>"])
        + "\n</html>\n"
    )


def _html_kind(result: Result | None, kept: Table) -> str:
    if result is None:
        return "<td></td>"
    kind = result.outcome.kind
    style = kind.removeprefix("equal, ")
    entry = kept.entries.get(result.cell)
    change = "" if entry is None or entry.outcome == kind else f"<br>was: {entry.outcome}"
    if entry is not None and is_worse(kind, entry.outcome):
        style += " worse"
    return f'<td class="{style}" title="{result.seconds:g} s">{kind}{change}</td>'


def _html_detail(result: Result) -> str:
    if not result.outcome.detail:
        return ""
    name, detail = html.escape(result.cell), html.escape(result.outcome.detail)
    return f"<details><summary>{name}</summary><pre>{detail}</pre></details>"


def as_junit(cells: Sequence[Cell], results: Mapping[str, Result], kept: Table) -> str:
    """A JUnit file: what is broken or worse than the kept table fails, a refusal is skipped."""
    suite = ElementTree.Element("testsuite", name="nightly")
    counts: Counter[str] = Counter()
    for cell in cells:
        result = results.get(cell.name)
        if result is None:
            continue
        place = f"nightly.{cell.scenario.parallelism}.{cell.mode}.{cell.dtype}"
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=place,
            name=cell.scenario.feature,
            time=f"{result.seconds:g}",
        )
        verdict = _junit_verdict(result, kept)
        counts[verdict] += 1
        if verdict:
            words = f"{result.outcome.kind}: {result.outcome.words}"
            mark = ElementTree.SubElement(case, verdict, message=_printable(words))
            mark.text = _printable(result.outcome.detail)
    suite.attrib |= {
        "tests": str(len(suite)),
        "failures": str(counts["failure"]),
        "skipped": str(counts["skipped"]),
        "errors": "0",
        "time": f"{sum(results[c.name].seconds for c in cells if c.name in results):.1f}",
    }
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _junit_verdict(result: Result, kept: Table) -> str:
    kind, entry = result.outcome.kind, kept.entries.get(result.cell)
    if kind == "broken" or (entry is not None and is_worse(kind, entry.outcome)):
        return "failure"
    return "skipped" if kind == "refused" else ""


def _printable(text: str) -> str:
    """Without the characters that XML cannot hold."""
    return re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd]", "?", text)
