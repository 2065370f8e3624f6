"""The results of a run as a page. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benches.results import figures_table, overview, table
from gpu_checks.machine import Machine
from gpu_checks.parts import Part
from gpu_checks.processes import Result


def as_markdown(
    machine: Machine,
    parts: Sequence[Part],
    results: Mapping[str, Result],
    *,
    date: str,
    command: str,
) -> str:
    """The page.

    Args:
        machine: what the parts ran on.
        parts: all that were to run.
        results: of those that did, by name.
        date: in ISO's form.
        command: that repeats it.
    """
    memory = f", {machine.memory_gib:g} GiB" if machine.memory_gib else ""
    nccl = f", NCCL {machine.nccl}" if machine.nccl else ""
    triton = f", Triton {machine.triton}" if machine.triton else ""
    versions = f"torch {machine.torch}{nccl}{triton}, Python {machine.python}"
    measured = [part for part in parts if part.measure and part.name in results]
    blocks = [
        f"# On {machine.name}",
        f"{date}, {machine.name}{memory}, {versions}, code {machine.code}.",
        f"    {command}",
        summary(parts, results),
        overview(row for part in measured for row in results[part.name].rows),
    ]
    for part in measured:
        blocks += [f"## {part.name}", part.words, figures_table(results[part.name].rows)]
    blocks += ["## Parts", _list_of_parts(parts, results)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def summary(parts: Sequence[Part], results: Mapping[str, Result]) -> str:
    """How many parts are right, in a sentence."""
    right = sum(result.is_right for result in results.values())
    missing = [part.name for part in parts if part.name not in results]
    wrong = [name for name, result in results.items() if not result.is_right]
    text = f"{right} of {len(parts)} parts are as they must be."
    if wrong:
        text += f" Wrong: {', '.join(wrong)}."
    if missing:
        text += f" Not run: {', '.join(missing)}."
    return text


def _list_of_parts(parts: Sequence[Part], results: Mapping[str, Result]) -> str:
    """A row for each part, and what its trainings beside eager DDP have to say."""
    lines, words = [], []
    for part in parts:
        result = results.get(part.name)
        if result is None:
            lines.append([f"`{part.name}`", "not run", "", "", ""])
            continue
        wrong = sum(not row.is_right for row in result.rows)
        word = "right" if result.is_right else f"{wrong} of {len(result.rows)} rows are wrong"
        ranks = f"{part.ranks} over {result.backend}"
        cells = [result.failure or word, ranks, str(len(result.rows)), f"{result.seconds:.0f}"]
        lines.append([f"`{part.name}`", *cells])
        for row in result.rows if part.checks else ():
            kind = "" if row.is_right else "**wrong** "
            words += [f"* `{part.name}`, {row.title}: {kind}{row.words}"] if row.words else []
    shown = table(["part", "result", "ranks", "rows", "s"], lines, words=3)
    return "\n".join([shown, "", *words]) if words else shown
