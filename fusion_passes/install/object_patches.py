"""What the package changes in single objects: in the modules that it manages, and beside them.

The rooms that do so cannot name their entries themselves: this one imports them.
"""

from __future__ import annotations

from typing import Final

from fusion_passes.install.patch import DDP, Patch, Span


def _in_module(name: str, why: str) -> Patch:
    made = "when the module is constructed or copied"
    undone = "when DDP's own reducer takes the module over; with the module otherwise"
    return Patch(f"{DDP}.{name}", why, Span.OBJECT, made, undone)


def _attribute(name: str, why: str) -> Patch:
    made = "when the module is constructed or copied"
    return Patch(f"{DDP}.{name}", why, Span.OBJECT, made, "with the module")


_FORWARD: Final = "Dynamo cannot trace DDP's own, which is in a file that it skips."

IN_OBJECTS: Final = (
    _in_module("forward", _FORWARD),
    _in_module("_pre_forward", f"{_FORWARD} It broadcasts buffers."),
    _in_module("_run_ddp_forward", _FORWARD),
    _in_module("_post_forward", f"{_FORWARD} It notes which backward is to be averaged."),
    _in_module(
        "register_comm_hook",
        "Hooks that average become collectives, others are called with each bucket; one that steps "
        "an optimizer needs DDP's own reducer, which takes over then.",
    ),
    _in_module("_register_builtin_comm_hook", "As register_comm_hook; all of these average."),
    _in_module(
        "_register_buffer_comm_hook",
        "The Python reducer would ignore it, so DDP's own reducer takes over.",
    ),
    _in_module(
        "_check_and_sync_module_buffers",
        "A rank without inputs takes part in the broadcast of the others' forward.",
    ),
    _in_module(
        "_match_all_reduce_for_bwd_pass",
        "A rank without inputs takes part in what the others' backward reduces.",
    ),
    _in_module(
        "_match_unused_params_allreduce",
        "Ranks tell each other which parameters they have used when their buckets are launched.",
    ),
    _in_module(
        "_update_process_group",
        "The module gets a new reducer, over the new group.",
    ),
    _in_module(
        "_set_static_graph",
        "It takes the place of find_unused_parameters, of which the reducer must know.",
    ),
    _in_module(
        "_get_ddp_logging_data",
        "DDP's own reducer, which does not run, would have counted the steps and buckets.",
    ),
    _in_module("__reduce_ex__", "A copy of a managed module is managed too."),
    _in_module(
        "__class__",
        "Where the user's class has methods of the same names, these come first and reach the "
        "package's by super: a class with the same name, between theirs and DDP's.",
    ),
    _in_module(
        "reducer",
        "Pipeline stages ask it to prepare for the backward that is to be averaged; all else goes "
        "to DDP's own.",
    ),
    _in_module(
        "_accum_grad_hooks",
        "DDP's hooks on the parameters are replaced: those of the package tell the reducer of "
        "each gradient; traced, they are an all-reduce.",
    ),
    _attribute(
        "bucket_bytes_cap_list",
        "The Python reducer refuses the argument; buckets are filled by it.",
    ),
    _attribute("_ddp_fusion_expected", "Whether the next gradients are averaged."),
    _attribute("_ddp_fusion_local", "Whether the last forward ran under no_sync."),
    _attribute("_ddp_fusion_unfinished", "The error of the next forward, if there is one."),
    _in_module(
        "_ddp_fusion_reducer",
        "What averages the gradients, with the hooks on the parameters that tell it of them.",
    ),
    _attribute("_ddp_fusion_buffers_in", "The group over which buffers are broadcast."),
    Patch(
        "torch.distributed.distributed_c10d._register_process_group",
        "A group name in a graph says whose gradient is reduced.",
        Span.OBJECT,
        "when a backward of the module is first traced by compiled autograd",
        "when the module is freed, or DDP's own reducer takes it over",
        "names of the module's process group",
    ),
    Patch(
        "torch.nn.Module._parameters",
        "DDP's hooks that make DTensors of the parameters of a tensor-parallel model, which cannot "
        "be compiled, are removed: a class of the same name makes them when they are read.",
        Span.OBJECT,
        "when DDP wraps a tensor-parallel model whose mesh it knows",
        "with the model: DDP has changed its parameters for good, too",
        "properties of the model's class, and _ddp_fusion_layouts",
    ),
    Patch(
        f"{DDP}._delayed_all_reduce_hook",
        "The backward waits for the reduction of delayed gradients, which DDP only launches.",
        Span.OBJECT,
        "when a module with delay_all_reduce_named_params is constructed under the flag",
        "with the module",
    ),
)
