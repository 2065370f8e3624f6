"""Tells in words, with the parameters' names, that the ranks' backwards do not match."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from fusion_passes.agreement import RanksDisagreeError, numbers_in, waiting_ranks
from fusion_passes.ddp.modules import registry

_SHOWN: Final = 5
"""How many parameters or ranks are named."""


@contextlib.contextmanager
def named_disagreements() -> Iterator[None]:
    """Around a backward: its error says which parameters the ranks disagree about.

    Raises:
        RanksDisagreeError: the ranks run different collectives. A collective that failed because
            of that is its cause.
    """
    try:
        yield
    except RanksDisagreeError as error:
        raise _in_words(error) from None
    except RuntimeError as error:
        found = waiting_ranks(module.group_name for module in registry.fingerprint())
        if found is None:
            raise
        raise _in_words(found) from error


def _in_words(error: RanksDisagreeError) -> RanksDisagreeError:
    module = registry.module(error.module)
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
    return RanksDisagreeError(error.module, error.collectives, error.silent, "\n".join(lines))


def _differences(collectives: Mapping[int, str], parameters: Sequence[str]) -> list[str]:
    """A line for each set of ranks that have a gradient which others have not; what the ranks run,
    if all have the same."""
    reduced = {rank: _numbers(text) for rank, text in collectives.items()}
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


def _numbers(text: str) -> set[int]:
    """The parameters in what :meth:`fusion_passes.planning.BucketPlan.collectives` gives."""
    buckets = text.split("; ")[1:]
    return {number for bucket in buckets for number in numbers_in(bucket.rpartition(" ")[2])}


def _list(items: Iterable[str]) -> str:
    shown = list(items)
    rest = len(shown) - _SHOWN
    return ", ".join(shown[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
