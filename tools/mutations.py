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


_REPLANNED: Final = "tests/ddp/test_replanning.py::test_the_better_of_both_plans_stays"
_PROTOCOL: Final = "tests/agreement/test_protocol.py"
_GRAPHS: Final = "tests/equality/test_backward_graphs.py"
_LAUNCHES: Final = "tests/ddp/test_launches.py"
_SCENARIOS: Final = "tests/equality/test_scenarios.py"

MUTATIONS: Final = (
    # Sparse gradients.
    Mutation(
        "sparse-shared-memory",
        "install/inductor_pass.py",
        "        give_own_memory(graph)",
        "        pass",
        ("tests/ddp/test_sparse_on_one_rank.py::test_nothing_is_computed_where_a_gradient_lies",),
    ),
    Mutation(
        "averages-relaid",
        "reductions/insert.py",
        "        let_outputs_lie(output, {item.index: item.strides for item, _ in present})\n",
        "",
        ("tests/lowering/test_storage.py",),
    ),
    # What is sent, and by what it is divided.
    Mutation(
        "wrong-divisor",
        "ddp/hooks.py",
        'all_reduce(gradient / world_size, "sum", name)',
        'all_reduce(gradient / (world_size + 1), "sum", name)',
        (f"{_SCENARIOS}::test_one_graph_can_be_chosen[plain]",),
    ),
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
        "late-division-forgotten",
        "ddp/by_hand.py",
        "left = scaling.without(average if is_divided else NO_SCALING)",
        "left = scaling",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[other-orders-concat]",),
    ),
    Mutation(
        "read-while-in-flight",
        "ddp/in_flight.py",
        "if gradient is not None and gradient.data_ptr() != piece.data_ptr():",
        "if gradient is None:",
        (f"{_GRAPHS}::test_a_graph_does_not_wait_for_what_was_launched_before[coalesced-True]",),
    ),
    Mutation(
        "borrowed-numbers-forgotten",
        "ddp/prepared.py",
        "borrowed.parameters = item.parameters",
        "borrowed.parameters = {}",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[block-by-block-coalesced]",),
    ),
    Mutation(
        "borrowed-in-any-order",
        "ddp/prepared.py",
        "            elif frozenset(other) != frozenset(mine):\n",
        "            elif False:\n",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[other-orders-of-instances-coalesced]",),
    ),
    Mutation(
        "others-launch-ahead",
        "agreement/sharing.py",
        "            member.withdraw(launches, 0, everywhere=everywhere)",
        "            pass",
        (
            "tests/agreement/test_sharing.py",
            f"{_SCENARIOS}::test_trains_as_eager_ddp[other-orders-of-two-concat]",
        ),
    ),
    Mutation(
        "buckets-mapped-anew",
        "plan/caps.py",
        'KEPT_ON_CPU_BYTES if device_type == "cpu" else math.inf',
        "math.inf",
        ("tests/plan/test_measured.py::test_buckets_on_a_cpu_are_of_memory_that_is_kept",),
    ),
    Mutation(
        "foreign-not-counted",
        "plan/placement.py",
        "                count += 1\n",
        "                count += 0\n",
        ("tests/passes/test_pipeline.py",),
    ),
    Mutation(
        "unused-between-foreign",
        "agreement/usage.py",
        "        return bool(launches.foreign or self.has_foreign or is_likely)",
        "        return bool(self.has_foreign and is_likely)",
        ("tests/agreement/test_foreign.py",),
    ),
    Mutation(
        "follows-behind-foreign",
        "agreement/participant.py",
        "        if expected is not None and expected.is_overtaken(launches.foreign):\n",
        "        if expected is None and launches.foreign < 0:\n",
        ("tests/agreement/test_foreign.py",),
    ),
    Mutation(
        "sizes-counted-as-edges",
        "ddp/aot_forward.py",
        "for edge, index in enumerate(tensors)}",
        "for edge, index in enumerate(range(len(inputs)))}",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[mark-dynamic-coalesced]",),
    ),
    Mutation(
        "numbers-of-the-program-stay",
        "ddp/traced_inputs.py",
        "inputs[:] = map(_no_number, inputs)",
        "inputs[:] = inputs",
        ("tests/ddp/test_traceable.py",),
    ),
    Mutation(
        "hooks-are-compiled-alone",
        "torch_private/autograd.py",
        "    compile_hooks_alone(False)\n",
        "    compile_hooks_alone(True)\n",
        ("tests/ddp/test_traceable.py",),
    ),
    Mutation(
        "second-derivatives-are-traced",
        "ddp/traceable.py",
        " and not _has_untraceable_nodes(outputs)",
        "",
        ("tests/ddp/test_traceable.py",),
    ),
    Mutation(
        "nested-tensors-are-traced",
        "ddp/traceable.py",
        "if has_nested_tensors(node)",
        "if False",
        ("tests/ddp/test_traceable.py",),
    ),
    Mutation(
        "grad-overwrites-what-it-keeps",
        "ddp/backward.py",
        "traced or must_be_kept(call, outputs)",
        "traced",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[grad-of-inputs-concat]",),
    ),
    Mutation(
        "failure-of-some-modules",
        "ddp/disagreement.py",
        "forget(failed, _may",
        "forget(touched, _may",
        ("tests/agreement/test_trying_again.py",),
    ),
    Mutation(
        "failure-under-no-sync",
        "ddp/backward.py",
        "shared_errors(reached, owing, fail_backward)",
        "shared_errors(reached, list, fail_backward)",
        ("tests/agreement/test_trying_again.py",),
    ),
    Mutation(
        "users-error-replaced",
        "ddp/disagreement.py",
        "why_failed(failed) if _may_be_a_collectives(error) else None",
        "why_failed(failed)",
        ("tests/agreement/test_trying_again.py",),
    ),
    Mutation(
        "failure-told-to-nobody",
        "ddp/disagreement.py",
        "            if participants[name].is_local:  # It has no others",
        "            if False:  # It has no others",
        ("tests/agreement/test_trying_again.py",),
    ),
    Mutation(
        "failure-without-the-flag",
        "ddp/rounds.py",
        "            leave_error(registry.ddp_of(module), NOT_ENDED)\n",
        "            pass\n",
        ("tests/agreement/test_trying_again.py",),
    ),
    Mutation(
        "failed-rank-goes-on",
        "ddp/rounds.py",
        "        note_failed(name)\n",
        "",
        ("tests/agreement/test_trying_again.py",),
    ),
    Mutation(
        "failure-of-all-is-not-noticed",
        "ddp/disagreement.py",
        "        _ask_each(failed, start, lambda participant: participant.note_failed())\n",
        "",
        ("tests/agreement/test_trying_again.py",),
    ),
    Mutation(
        "broken-group-is-met-on",
        "ddp/failed_rounds.py",
        "    if participant.is_broken:\n",
        "    if False:\n",
        ("tests/agreement/test_trying_again.py",),
    ),
    Mutation(
        "ends-remembered-too-long",
        "ddp/found_ends.py",
        "        if found is not None and state == _state_of(found.modules, config, prepared):\n",
        "        if found is not None:\n",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[second-ddp-concat]",),
    ),
    Mutation(
        "flags-of-one-graph",
        "agreement/usage.py",
        "used if known is None else used | known",
        "used",
        ("tests/agreement/test_usage.py",),
    ),
    Mutation(
        "flags-read-in-flight",
        "agreement/usage.py",
        "        if not self.is_postponed:\n",
        "        if True:\n",
        ("tests/agreement/test_usage.py",),
    ),
    Mutation(
        "part-run-twice",
        "ddp/uncompiled.py",
        "if _has_run(traced, error.__traceback__):",
        "if False:",
        ("tests/ddp/test_uncompiled.py",),
    ),
    Mutation(
        "zeros-of-nobody",
        "agreement/history.py",
        "return before if all(map(self.usage.is_absent, before)) else []",
        "return []",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[unused-shared-others-concat]",),
    ),
    Mutation(
        "flags-of-what-was-left-out",
        "ddp/own_flags.py",
        ".parameters & usage.reached",
        ".parameters",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[unused-shared-others-concat]",),
    ),
    Mutation(
        "flags-of-another-block",
        "ddp/own_flags.py",
        "if number == usage.flags:",
        "if False:",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[unused-shared-parts-concat]",),
    ),
    Mutation(
        "flags-for-the-lender",
        "agreement/protocol.py",
        """    participant = participants.get(borrowed.modules.get(module, module))
    if participant is not None:
        participant.deliver""",
        """    participant = participants.get(module)
    if participant is not None:
        participant.deliver""",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[unused-instances-coalesced]",),
    ),
    Mutation(
        "another-order-not-told",
        "agreement/usage.py",
        "float(self.is_out_of_order)]",
        "0.0]",
        ("tests/ddp/test_unused.py::test_blocks_come_to_one_order",),
    ),
    Mutation(
        "parts-in-the-order-of-ranks",
        "agreement/comparing.py",
        "return max(parts, key=LaunchList.order, default=None)",
        "return next(iter(parts), None)",
        ("tests/ddp/test_unused.py::test_blocks_come_to_one_order",),
    ),
    Mutation(
        "other-graphs-not-awaited",
        "agreement/history.py",
        "return not is_known or (self.meetings > 0 and not sends_all)",
        "return not is_known",
        ("tests/agreement/test_usage.py",),
    ),
    Mutation(
        "swapped-offset",
        "passes/concat.py",
        "        [place.offset for place in places],\n",
        "        [place.offset for place in reversed(places)],\n",
        ("tests/passes/test_concat.py",),
    ),
    Mutation(
        "gap-in-the-bucket",
        "plan/layout.py",
        "        offset += numels[index]\n",
        "        offset += numels[index] + 1\n",
        ("tests/plan/test_layout.py",),
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
        "cap-ignored",
        "plan/planner.py",
        "if self.filled_by is None and self.num_bytes >= self.cap_bytes:",
        "if self.filled_by is None and self.num_bytes > self.cap_bytes:",
        ("tests/plan/test_planner.py",),
    ),
    Mutation(
        "launches-not-sorted",
        "plan/planner.py",
        "closed = sorted([*closed, *filled], key=lambda bucket: bucket.ready.position)",
        "closed = [*closed, *filled]",
        ("tests/plan/test_planner.py",),
    ),
    Mutation(
        "level-ignored",
        "plan/planner.py",
        "slot = (reduction.key, levels[reduction.start])",
        "slot = (reduction.key, 0)",
        ("tests/plan/test_planner.py",),
    ),
    # What the graph becomes.
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
        "no-agreement",
        "passes/agree.py",
        "        missing = dict(self.collectives)\n",
        "        missing: dict[str, str] = {}\n",
        ("tests/passes/test_pipeline.py",),
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
    Mutation(
        "saved-buffer-not-donated",
        "ddp/donation.py",
        "        if donated:\n            arguments",
        "        if donated and not numbered:\n            arguments",
        ("tests/ddp/test_donation.py::test_backward_overwrites_what_one_without_ddp_does[concat]",),
    ),
    Mutation(
        "last-bucket-of-a-hook",
        "ddp/hook_buckets.py",
        "bucket = GradBucket(index, buffer, parameters, is_last)",
        "bucket = GradBucket(index, buffer, parameters, index == 0)",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[hook-users-buckets-concat]",),
    ),
    Mutation(
        "hook-alone-divided",
        "ddp/hook_buckets.py",
        "buffer = flat[0] if len(flat) == 1 else torch.cat(flat)",
        "buffer = flat[0] / 2 if len(flat) == 1 else torch.cat(flat)",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[hook-users-concat]",),
    ),
    # What ranks do together, and what is remembered.
    Mutation(
        "no-sync-ignored",
        "ddp/expecting.py",
        "        if ddp.require_backward_grad_sync:\n            setattr(ddp, EXPECTED, True)\n",
        "        if True:\n            setattr(ddp, EXPECTED, True)\n",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[no-sync-concat]",),
    ),
    Mutation(
        "reduced-twice",
        "ddp/rounds.py",
        "    return participant is not None and number in participant.announced\n",
        "    return False\n",
        (f"{_LAUNCHES}::test_a_step_launches_what_its_report_says[concat-aot_autograd-False]",),
    ),
    Mutation(
        "hook-not-last",
        "ddp/backward.py",
        "        put_hooks_last()\n",
        "",
        (f"{_SCENARIOS}::test_trains_as_eager_ddp[hooks-in-order-concat]",),
    ),
    Mutation(
        "settings-not-compared",
        "agreement/comparing.py",
        "    if len({settings for settings, *_ in items.values()}) > 1:\n",
        "    if not items:\n",
        (f"{_PROTOCOL}::test_ranks_with_other_settings_stop",),
    ),
    Mutation(
        "error-swallowed",
        "ddp/disagreement.py",
        "            raise said from cause\n        raise\n",
        "            raise said from cause\n",
        (f"{_PROTOCOL}::test_a_failure_on_one_rank_is_an_error_on_the_others_at_once",),
    ),
    Mutation(
        "second-plan-never-runs",
        "torch_private/compiled_backward.py",
        "        holder.compiled_bw = compiled\n",
        "        pass\n",
        (f"{_REPLANNED}[second-subclass]",),
    ),
    Mutation(
        "slower-plan-kept",
        "ddp/replanning.py",
        "            if value / 1e9 < report.first_s:\n",
        "            if value:\n",
        (f"{_REPLANNED}[first]",),
    ),
    Mutation(
        "cache-key-without-caps",
        "install/inductor_pass.py",
        "        state.append(registry.fingerprint())\n",
        "        state.append(sorted(module.group_name for module in registry.fingerprint()))\n",
        ("tests/install/test_cache.py::test_another_setting_misses[cap of the module]",),
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
