"""Breaks the package on purpose, one line at a time, and asks whether a test notices.

Each mutation is applied in a temporary copy of the checkout, where the tests that must go red are
run. First the same tests run on an unbroken copy: what is red there would prove nothing. Ends with
1 where a mutation survived, and a test is missing.

The breaks take about ten minutes on two cores that others use too; the unbroken run some more.

    python tools/mutations.py                       # all of them
    python tools/mutations.py swapped-offset no-wait
    python tools/mutations.py --list                # what there is
    python tools/mutations.py --check               # whether each text is still there, once
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from command_line import parser_of

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGE: Final = "fusion_passes"
TIMEOUT_S: Final = 900.0
RED: Final = 1
"""How pytest ends where tests have failed. Otherwise it found none, or could not import them."""

UNCOMPARED: Final = '__import__("dataclasses").field(compare=False)'
"""A field that two keys need not have in common."""


@dataclass(frozen=True)
class Mutation:
    """One break.

    Attributes:
        name: what is broken.
        file: in the package.
        text: occurs there exactly once.
        replacement: for ``text``.
        tests: files or tests that must go red.
    """

    name: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]

    def occurrences(self, root: Path) -> int:
        """How often the text occurs in a checkout."""
        return (root / PACKAGE / self.file).read_text().count(self.text)

    def apply(self, root: Path) -> None:
        """Break the package of a checkout."""
        assert self.occurrences(root) == 1, f"{self.name}: --check says what is wrong"
        path = root / PACKAGE / self.file
        path.write_text(path.read_text().replace(self.text, self.replacement))


_SCENARIOS: Final = "tests/reducer/test_scenarios.py"
_LEARNED: Final = "tests/reducer/test_learned_layout.py"

MUTATIONS: Final = (
    # Auto with a reducer.
    Mutation(
        "measured-beside-launches",
        "reducer/reducer.py",
        " and self.clock.is_running and any(now.pending):",
        " and self.clock.is_running and False:",
        (f"{_LEARNED}::test_nothing_is_sent_while_ready_times_are_measured",),
    ),
    Mutation(
        "measured-by-bucket",
        "ddp/learned_layout.py",
        "size = max(caps.cap_bytes // PIECES, 1)",
        "size = caps.cap_bytes",
        (f"{_LEARNED}::test_nothing_is_sent_while_ready_times_are_measured",),
    ),
    Mutation(
        "own-files-on-each-rank",
        "profile/consensus.py",
        "    return bytes(sent.tolist()).decode()",
        "    return text or bytes(sent.tolist()).decode()",
        (f"{_LEARNED}::test_texts_of_any_length_come_to_all_ranks",),
    ),
    Mutation(
        "static-round-by-layout",
        "reducer/reducer.py",
        "return self.layout is None or (self.is_static and self._static_counts is None)",
        "return self.layout is None",
        ("tests/reducer/test_given_layout.py::test_a_static_graph_counts_in_its_first_round",),
    ),
    # Sparse gradients.
    Mutation(
        "sparse-shared-memory",
        "install/store_pass.py",
        "        give_own_memory(graph)",
        "        pass",
        ("tests/ddp/test_sparse_on_one_rank.py::test_nothing_is_computed_where_a_gradient_lies",),
    ),
    Mutation(
        "averages-relaid",
        "passes/store.py",
        "        let_outputs_lie(output, {item.index: item.strides for item, _ in stored})\n",
        "",
        ("tests/lowering/test_storage.py",),
    ),
    # What is sent, and by what it is divided.
    Mutation(
        "divided-twice",
        "plan/scaling.py",
        'return self.by if self.method == "result" else NO_SCALING',
        "return self.by",
        ("tests/passes/test_coalesced.py",),
    ),
    Mutation(
        "averages-other-divisors",
        "plan/scaling.py",
        'key.reduce_op == "sum" and key.scaling == Scaling("div", owner.world_size)',
        'key.reduce_op == "sum" and key.scaling.kind == "div"',
        ("tests/plan/test_scaling.py",),
    ),
    Mutation(
        "buckets-mapped-anew",
        "plan/caps.py",
        'KEPT_ON_CPU_BYTES if device_type == "cpu" else math.inf',
        "math.inf",
        (
            "tests/plan/test_timetable.py::test_no_bucket_is_larger_than_memory_that_is_kept_on_a_cpu",
        ),
    ),
    # What shares a bucket, and when it is full.
    Mutation(
        "key-without-dtype",
        "reductions/find.py",
        "    dtype: torch.dtype\n    reduce_dtype: torch.dtype\n",
        f"    dtype: torch.dtype = {UNCOMPARED}\n    reduce_dtype: torch.dtype = {UNCOMPARED}\n",
        ("tests/plan/test_planner.py",),
    ),
    Mutation(
        "key-without-group",
        "reductions/find.py",
        "    group_name: str\n    reduce_op: str\n",
        f"    group_name: str = {UNCOMPARED}\n    reduce_op: str\n",
        ("tests/plan/test_planner.py",),
    ),
    Mutation(
        "gap-in-the-bucket",
        "plan/layout.py",
        "        numel += kinds[number].numel\n",
        "        numel += kinds[number].numel + 1\n",
        ("tests/reducer/test_layout.py",),
    ),
    Mutation(
        "cap-ignored",
        "plan/layout.py",
        "if _nbytes(bucket, kinds) >= caps.of_bucket(",
        "if _nbytes(bucket, kinds) > caps.of_bucket(",
        ("tests/reducer/test_layout.py",),
    ),
    # Which traced backwards can launch the buckets of the layout.
    Mutation(
        "first-backward-traced",
        "ddp/traced.py",
        "        FIRST: reducer.layout is None,\n",
        "        FIRST: False,\n",
        ("tests/ddp/test_traced.py::test_the_first_backward_is_not_traced",),
    ),
    Mutation(
        "incomplete-graph-launches",
        "plan/planner.py",
        "if len(by_number) < len(reductions) or by_number.keys() != numbers:",
        "if False:",
        ("tests/plan/test_planner.py",),
    ),
    Mutation(
        "launched-before-its-turn",
        "plan/planner.py",
        "max((*members, ready or members[0]), key=",
        "max(members, key=",
        ("tests/plan/test_planner.py",),
    ),
    Mutation(
        "averages-averaged-again",
        "plan/planner.py",
        "if any(levels[reduction.start] for reduction in found.reductions):",
        "if False:",
        ("tests/plan/test_planner.py",),
    ),
    Mutation(
        "sent-after-it-is-overwritten",
        "plan/planner.py",
        "if overwritten_at[member.start] < item.ready.position:",
        "if False:",
        ("tests/plan/test_planner.py",),
    ),
    # What the graph becomes.
    Mutation(
        "swapped-offset",
        "passes/concat.py",
        "        [offsets[index] for index in filled],\n",
        "        [offsets[index] for index in reversed(filled)],\n",
        ("tests/passes/test_concat.py",),
    ),
    Mutation(
        "no-wait",
        "graph/collectives.py",
        "    return [WAIT(tensor) for tensor in ALL_REDUCE_COALESCED("
        "list(tensors), reduce_op, group_name)]\n",
        "    return list(ALL_REDUCE_COALESCED(list(tensors), reduce_op, group_name))\n",
        ("tests/passes/test_coalesced.py",),
    ),
    Mutation(
        "queue-order-lost",
        "passes/place.py",
        "reorder(graph, self.plan.keys, self.plan.queues)",
        "reorder(graph, self.plan.keys)",
        ("tests/passes/test_place.py",),
    ),
    Mutation(
        "wait-not-pinned",
        "passes/pin.py",
        "                orderings.append((waits, sources))\n",
        "",
        ("tests/passes/test_pin.py",),
    ),
    Mutation(
        "change-not-checked",
        "passes/pipeline.py",
        "if changed != (_structure(self._graph) != before):",
        "if changed and _structure(self._graph) == before:",
        ("tests/passes/test_pipeline.py",),
    ),
    Mutation(
        "reduced-elements-not-checked",
        "passes/verify.py",
        '    _same("other elements are reduced", +before.reduced, +after.reduced)\n',
        "",
        ("tests/passes/test_verify.py",),
    ),
    # What ranks do together, and what is remembered.
    Mutation(
        "wrong-divisor",
        "reducer/communication.py",
        "real.div_(divisor or size)",
        "real.div_((divisor or size) + 1)",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[scaling-bucket-concat]",),
    ),
    Mutation(
        "existing-gradients-lost",
        "reducer/reducer.py",
        "            if gradient is not None:  # What was there is averaged too.\n",
        "            if False:\n",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[kept-tensors-coalesced]",),
    ),
    Mutation(
        "launched-out-of-order",
        "reducer/reducer.py",
        "        if self.follows is not None and not self.follows.has_launched_all:\n",
        "        if False:\n",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[other-orders-of-two-concat]",),
    ),
    Mutation(
        "repeated-gradient-not-refused",
        "reducer/reducer.py",
        "        if repeated:\n",
        "        if False:\n",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[in-parts-one-by-one-coalesced]",),
    ),
    Mutation(
        "last-bucket-of-a-hook",
        "reducer/communication.py",
        "given = GradBucket(index, buffer, parameters, is_last)",
        "given = GradBucket(index, buffer, parameters, index == 0)",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[hook-users-buckets-concat]",),
    ),
    Mutation(
        "no-sync-ignored",
        "ddp/module.py",
        "            if self.require_backward_grad_sync:\n                setattr(self, EXPECTED",
        "            if True:\n                setattr(self, EXPECTED",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[no-sync-concat]",),
    ),
    Mutation(
        "settings-not-compared",
        "reducer/rank_errors.py",
        "    if len(set(digests)) == 1:\n",
        "    if digests:\n",
        ("tests/reducer/test_reducer.py",),
    ),
    Mutation(
        "missing-gradient-told-to-nobody",
        "reducer/reducer.py",
        '            self.failures.leave(self.steps, f"it has no gradient of {names}")\n',
        "            pass\n",
        ("tests/reducer/test_errors.py",),
    ),
    Mutation(
        "cache-key-without-caps",
        "passes/store.py",
        "        return hashlib.sha256(repr(self).encode()).hexdigest()\n",
        "        return hashlib.sha256(repr(self.inputs).encode()).hexdigest()\n",
        ("tests/install/test_cache.py::test_another_setting_misses[cap of the module]",),
    ),
    Mutation(
        "traced-cache-key-without-layouts",
        "install/fuse_pass.py",
        "self._config, donates_buffers(), self._modules]",
        "self._config, donates_buffers()]",
        ("tests/install/test_pass_identity.py",),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutations; 1 where one survived."""
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of them (all)")
    parser.add_argument("--list", action="store_true", help="print them, and run nothing")
    parser.add_argument(
        "--check", action="store_true", help="look for their texts, and run nothing"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.names) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        parser.error(f"no mutation {', '.join(sorted(unknown))}; --list names them")
    chosen = [m for m in MUTATIONS if not options.names or m.name in options.names]
    if options.list:
        for mutation in chosen:
            print(f"{mutation.name:30}{mutation.file:30}{' '.join(mutation.tests)}")
        return 0
    problems = misplaced(chosen, ROOT)
    for problem in problems:
        print(problem)
    if problems or options.check:
        return int(bool(problems))
    return run(chosen)


