"""Constructing DDP under the flag: what is refused, and the text of the errors."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.testing._internal.distributed.fake_pg import FakeStore

from fusion_passes import FusionConfig, FusionWarning
from fusion_passes.ddp import module
from fusion_passes.ddp.module import manage_by_reducer
from fusion_passes.layout.caps import MIB, BucketCaps
from fusion_passes.reducer import hooks, rank_errors
from fusion_passes.reducer.backward import reducers
from fusion_passes.reducer.communication import AllReduce
from fusion_passes.reducer.reducer import reducer_of
from fusion_passes.torch_private.autograd import hook_behind_accumulation, hooks_on_node
from tests.support.fake_world import fake_world, two_layers


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    gc.collect()  # Otherwise modules of other tests would be counted below.
    with fake_world(), inductor_config.patch(ddp_fusion="concat"):
        yield


def test_refuses_mixed_precision() -> None:
    options = _MixedPrecision(param_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"mixed_precision=\.\.\.\).*autocast.*ddp_fusion = None"):
        DistributedDataParallel(two_layers(), mixed_precision=options)
    assert not len(reducers), "nothing was changed before the refusal"


def test_inputs_go_to_the_device_of_device_ids() -> None:
    # DDP accepts device_ids for GPUs only: another device stands in for one.
    ddp = DistributedDataParallel(two_layers())
    ddp.device_type, ddp.device_ids = "meta", [0]
    x = torch.ones(2)
    packed = nn.utils.rnn.pack_sequence([x, x])
    args, kwargs = ddp._pre_forward(x, [x, 3], packed, mask={"of": x})
    moved = [args[0], args[1][0], kwargs["mask"]["of"]]
    assert [tensor.device.type for tensor in moved] == ["meta"] * 3
    assert args[1][1] == 3
    assert (args[2].data.device.type, args[2].batch_sizes.device.type) == ("meta", "cpu")


@pytest.mark.parametrize("late", [False, True])
def test_refuses_optimizers_in_the_backward(late: bool) -> None:
    model = two_layers()
    ddp = DistributedDataParallel(model) if late else None
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    step = ddp(torch.ones(2, 4)).sum().backward if ddp else lambda: DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"_apply_optimizer_in_backward, parameter '0\.weight'"):
        step()


def test_delayed_parameters_have_the_last_buckets() -> None:
    model = two_layers()
    ignored = ["0.bias", "0.weight"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(
        model,
        delay_all_reduce_named_params=[("0.weight", model[0].weight), ("1.bias", model[1].bias)],
        param_to_hook_all_reduce=model[1].weight,
    )
    reducer = reducer_of(ddp)
    names = [
        [reducer.parameters.names[n] for n in b.numbers] for b in reducer.assignment.layout.buckets
    ]
    assert names == [["1.weight"], ["0.weight", "1.bias"]]
    kept: Any = model._ddp_params_and_buffers_to_ignore
    assert kept is ignored


@pytest.mark.parametrize("flag", [None, "concat"])
def test_refuses_what_eager_ddp_refuses(flag: str | None) -> None:
    """Delayed parameters that are wrong, and synchronised batch norms on the CPU."""
    model = two_layers()
    synced = nn.Sequential(model, nn.SyncBatchNorm(4))
    named = [("0.weight", model[0].weight)]
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    together = r"delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the"
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "SyncBatchNorm layers only work with GPU modules", {"module": synced}),
        (ValueError, together, {"delay_all_reduce_named_params": named}),
        (ValueError, together, {"param_to_hook_all_reduce": model[1].weight}),
        (
            RuntimeError,
            "cannot register a hook on a tensor that doesn't require gradient",
            {"delay_all_reduce_named_params": named, "param_to_hook_all_reduce": frozen},
        ),
    ]
    for kind, words, options in cases:
        with inductor_config.patch(ddp_fusion=flag), pytest.raises(kind, match=words):
            DistributedDataParallel(**{"module": model, **options})
    assert not len(reducers)


@pytest.mark.parametrize("name", ["0.weigth", "0.bias"])
def test_refuses_delayed_parameters_under_other_names(name: str) -> None:
    model = two_layers()
    others = "is the name of another" if name == "0.bias" else "is the name of no"
    with pytest.raises(ValueError, match=f"delay_all_reduce_named_params.*{name}.*{others}"):
        DistributedDataParallel(
            model,
            delay_all_reduce_named_params=[(name, model[0].weight)],
            param_to_hook_all_reduce=model[1].weight,
        )


def test_sparse_gradients_count_in_no_bucket() -> None:
    model = nn.Sequential(nn.Embedding(2**20, 4, sparse=True), nn.Linear(4, 4))
    reducer = reducer_of(DistributedDataParallel(model))
    assert [number for number, kind in reducer.parameters.kinds.items() if kind.is_sparse] == [0]
    assert (
        reducer.assignment.caps
        == reducer_of(DistributedDataParallel(nn.Linear(4, 4))).assignment.caps
    )


@pytest.mark.parametrize("mode", ["no_optimization", "ddp_optimizer", False])
def test_refuses_another_reducer_mode(mode: object) -> None:
    with (
        torch._dynamo.config.patch(optimize_ddp=mode),
        pytest.raises(ValueError, match=r"optimize_ddp = .*contradicts.*ddp_fusion"),
    ):
        DistributedDataParallel(two_layers())


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("bucket_all_reduces_fx", "all"),
        ("aten_distributed_optimizations.enable_overlap_scheduling", True),
        ("_fuse_ddp_communication", True),
    ],
)
def test_refuses_settings_that_fuse_the_same_reductions(setting: str, value: object) -> None:
    with (
        inductor_config.patch({setting: value}),
        pytest.raises(ValueError, match=f"{setting} = {value!r} cannot be combined"),
    ):
        DistributedDataParallel(two_layers())


def _caps(config: FusionConfig | str, model: nn.Module | None = None, **options: Any) -> BucketCaps:
    """The bucket caps of a module that is constructed with these options."""
    with inductor_config.patch(ddp_fusion=config):
        return reducer_of(DistributedDataParallel(model or two_layers(), **options)).assignment.caps


def test_caps_are_the_modules_own_unless_set_by_option() -> None:
    assert _caps("concat") == BucketCaps(MIB, MIB)
    eighth = (1024 + 1) * 4 * 1024 * 4 // 8
    assert _caps("concat", nn.Linear(1024, 4 * 1024)) == BucketCaps(MIB, eighth)
    own = BucketCaps(2 * MIB, 2 * MIB, are_given=True)
    assert _caps("concat", bucket_cap_mb=2) == own
    config = FusionConfig(bucket_cap_mb=4, first_bucket_cap_mb=0.5)
    assert _caps(config, bucket_cap_mb=2) == BucketCaps(MIB // 2, 4 * MIB, are_given=True)


def _hooks_on(model: nn.Module) -> list[int]:
    """Number of hooks on the autograd node of each parameter, and on the parameter itself."""
    counts = []
    for parameter in model.parameters():
        on_node = hooks_on_node(torch.autograd.graph.get_gradient_edge(parameter).node)
        assert on_node is not None
        counts.append(sum(on_node) + len(parameter._post_accumulate_grad_hooks or ()))
    return counts


def test_nodes_are_asked_for_hooks_once_and_again_after_one() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    asks: list[int] = []
    with mock.patch.object(hooks, "hooks_on_node", wraps=hooks_on_node) as asked:
        for step in range(3):
            if step == 2:
                node = torch.autograd.graph.get_gradient_edge(ddp.module.bias).node
                node.register_prehook(lambda _: None)
            ddp(torch.ones(2, 2)).sum().backward()
            asks.append(asked.call_count)
    assert asks == [2, 2, 4], "to be asked is no hook: it would be asked in each backward"


def test_module_hooks_are_on_no_node_of_a_parameter() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    ddp.module.register_full_backward_hook(lambda *_: None)
    ddp.module.register_full_backward_pre_hook(lambda *_: None)
    with mock.patch.object(hooks, "hooks_on_node", wraps=hooks_on_node) as asked:
        for _ in range(3):
            ddp(torch.ones(2, 2, requires_grad=True)).sum().backward()
    assert asked.call_count == 2


def test_settings_are_compared_on_the_modules_device() -> None:
    """The comparison does not use the current device, which a program need not set."""
    ddp = DistributedDataParallel(two_layers())
    ddp.device = torch.device("cuda", 1)
    with mock.patch.object(module, "compare_settings") as compared:
        manage_by_reducer(ddp, FusionConfig())
    assert compared.call_args.args[3] == ddp.device


def test_nobody_waits_for_the_ranks_of_a_fake_group() -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    with mock.patch.object(rank_errors, "MEET_SECONDS", 0.1):
        DistributedDataParallel(two_layers())


def _raise(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "what",
    [
        "attach_reducer",
        "report_when_freed",
        "settings_of",
        "compare_settings",
        "learn_layout",
        "_give_methods",
    ],
)
def test_a_constructor_that_fails_leaves_nothing_on_the_parameters(what: str) -> None:
    model, slices = two_layers(), reducers.slices
    failing: Any
    if hasattr(slices, what):
        failing = mock.patch.object(reducers, "slices", replace(slices, **{what: _raise}))
    else:
        failing = mock.patch.object(module, what, _raise)
    with (
        inductor_config.patch(ddp_fusion="auto"),
        failing,
        pytest.raises(ZeroDivisionError) as caught,
    ):
        DistributedDataParallel(model)
    assert not len(reducers)
    assert _hooks_on(model) == [0] * 4
    ddp = DistributedDataParallel(model)
    assert _hooks_on(model) == [1] * 4
    ddp(torch.ones(2, 4)).sum().backward()
    assert reducer_of(ddp).steps == 1
    del caught


def test_a_warning_that_is_an_error_leaves_nothing_on_the_parameters() -> None:
    model = two_layers()
    with pytest.raises(FusionWarning) as caught:  # As all of them are in the tests.
        DistributedDataParallel(model, gradient_as_bucket_view=True)
    assert _hooks_on(model) == [0] * 4
    del caught


@pytest.mark.parametrize("calls", range(4))
def test_a_hook_that_cannot_be_registered_leaves_none(calls: int) -> None:
    model = two_layers()
    failing = mock.Mock(side_effect=_fails_after(calls))
    with (
        mock.patch("fusion_passes.reducer.hooks.hook_behind_accumulation", failing),
        pytest.raises(ZeroDivisionError) as caught,
    ):
        DistributedDataParallel(model)
    assert _hooks_on(model) == [0] * 4
    del caught


def _fails_after(calls: int) -> Callable[..., Any]:
    """A replacement of ``hook_behind_accumulation`` that raises after this number of calls."""
    left = iter(range(calls))

    def register(*args: Any) -> Any:
        if next(left, None) is None:
            raise ZeroDivisionError
        return hook_behind_accumulation(*args)

    return register


def test_another_group_that_fails_leaves_the_module_as_it_was() -> None:
    ddp = DistributedDataParallel(two_layers())
    reducer, group = reducer_of(ddp), ddp.process_group
    failing = mock.Mock(side_effect=_fails_after(2))
    with (
        mock.patch("fusion_passes.reducer.hooks.hook_behind_accumulation", failing),
        pytest.raises(ZeroDivisionError),
    ):
        ddp._update_process_group(dist.new_group([0, 1]))
    assert (reducer_of(ddp), ddp.process_group) == (reducer, group)
    assert len(reducers) == 1
    assert _hooks_on(ddp.module) == [1] * 4
    ddp(torch.ones(2, 4)).sum().backward()
    assert reducer.steps == 1
    assert isinstance(reducer.queue.communication, AllReduce)
    assert reducer.queue.communication.group is group


def test_a_module_is_freed_and_leaves_no_hook() -> None:
    model = two_layers()
    ddp = DistributedDataParallel(model)
    assert len(reducers) == 1
    assert _hooks_on(model) == [1] * 4
    del ddp
    gc.collect()
    assert not len(reducers)
    assert _hooks_on(model) == [0] * 4


def test_a_model_is_wrapped_anew_once_its_hooks_are_removed() -> None:
    old = DistributedDataParallel(two_layers())
    old(torch.ones(2, 4))  # The hook waits for gradients.
    old._remove_autograd_hooks()
    new = DistributedDataParallel(old.module)
    new(torch.ones(2, 4)).sum().backward()
    assert len(reducers) == 1
    assert reducer_of(new).steps == 1


def test_modules_of_equal_names_on_other_groups_are_warned_of_by_themselves() -> None:
    modules = []
    for group in (dist.group.WORLD, dist.new_group([0, 1])):
        model = two_layers()
        model[0].weight.requires_grad_(False)
        modules.append(DistributedDataParallel(model, process_group=group))
        model[0].weight.requires_grad_(True)
    for ddp in modules:
        name = f"DDP 0 (Sequential) on group {ddp.process_group.group_name}"
        with pytest.warns(FusionWarning, match=re.escape(f"of {name} (1: '0.weight') are not")):
            ddp(torch.ones(2, 4)).sum().backward()


def test_a_module_that_outlives_its_group_leaves_the_next_one_alone() -> None:
    old = DistributedDataParallel(two_layers())
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    new = DistributedDataParallel(two_layers())
    weight = new.module[0].weight
    assert reducers.gradients()[id(weight)] == [(reducer_of(new), 0)]
    del old
    gc.collect()
    assert reducers.gradients()[id(weight)] == [(reducer_of(new), 0)]
    new(torch.ones(2, 4)).sum().backward()
    assert weight.grad is not None


def test_parameters_keep_no_table_of_the_hooks_of_ddps_python_reducer() -> None:
    """Autograd reads such a table in each backward, even if it is empty."""
    ddp = DistributedDataParallel(two_layers())
    assert [p._post_accumulate_grad_hooks for p in ddp.parameters()] == [None] * 4
