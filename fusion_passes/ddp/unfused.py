"""Warnings of backwards whose gradients are not fused, or not overlapped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fusion_passes.agreement.launches import shown_list
from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.protocol import participants
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.rounds import owing
from fusion_passes.ddp.unused import beside_foreign, often_in_parts
from fusion_passes.plan.planner import NO_PROFILE
from fusion_passes.reducer.backward import reducers
from fusion_passes.reductions.owners import Owner
from fusion_passes.reporting.records import FusionReport
from fusion_passes.reporting.warnings import warn_once
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private.ddp import parameters_of


def warn_threads() -> None:
    """Warn that a backward was not traced because another thread's was."""
    warn_once(
        "threads",
        "Two threads ran backwards of DDP modules under ddp_fusion at once. Torch can trace only "
        "one at a time: the gradients of the other were reduced when it had ended, with no compute "
        "beside them. Call the backwards from one thread to overlap them.",
    )


_PARTS: Final = (
    "it broke into several graphs, and with find_unused_parameters=True a rank must send all that "
    "one of them sends, or nothing of it, and a communication hook takes all at once. "
    "TORCH_LOGS=graph_breaks shows where it breaks. If all parameters take part in each step, "
    "construct DistributedDataParallel without the option."
)

_FOREIGN: Final = (
    "it has collectives of its own on the process group (as those of SyncBatchNorm), and with "
    "find_unused_parameters=True a rank that leaves out a layer would pair them up with others' "
    "all-reduces. Give them a process group of their own (torch.distributed.new_group; "
    "SyncBatchNorm takes process_group=). If all parameters take part in each step, construct "
    "DistributedDataParallel without the option."
)


_HOOKS_ON_NODES: Final = (
    "there are hooks on the autograd nodes that accumulate them (register_hook, register_prehook "
    "of a node), which are to see the gradients of this rank, as with eager DDP. Put them on the "
    "parameters (Tensor.register_hook, register_post_accumulate_grad_hook)."
)


def warn_averaged_later(hooked: Iterable[str], *, is_mixed: bool) -> None:
    """Warn of a backward that must not average gradients before it ends.

    Args:
        hooked: the modules with hooks on their parameters' nodes, by name.
        is_mixed: whether it reaches parameters of others too.
    """
    if is_mixed:
        warn_once(
            "mixed backward",
            "A backward reaches parameters of a DDP module under ddp_fusion, and others that FSDP "
            "or DDP's own reducer must handle, which do nothing in a traced backward. It is not "
            "traced: the gradients of the former are reduced when it has ended. To overlap them "
            "with it, call backward for the two apart.",
        )
    for module in hooked:
        _warn_by_hand("hooks on nodes", module, _HOOKS_ON_NODES)


def warn_lacking(reached: Sequence[Participant]) -> None:
    """Warn of modules whose backwards are not fused because parameters may go unused.

    Args:
        reached: those of which that is so, and that a backward has reached.
    """
    foreign = beside_foreign(reached)
    for module in foreign:
        _warn_by_hand("foreign", module, _FOREIGN)
    for module in often_in_parts(reached):
        if module not in foreign:
            _warn_by_hand("parts", module, _PARTS)


def _warn_by_hand(kind: str, module: str, why: str) -> None:
    label = registry.module(module).label
    warn_once(
        f"{kind} {label}",
        f"Gradients of {label} are reduced after their backward, with no compute beside them: "
        f"{why}",
    )


