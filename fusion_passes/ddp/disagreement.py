"""Says in words, with the parameters' names, why ranks cannot run the same collectives."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import torch.distributed as dist

from fusion_passes.agreement.exchange import ASKING_SECONDS
from fusion_passes.agreement.launches import LaunchList, shown_list
from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.protocol import participants, why_failed
from fusion_passes.agreement.rendezvous import RanksDisagreeError
from fusion_passes.ddp.modules import registry

_TAKE_PART: Final = (
    "Let every parameter take part in each step on all ranks, freeze it, or give "
    "DistributedDataParallel find_unused_parameters=True."
)

_OVERTAKEN: Final = (
    "Collectives that are not DDP's lie between them in the backward, on the same process group "
    "(as those of SyncBatchNorm): a rank whose graph differs cannot launch its own when it has "
    "ended, as it would otherwise. Give them a process group of their own "
    "(torch.distributed.new_group; SyncBatchNorm takes process_group=), or run the same layers in "
    "the same order on all ranks."
)

_GLOO_TEXTS: Final = ("gloo", "pair closure", "monitoredBarrier")
"""What errors of Gloo's have in their texts; they have no class of their own."""

_SHOWN_CHARACTERS: Final = 500
"""Of another rank's error."""


@contextlib.contextmanager
def shared_errors(
    reached: Callable[[], Iterable[str]],
    owing: Callable[[Iterable[str]], Iterable[str]],
    forget: Callable[[Iterable[str], bool], None],
) -> Iterator[None]:
    """Around a backward: an error of one rank reaches the others, and says where they disagree.

    Args:
        reached: gives the names of the managed modules that the backward reaches; called after an
            error only, as all of these are.
        owing: gives those of them whose averages other ranks wait for.
        forget: forgets what the ranks have agreed on, of modules whose backward has failed; the
            second argument says whether a collective has.

    Raises:
        RanksDisagreeError: the ranks run different collectives, or another rank has failed. A
            collective that failed because of that is its cause.
    """
    before = _progress()
    try:
        yield
    except Exception as error:
        names, start = list(reached()), time.monotonic()
        touched = _touched(before, names)
        # A module that this backward has not come to may have launched on another rank, and what
        # this rank launches next must not pair up with that: the ranks meet first, at all of them.
        failed = [*dict.fromkeys([*touched, *owing(names)])]
        for name in failed:
            if participants[name].is_local:  # It has no others to ask, nor to tell.
                registry.rejoin(name)
        said: RanksDisagreeError | None
        if isinstance(error, RanksDisagreeError):
            said, cause = _in_words(error), error.__cause__
            if participants[error.module].is_alone:
                # Ranks that have yet to come to a module's first meeting have not failed.
                failed = touched
        else:
            said, cause = _share(error, failed, start), error
        _ask_each(failed, start, lambda participant: participant.note_failed())
        forget(failed, _may_be_a_collectives(error))
        if said is not None:
            raise said from cause
        raise


def _share(error: Exception, failed: Sequence[str], start: float) -> RanksDisagreeError | None:
    """Why a collective has failed with this error, if other ranks say so. They are told of it
    otherwise."""
    found = why_failed(failed) if _may_be_a_collectives(error) else None
    if found is not None:
        return _in_words(found)
    reason = f"{type(error).__name__}: {str(error)[:_SHOWN_CHARACTERS]}"
    _ask_each(failed, start, lambda participant: participant.leave_word(reason))
    return None


def _ask_each(failed: Iterable[str], start: float, ask: Callable[[Participant], None]) -> None:
    """Ask the store for each module, as long as it answers: an error that came at ``start`` must
    not wait for it twice."""
    for name in failed:
        if time.monotonic() - start < ASKING_SECONDS:
            ask(participants[name])


def _may_be_a_collectives(error: Exception) -> bool:
    """Whether a collective has raised an error, as far as can be told. A user's own goes on as it
    is, whatever the other ranks do."""
    texts = _GLOO_TEXTS if type(error) is RuntimeError else ()
    return isinstance(error, dist.DistError) or any(text in str(error) for text in texts)


def _progress() -> dict[str, tuple[int, int, int]]:
    return {
        name: (item.rounds, item.meetings, len(item.received))
        for name, item in participants.copy().items()
    }