def misplaced(mutations: Iterable[Mutation], root: Path) -> list[str]:
    """Which mutations have a text that is not in their file exactly once."""
    counts = {mutation: mutation.occurrences(root) for mutation in mutations}
    return [f"{m.name}: {m.file} has its text {n} times" for m, n in counts.items() if n != 1]


def run(mutations: Sequence[Mutation]) -> int:
    """Run the tests of each mutation; 1 where one survived, or the tests are red without it."""
    start = time.monotonic()
    survived = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tests = list(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
        print(f"without a break: {len(tests)} files or tests", flush=True)
        if run_tests(copy_checkout(ROOT, Path(folder) / "unbroken"), tests) != 0:
            print("red without a break: nothing to learn from them")
            return 1
        for mutation in mutations:
            begun = time.monotonic()
            copy = copy_checkout(ROOT, Path(folder) / mutation.name)
            mutation.apply(copy)
            is_red = run_tests(copy, mutation.tests) == RED
            survived += [] if is_red else [mutation.name]
            seconds = time.monotonic() - begun
            word = "red" if is_red else "SURVIVED"
            print(f"{mutation.name:30}{word:10}{seconds:4.0f} s", flush=True)
            shutil.rmtree(copy)
    minutes = (time.monotonic() - start) / 60
    print(f"{len(mutations) - len(survived)} of {len(mutations)} are noticed, {minutes:.1f} min")
    return int(bool(survived))


def copy_checkout(root: Path, copy: Path) -> Path:
    """Copy the files that git tracks or would add, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        if name and (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
    return copy


def run_tests(checkout: Path, tests: Sequence[str]) -> int | None:
    """Run tests up to the first that fails, in a checkout and with its package.

    Returns:
        How pytest ended; ``None`` if it had to be stopped.
    """
    paths = [str(checkout), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        # In this process's group: what interrupts one interrupts both.
        done = subprocess.run(
            command,
            cwd=checkout,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