def warn_unfused(names: Iterable[str], reports: Sequence[FusionReport]) -> None:
    """Warn of gradients that were just traced and will not be fused.

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
            _warn_missing(label, missing, reports)
        elif len(traced) > 1 and max(found) == 1:
            _warn_alone(label, traced, graphs[group, label])


def warn_others_reductions(reports: Sequence[FusionReport]) -> None:
    """Warn of averages that look like gradients of a module that is not managed."""
    reasons = sorted({item.reason for report in reports for item in report.rejections})
    if reasons:
        warn_once(
            f"others {reasons}",
            "A backward averages tensors one by one that look like gradients, but are left alone: "
            f"{'; '.join(reasons)}. If they are a module's gradients, set "
            "torch._inductor.config.ddp_fusion before you construct it.",
        )


def _warn_missing(label: str, parameters: list[str], reports: Sequence[FusionReport]) -> None:
    rejections = [
        f"{item.collective}: {item.reason}" for report in reports for item in report.rejections
    ]
    what = f"{len(parameters)} gradients of {label} ({shown_list(parameters)})"
    if rejections:
        warn_once(
            f"left {label}",
            f"{what} are not fused, but reduced when the backward has ended, with no compute "
            f"beside them: {'; '.join(rejections[:3])}.",
        )
        return
    warn_once(
        f"missing {label}",
        f"{what} are reduced one by one: no pass of fusion_passes has seen their graph: the "
        "backward was not compiled by Inductor's default backend, this compile was given "
        "ddp_fusion=None or a post_grad_custom_post_pass of its own, use_post_grad_passes is off "
        "(as in mode='lite'), or TORCHINDUCTOR_DISABLED_PASSES names the pass. Use torch.compile's "
        "default backend and set torch._inductor.config.ddp_fusion for all of the process.",
    )


def _warn_alone(label: str, parameters: list[str], graphs: int) -> None:
    reason = (
        f"the backward broke into {graphs} graphs, and what is to be fused must be in one. "
        "TORCH_LOGS=graph_breaks shows where"
        if graphs > 1
        else "each one fills a bucket alone. Raise DistributedDataParallel's bucket_cap_mb"
    )
    warn_once(
        f"alone {label}",
        f"Nothing was fused in a backward of {label} ({shown_list(parameters)}): {reason}.",
    )


def warn_without_profile(modules: Iterable[str]) -> None:
    """Warn that buckets were not chosen from measurement, though the flag is ``"auto"``."""
    for module in modules:
        warn_once(
            f"profile {module}",
            f"torch._inductor.config.ddp_fusion = 'auto': the buckets of {module} are "
            f"{NO_PROFILE}. Construct it under 'auto', or set 'concat'.",
        )


def warn_local(name: str) -> str:
    """Warn that gradients were not averaged, though nothing asked for that.

    Args:
        name: the group name of one of their reductions.
    """
    owner = registry.owner_of(name)
    label = owner.module if owner else name
    if owner is not None and owner.world_size == 1:
        return name  # There is nobody to average with.
    if owner is not None and _is_averaged_by_another(owner):
        return name
    participant = participants.get(owner.group_name) if owner is not None else None
    if participant is not None and participant.usage is not None:
        # DDP puts a node of its own behind all outputs there, which a backward frees.
        warn_once(
            f"local gradients of {label}",
            f"The gradients of a backward of {label} stay on their rank: its forward has had its "
            "backward before, for which eager DDP raises an error where find_unused_parameters is "
            "True, or did not run through the DDP module. Add up the losses of a forward, or call "
            "the module anew before each backward that is to be averaged.",
        )
        return name
    warn_stays_local(label)
    return name


def warn_stays_local(label: str) -> None:
    """Warn that gradients of a module were not averaged, though nothing asked for that."""
    warn_once(
        f"local gradients of {label}",
        f"The gradients of a backward of {label} stay on their rank, as with eager DDP: its "
        "forward has had its backward before, or did not run through the DDP module. Call the "
        "module anew before each backward that is to be averaged.",
    )


_looked_at: Final = process_state.keep(
    WeakTensorKeyDictionary(),
    "parameters of which it is known whose they are, and the version of the registry then",
    Lifetime.PROCESS,
    reset=WeakTensorKeyDictionary.clear,
)


def warn_not_reduced(unmanaged: Iterable[Tensor]) -> None:
    """Warn of parameters of managed modules whose gradients DDP does not know of.

    Args:
        unmanaged: tensors that a backward reaches, and no managed module reduces.
    """
    parameters = [leaf for leaf in unmanaged if isinstance(leaf, nn.Parameter)]
    version = registry.version, reducers.version
    new = {id(leaf) for leaf in parameters if _looked_at.get(leaf) != version}
    if not new:
        return
    _looked_at.update((leaf, version) for leaf in parameters)
    labelled = [(ddp, registry.module_of(ddp).label) for ddp in registry.modules()]
    labelled += [(r.ddp, r.label) for r in reducers.alive() if r.ddp is not None]
    for ddp, label in labelled:
        named = ddp.module.named_parameters()
        found = [name for name, parameter in named if id(parameter) in new]
        names = [repr(name) for name in found if name not in ddp.parameters_to_ignore]
        if names:
            warn_once(
                f"not reduced {label}",
                f"Gradients of {label} ({len(names)}: {shown_list(names)}) stay on their rank, as "
                "with eager DDP: DistributedDataParallel was constructed before these parameters "
                "were made, or required a gradient. Construct it after the last change of the "
                "model.",
            )


def _is_averaged_by_another(owner: Owner) -> bool:
    """Whether the backward is of another module's forward, over the same parameter.

    Args:
        owner: of the parameter's reduction.
    """
    ddp = registry.ddp_of(owner.group_name)
    if ddp is None:
        return False
    parameter = parameters_of(ddp)[owner.number]
    is_shared = not registry.manages_once(parameter)
    return is_shared and bool(owing(registry.reached_by([parameter])))
