"""All scenarios and their expected results: the contract of the package. ``features`` has their
trainings. Nothing here imports torch, so that listing them is fast.

A model that rounds may differ from eager DDP as far as its compiled kernels round differently than
PyTorch's own. All other models must agree bitwise on any number of ranks, because nothing in them
is ever rounded (:mod:`testing.models`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from testing.scenarios.entries import Scenario

FEATURES = "testing.scenarios.features"

ALL_DTYPES = ("fp32", "bf16", "fp16")
UNFUSED = "equal, unfused"

Options = dict[str, Any]

ROUNDS: Options = {"tolerance_eps": 32.0}
"""Tolerance of models that round, after three steps. Sums of n terms in two orders differ by about
sqrt(n) eps; n is at most 4 x 8 x 8 = 256 here (a BatchNorm statistic; a row of the embedding's
gradient has fewer terms), which gives 16, doubled for the following steps. 10.6 was measured."""

AUTOCAST: Options = {"dtypes": ("bf16",), "launches": 1}
AUTOCAST_FP16: Options = {"dtypes": ("fp16",), "tolerance_eps": 2.0**13}
"""Eps of fp16 in eps of fp32. A compiled kernel sums the gradient of a bias in fp32, while eager
rounds each step to fp16: half a rounding in the gradient, and the same again in the fp16 copies of
the trained weights."""

THIRDS_EPS = 4.0
"""Tolerance of averages over three ranks. Each rank's share is rounded once by a division and twice
by a multiplication with the rounded reciprocal, and two sums are rounded in another order: at most
half an eps each, relative to the largest value, which makes 3; a cancelled sum adds a little. 0.83
was measured."""
THREE: Options = {"ranks": 3, "tolerance_eps": THIRDS_EPS}

POWER_SGD: Options = {"hook": "power sgd", "steps": 5, "moves": False, "tolerance_eps": 64.0}
"""PowerSGD: matrix products that are summed in another order, so twice the tolerance of other
rounding. Parameters do not move, so that rounding errors do not reach later steps."""

FP16_PRODUCTS_EPS = 2.0**14
"""The same for products that are sent in fp16, whose eps is this multiple of fp32's: one rounding,
and one that follows from it."""

CONCAT, COALESCED = "concat", "coalesced"
"""Modes in which the check trains a scenario; scenarios alternate between them."""

EACH_TORCH, NEWEST_TORCH = "each torch", "newest torch"
"""Further versions of torch on which the check trains a scenario."""

INSIDE: Options = {"style": "inside"}
TRACED: Options = {"options": {"backward_graph": "compiled_autograd"}}
AS_IT_IS: Options = {"style": "as it is"}
KEPT: Options = {"zero": "kept"}
ADDED: Options = {"zero": "never"}
TWO_BY_TWO: Options = {"steps": 2, "micro_batches": 2, "no_sync": True}
TWO_BY_THREE: Options = {"steps": 2, "micro_batches": 3, "no_sync": True}
SIZES: Options = {"steps": 4, "sizes": (2, 4, 3, 5)}
CALLED: Options = {"compiling": {"options": {"fallback_by_default": True}}}
"""Loops of several scenarios; see :class:`testing.scenarios.loop.Loop`."""

USERS: Options = {"hook": "summing"}
CHANGING: Options = {"model": "normed", "loss": "of a product", "steps": 2, "moves": False}
COUNTING: Options = {"model": "counting"}
DEEP: Options = {"model": "five layers"}
BLOCKS: Options = {"style": "as it is", "model": "blocks"}
TURNS = "a/b b/a a/a b/b"
OTHERS = f"{TURNS} abc/a a/c"
IN_TURN: Options = {"takes": TURNS}
SOME_IN_TURN: Options = {"takes": "a/b ab/ b/a a/a"}
FOUR_IN_TURN = "/a/a/a a//a/a a/a//a ///"
FOUR_OTHERS = "a/b/c/ /a/b/c a/a/b/b ///c"
"""The branches that ranks run: ``a/bc b`` are two steps; in the first, rank 0 runs ``a`` and rank 1
runs ``b`` and ``c``; in the second, both run ``b``."""

NEVER_THE_SAME = (
    f"b/ac bc/a abc/b ab/c a/bc ac/ab{' b/c' * 10} abc/b c/ab{' b/a' * 10} c/ab abc/b bc/ac"
)
"""In the first averaged backward, a later block comes from another rank than an earlier one, and
one block comes from none. A block that all ranks skip for a long time returns, as the last of a
backward and as the first."""

NESTED: Options = {"keeps_graph": True, "uses": 2}
FIND_UNUSED = {"find_unused_parameters": True}
BRANCHES: Options = {"model": "branches", "ddp": FIND_UNUSED, "moves": False}
JOINED_UNUSED: Options = {"steps": ((2, 5), (4, 2)), "model": "branches", "ddp": FIND_UNUSED}
SMALL_MB = 300 / 2**20
SMALL_BUCKETS: Options = {"ddp": {"bucket_cap_mb": SMALL_MB}}
CAP_LIST: Options = {"ddp": {"bucket_cap_mb_list": [SMALL_MB, 2 * SMALL_MB]}}
"""Options of several scenarios; a cap that gives small models several buckets."""

ONE_BACKWARD = 2
"""Launches of a training with a single backward: a bucket, and the broadcast that rebuilds
buckets."""

COLLECTIVE: Options = {"options": {"scaling": "collective"}}
BUCKET: Options = {"options": {"scaling": "bucket"}}
FLAG_CAP: Options = {"options": {"bucket_cap_mb": SMALL_MB, "first_bucket_cap_mb": SMALL_MB}}
SHARDED: Options = {"options": {"shard_optimizer": True}, "modes": ("concat",)}
OVERLAPPED: Options = {"options": {"shard_optimizer": "overlap"}, "modes": ("concat",)}
"""Options of ``FusionConfig``. With the last one, a rank has the gradients of its own parameters;
those of other ranks are compared too."""

STAYS_LOCAL = ("are not all-reduced, as with eager DDP: its forward ran under no_sync",)
MAY_STAY_LOCAL = ("are not all-reduced, as with eager DDP, if that raises no error: its forward",)
OWN_REDUCER = (
    "is trained by DDP's own reducer, as without ddp_fusion, and its gradients are not fused:"
)
ON_BUFFERS = (f"{OWN_REDUCER} a hook of yours synchronises its buffers",)
STEPS = (OWN_REDUCER,)
NO_EFFECT = ("has no effect under ddp_fusion: it tunes the C++ reducer, which does not run",)
NOT_DDPS_OWN = ("are not all-reduced, as with eager DDP: DistributedDataParallel was constructed",)
ONE_OWN_REDUCER = ("trained by DDP's own reducer",)
"""Warnings that several scenarios expect."""

TORCH_CRASHES = "torch 2.11 can crash where one thread is traced while another one runs"
"""Observed once in three runs; docs/support.md."""


def on_two(feature: str, target: str, *checked: str, **options: Any) -> Scenario:
    """A scenario on two ranks.

    Args:
        feature: name of the scenario.
        target: ``module:function`` among the features.
        checked: modes in which the check trains it, :data:`EACH_TORCH`, :data:`NEWEST_TORCH`.
        options: fields of :class:`testing.scenarios.entries.Scenario`, ``options`` as a dictionary;
            all others are arguments of the target.
    """
    return with_ddp(feature, target, *checked, **options)


def on_ranks(
    parallelism: str, feature: str, target: str, *checked: str, ranks: int = 4, **options: Any
) -> Scenario:
    """A scenario of a kind of parallelism, by default on four ranks."""
    arguments = {name: options.pop(name) for name in [*options] if name not in _FIELDS}
    return Scenario(
        parallelism,
        feature,
        f"{FEATURES}.{target}",
        ranks,
        tested=tuple(item for item in checked if item not in (EACH_TORCH, NEWEST_TORCH)),
        each_torch=EACH_TORCH in checked,
        newest_torch=NEWEST_TORCH in checked,
        options=tuple(options.pop("options", {}).items()),
        arguments=tuple(arguments.items()),
        **options,
    )


def with_ddp(feature: str, target: str, *checked: str, ranks: int = 2, **options: Any) -> Scenario:
    """A scenario with one DDP module, by default on two ranks."""
    return on_ranks(f"ddp-{ranks}", feature, target, *checked, ranks=ranks, **options)


def plain(feature: str, *checked: str, **options: Any) -> Scenario:
    """A scenario with the most common training loop."""
    return with_ddp(feature, "loops:plain", *checked, **options)


def joined(feature: str, *checked: str, **options: Any) -> Scenario:
    """A scenario of ``join`` in the most common training loop."""
    return with_ddp(feature, "joining:uneven", *checked, **options)


def tables(feature: str, *checked: str, **options: Any) -> Scenario:
    """A scenario with two sparse embeddings."""
    return with_ddp(feature, "sparse:tables", *checked, **options)


def strides_changed(feature: str, *checked: str, **options: Any) -> Scenario:
    """A scenario in which strides of parameters change after DDP is constructed."""
    return with_ddp(feature, "by_hand:strides_changed", *checked, **options)


def branches(feature: str, *checked: str, **options: Any) -> Scenario:
    """A scenario whose model has branches. A step may skip some of them."""
    return plain(feature, *checked, **{**BRANCHES, **options})


def around_construction(feature: str, *checked: str, **options: Any) -> Scenario:
    """A scenario whose flag is set only while DDP is constructed."""
    target = "backwards:flag_around_construction"
    return on_two(feature, target, *checked, **options, launches=1)


def tensor_parallel(feature: str, *checked: str, **options: Any) -> Scenario:
    """A scenario of DDP around a tensor-parallel model, on a mesh of 2 x 2 ranks."""
    return on_ranks("tp", feature, "tensor:uneven", *checked, **options)


def in_thirds(feature: str, *checked: str, **options: Any) -> Scenario:
    """A scenario of averages over three ranks, in a single backward."""
    defaults: Options = {**THREE, "launches": ONE_BACKWARD}
    return with_ddp(feature, "precision:in_thirds", *checked, **defaults, **options)


def smaller(feature: str, dtype: str, *checked: str, **options: Any) -> Scenario:
    """A scenario whose fp32 gradients are sent in a smaller dtype, on two ranks."""
    flag = {"reduce_dtype": dtype, **options.pop("options", {})}
    options = {"launches": 1, "dtype": dtype, **options, "options": flag}
    return on_two(feature, "precision:sent_in", *checked, **options)


_FIELDS = {field.name for field in dataclasses.fields(Scenario)}


SCENARIOS = (
    # --- How ranks share the work
    plain("plain", CONCAT, "concat/bf16", EACH_TORCH, dtypes=ALL_DTYPES, launches=1),
    plain("plain", ranks=4, dtypes=ALL_DTYPES, launches=1),
    plain("no-sync", ranks=4, **TWO_BY_THREE),
    branches("unused-changing", ranks=4, takes=FOUR_IN_TURN),
    branches("unused-added", ranks=4, takes=FOUR_OTHERS, **ADDED),
    on_ranks("ddp-4", "update-group", "reducer:another_group"),
    on_ranks("ddp-4", "update-group-hook", "reducer:another_group_for_all", CONCAT),
    tensor_parallel("plain", dtypes=("fp32", "bf16"), steps=2, sizes=(3, 5), launches=1),
    tensor_parallel("backward-inside", COALESCED, NEWEST_TORCH, steps=2, **INSIDE, launches=1),
    tensor_parallel("eager-forward", CONCAT, recomputed=True, **AS_IT_IS),
    on_ranks("tp", "compiled-before", "tensor:compiled_before"),
    tensor_parallel("no-sync", **TWO_BY_TWO),
    on_ranks("tp", "sequence", "tensor:sequence", **ROUNDS, launches=1),
    on_ranks("tp", "returns-dtensors", "tensor:returning_dtensors", CONCAT),
    on_ranks("pp", "gpipe", "pipeline:two_stages", schedule="GPipe", launches=1),
    on_ranks("pp", "1f1b", "pipeline:two_stages", schedule="1F1B"),
    on_ranks("pp", "traced-gpipe", "pipeline:two_stages", schedule="GPipe", is_traced=True),
    on_ranks("pp", "traced-1f1b", "pipeline:two_stages", schedule="1F1B", is_traced=True),
    on_ranks("fsdp", "beside", "sharded:beside", CONCAT, ranks=2),
    on_ranks("fsdp", "beside-inside", "sharded:beside", ranks=2, **INSIDE),
    on_ranks("fsdp", "within", "sharded:within", ranks=2),
    on_ranks("hsdp", "beside", "sharded:hybrid_beside"),
    # --- Several process groups
    on_ranks("groups", "plain", "instances:two_groups", CONCAT, launches=2),
    on_ranks("groups", "backward-inside", "instances:two_groups", **INSIDE),
    on_ranks("groups", "no-sync", "instances:two_groups", **TWO_BY_TWO),
    # --- Ways to write a training loop
    plain("backward-inside", COALESCED, EACH_TORCH, dtypes=ALL_DTYPES, **INSIDE, launches=1),
    plain("eager-forward", **AS_IT_IS),
    plain("no-sync", CONCAT, **TWO_BY_THREE, launches=1),
    plain("no-sync-inside", COALESCED, **INSIDE, **TWO_BY_THREE, launches=1),
    plain("kept-gradients", COALESCED, **KEPT, launches=1),
    plain("detached-gradients", CONCAT, zero="detached", launches=1),
    plain("added-gradients", **ADDED),
    plain("several-forwards", COALESCED, loss="of halves"),
    plain("several-backwards", CONCAT, micro_batches=2, launches=1),
    on_two("forwards-then-backwards", "loops:forwards_then_backwards", warns=STAYS_LOCAL),
    on_two("evaluation", "loops:evaluation"),
    plain("reduce-overhead", compiling={"mode": "reduce-overhead"}),
    plain("cpp-wrapper", model="layouts", compiling={"options": {"cpp_wrapper": True}}, launches=1),
    plain("dynamic", compiling={"dynamic": True}, **SIZES, launches=1),
    plain("automatic-dynamic", CONCAT, **INSIDE, **SIZES, launches=1),
    plain("checkpointing", model="checkpointed"),
    plain("checkpointing-inside", CONCAT, model="checkpointed", **INSIDE, launches=1),
    on_two("checkpointing-reentrant", "loops:reentrant_checkpointing", COALESCED),
    on_two("upsampled", "loops:upsampled", CONCAT),
    on_two("mark-dynamic", "loops:marked_dynamic", COALESCED, **SIZES, launches=1),
    on_two("mark-dynamic-inside", "loops:marked_dynamic", **INSIDE, **SIZES, launches=1),
    on_two("recompilation", "ranks:recompilation", CONCAT, launches=1),
    on_two("transformer", "loops:transformer", **ROUNDS, launches=1),
    on_two("transformer-inside", "loops:transformer", **INSIDE, **ROUNDS, launches=1),
    # --- What a backward is asked for, and what reaches it
    on_two(
        "retain-graph", "backwards:twice", CONCAT, EACH_TORCH, warns=STAYS_LOCAL, keeps_graph=True
    ),
    on_two("grad-of-inputs", "backwards:grad_of_inputs", CONCAT),
    on_two("gradient-penalty", "backwards:gradient_penalty", CONCAT),
    on_two("no-sync-elsewhere", "backwards:no_sync", CONCAT, warns=STAYS_LOCAL, keeps_graph=True),
    on_two("local-gradients", "backwards:local_gradients", COALESCED, EACH_TORCH),
    on_two("backward-inputs", "backwards:some_inputs", COALESCED, keeps_graph=True),
    on_two("backward-inputs-alone", "backwards:inputs_alone", CONCAT),
    on_two("loss-reads-parameter", "backwards:loss_that_reads_a_parameter", CONCAT),
    on_two("flag-unset", "backwards:flag_unset", CONCAT),
    on_two("another-flag", "backwards:another_flag", COALESCED),
    around_construction("flag-around", CONCAT, EACH_TORCH),
    around_construction("flag-around-inside", COALESCED, **INSIDE),
    around_construction("flag-around-thread", thread=True),
    around_construction("flag-around-traced", CONCAT, **TRACED),
    around_construction("flag-around-traced-inside", **TRACED, **INSIDE),
    on_two("flags", "backwards:flags_of_their_own", CONCAT, **TRACED, modes=("concat",)),
    on_two("kept-tensors", "backwards:kept_gradients", COALESCED, EACH_TORCH),
    on_two("set-meanwhile", "backwards:set_meanwhile", CONCAT),
    on_two("kept-unused", "backwards:kept_unused", CONCAT),
    on_two("kept-in-graph", "backwards:kept_in_a_graph", CONCAT),
    on_two("several-outputs", "backwards:several_outputs", CONCAT),
    on_two("several-outputs-eager", "backwards:backwards_of_one_iteration"),
    on_two("several-outputs-cleared", "backwards:cleared_between", CONCAT),
    on_two("head-then-body", "backwards:head_then_body", CONCAT, finds_unused=False),
    on_two("head-then-body-unused", "backwards:head_then_body", COALESCED, finds_unused=True),
    on_two("failing-late", "backwards:failing_late", CONCAT),
    on_two("anomaly-mode", "backwards:under_anomaly_mode", COALESCED),
    on_two("failing", "backwards:failing", COALESCED, model="two layers"),
    on_two("queued-callbacks", "backwards:queued_callbacks", COALESCED, EACH_TORCH),
    # --- Models in several graphs
    plain("graph-break", model="broken"),
    plain("graph-break-inside", loss="behind a break", **INSIDE),
    plain("partly-compiled", model="partly compiled", **AS_IT_IS),
    plain("compiled-before", COALESCED, model="compiled", **AS_IT_IS),
    plain("compiler-disable", model="disabled"),
    on_two("in-parts", "parts:in_parts", CONCAT),
    on_two("in-parts-failing", "backwards:failing", CONCAT, model="in parts"),
    on_two("in-parts-shared", "parts:shared_by_parts", CONCAT),
    on_two("in-parts-one-by-one", "backwards:several_outputs", COALESCED, are_compiled=True),
    on_two("block-by-block", "parts:block_by_block", COALESCED),
    on_two("breaks-in-a-loop", "parts:breaks_in_a_loop", CONCAT),
    on_two("disabled-hook", "parts:broken_backward", COALESCED, NEWEST_TORCH),
    # --- Modules that share graphs, weights or a backward
    on_two("two-caps", "instances:two_caps", CONCAT, launches=3),
    on_two("one-before-the-other", "instances:one_before_the_other", CONCAT),
    on_two("alternating", "instances:alternating"),
    on_two("second-instance", "instances:second_instance", CONCAT, EACH_TORCH),
    on_two("instances-in-parts", "instances:instances_in_parts", COALESCED),
    on_two("instances-in-one-backward", "instances:instances_in_one_backward", COALESCED),
    on_two("same-weights", "instances:over_the_same_weights", COALESCED),
    on_two("same-weights-at-once", "instances:over_the_same_weights_at_once", CONCAT),
    on_two("one-thread", "instances:in_a_thread", CONCAT),
    on_two("threads", "instances:threads", COALESCED, fails_on_oldest=TORCH_CRASHES),
    on_two("bare-threads", "instances:bare_threads", CONCAT, fails_on_oldest=TORCH_CRASHES),
    on_two("subclass", "instances:subclass", CONCAT, EACH_TORCH),
    on_two("replicate", "instances:replicated", CONCAT),
    on_two("two-reducers", "instances:two_reducers", CONCAT, warns=ONE_OWN_REDUCER),
    on_two(
        "two-reducers-apart", "instances:reducers_apart", CONCAT, EACH_TORCH, warns=ONE_OWN_REDUCER
    ),
    # --- What random trainings have led to
    on_two("lacking-beside-another", "unused:one_may_lack_gradients", CONCAT, **ROUNDS),
    on_two("no-sync-twice", "backwards:kept_under_no_sync", CONCAT, **ROUNDS),
    plain("buffers-change-between", CONCAT, **CHANGING, **INSIDE, **ROUNDS),
    on_two("incomplete-twice", "unused:incomplete_twice", CONCAT, averages=False),
    # --- Ranks that do not do the same
    on_two("batch-sizes", "ranks:batch_sizes", CONCAT),
    on_two("hooks-on-one-rank", "ranks:hooks_on_one_rank", CONCAT),
    on_two("other-orders", "ranks:other_orders", CONCAT),
    on_two("other-orders-of-two", "ranks:other_orders_of_two", CONCAT),
    on_two("other-orders-of-another", "ranks:other_orders_of_two", are_others=True),
    on_two("other-orders-of-instances", "ranks:other_orders_of_instances", COALESCED),
    on_two("other-orders-of-blocks", "ranks:other_orders_of_blocks", CONCAT),
    on_two("foreign", "foreign:in_graphs", COALESCED),
    on_two("foreign-batch-sizes", "foreign:batch_sizes", CONCAT),
    on_two("foreign-first-batch-sizes", "foreign:first_batch_sizes", CONCAT),
    on_two("static-graph-without-some", "ranks:static_graph_without_some", CONCAT),
    on_two("static-graph-sides", "ranks:static_graph_of_sides"),
    on_two("static-graph-changes", "ranks:static_graph_that_changes", CONCAT),
    on_two("unreached", "ranks:unreached", COALESCED, EACH_TORCH, averages=False),
    on_two("unreached-inside", "ranks:unreached", CONCAT, is_inside=True, averages=False),
    on_two("unreached-later", "ranks:unreached_later", CONCAT),
    on_two("unreached-at-first", "ranks:unreached_at_first", CONCAT, averages=False),
    on_two("all-replaced", "ranks:all_replaced", CONCAT, averages=False, warns=NOT_DDPS_OWN),
    on_two("thawed", "ranks:thawed", COALESCED, warns=NOT_DDPS_OWN),
    on_two("swapped", "ranks:swapped", COALESCED, averages=False, warns=NOT_DDPS_OWN),
    # --- Parameters that take no part in a step
    branches("unused-never", CONCAT, takes="abc abc abc abc"),
    branches("unused-all", takes="/ / / /"),
    branches("unused-all-kept", takes="a / a /", **KEPT),
    branches("unused-some", takes="a/ a/ a/ a/"),
    branches("unused-some-inside", takes="a/ a/ a/ a/", **INSIDE),
    branches("unused-changing", takes="/a a/ /a /"),
    # A bucket, and the used-parameter map.
    branches("unused-in-turn", CONCAT, **IN_TURN, launches=2),
    branches("unused-many", takes=f"{OTHERS} c/a b/b a/b /c"),
    branches("unused-changing-inside", takes=OTHERS, **INSIDE),
    branches("unused-changing-eager", takes=OTHERS, **AS_IT_IS),
    branches("unused-new-branch", takes="a a c c c a a"),
    branches("unused-added", takes="a/b b/a a b a/b", **ADDED),
    on_two("unused-outputs", "unused:outputs_in_turn", CONCAT, takes="b abc a/b b/a c"),
    on_two("unused-outputs-apart", "unused:outputs_apart", CONCAT, warns=MAY_STAY_LOCAL),
    branches("unused-added-late", takes="a c/b a/b /c", **ADDED),
    branches("unused-zeroed", takes="a/b b/a a c/b a", **KEPT),
    branches("unused-no-sync", CONCAT, takes="a/b b a b a a", local=(0, 1, 3)),
    branches("unused-hook-fp16", takes=OTHERS, hook="fp16"),
    branches("unused-dtypes", takes=OTHERS, model="branches of several dtypes"),
    branches(
        "unused-static-graph", takes="a/b a/b a/b a/b", ddp={**FIND_UNUSED, "static_graph": True}
    ),
    on_two("unused-static-graph-later", "unused:in_a_static_graph_later", takes="a/b a/b a/b a/b"),
    branches(
        "unused-several-graphs", CONCAT, takes=f"{TURNS} abc/a", model="broken backward", **AS_IT_IS
    ),
    branches("unused-in-parts", CONCAT, NEWEST_TORCH, takes="a a a a", model="parts"),
    branches("unused-other-parts", COALESCED, takes="a a / a a/ / a a", model="parts"),
    branches("unused-shared-parts", CONCAT, takes="abc abc abc abc ac ac c", local=(1,), **BLOCKS),
    branches("unused-shared-zeroed", takes="abc abc ab ab abc", model="a loop", **KEPT),
    branches("unused-shared-others", CONCAT, takes="abc abc ab/abc abc a/c abc b/ abc", **BLOCKS),
    branches("unused-shared-order", COALESCED, takes=NEVER_THE_SAME, **BLOCKS),
    on_two("unused-instances", "unused:by_instances", COALESCED),
    on_two("unused-in-parts-of-two", "unused:in_parts_beside_another"),
    on_two("unused-beside-foreign", "foreign:with_unused"),
    branches(
        "skip-unused", takes="/ / / /", ddp={**FIND_UNUSED, "skip_all_reduce_unused_params": True}
    ),
    # --- Unusual parameters
    plain("frozen", COALESCED, model="frozen", launches=1),
    plain("ignored", model="ignored"),
    tables("sparse-accumulated", micro_batches=2, no_sync=True, moves=True),
    tables("sparse-tables-inside", **INSIDE),
    tables("sparse-tables-kept", CONCAT, local=(0, 2), zero="never", launches=3),
    tables("sparse-tables-zeroed", zero="kept"),
    tables("sparse-padding", of_first={"padding_idx": 1}),
    tables("sparse-all-used", ddp=FIND_UNUSED),
    tables("sparse-static-graph", ddp={"static_graph": True}),
    tables("sparse-unused", CONCAT, takes="b b/ / /b b", is_dense=True, ddp=FIND_UNUSED),
    # Torch produces dense gradients for it if the forward is compiled.
    tables("sparse-max-norm", CONCAT, is_dense=True, of_first={"max_norm": 0.5}, launches=3),
    # The last layer fills one bucket, the other layer another one, and each table is a bucket of
    # its own.
    tables("sparse-tables", CONCAT, ddp={"bucket_cap_mb": 144 / 2**20}, **THREE, launches=4),
    tables("sparse-join", is_joined=True, **THREE),
    tables("sparse-join-divided", CONCAT, is_joined=True, by_initial=False, **THREE),
    plain("tied", CONCAT, model="tied", launches=1),
    plain("layouts", model="layouts", launches=1),
    plain("layouts-kept", CONCAT, NEWEST_TORCH, model="layouts", **KEPT, launches=1),
    plain("scalars", CONCAT, model="scalars", launches=1),
    plain("complex", model="complex", launches=2),
    on_two("complex-kept", "loops:complex_that_stay"),
    plain("shared-storage", model="shared storage"),
    # --- What DDP offers
    on_two("static-graph", "reducer:static_graph", COALESCED),
    on_two("static-graph-reentrant", "reducer:static_graph_of_a_checkpoint", CONCAT),
    branches("static-graph-unused", CONCAT, takes="ab ab ab", ddp={"static_graph": True}),
    plain("bucket-view", ddp={"gradient_as_bucket_view": True}, **KEPT, warns=NO_EFFECT),
    plain("batched-copy", ddp={"batched_grad_copy": True}, warns=NO_EFFECT),
    plain("bucket-cap", COALESCED, **DEEP, **SMALL_BUCKETS, launches=3),
    plain("flag-cap", CONCAT, **DEEP, **INSIDE, **FLAG_CAP, launches=3),
    plain("bucket-cap-list", CONCAT, **DEEP, **CAP_LIST, launches=2),
    on_two("update-group-after-error", "reducer:after_an_error", CONCAT, leaves_unwaited=True),
    on_two("state-dict", "reducer:state_dict", CONCAT),
    on_two("saved-module", "reducer:saved_module", CONCAT),
    on_two("deepcopy", "reducer:deepcopy", CONCAT, EACH_TORCH),
    on_two("deepcopy-on-one-rank", "reducer:deepcopy_on_one_rank", CONCAT),
    on_two("second-ddp", "reducer:second_ddp", CONCAT),
    # --- Strides that change after DDP is constructed, beside averages that are made by hand
    strides_changed(
        "strides-changed",
        CONCAT,
        NEWEST_TORCH,
        where=(0, 1),
        fails_on_oldest="Dynamo of this torch has no guard on the strides of a parameter",
    ),
    strides_changed("strides-changed-eager", is_compiled=False, where=(0, 1)),
    strides_changed("strides-changed-on-one", COALESCED, where=(1,)),
    strides_changed("strides-changed-on-one-kept", CONCAT, where=(0,), **KEPT),
    strides_changed("strides-changed-on-one-eager", CONCAT, is_compiled=False, where=(1,)),
    # --- Delayed reductions, beside averages that are made by hand
    on_two("delayed", "by_hand:delayed", CONCAT, EACH_TORCH),
    on_two("delayed-no-sync", "by_hand:delayed", COALESCED, micro_batches=3, steps=2),
    on_two("delayed-kept", "by_hand:delayed", **KEPT, micro_batches=2),
    on_two("delayed-added", "by_hand:delayed", **ADDED),
    on_two("delayed-eager", "by_hand:delayed_eager", CONCAT),
    on_two("delayed-options", "by_hand:delayed_options", CONCAT),
    on_two("delayed-unused", "by_hand:delayed_unused", COALESCED),
    on_two("delayed-unused-found", "by_hand:delayed_unused", **FIND_UNUSED),
    on_two("delayed-repeated", "by_hand:delayed_repeated", CONCAT),
    on_two("delayed-sparse", "by_hand:delayed_sparse", CONCAT),
    on_two("delayed-instances", "by_hand:delayed_instances", CONCAT),
    with_ddp("delayed", "by_hand:delayed", CONCAT, **THREE),
    # --- join
    joined("join", CONCAT, EACH_TORCH),
    joined("join-rank-0", COALESCED, steps=((4, 1),)),
    joined("join-several-times", CONCAT, steps=((0, 3), (3, 1), (2, 2))),
    joined("join-divided", COALESCED, steps=((1, 2), (3, 1)), by_initial=False),
    joined("join-buffers", CONCAT, EACH_TORCH, steps=((2, 4), (3, 1)), **COUNTING),
    joined("join-no-sync", COALESCED, steps=((1, 3),), micro_batches=2, no_sync=True),
    joined("join-inside", CONCAT, **INSIDE),
    joined("join-batch-sizes", COALESCED, steps=((2, 5),), sizes=(4, 1, 3)),
    joined("join-buckets", CONCAT, ddp={"bucket_cap_mb": 0.0005}),
    joined("join-hook", COALESCED, hook="summing"),
    joined("join-unused", takes="a/ /a", **JOINED_UNUSED),
    joined("join-unused-more", takes="a/b /a ab/", **JOINED_UNUSED),
    on_two("join-static-graph", "joining:static_graph", CONCAT),
    on_two("join-static-graph-unused", "joining:static_graph_of_some"),
    on_two("join-optimizer", "joining:beside_an_optimizer", CONCAT),
    on_two("join-disabled", "joining:disabled", CONCAT),
    joined("join", CONCAT, ranks=4, steps=((1, 2, 4, 4),)),
    joined(
        "join-divided",
        ranks=4,
        steps=((1, 2, 4, 4),),
        by_initial=False,
        moves=False,
        tolerance_eps=THIRDS_EPS,
    ),
    # --- Buffers
    plain("buffers", **COUNTING),
    plain("buffers-inside", **COUNTING, **INSIDE),
    plain("buffers-no-sync", micro_batches=3, no_sync=True, **COUNTING),
    on_two(
        "buffers-several-forwards",
        "loops:broadcast_between_forwards",
        CONCAT,
        **ROUNDS,
        fails_on_oldest="eager DDP of this torch raises here",
    ),
    plain("buffers-shared", COALESCED, model="shared counters"),
    plain("buffers-shared-inside", model="shared counters", **INSIDE),
    plain("no-forward-sync", ddp={"forward_sync_buffers": False}, **COUNTING),
    plain("no-broadcast", ddp={"broadcast_buffers": False}, **COUNTING),
    plain("buffers-called", CONCAT, EACH_TORCH, model="shifting", **CALLED, **INSIDE, launches=2),
    plain("buffer-hook", CONCAT, **COUNTING, hook="on buffers", becomes=UNFUSED, warns=ON_BUFFERS),
    # One for the floating-point buffers, and one for the counters.
    on_two("batch-norm", "loops:batch_norm", **ROUNDS, launches=3),
    on_two("batch-norm-inside", "loops:batch_norm", **INSIDE, **ROUNDS, launches=3),
    on_two("batch-norm-shared", "loops:batch_norm", CONCAT, is_shared=True, **ROUNDS, launches=3),
    on_two("batch-norm-evaluated", "loops:batch_norm", is_evaluated=True, **ROUNDS, launches=3),
    # --- Dtypes
    on_two("autocast", "precision:autocast", CONCAT, **AUTOCAST),
    on_two("autocast-inside", "precision:autocast", **INSIDE, **AUTOCAST),
    on_two("grad-scaler", "precision:grad_scaler"),
    on_two("grad-scaler-inf", "precision:grad_scaler", infinite_in=1),
    on_two("grad-scaler-autocast", "precision:grad_scaler", CONCAT, infinite_in=1, **AUTOCAST_FP16),
    plain("two-dtypes", COALESCED, model="two dtypes", launches=2),
    on_two("fp64", "precision:double_precision", launches=1),
    # --- Where gradients are scaled, and in which dtype they are sent
    plain("scaling-collective", CONCAT, **COLLECTIVE, launches=1),
    plain("scaling-bucket", CONCAT, **BUCKET, launches=1),
    plain("scaling-collective-kept", COALESCED, **COLLECTIVE, **KEPT, launches=1),
    plain("scaling-bucket-kept", CONCAT, **BUCKET, **KEPT, launches=1),
    in_thirds("scaling-auto", options={"scaling": "auto"}),
    in_thirds("scaling-collective", COALESCED, **COLLECTIVE),
    in_thirds("scaling-bucket", **BUCKET),
    on_two(
        "near-overflow",
        "precision:near_overflow",
        CONCAT,
        COALESCED,
        dtypes=("fp16",),
        launches=ONE_BACKWARD,
    ),
    smaller("reduce-bf16", "bf16"),
    smaller("reduce-bf16-kept", "bf16", **KEPT),
    smaller("reduce-bf16-collective", "bf16", **COLLECTIVE),
    smaller("reduce-bf16-bucket", "bf16", **BUCKET),
    smaller("reduce-fp16", "fp16"),
    smaller("reduce-fp16-kept", "fp16", CONCAT, **KEPT),
    smaller("reduce-small", "fp16", CONCAT, two_dtypes=True, launches=2),
    # --- Hooks of users, and the communication hooks that only average
    plain("tensor-hook", loss="hooked"),
    on_two("hooks-in-order", "hooks:in_order", CONCAT),
    on_two("hooks-in-order-inside", "hooks:in_order", **INSIDE),
    on_two("hooks-that-come-and-go", "hooks:come_and_go", COALESCED, EACH_TORCH),
    on_two("node-hooks", "hooks:on_nodes", CONCAT, EACH_TORCH),
    on_two("node-hooks-eager", "hooks:on_nodes", COALESCED, is_compiled=False),
    on_two("node-hooks-reentrant", "hooks:on_nodes", CONCAT, is_compiled=False, is_reentrant=True),
    on_two("node-hooks-before", "hooks:on_nodes_before", COALESCED),
    on_two("module-hooks", "hooks:on_modules"),
    on_two("nested-grad", "hooks:nested_grad", CONCAT, keeps_graph=True, uses=1),
    on_two("nested-grad-twice", "hooks:nested_grad", COALESCED, EACH_TORCH, **NESTED),
    on_two("nested-grad-weight", "hooks:nested_grad", CONCAT, of_weight=True, **NESTED),
    on_two("hooks-meanwhile", "hooks:registered_meanwhile", CONCAT, EACH_TORCH),
    on_two("node-hooks-meanwhile", "hooks:registered_meanwhile", COALESCED, on_node=True),
    on_ranks("ddp-4", "users-average", "hooks:users_average", CONCAT),
    plain("hook-allreduce", CONCAT, hook="allreduce", launches=1),
    plain("hook-builtin", hook="builtin"),
    plain("hook-bf16", COALESCED, hook="bf16", launches=1),
    plain("hook-fp16", CONCAT, EACH_TORCH, hook="fp16", launches=1),
    plain("hook-wrapper", CONCAT, hook="wrapped in fp16", launches=1),
    plain("hook-noop", hook="noop"),
    # --- Communication hooks that are called with buckets
    plain("hook-users", CONCAT, EACH_TORCH, **USERS, launches=1),
    plain("hook-users-inside", COALESCED, **USERS, **INSIDE, launches=1),
    plain("hook-users-no-sync", CONCAT, **USERS, **KEPT, **TWO_BY_THREE, launches=1),
    plain("hook-users-no-sync-inside", **USERS, **INSIDE, **TWO_BY_TWO, launches=1),
    plain("hook-users-batch-sizes", **USERS, **SIZES, launches=1),
    plain("hook-users-buckets", CONCAT, **USERS, **SMALL_BUCKETS, launches=2),
    on_two("hook-users-autocast", "precision:autocast", **USERS, **AUTOCAST),
    plain("hook-users-parameters", CONCAT, **USERS, model="unusual"),
    plain("hook-users-layouts", **USERS, model="layouts"),
    plain("hook-users-dtypes", CONCAT, COALESCED, **USERS, model="complex", launches=2),
    on_two("hook-users-flag-unset", "backwards:flag_unset_with_a_hook", CONCAT),
    branches("hook-users-unused", CONCAT, **USERS, **SOME_IN_TURN, launches=2),
    branches("hook-users-unused-inside", **USERS, **INSIDE, **IN_TURN, launches=2),
    branches("hook-users-unused-no-sync", **USERS, local=(1, 3), **IN_TURN, launches=2),
    branches("hook-users-unused-kept", **USERS, **SOME_IN_TURN, **KEPT, launches=2),
    branches(
        "hook-users-unused-buckets",
        **USERS,
        **IN_TURN,
        ddp={**FIND_UNUSED, "bucket_cap_mb": SMALL_MB},
        launches=4,
    ),
    branches("hook-users-unused-never", **USERS, takes="abc abc abc", launches=2),
    plain("hook-powersgd", CONCAT, EACH_TORCH, **POWER_SGD),
    plain(
        "hook-wrapper-powersgd",
        **{**POWER_SGD, "hook": "power sgd in fp16", "tolerance_eps": FP16_PRODUCTS_EPS},
    ),
    plain("hook-wrapper-bf16", hook="wrapped in bf16", launches=1),
    on_two("hook-wrapper-unused", "unused:wrapped_hook", **IN_TURN, launches=2),
    plain("hook-post-local", CONCAT, hook="post-local sgd", steps=4),
    plain("hook-another-group", CONCAT, hook="another group"),
    branches("hook-another-group-unused", hook="another group", **IN_TURN),
    plain("hook-users", CONCAT, ranks=4, **USERS, launches=1),
    plain("hook-powersgd", CONCAT, ranks=4, **POWER_SGD),
    # --- Optimizers
    plain("optimizer-in-hook", hook="stepping", moves=False, becomes=UNFUSED, warns=STEPS),
    on_two("optimizer-fused", "loops:clipped", kind="fused", **ROUNDS),
    on_two("optimizer-foreach", "loops:clipped", kind="foreach", **ROUNDS),
    on_two("optimizer-foreach-inside", "loops:clipped", kind="momentum", **INSIDE, **ROUNDS),
    on_two("optimizer-compiled", "loops:compiled_step", **ROUNDS),
    # --- Optimizers that are divided by the ranks
    plain("sharded", CONCAT, "concat/bf16", EACH_TORCH, **SHARDED, dtypes=ALL_DTYPES),
    plain("sharded-inside", **SHARDED, **INSIDE),
    plain("sharded-no-sync", CONCAT, **SHARDED, **KEPT, **TWO_BY_THREE),
    plain("sharded-added", CONCAT, **SHARDED, **ADDED),
    plain("sharded-tied", **SHARDED, model="tied"),
    branches("sharded-unused", CONCAT, **SHARDED, takes=OTHERS, moves=True),
    smaller("sharded-bf16", "bf16", CONCAT, **SHARDED, **AS_IT_IS, launches=0),
    on_two("sharded-clipped", "loops:clipped", CONCAT, **SHARDED, kind="foreach", **ROUNDS),
    on_two("sharded-fused", "loops:clipped", **SHARDED, kind="fused", **ROUNDS),
    on_two("sharded-scaler", "precision:grad_scaler", CONCAT, **SHARDED, infinite_in=1),
    on_two("sharded-compiled", "loops:compiled_step", **SHARDED, **ROUNDS),
    on_two("sharded-instances", "instances:two_caps", **SHARDED),
    on_two("sharded-deepcopy", "reducer:deepcopy", **SHARDED),
    on_ranks("ddp-4", "sharded", "loops:plain", **SHARDED),
    on_ranks("groups", "sharded", "instances:two_groups", **SHARDED),
    tensor_parallel("sharded", **SHARDED, steps=2, sizes=(3, 5)),
    plain("overlapped", CONCAT, "concat/bf16", EACH_TORCH, **OVERLAPPED, dtypes=ALL_DTYPES),
    plain("overlapped-inside", CONCAT, **OVERLAPPED, **INSIDE),
    plain("overlapped-no-sync", **OVERLAPPED, **KEPT, **TWO_BY_THREE),
    plain("overlapped-tied", CONCAT, **OVERLAPPED, model="tied"),
    branches("overlapped-unused", CONCAT, **OVERLAPPED, takes=OTHERS, moves=True),
    on_two("overlapped-clipped", "loops:clipped", **OVERLAPPED, kind="foreach", **ROUNDS),
    on_two("overlapped-compiled", "loops:compiled_step", **OVERLAPPED, **ROUNDS),
    on_two("overlapped-instances", "instances:two_caps", CONCAT, **OVERLAPPED),
    on_two("overlapped-deepcopy", "reducer:deepcopy", **OVERLAPPED),
    on_ranks("ddp-4", "overlapped", "loops:plain", **OVERLAPPED),
    on_ranks("groups", "overlapped", "instances:two_groups", **OVERLAPPED),
    tensor_parallel("overlapped", **OVERLAPPED, steps=2, sizes=(3, 5)),
)
