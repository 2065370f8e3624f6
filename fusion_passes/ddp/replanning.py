"""Plans a module's buckets once more from measured steps, and keeps the better of both plans.

After a number of rounds, the ranks meet over their group's store, outside of any backward: each
says what it has measured, and all get the slowest rank's times. Where these predict that other
buckets are better by enough, each rank compiles the same backward once more, and they meet again:
if all have it, it runs from the next round on. After some rounds of it they meet a last time, and
the plan stays whose backward took less on the slowest rank. The rendezvous before the first launch
of a graph (:mod:`fusion_passes.agreement.protocol`) sees that all ranks run the same, as for any
other graph.

What was measured is kept in a file, with whether a plan from it was better. The ranks agree on a
file when a module is constructed (:mod:`fusion_passes.ddp.costs`), so the next start plans right at
once.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.exchange import meeting_of
from fusion_passes.agreement.protocol import participants
from fusion_passes.ddp.aot_forward import compiling
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.replan_meetings import meet, say_failed
from fusion_passes.ddp.replan_verdicts import EARLY, compiled, measured, timed
from fusion_passes.ddp.replannable import digest_of, graph_of, merged_steps, sharing
from fusion_passes.ddp.watched import FIRST_ROUND, STEPS, PlannedGraph, Watched
from fusion_passes.plan.again import WORTH_PER_MILLE, forecast
from fusion_passes.profile.steps import MeasuredSteps, store_steps
from fusion_passes.reporting.journal import journal
from fusion_passes.reporting.replans import ReplanReport, replans
from fusion_passes.reporting.warnings import warn_once
from fusion_passes.torch_private.compiled_backward import (
    compile_again,
    exchange,
    seconds_of_compile,
)

log = logging.getLogger(__name__)

AT: Final = (FIRST_ROUND + STEPS + 1, 16, 32)
"""After so many rounds the ranks meet: if some have not measured enough steps by then, as under a
profiler, they meet later, and a last time."""

_SETTLED: Final = 2
"""So many rounds of a second plan are not measured: in the first, the ranks agree on it."""


_AGREES: Final = MappingProxyType(
    {
        True: "an earlier start has measured the same, and the plan is made from it",
        False: "an earlier start has measured the same, and the plan from it was slower",
    }
)
_NOT_WORTH: Final = f"measured steps predict none that is better by {WORTH_PER_MILLE / 10:g} %"
_FASTER: Final = "its backward took less"
_SLOWER: Final = "the backward of the second one took no less"
_UNTIMED: Final = "steps of the second one could not be measured"


@dataclass
class _Second:
    """A plan that is being tried.

    Attributes:
        forward: the compiled forward whose backward runs it.
        first: what the backward ran before.
        since: the round in which it came.
        report: what is known of both plans.
    """

    forward: weakref.ref[Any]
    first: Callable[..., Any]
    since: int
    report: ReplanReport


@dataclass
class Replanning:
    """A module whose buckets may be planned once more.

    Attributes:
        watched: measures its steps.
    """

    watched: Watched
    _second: _Second | None = None
    _meetings: int = 0

    def meet(self, ddp: DistributedDataParallel) -> bool:
        """Say what was measured, and do what all ranks then do.

        Returns:
            Whether steps are to be measured further.

        Raises:
            RanksDisagreeError: a rank has not come within the group's timeout, or has failed.
        """
        self.watched.participant.meets_at = -1
        self._meetings += 1
        return self._try_second(ddp) if self._second is None else self._choose(ddp, self._second)

    def _say(self, statement: object, compare: Callable[..., str]) -> tuple[str, Any]:
        item, second = self.watched, self._second
        is_done = item.is_done and (second is None or item.forward is second.forward())
        said = ["measured", statement] if is_done else [EARLY, item.why_not_measured]
        label = registry.module(item.name).label
        return meet(item.participant, label, "steps", json.dumps(said), compare)

    def _try_second(self, ddp: DistributedDataParallel) -> bool:
        item, profile = self.watched, self.watched.profile
        graph, why_not = graph_of(ddp, item)
        statement = {
            "launches": item.launches,
            "times_ns": item.medians_ns() if item.is_done else [],
            "chosen_from": digest_of(graph),
            "because": why_not,
        }
        kind, value = self._say(
            statement,
            functools.partial(measured, merge=functools.partial(merged_steps, ddp, profile)),
        )
        if kind == "again":
            return self._meet_later(0) or self.leave(value)
        if kind == "stop":
            return self.leave(value)
        steps = MeasuredSteps.from_json(value["steps"])
        report = ReplanReport("", steps.steps, "first", "", first_s=value["first_ns"] / 1e9)
        if item.known is not None and item.known.agrees_with(steps):
            return self._note(replace(report, because=_AGREES[item.known.serves]))
        store_steps(item.path, steps)
        chosen_from = None if value["because"] or graph is None else graph.chosen_from
        predicted = None if chosen_from is None else forecast(chosen_from, steps)
        if predicted is None:
            because = f"{value['because'] or 'its buckets are no plan'}: the next start plans anew"
            return self._note(replace(report, because=because))
        report = replace(
            report,
            predicted_first_s=predicted.first_ns / 1e9,
            predicted_second_s=predicted.second_ns / 1e9,
        )
        if not predicted.is_worth_it:
            return self._note(replace(report, because=_NOT_WORTH))
        assert graph is not None, "it was asked for a forecast"
        return self._switch(ddp, graph, steps, report)

    def _switch(
        self,
        ddp: DistributedDataParallel,
        graph: PlannedGraph,
        steps: MeasuredSteps,
        report: ReplanReport,
    ) -> bool:
        """Let the backward run a second plan, if all ranks have compiled it."""
        item, forward = self.watched, self.watched.forward
        assert forward is not None, "a graph was found"
        label = registry.module(item.name).label
        _say_compiling(item.name, label, steps, seconds_of_compile(forward))
        report = replace(report, first_plan=_running_plan(label))
        known, begin = len(journal.reports()), time.monotonic()
        registry.set_costs(ddp, item.profile, steps)
        second, error = _compiled(item, graph, forward)
        compile_s = time.monotonic() - begin
        digests = [each.digest for each in journal.reports()[known:]]
        error = error or ("" if digests else "no pass has fused its gradients")
        kind, said = meet(item.participant, label, "compiled", json.dumps(error), compiled)
        if kind == "stop" or second is None:
            registry.set_costs(ddp, item.profile, None)
            _warn_failed(label, said)
            return self._note(replace(report, because=said))
        report = replace(report, compile_s=compile_s, second_plan=digests[-1])
        first = exchange(forward, second)
        item.participant.history.clear()  # They agree on it in the next round.
        rounds = item.participant.rounds
        self._second, self._meetings = _Second(weakref.ref(forward), first, rounds, report), 0
        item.measure_again(rounds + _SETTLED)
        return self._meet_later(rounds)

    def _choose(self, ddp: DistributedDataParallel, second: _Second) -> bool:
        """Keep the better of both plans."""
        item, report = self.watched, second.report
        kind, value = self._say(item.medians_ns()[-1] if item.is_done else 0, timed)
        if kind == "again" and self._meet_later(second.since):
            return True
        if kind == "stop":
            return self.leave(value)
        if kind == "timed":
            report = replace(report, second_s=value / 1e9)
            assert report.first_s is not None, "it was measured before"
            if value / 1e9 < report.first_s:
                return self._note(replace(report, kept="second", because=_FASTER))
        self._go_back(ddp, second, was_slower=kind == "timed")
        because = _SLOWER if kind == "timed" else _UNTIMED
        return self._note(replace(report, kept="first", because=because))

    def leave(self, because: str) -> bool:
        """Note that the ranks do not speak of the plan any more: what they run, they run on.

        Args:
            because: why, for people.
        """
        if self._second is None:
            return self._note(ReplanReport("", 0, "first", because))
        because = f"{_UNTIMED}, since {because}"
        return self._note(replace(self._second.report, kept="second", because=because))

    def _go_back(self, ddp: DistributedDataParallel, second: _Second, *, was_slower: bool) -> None:
        item, forward = self.watched, second.forward()
        steps = registry.module_of(ddp).steps
        registry.set_costs(ddp, item.profile, None)
        if forward is not None:
            exchange(forward, second.first)
        for name in sharing(ddp):
            if not participants[name].received:  # Else its round goes on as it began.
                participants[name].history.clear()
        if steps is not None and was_slower:
            store_steps(item.path, replace(steps, serves=False))

    def _meet_later(self, since: int) -> bool:
        """Meet after some rounds more, if there is another time."""
        if self._meetings == len(AT):
            return False
        self.watched.participant.meets_at = since + AT[self._meetings]
        return True

    def _note(self, report: ReplanReport) -> bool:
        label = registry.module(self.watched.name).label
        report = replace(report, module=label)
        replans.note(self.watched.name, report)
        log.info("%s", report.describe())
        return False


def _compiled(
    item: Watched, graph: PlannedGraph, forward: Any
) -> tuple[Callable[..., Any] | None, str]:
    """The second plan's graph; ``None`` and an error where it cannot be compiled."""
    try:
        with compiling(graph.inputs):
            return compile_again(forward), ""
    except Exception as error:  # All ranks hear of it, and run what they ran.
        log.exception("%s: the second compile has failed", item.name)
        return None, f"{type(error).__name__}: {error}"
    except BaseException as error:
        say_failed(item.participant, "compiled", type(error).__name__)
        raise


def _running_plan(label: str) -> str:
    """Digest of the plan that a module has run so far."""
    of = [r.digest for r in journal.reports() if any(b.module == label for b in r.buckets)]
    return "".join(of[-1:])


def _say_compiling(name: str, label: str, steps: MeasuredSteps, seconds: float | None) -> None:
    """Say, on one rank, that a step is going to take longer."""
    meeting = meeting_of(name)
    if meeting is not None and meeting.rank == 0:
        how_long = (
            f"at most about {seconds:.1f} s" if seconds is not None else "as long as the first time"
        )
        line = (
            f"fusion_passes: the buckets of {label} are planned once more, from {steps.steps} "
            f"measured steps; compiling its backward again: {how_long}"
        )
        print(line, file=sys.stderr, flush=True)


def _warn_failed(label: str, why: str) -> None:
    warn_once(
        f"second plan of {label}",
        f"torch._inductor.config.ddp_fusion = 'auto': the buckets of {label} stay as they were "
        f"planned first: {why}. Gradients are right; the next start tries the second plan.",
    )
