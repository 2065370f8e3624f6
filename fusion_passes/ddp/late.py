"""Reduces gradients after the backward, by hand: those that no graph of this rank has reduced.

They are those of hooks that ran eagerly, and of graphs that would have launched something else than
what the ranks have agreed on (see :mod:`fusion_passes.agreement.protocol`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from fusion_passes.agreement.launches import FOLLOWS, LATE, Collective, LaunchList
from fusion_passes.agreement.participant import Participant
from fusion_passes.config import FusionConfig
from fusion_passes.ddp.absent import finish_absent
from fusion_passes.ddp.by_hand import Job, Launched
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.sparse import SentRows, group_by_dtype
from fusion_passes.ddp.unused import write_averages
from fusion_passes.flag import active_config
from fusion_passes.plan.caps import bucket_caps
from fusion_passes.plan.scaling import choose_scaling
from fusion_passes.reductions.find import dtype_name


def reduce_late(participants: Iterable[Participant]) -> None:
    """Reduce what is left of the gradients of these modules, in the order of the other ranks.

    Raises:
        RanksDisagreeError: these reduce other gradients, or as
            :meth:`fusion_passes.agreement.participant.Participant.announce`.
    """
    jobs = []
    for participant in participants:
        ddp = registry.ddp_of(participant.module)
        participant.count_foreign()
        if participant.is_local:
            registry.rejoin(participant.module)
            participant.is_local = False  # The round's next backward settles anew.
        if ddp is not None:
            jobs.append(Job(ddp, registry.module_of(ddp), participant))
    with torch.no_grad():
        for job in jobs:
            finish_absent(job.participant)
        left = [job for job in jobs if _is_left(job) or _lacks_use(job)]
        while left:
            _run(_next_lists(left))
            left = [job for job in left if _is_left(job)]
        for job in jobs:
            _reduce_new(job)
            _reduce_rows(job)


def reduce_without_inputs(participant: Participant) -> None:
    """Take part, with zeros, in what the other ranks reduce in a round: this one has run out of
    inputs. Its gradients stay as they are.

    Raises:
        RanksDisagreeError: as :func:`reduce_late`.
    """
    ddp = registry.ddp_of(participant.module)
    assert ddp is not None, "it calls this"
    module, usage = registry.module_of(ddp), participant.usage
    job = Job(ddp, module, participant, has_inputs=False)
    is_sharing = participant.is_sharing = ddp.static_graph and participant.used is None
    if usage is None:
        expected = module.trained if participant.used is None else participant.used
        participant.late |= dict.fromkeys(expected, False)
    else:
        usage.pending.clear()
    launched = set[int]()
    with torch.no_grad():
        while _is_left(job):
            lists = _next_lists([job])
            _run(lists)
            ((_, last),) = lists
            launched |= last.parameters
            if is_sharing and last.mode == LATE:
                break  # In a static graph's first round, nothing follows that.
        _reduce_new(job)
        _reduce_rows(job)
    if is_sharing:
        participant.used = frozenset(launched)


def _is_left(job: Job) -> bool:
    if job.participant.usage is not None:
        return job.participant.has_more_to_send
    return bool(job.participant.late)


def _lacks_use(job: Job) -> bool:
    return bool(job.participant.unused) or job.participant.is_sharing


def _reduce_new(job: Job) -> None:
    """Reduce what some rank has used and none has sent, which all ranks read in the flags; give
    the parameters that this rank has not used what the others have, unless it has no inputs."""
    participant, usage = job.participant, job.participant.usage
    if usage is None:
        return
    may_reorder = usage.may_reorder(participant.agreed[: participant.position])
    if not may_reorder and not usage.must_read(participant.kind, job.own_use):
        return
    usage.read(usage.averages.pop(usage.flags), may_reorder)
    new = (usage.used or frozenset()) - usage.sent_in(participant.kind)
    if new:
        _run([(job, planned_by_hand(job, new))])
        usage.sent[participant.kind] |= new
        usage.is_new = participant.needs_replanning = True
    if job.has_inputs:
        write_averages(participant, usage.averages)


def _reduce_rows(job: Job) -> None:
    """Where ranks may use other parameters: average the sparse gradients of all tables. How many
    rows each rank has of them says also who has used them, so there is nothing to agree on."""
    if job.participant.usage is not None and job.module.sparse:
        _run([(job, planned_by_hand(job, job.module.sparse))])


def _next_lists(jobs: Sequence[Job]) -> list[tuple[Job, LaunchList]]:
    """What to run next: of what is known, the lists of the graph that comes first, then those that
    follow; else a list for which the ranks must meet. Others may reach that meeting only once
    what is known has been run, unless a graph of theirs launches both in turn."""
    turns = {turn for job in jobs if (turn := job.participant.turn) is not None}
    first = [job for job in jobs if turns and job.participant.turn == min(turns)]
    lists = [(job, _next_list(job)) for job in first]
    # As others meet in graphs: backwards reach first what forwards have reached last.
    unknown = [job for job in reversed(jobs) if job.participant.turn is None]
    while unknown and (not lists or _has_gap(lists)):
        job = unknown.pop(0)
        lists.append((job, _next_list(job)))
    return lists


def _next_list(job: Job) -> LaunchList:
    return job.participant.next_late(functools.partial(_plan_left, job))


def _has_gap(lists: Iterable[tuple[Job, LaunchList]]) -> bool:
    """Whether a graph that launches these launches something of another module in between."""
    places = {item.place for _, mine in lists for item in mine.collectives}
    return bool(places) and len(places) <= max(places) - min(places)


def _run(lists: Sequence[tuple[Job, LaunchList]]) -> None:
    ordered = [(job, item, mine.mode) for job, mine in lists for item in mine.collectives]
    ordered.sort(key=lambda entry: entry[1].place)
    for launched in [_launch(job, item, mode) for job, item, mode in ordered]:
        launched.finish()


def _launch(job: Job, item: Collective, mode: str) -> Launched | SentRows:
    return SentRows.launch(job, item) if item.divided == "rows" else job.launch(item, mode)


def _plan_left(job: Job) -> LaunchList:
    job.count_unused()
    planned = planned_by_hand(job, job.numbers)
    has_own = job.has_inputs or job.participant.usage is not None
    return planned if has_own else replace(planned, mode=FOLLOWS)


def planned_by_hand(job: Job, numbers: Iterable[int]) -> LaunchList:
    """Put gradients in buckets that only depend on what ranks cannot differ in: last parameters
    first, as DDP does before it has seen a backward.

    Args:
        job: the module.
        numbers: of the parameters.
    """
    config = active_config() or FusionConfig()
    cap_bytes = bucket_caps(config, job.module.caps).cap_bytes
    buckets: list[tuple[Collective, int]] = []
    open_at: dict[tuple[object, ...], int] = {}
    sparse = job.module.sparse.intersection(numbers)
    for number in sorted(frozenset(numbers) - sparse, reverse=True):
        parameter = job.like(number)
        key = job.key_of(number, config)
        kind = (key.dtype, key.reduce_dtype, key.device, key.calls_hook)
        index = open_at.get(kind)
        if index is None:
            owner = registry.owner_of(job.module.name_for(number))
            assert owner is not None, "it is managed"
            scaling = choose_scaling(key, owner, config.scaling, folds=False)
            name = dtype_name(key.reduce_dtype)
            item, size = Collective(scaling.divided, name, (), len(buckets)), 0
            index = open_at[kind] = len(buckets)
            buckets.append((item, size))
        item, size = buckets[index]
        numbers = (*item.parameters, number)
        size += parameter.nbytes
        buckets[index] = Collective(item.divided, item.dtype, numbers, item.place), size
        if size >= cap_bytes:
            del open_at[kind]
    tables = sorted(sparse)
    dtypes = [dtype_name(job.key_of(number, config).reduce_dtype) for number in tables]
    rows = group_by_dtype(job, tables, dtypes, len(buckets))
    return LaunchList(LATE, (*(item for item, _ in buckets), *rows))
