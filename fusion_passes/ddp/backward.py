"""Runs the backwards that reduce gradients under the flag as compiled graphs, and only those."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from fusion_passes.ddp.autograd_graph import leaves_behind
from fusion_passes.ddp.disagreement import shared_errors
from fusion_passes.ddp.hooks import put_hooks_last, traced_hooks
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.own_reducer import check_optimizers
from fusion_passes.ddp.sync import note_backward
from fusion_passes.ddp.tensor_parallel import can_be_traced
from fusion_passes.report.journal import Journal
from fusion_passes.report.records import FusionReport
from fusion_passes.report.telling import tell_once
from fusion_passes.torch_private import (
    compiled_autograd,
    has_flattened_parameters,
    has_fully_sharded_modules,
    is_flattened,
)

CompilerFn = Callable[[torch.fx.GraphModule], Any]


@dataclass
class BackwardRunner:
    """Decides, for each call of the autograd engine, whether it is traced.

    The gradient hooks are only part of a graph if the backward runs under compiled autograd, which
    torch switches on for the whole process or not at all. Here it is on for exactly the calls that
    reach a parameter of a managed module. A call that a compiled training step makes keeps the
    options of that step. One made outside of any takes those of the compiled region that ran last
    before it: the forward, in a usual loop.

    Attributes:
        journal: where graphs that were compiled or loaded are recorded.
        switched_on: whether compiled autograd is enabled in compiled regions because of the flag,
            and not by the user.
        before_traced: called before each backward that is traced.
        is_running: whether one that is traced runs now.
    """

    journal: Journal
    switched_on: bool = False
    before_traced: Callable[[], None] = lambda: None
    is_running: bool = False
    _compiler: tuple[CompilerFn, bool] | None = None

    def remember_region(self, compiler_fn: CompilerFn, dynamic: bool) -> None:
        """Notes the options of a compiled region that is being entered."""
        if not self.is_running:
            self._compiler = (compiler_fn, dynamic)

    def run(self, engine: Callable[..., Any], outputs: Sequence[Any], *args: Any, **kw: Any) -> Any:
        """Calls ``engine`` as ``torch.autograd.graph._engine_run_backward`` would be called.

        Args:
            engine: runs the backward.
            outputs: tensors or gradient edges to start from.
            args: gradients, retain_graph, create_graph, inputs.
            kw: allow_unreachable, accumulate_grad.
        """
        create_graph = args[2] if len(args) > 2 else kw.get("create_graph", False)
        accumulates = kw.get("accumulate_grad", False)
        if self.is_running or torch.compiler.is_compiling():
            return engine(outputs, *args, **kw)
        traced_hooks.take()  # What is left of a backward that failed.
        known, unreadable = len(self.journal.reports()), self.journal.unreadable
        put_hooks_last()
        reach = _reach(outputs) if accumulates and not create_graph else _NOTHING
        traced = reach.managed and not reach.others and can_be_traced(outputs)
        if reach.managed and reach.others:
            _tell_mixed()
        if traced:
            registry.check_new(check_optimizers)
        if traced:
            with (
                self._traced(),
                shared_errors(lambda: registry.reached_by(leaves_behind(outputs))),
            ):
                result = engine(outputs, *args, **kw)
        else:
            with self._untraced(is_told=reach.managed), shared_errors(lambda: ()):
                result = engine(outputs, *args, **kw)
        note_backward()
        reports = self.journal.reports()[known:]
        names = traced_hooks.take()
        if self.journal.unreadable > unreadable:
            return result  # Fused in the cache, but nobody knows how: the journal has said so.
        if names:
            _tell_unfused(names, reports)
        elif reports:
            _tell_strangers(reports)
        return result

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        autograd = compiled_autograd()
        self.before_traced()
        self.is_running = True
        try:
            if autograd.compiled_autograd_enabled or autograd.active_disable_ctx:
                yield
            else:
                compiler_fn, dynamic = self._compiler or (torch.compile, False)
                with autograd._enable(compiler_fn, dynamic=dynamic):
                    yield
        finally:
            self.is_running = False

    @contextlib.contextmanager
    def _untraced(self, is_told: bool) -> Iterator[None]:
        autograd = compiled_autograd()
        outer, traced_hooks.untraced_is_told = traced_hooks.untraced_is_told, is_told
        try:
            if self.switched_on and autograd.compiled_autograd_enabled:
                with autograd._disable():
                    yield
            else:
                yield
        finally:
            traced_hooks.untraced_is_told = outer


@dataclass(frozen=True)
class _Reach:
    """Where an autograd graph ends.

    Attributes:
        managed: at a parameter of a managed module.
        others: at one whose gradient DDP's own reducer or FSDP must see. Both do nothing in a
            traced backward.
    """

    managed: bool = False
    others: bool = False


_NOTHING: Final = _Reach()


def _reach(outputs: Sequence[Any]) -> _Reach:
    """Where the autograd graph behind ``outputs`` ends.

    Depth first, so that a graph that ends at a managed parameter is left after a few nodes where
    there is nothing else to look for. Another is walked whole, about a microsecond a node.
    """
    if not len(registry):
        return _NOTHING
    fully_sharded = has_fully_sharded_modules()
    looks_for_others = registry.has_unfused or fully_sharded or has_flattened_parameters()
    managed = others = False
    for leaf in leaves_behind(outputs):
        if registry.manages(leaf):
            managed = True
        # What fully_shard puts into a graph is a parameter like any other: in a process that uses
        # it, one that no DDP module manages is taken for its.
        elif looks_for_others and (
            registry.is_unfused(leaf)
            or is_flattened(leaf)
            or (fully_sharded and isinstance(leaf, nn.Parameter))
        ):
            others = True
        if managed and (others or not looks_for_others):
            break
    return _Reach(managed, others)


def _tell_mixed() -> None:
    tell_once(
        "mixed backward",
        "A backward reaches parameters of a DDP module under ddp_fusion, and others that FSDP or "
        "DDP's own reducer must see to, which do nothing in a traced backward. It is not traced: "
        "the gradients of the former are reduced one by one. To fuse them, call backward for the "
        "two apart.",
    )


def _tell_unfused(names: Iterable[str], reports: Sequence[FusionReport]) -> None:
    """Tells about gradients that were just traced and will not be fused.

    Args:
        names: the group names of their reductions.
        reports: what was done to the graphs that were compiled meanwhile.
    """
    sizes: dict[tuple[str, str, str], int] = {}
    graphs: Counter[tuple[str, str]] = Counter()
    for report in reports:
        graphs.update({(bucket.group, bucket.module) for bucket in report.buckets})
        for bucket in report.buckets:
            for parameter in bucket.parameters:
                sizes[bucket.group, bucket.module, parameter] = len(bucket.parameters)
    parameters: dict[tuple[str, str], list[str]] = {}
    for name in names:
        owner = registry.owner_of(name)
        if owner is not None:
            parameters.setdefault((owner.process_group, owner.module), []).append(owner.parameter)
    for (group, label), traced in parameters.items():
        found = [sizes.get((group, label, parameter), 0) for parameter in traced]
        missing = [p for p, size in zip(traced, found, strict=True) if not size]
        if missing:
            _tell_missing(label, missing, reports)
        elif len(traced) > 1 and max(found) == 1:
            _tell_alone(label, traced, graphs[group, label])


def _tell_strangers(reports: Sequence[FusionReport]) -> None:
    """Tells about averages that look like gradients of a module that is not managed."""
    reasons = sorted({item.reason for report in reports for item in report.rejections})
    if reasons:
        tell_once(
            f"strangers {reasons}",
            "A backward averages tensors one by one that look like gradients, but are left alone: "
            f"{'; '.join(reasons)}. If they are a module's gradients, set "
            "torch._inductor.config.ddp_fusion before you construct it.",
        )


def _tell_missing(label: str, parameters: list[str], reports: Sequence[FusionReport]) -> None:
    rejections = [
        f"{item.collective}: {item.reason}" for report in reports for item in report.rejections
    ]
    reason = (
        f"they were left alone: {'; '.join(rejections[:3])}"
        if rejections
        else "no pass of fusion_passes has seen their graph: the backward was not compiled by "
        "Inductor's default backend, this compile was given ddp_fusion=None or a "
        "post_grad_custom_post_pass of its own, or TORCHINDUCTOR_DISABLED_PASSES names the pass"
    )
    tell_once(
        f"missing {label}",
        f"{len(parameters)} gradients of {label} ({_names(parameters)}) are reduced one by one: "
        f"{reason}. Use torch.compile's default backend and set "
        "torch._inductor.config.ddp_fusion for all of the process.",
    )


def _tell_alone(label: str, parameters: list[str], graphs: int) -> None:
    reason = (
        f"the backward broke into {graphs} graphs, and what is to be fused must be in one. "
        "TORCH_LOGS=graph_breaks shows where"
        if graphs > 1
        else "each one fills a bucket alone. Raise DistributedDataParallel's bucket_cap_mb"
    )
    tell_once(
        f"alone {label}",
        f"Nothing was fused in a backward of {label} ({_names(parameters)}): {reason}.",
    )


def _names(parameters: list[str]) -> str:
    shown = ", ".join(parameters[:5])
    return shown if len(parameters) <= 5 else f"{shown} and {len(parameters) - 5} more"
