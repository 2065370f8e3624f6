"""The registry of what the package changes in torch: for the process, during a call, and in the
modules that it manages.

Nothing is changed by :mod:`fusion_passes.install.changes` that has no entry here. The rooms that
this one imports change things too, which are listed all the same. What is written into one graph,
by a pass or a lowering, is no part of it. ``docs/patches.md`` is made from it.
"""

from __future__ import annotations

from typing import Final

from fusion_passes.install.object_patches import IN_OBJECTS
from fusion_passes.install.patch import DDP, Patch, Span
from fusion_passes.torch_private.older_torch import LAYOUT_CONSTRAINTS

_AUTOGRAD: Final = "torch._dynamo.compiled_autograd"


def _with_flag(what: str, why: str, *, adds: str = "") -> Patch:
    return Patch(what, why, Span.FLAG, "when ddp_fusion is set", "when it is unset", adds)


def _in_constructor(what: str, why: str) -> Patch:
    made = "when DDP's constructor is called under the flag"
    return Patch(what, why, Span.CALL, made, "when it returns")


def _in_backward(what: str, why: str) -> Patch:
    return Patch(what, why, Span.CALL, "when a backward is traced", "when that is done")


def _for_good(what: str, why: str, made: str, undone: str, *, adds: str) -> Patch:
    return Patch(what, why, Span.PROCESS, made, f"never: {undone}", adds)


_WITH_FLAG: Final = (
    _with_flag(
        f"{DDP}.__init__",
        "A module that is constructed under the flag gets DDP's Python reducer, whose hooks the "
        "package's take the place of, and is managed from then on.",
    ),
    _with_flag(
        f"{DDP}._inside_ddp_forward",
        "Each forward with DDP's own reducer comes through it: a module that was constructed too "
        "early is warned about.",
    ),
    _with_flag(
        "torch.autograd._engine_run_backward",
        "Each Tensor.backward and torch.autograd.backward comes through it: reducers prepare for "
        "those that reach their parameters.",
    ),
    _with_flag(
        "torch.autograd.graph._engine_run_backward",
        "The same function, by the name that the module has for it that defines it.",
    ),
    _with_flag(
        "torch._TorchCompileInductorWrapper.__call__",
        "Each graph that torch.compile gives to Inductor comes through it: which of its inputs are "
        "parameters of a managed module is noted, and the compile gets a pass that stores their "
        "gradients in buckets.",
    ),
    _with_flag(
        "torch.autograd.function._HookMixin._register_hook",
        "Hooks on autograd nodes come through it, of which torch tells nobody: on the nodes that "
        "accumulate gradients they must see these before they are averaged.",
    ),
    _with_flag(
        "torch._inductor.config._fuse_ddp_communication",
        "Torch's own fusion would fuse the same gradients.",
    ),
)

_IN_A_CALL: Final = (
    _in_constructor(
        "torch._dynamo.config.optimize_ddp",
        "DDP's constructor reads there which reducer the module gets.",
    ),
    _in_constructor(
        "torch._inductor.config._fuse_ddp_bucket_size",
        "DDP's constructor sets it with the Python reducer, and nobody would undo that.",
    ),
    _in_constructor(
        "torch._dynamo.trace_rules.LEGACY_MOD_INLINELIST",
        "DDP's constructor adds its file to it, so that Dynamo would inline what only DDP's own "
        "reducer does: it is taken out again.",
    ),
    _in_backward(
        f"{_AUTOGRAD}.compiled_autograd_enabled",
        "Compiled autograd is on for the backwards that are to be traced, and off for others that "
        "reach a managed module.",
    ),
    Patch(
        f"{DDP}.__setstate__",
        "A copy of a managed module is to be managed too, once it has its state.",
        Span.CALL,
        "when a managed module is copied or unpickled",
        "when the copy has its state",
    ),
)

_FOR_GOOD: Final = (
    _for_good(
        "torch._inductor.config._config",
        "The flag is an entry of Inductor's configuration, so that torch.compile takes it as an "
        "option and the graph caches have it in their keys.",
        "when the package is imported",
        "it is None unless somebody sets it",
        adds="ddp_fusion",
    ),
    _for_good(
        "torch.ops.fusion_passes",
        "Fused graphs call operators of the package.",
        "when the package is imported",
        "nothing else calls them",
        adds="the package's operators",
    ),
    _for_good(
        "torch._library.simple_registry.singleton",
        "Torch is to know what those of them give that make sparse tensors, without running them.",
        "when the package is imported",
        "nothing else calls them",
        adds="the package's operators",
    ),
    _for_good(
        "torch._inductor.lowering.lowerings",
        "Inductor is to generate code for the package's operators.",
        "when a graph is first compiled under the flag",
        "only graphs with these operators ask for them",
        adds="the package's operators",
    ),
    Patch(
        LAYOUT_CONSTRAINTS,
        "Torch before 2.13 would reduce a coalesced gradient in another layout than the graph's.",
        Span.PROCESS,
        "when a graph is first compiled under the flag",
        "never: the graph's layout is right for anybody's coalesced all-reduce",
        "the two coalesced all-reduces",
        ("2.11",),
    ),
    _for_good(
        "torch._dynamo.utils.counters",
        "The graph caches store what a compile has counted: so a process knows what a graph that "
        "it takes from there holds.",
        "when a fused graph is compiled or loaded",
        "counters are the process's record; a user may clear them",
        adds="ddp_fusion_plan:... under inductor",
    ),
    _for_good(
        "torch._logging._internal.log_registry",
        "The table of buckets is written where DDPOptimizer writes its own, for "
        "TORCH_LOGS=ddp_graphs.",
        "when a fused graph is reported",
        "torch registers the same log when it compiles for DDP",
        adds="the artifact ddp_graphs of torch._dynamo.backends.distributed",
    ),
    Patch(
        "torch.distributed.distributed_c10d.ProcessGroup.shutdown",
        "Memory that is registered with NCCL is deregistered before its communicator is destroyed: "
        "torch would fail when it is freed.",
        Span.PROCESS,
        "when memory is first registered, with memory='registered'",
        "never: all other groups are shut down as before",
    ),
    Patch(
        "torch.distributed.distributed_c10d.ProcessGroup.abort",
        "A communicator that is aborted deregisters such memory itself.",
        Span.PROCESS,
        "when memory is first registered, with memory='registered'",
        "never: groups are aborted as before",
    ),
    _for_good(
        "atexit.register",
        "Gloo's threads are to finish before the interpreter ends, or they abort the process.",
        "when the first module over Gloo is constructed under the flag",
        "modules may outlive the flag",
        adds="a pause of 0.05 s",
    ),
)

PATCHES: Final = (*_WITH_FLAG, *_IN_A_CALL, *IN_OBJECTS, *_FOR_GOOD)


def find(what: str, *spans: Span) -> Patch:
    """Find the entry of what is about to be changed.

    Args:
        what: dotted name.
        spans: how long it is to be changed, one of them.

    Raises:
        LookupError: there is no such entry.
    """
    for patch in PATCHES:
        if patch.what == what and patch.span in spans:
            return patch
    spoken = " or ".join(span.name for span in spans)
    raise LookupError(f"{what} is not in fusion_passes/install/patches.py as {spoken}: add it.")
