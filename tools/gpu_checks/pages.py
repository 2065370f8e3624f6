"""The results of a run as a page. Nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gpu_checks.machine import Machine
from gpu_checks.parts import Part
from gpu_checks.results import Result, Row
from testing.scenarios.entries import MODES

AUTO: Final = "auto"

TITLES: Final = {
    "norms": "Gradients of norms",
    "steps": "Steps and peak memory",
    "starts": "Time to the first step, and the host's",
    "graphs": "CUDA graphs",
    "copies": "Kernels that move gradients",
    "trainers": "Trainers",
}

NOTES: Final = {
    "norms": "One rank, 8192 x 768, beside eager DDP; *backward ms* is the GPU's time, with the "
    "host ahead.",
    "steps": "Two ranks, bf16 autocast, forward and backward, in rounds: gpt2 has 124 million "
    "parameters and 8 x 1024 tokens a rank, resnet is ResNet-50 with 64 images, channels last. "
    "NCCL sends through sockets. Both ranks of one GPU compute on it, with DDP or without. "
    "*Exposed ms* is what a step takes beyond no DDP; *least* and *most* are of rounds. Eager "
    "DDP's forward is compiled, without DDPOptimizer. `auto` plans for the network on which it "
    "starts, and is timed there alone.",
    "starts": "One rank, a small GPT, from the wrapping in DDP to the end of the first step, in a "
    "new process: with an empty compiler cache, and with what that has left. *Host* is the time "
    "until a step is launched.",
    "graphs": 'One rank, a small GPT with `mode="reduce-overhead"`: CUDA graphs of a forward and '
    "its backward.",
    "copies": "Read and written bytes a second, over those of a plain copy of a large tensor in "
    "the same rounds.",
    "trainers": "The scripts of examples/trainers under `torchrun`, with nothing but the flag: by "
    "how many millionths a weight differs after 8 steps, at most, and all-reduces a backward.",
}

RATIO: Final = "time over no DDP"
PEAK: Final = "peak over no DDP"


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
    triton = f", Triton {machine.triton}" if machine.triton else ""
    nccl = f", NCCL {machine.nccl}" if machine.nccl else ""
    if machine.torchs_nccl not in ("", machine.nccl):
        nccl += f" (torch's own is {machine.torchs_nccl})"
    memory = f", {machine.memory_gib:g} GiB" if machine.memory_gib else ""
    versions = f"torch {machine.torch}{nccl}{triton}, Python {machine.python}"
    lines = [
        f"# On {machine.name}",
        "",
        f"{date}, {machine.name}{memory}, {versions}, code {machine.code}.",
        "",
        f"    {command}",
        "",
        f"{summary(parts, results)}",
        "",
        *_headline(parts, results),
        *(line for group in TITLES for line in _figures(group, parts, results)),
        *_correctness(parts, results),
        *_list_of_parts(parts, results),
    ]
    return "\n".join(lines).rstrip() + "\n"


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


def _headline(parts: Sequence[Part], results: Mapping[str, Result]) -> Iterator[str]:
    """A row for each model and network, a column for each method."""
    cases: dict[str, dict[str, Row]] = {}
    for part in parts:
        for row in results[part.name].rows if part.name in results else ():
            case, _, method = row.title.partition(": ")
            if part.group == "steps" and RATIO in row.figures:
                cases.setdefault(case, {})[method] = row
    methods = list(dict.fromkeys(name for rows in cases.values() for name in rows))
    if not methods:
        return
    yield "Time of a step over no DDP; in brackets, peak memory over no DDP."
    yield ""
    plain, others = methods[0], methods[1:]
    yield from _table(
        ["two ranks", f"{plain}, ms", *others],
        [
            [case, number(rows[plain].figures["ms"]), *(_in_short(rows.get(m)) for m in others)]
            for case, rows in cases.items()
        ],
        right=len(methods),
    )
    yield ""


def _in_short(row: Row | None) -> str:
    if row is None or row.figures[RATIO] is None:
        return ""
    peak = number(row.figures[PEAK])
    wrong = "" if row.is_right else " **wrong**"
    return f"{number(row.figures[RATIO])}{f' ({peak})' if peak else ''}{wrong}"


def _correctness(parts: Sequence[Part], results: Mapping[str, Result]) -> Iterator[str]:
    """A row for each training, a column for each mode and number of ranks."""
    chosen = [part for part in parts if part.group == "correctness" and part.name in results]
    if not chosen:
        return
    there = {(part.mode, part.ranks) for part in chosen}
    columns = sorted(there, key=lambda column: (column[1], [*MODES, AUTO].index(column[0])))
    cells: dict[str, dict[tuple[str, int], Row]] = {}
    for part in chosen:
        for row in results[part.name].rows:
            cells.setdefault(row.title, {})[part.mode, part.ranks] = row
    yield "## Beside eager DDP"
    yield ""
    backends = {part.ranks: results[part.name].backend for part in chosen}
    over = [f"{_ranks(ranks)} over {backend}" for ranks, backend in sorted(backends.items())]
    yield f"Gradients after each backward, parameters and buffers: {', '.join(over)}."
    yield ""
    yield from _table(
        ["", *(f"`{mode}`, {_ranks(ranks)}" for mode, ranks in columns)],
        [
            [title, *(_outcome(rows.get(column)) for column in columns)]
            for title, rows in cells.items()
        ],
    )
    yield ""
    for title, rows in cells.items():
        for (mode, ranks), row in rows.items():
            if row.words:
                yield f"* {title}, `{mode}`, {_ranks(ranks)}: {row.words}"
    yield ""


def _ranks(ranks: int) -> str:
    return "one rank" if ranks == 1 else f"{ranks} ranks"


def _outcome(row: Row | None) -> str:
    if row is None:
        return ""
    return "equal" if row.is_right else "**wrong**"


def _figures(group: str, parts: Sequence[Part], results: Mapping[str, Result]) -> Iterator[str]:
    rows = [
        row
        for part in parts
        if part.group == group and part.name in results
        for row in results[part.name].rows
    ]
    if not rows:
        return
    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    yield f"## {TITLES[group]}"
    yield ""
    yield NOTES[group]
    yield ""
    yield from _table(
        ["", *names, "remarks"],
        [
            [
                row.title,
                *(number(row.figures.get(name)) for name in names),
                f"{'' if row.is_right else '**wrong** '}{row.words}",
            ]
            for row in rows
        ],
        right=len(names),
    )
    yield ""


def _list_of_parts(parts: Sequence[Part], results: Mapping[str, Result]) -> Iterator[str]:
    yield "## Parts"
    yield ""
    rows = []
    for part in parts:
        result = results.get(part.name)
        if result is None:
            rows.append([f"`{part.name}`", "", "not run"])
        else:
            wrong = sum(not row.is_right for row in result.rows)
            word = "right" if result.is_right else f"{wrong} of {len(result.rows)} rows are wrong"
            rows.append([f"`{part.name}`", f"{result.seconds:.0f}", result.failure or word])
    yield from _table(["part", "s", "result"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], right: int = 0) -> Iterator[str]:
    rules = ["---:" if 0 < index <= right else "---" for index in range(len(head))]
    for cells in (head, rules, *rows):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def number(value: float | None) -> str:
    """A figure with three digits, or more where it is larger."""
    if value is None or not math.isfinite(value):
        return ""
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{min(digits, 3)}f}"