def _touched(before: Mapping[str, tuple[int, int, int]], reached: Sequence[str]) -> list[str]:
    """The modules that have got gradients, or met, since then: those that the backward reaches, and
    those in it whose graph it cannot see, as of reentrant checkpointing, but none of another
    thread's."""
    changed = [name for name, now in _progress().items() if now != before.get(name)]
    mine = threading.get_ident()
    return [n for n in changed if n in reached or participants[n].thread == mine]


def _in_words(error: RanksDisagreeError) -> RanksDisagreeError:
    module = registry.module(error.module)
    if error.failure:
        text = f"The backward of {module.label} failed on {error.failure}"
        return RanksDisagreeError(error.module, {}, failure=error.failure, text=text)
    lists = {rank: LaunchList.decode(text) for rank, text in error.collectives.items()}
    what = f"The ranks of {module.label} do not reduce the same gradients in the same buckets"
    lines = [f"{what}, which would hang or mix them up. All of them stop here."]
    if error.silent:
        silent = shown_list(map(str, error.silent))
        lines.append(f"Rank {silent} did not answer within the process group's timeout.")
    if error.settings:
        lines += _other_settings(error.settings)
    elif error.agreed:
        lines = _unlike_before(error, lists)
    else:
        lines += _differences(lists, module.sent, error.is_overtaken)
    return RanksDisagreeError(
        error.module,
        error.collectives,
        error.silent,
        text="\n".join(lines),
        settings=error.settings,
        agreed=error.agreed,
        is_overtaken=error.is_overtaken,
    )


def _other_settings(settings: Mapping[int, str]) -> list[str]:
    values = {rank: json.loads(text) for rank, text in settings.items()}
    lines = []
    for name in next(iter(values.values())):
        by_value: dict[str, list[str]] = {}
        for rank, named in values.items():
            by_value.setdefault(json.dumps(named[name]), []).append(str(rank))
        if len(by_value) > 1:
            lines.append(f"{name} must be the same on all ranks, but is:")
            lines += [f"  {value} on rank {shown_list(r)}" for value, r in by_value.items()]
    return [*lines, "Set it to one value on all ranks, before DistributedDataParallel."]


def _unlike_before(error: RanksDisagreeError, lists: Mapping[int, LaunchList]) -> list[str]:
    """What a rank would run now, and what all of them ran before, and the remedy."""
    module, agreed = registry.module(error.module), LaunchList.decode(error.agreed)
    ((rank, own),) = lists.items()
    what = (
        f"Rank {rank} of {module.label} cannot reduce what all ranks have reduced in earlier steps"
    )
    first = f"{what}, and does not know whether the others can. It stops here, and tells them."
    lacking = [repr(module.sent[number]) for number in sorted(agreed.parameters - own.parameters)]
    if lacking and not error.is_overtaken:
        return [first, f"{shown_list(lacking)}: no gradient on rank {rank}.", _TAKE_PART]
    before, now = agreed.describe(module.sent), own.describe(module.sent)
    return [first, f"All ranks, before: {before}.", f"Rank {rank}, now: {now}.", _OVERTAKEN]


def _differences(
    lists: Mapping[int, LaunchList], names: Sequence[str], is_overtaken: bool
) -> list[str]:
    """A line for each set of ranks that have a gradient which others have not, and the remedy; what
    the ranks run, if all have the same."""
    named: dict[tuple[int, ...], list[str]] = {}
    for number, parameter in enumerate(names):
        ranks = tuple(rank for rank in lists if number in lists[rank].parameters)
        if 0 < len(ranks) < len(lists):
            named.setdefault(ranks, []).append(repr(parameter))
    if named:
        lines = [
            f"{shown_list(parameters)}: a gradient on rank {shown_list(map(str, ranks))}, and "
            f"none on rank {shown_list(str(rank) for rank in lists if rank not in ranks)}."
            for ranks, parameters in named.items()
        ]
        return [*lines, _TAKE_PART]
    by_list: dict[LaunchList, list[str]] = {}
    for rank, launches in lists.items():
        by_list.setdefault(launches, []).append(str(rank))
    lines = [
        f"Rank {shown_list(ranks)}: {launches.describe(names)}."
        for launches, ranks in by_list.items()
    ]
    if is_overtaken:
        lines.append(_OVERTAKEN)
    elif len(by_list) > 1:
        lines.append(
            "They reduce the same gradients, but have left the agreement that they had: an earlier "
            "error, or a restart of one rank alone, is the usual cause. Restart all ranks."
        )
    return lines
