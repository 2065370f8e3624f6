"""Makes a case that fails small: leaves out one thing after the other while the outcome stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from fuzzing.case import Case, Loop, Part
from fuzzing.running import Outcome, Runner


def shrink(runner: Runner, case: Case, outcome: Outcome, *, seconds: float) -> tuple[Case, Outcome]:
    """The smallest case found with an outcome of the same kind.

    Args:
        runner: runs cases.
        case: fails.
        outcome: of ``case``.
        seconds: after which no more is tried.
    """
    start, tried = time.monotonic(), {case_key(case)}
    progress = True
    while progress:
        progress = False
        for smaller in candidates(case):
            if time.monotonic() - start > seconds:
                return case, outcome
            if case_key(smaller) in tried:
                continue
            tried.add(case_key(smaller))
            seen = runner.run(smaller)
            if seen.signature == outcome.signature:
                case, outcome, progress = smaller, seen, True
                break
    return case, outcome


def case_key(case: Case) -> str:
    """What tells two cases apart."""
    return repr(case)


def candidates(case: Case) -> Iterator[Case]:
    """Cases that are smaller by one thing, those that leave out most first."""
    if len(case.parts) > 1:
        yield from (
            replace(case, parts=(part,), joined="serial", groups=False) for part in case.parts
        )
    if case.ranks > 2:
        batches = tuple(step[:2] for step in case.loop.batches)
        yield replace(case, ranks=2, loop=replace(case.loop, batches=batches))
    for number, part in enumerate(case.parts):
        for smaller in _smaller_parts(part):
            parts = (*case.parts[:number], smaller, *case.parts[number + 1 :])
            yield replace(case, parts=parts)
    for loop in _smaller_loops(case.loop):
        yield replace(case, loop=loop)
    yield from (replace(case, flag=flag) for flag in _smaller_flags(case.flag))
    if case.groups and case.joined != "threads":
        yield replace(case, groups=False)
    if case.joined != "serial":
        yield replace(case, joined="serial")


def _smaller_flags(flag: str | dict[str, Any]) -> Iterator[str | dict[str, Any]]:
    if isinstance(flag, dict):
        yield flag["mode"]
        for option in flag:
            if option != "mode":
                yield {name: value for name, value in flag.items() if name != option}


def _smaller_parts(part: Part) -> Iterator[Part]:
    for index in range(len(part.blocks)):
        yield replace(part, blocks=(*part.blocks[:index], *part.blocks[index + 1 :]))
    if part.heads > 1:
        yield replace(part, heads=1, split=False, output="tensor")
        yield replace(part, heads=part.heads - 1)
    for trait in part.traits:
        yield replace(part, traits=tuple(other for other in part.traits if other != trait))
    for option in part.ddp:
        rest = {name: value for name, value in part.ddp.items() if name != option}
        yield replace(part, ddp=rest)
    yield from _with_defaults(part, Part(part.blocks), {"blocks", "traits", "ddp", "heads"})
    for index, name in enumerate(part.blocks):
        if name != "dense":
            yield replace(part, blocks=(*part.blocks[:index], "dense", *part.blocks[index + 1 :]))


def _smaller_loops(loop: Loop) -> Iterator[Loop]:
    if len(loop.batches) > 1:
        yield replace(loop, batches=loop.batches[:1])
        yield replace(loop, batches=loop.batches[:-1])
    if any(len(sizes) > 1 for step in loop.batches for sizes in step):
        yield replace(loop, batches=tuple(tuple(r[:1] for r in step) for step in loop.batches))
    alike = tuple(tuple(tuple(4 for _ in sizes) for sizes in step) for step in loop.batches)
    if alike != loop.batches:
        yield replace(loop, batches=alike)
    yield from _with_defaults(loop, Loop(), {"batches"})


def _with_defaults(value: Any, plain: Any, kept: set[str]) -> Iterator[Any]:
    for field in fields(value):
        default = getattr(plain, field.name)
        if field.name not in kept and getattr(value, field.name) != default:
            yield replace(value, **{field.name: default})
