"""The results of a run as a page. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from benches.results import Row, figures_table, overview, table
from gpu_checks.machine import Machine
from gpu_checks.parts import Part
from gpu_checks.sites import Result
from testing.scenarios.entries import MODES

TITLES: Final = {
    "norms": "Gradients of norms",
    "steps": "Steps and peak memory",
    "starts": "Time to the first step, and the host's",
    "graphs": "CUDA graphs",
    "copies": "Kernels that move gradients",
}
"""By group."""

NOTES: Final = {
    "norms": "One rank, 8192 x 768, beside eager DDP.",
    "steps": "Two ranks, bf16 autocast, forward and backward, in rounds: gpt2 has 124 million "
    "parameters and 8 x 1024 tokens a rank, resnet is ResNet-50 with 64 images, channels last. "
    "NCCL sends through sockets. Both ranks of one GPU compute on it, with DDP or without. "
    "*Exposed ms* is what a step takes beyond no DDP; *25 %* and *75 %* are quartiles of rounds. "
    "`DDP, one graph` is DDP's own reducer without DDPOptimizer. `auto` plans for the network on "
    "which it starts, and is timed there alone.",
    "starts": "One rank, a small GPT, from the wrapping in DDP to the end of the first step, in a "
    "new process: with an empty compiler cache, and with what that has left. *Host* is the time "
    "until a step is launched.",
    "graphs": 'One rank, a small GPT with `mode="reduce-overhead"`: CUDA graphs of a forward and '
    "its backward.",
    "copies": "Read and written bytes a second, over those of a plain copy of a large tensor in "
    "the same rounds.",
}
"""By group, what is to be said of its table."""


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
    blocks = [
        f"# On {machine.name}",
        f"{date}, {machine.name}{memory}, {versions}, code {machine.code}.",
        f"    {command}",
        summary(parts, results),
        overview(rows_of("steps", parts, results)),
    ]
    for group, title in TITLES.items():
        if rows := rows_of(group, parts, results):
            blocks += [f"## {title}", NOTES[group], figures_table(rows)]
    blocks += [*_correctness(parts, results), "## Parts", _list_of_parts(parts, results)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def rows_of(group: str, parts: Sequence[Part], results: Mapping[str, Result]) -> list[Row]:
    """All rows of a group."""
    chosen = [part for part in parts if part.group == group and part.name in results]
    return [row for part in chosen for row in results[part.name].rows]


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


def _correctness(parts: Sequence[Part], results: Mapping[str, Result]) -> Iterator[str]:
    """A row for each training, a column for each mode and number of ranks."""
    chosen = [part for part in parts if part.group == "correctness" and part.name in results]
    if not chosen:
        return
    order = [*MODES, "auto"]
    columns = sorted({(part.ranks, order.index(part.mode)) for part in chosen})
    cells: dict[str, dict[tuple[int, int], Row]] = {}
    for part in chosen:
        for row in results[part.name].rows:
            cells.setdefault(row.title, {})[part.ranks, order.index(part.mode)] = row
    backends = {part.ranks: results[part.name].backend for part in chosen}
    over = [f"{_ranks(ranks)} over {backend}" for ranks, backend in sorted(backends.items())]
    yield "## Beside eager DDP"
    yield f"Gradients after each backward, parameters and buffers: {', '.join(over)}."
    names = {column: f"`{order[column[1]]}`, {_ranks(column[0])}" for column in columns}
    yield table(
        ["", *names.values()],
        [[title, *(_outcome(rows.get(c)) for c in columns)] for title, rows in cells.items()],
        words=1 + len(columns),
    )
    yield "\n".join(
        f"* {title}, {names[column]}: {row.words}"
        for title, rows in cells.items()
        for column, row in rows.items()
        if row.words
    )


def _ranks(ranks: int) -> str:
    return "one rank" if ranks == 1 else f"{ranks} ranks"


def _outcome(row: Row | None) -> str:
    if row is None:
        return ""
    return "equal" if row.is_right else "**wrong**"


def _list_of_parts(parts: Sequence[Part], results: Mapping[str, Result]) -> str:
    rows = []
    for part in parts:
        result = results.get(part.name)
        if result is None:
            rows.append([f"`{part.name}`", "not run", ""])
            continue
        wrong = sum(not row.is_right for row in result.rows)
        word = "right" if result.is_right else f"{wrong} of {len(result.rows)} rows are wrong"
        rows.append([f"`{part.name}`", result.failure or word, f"{result.seconds:.0f}"])
    return table(["part", "result", "s"], rows, words=2)
