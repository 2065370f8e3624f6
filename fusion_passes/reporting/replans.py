"""What became of planning a module's buckets once more from measured steps, for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from fusion_passes.state import Lifetime, process_state

Kept: TypeAlias = Literal["first", "second"]


@dataclass(frozen=True)
class ReplanReport:
    """What became of planning a module's buckets once more in this process.

    Attributes:
        module: the DDP module, by number of construction on its group and by class.
        steps: in how many steps ready times were measured; 0 if that was not done.
        kept: the plan that runs now: ``"first"`` or ``"second"``.
        because: why, for people; what follows "because".
        first_plan: digest of the plan that ran first; empty if there was no second.
        second_plan: digest of the second one; empty if there was none.
        first_s: seconds of a backward with the first plan, from its beginning to the end of its
            last wait: the median on the slowest rank; ``None`` if it was not measured.
        second_s: the same with the second plan.
        predicted_first_s: when the last all-reduce of a backward ends with the first plan, by
            measured ready times; ``None`` if nothing was predicted.
        predicted_second_s: the same with the second plan.
        compile_s: what the second compile has taken here, in seconds; ``None`` if there was none.
    """

    module: str
    steps: int
    kept: Kept
    because: str
    first_plan: str = ""
    second_plan: str = ""
    first_s: float | None = None
    second_s: float | None = None
    predicted_first_s: float | None = None
    predicted_second_s: float | None = None
    compile_s: float | None = None

    @property
    def dropped_plan(self) -> str:
        """Digest of the plan that ran once and runs no more; empty if there is none."""
        if self.first_plan == self.second_plan:
            return ""
        return self.first_plan if self.kept == "second" else self.second_plan

    def describe(self) -> str:
        """The report as one line."""
        said = f"{self.module}: the {self.kept} plan runs, because {self.because}"
        if self.first_s is not None and self.second_s is not None:
            said += (
                f" (a backward took {self.first_s * 1e3:.2f} ms with the first plan "
                f"{self.first_plan}, and {self.second_s * 1e3:.2f} ms with the second one "
                f"{self.second_plan})"
            )
        return said


@dataclass
class Replans:
    """What became of it, by a module's name for its group: each module's last."""

    _reports: dict[str, ReplanReport] = field(default_factory=dict)

    def note(self, name: str, report: ReplanReport) -> None:
        """Note what has become of a module's plan.

        Args:
            name: the module's for its group.
            report: what.
        """
        self._reports.pop(name, None)
        self._reports[name] = report

    def reports(self) -> tuple[ReplanReport, ...]:
        """Of all modules, in the order in which that was settled."""
        return tuple(self._reports.values())

    def reset(self) -> None:
        self._reports.clear()


replans: Final = process_state.keep(
    Replans(),
    "what became of planning buckets once more from measured steps",
    Lifetime.PROCESS,
    reset=Replans.reset,
)
