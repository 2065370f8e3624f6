"""Tells in words, with the parameters' names, that the ranks' backwards do not match."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from fusion_passes.agreement import (
    RanksDisagreeError,
    agree,
    calls_of,
    number_runs,
    numbers_in,
    tell_failure,
    waiting_ranks,
)
from fusion_passes.ddp.modules import registry

_SHOWN: Final = 5
"""How many parameters or ranks are named."""

_SHOWN_CHARACTERS: Final = 500
"""Of another rank's error."""


@contextlib.contextmanager
def shared_errors(modules_of_backward: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Around a backward that is traced: an error of one rank reaches the others, and says what they
    disagree about.

    Args:
        modules_of_backward: gives the names of the managed modules that the backward reaches;
            called after an error only.

    Raises:
        RanksDisagreeError: the ranks run different collectives, or another rank has failed. A
            collective that failed because of that is its cause.
    """
    before = {name: calls_of(name) for name in registry.names()}
    try:
        yield
    except RanksDisagreeError as error:
        raise _in_words(error) from None
    except Exception as error:
        found = waiting_ranks(registry.names())
        if found is not None:
            raise _in_words(found) from error
        for name in modules_of_backward():
            if calls_of(name) == before.get(name):
                tell_failure(name, f"{type(error).__name__}: {str(error)[:_SHOWN_CHARACTERS]}")
        raise


def agree_on_eager(reduced: Mapping[str, Sequence[int]]) -> None:
    """Returns if all ranks have reduced the same gradients one by one, in the same order.

    Args:
        reduced: the parameters' numbers, by the group name of their module.

    Raises:
        RanksDisagreeError: they have not.
    """
    for name, numbers in reduced.items():
        try:
            agree(name, f"one by one; {number_runs(numbers)}", "/eager")
        except RanksDisagreeError as error:
            raise _in_words(error) from None


def _in_words(error: RanksDisagreeError) -> RanksDisagreeError:
    module = registry.module(error.module)
    if error.failure:
        text = f"The backward of {module.label} failed on {error.failure}"
        return RanksDisagreeError(error.module, {}, failure=error.failure, text=text)
    what = f"The ranks of {module.label} do not reduce the same gradients in the same buckets"
    lines = [f"{what}, which would hang or mix them up. All of them stop here."]
    if error.silent:
        silent = _list(map(str, error.silent))
        lines.append(f"Rank {silent} did not answer within the process group's timeout.")
    lines += _differences(error.collectives, module.parameters)
    lines.append(
        "Let every parameter take part in each step on all ranks, freeze it, or give "
        "DistributedDataParallel find_unused_parameters=True."
    )
    return RanksDisagreeError(error.module, error.collectives, error.silent, text="\n".join(lines))


def _differences(collectives: Mapping[int, str], parameters: Sequence[str]) -> list[str]:
    """A line for each set of ranks that have a gradient which others have not; what the ranks run,
    if all have the same."""
    reduced = {rank: parameters_in(text) for rank, text in collectives.items()}
    named: dict[tuple[int, ...], list[str]] = {}
    for number, parameter in enumerate(parameters):
        ranks = tuple(rank for rank in reduced if number in reduced[rank])
        if 0 < len(ranks) < len(reduced):
            named.setdefault(ranks, []).append(repr(parameter))
    if named:
        return [
            f"{_list(names)}: a gradient on rank {_list(map(str, ranks))}, and none on "
            f"rank {_list(str(rank) for rank in reduced if rank not in ranks)}."
            for ranks, names in named.items()
        ]
    by_text: dict[str, list[str]] = {}
    for rank, text in collectives.items():
        by_text.setdefault(text, []).append(str(rank))
    return [f"Rank {_list(ranks)}: {text}." for text, ranks in by_text.items()]


def parameters_in(text: str) -> set[int]:
    """The parameters in what :meth:`fusion_passes.planning.BucketPlan.collectives` gives."""
    buckets = text.split("; ")[1:]
    return {number for bucket in buckets for number in numbers_in(bucket.rpartition(" ")[2])}


def _list(items: Iterable[str]) -> str:
    shown = list(items)
    rest = len(shown) - _SHOWN
    return ", ".join(shown[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
