"""Ranks of the bench that measure nothing: each method answers what a test needs."""

import os
import sys
import time

from benches.processes import Assignment, Checked, Started, Stepped, serve

RAISES = "DDPOptimizer"
DIES = "torch concat"
HANGS = "torch coalesced"
WRONG = "bucket_all_reduces_fx"

STEP_S = {"no DDP": 0.1, "eager DDP": 0.2, "DDP, one graph": 0.2, "concat": 0.15}
PLANNED_STEP_S = 0.12
"""Step of ``"auto"`` after it has compared buckets."""
MEASURING_STEPS = 8


class FakeRank:
    def __init__(self, assignment: Assignment) -> None:
        self.way, self.forwards = assignment.way, assignment.place.forwards
        self.is_planned = False

    def listen(self):
        return 1

    def join(self, port):
        assert port == 1

    def build(self):
        return None

    def wrap(self):
        return None

    def start(self, averages=True):
        self.is_averaged = averages
        if self.way == RAISES:
            raise RuntimeError("this way does not compile")
        if self.way == DIES:
            print("out of everything", flush=True)
            os._exit(3)
        return Started(1.0, 1000, self.step_s)

    def first_average(self):
        assert not self.is_averaged
        return 2 * self.step_s

    def reduce(self, num_bytes, count):
        return Stepped((num_bytes / 1e5,) * count, 0.0)

    def check(self, reference, write):
        return Checked(0.5, "layer.weight") if self.way == WRONG else Checked()

    def state(self):
        return 0

    def peak(self):
        return 100

    @property
    def step_s(self):
        return PLANNED_STEP_S if self.is_planned else STEP_S.get(self.way, 0.3) * self.forwards

    def steps(self, count):
        if self.way == HANGS:
            time.sleep(600)
        if self.way == "auto" and count >= MEASURING_STEPS:
            self.is_planned = True
        return Stepped((self.step_s,) * count, self.step_s * count)

    def planned(self):
        return "planned" if self.is_planned else "not planned"


if __name__ == "__main__":
    serve(sys.argv[1:], FakeRank)
