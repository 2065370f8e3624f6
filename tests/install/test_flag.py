"""The flag: its values, what setting it changes in torch, and that unsetting it restores
everything."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from fusion_passes import FusionConfig, FusionWarning
from fusion_passes.install.compiles import SLOT
from fusion_passes.stored.store_pass import StorePass
from fusion_passes.traced.fuse_pass import FusePass
from tests.support.fake_world import fake_world, one_rank, two_layers, without_kernels
from tests.support.launch import launch


@pytest.fixture(autouse=True)
def _flag_off() -> Iterator[None]:
    inductor_config.ddp_fusion = None
    yield
    inductor_config.ddp_fusion = None


NO_CACHE: Any = {"fx_graph_cache": False}


class _UsersPass(CustomGraphPass):
    def __init__(self, ran: list[str]) -> None:
        self._ran = ran

    def __call__(self, graph: torch.fx.Graph) -> None:
        self._ran.append("theirs")

    def uuid(self) -> str:
        return "users pass"


@pytest.mark.parametrize("value", ["Auto", 25])
def test_refuses_a_wrong_value_and_keeps_the_old_one(value: object) -> None:
    inductor_config.ddp_fusion = "coalesced"
    with pytest.raises(ValueError, match=r"ddp_fusion.*'concat', 'coalesced'"):
        inductor_config.ddp_fusion = value
    assert inductor_config.ddp_fusion == "coalesced"


@pytest.mark.parametrize("value", ["Auto", 25])
def test_refuses_a_wrong_option_of_one_compile(value: Any) -> None:
    with pytest.raises(ValueError, match=r"torch.compile\(options=.*'concat', 'coalesced'"):
        torch.compile(lambda x: x, options={"ddp_fusion": value})


@pytest.mark.parametrize(
    ("flag", "option"), [(None, "coalesced"), ("concat", "coalesced"), ("concat", None)]
)
def test_an_option_of_one_compile_has_no_effect_and_says_so(
    flag: str | None, option: str | None
) -> None:
    inductor_config.ddp_fusion = flag
    options: dict[str, Any] = {"ddp_fusion": option}
    with one_rank(), without_kernels():
        ddp = DistributedDataParallel(two_layers())
        compiled = torch.compile(lambda x: ddp(x).sum(), options=options)
        with pytest.warns(FusionWarning, match="has no effect: a module keeps the options"):
            loss = compiled(torch.ones(2, 4))
        loss.backward()
        compiled(torch.ones(3, 4)).backward()
        modules = fusion_passes.report().modules
    assert inductor_config.ddp_fusion == flag
    assert [module.mode for module in modules] == ([flag] if flag else [])


def test_patch_sets_and_restores() -> None:
    with inductor_config.patch(ddp_fusion="concat"):
        assert inductor_config.ddp_fusion == "concat"
        with inductor_config.patch(ddp_fusion=None):
            assert inductor_config.ddp_fusion is None
        with pytest.raises(ValueError, match="ddp_fusion"), inductor_config.patch(ddp_fusion="x"):
            pass
        assert inductor_config.ddp_fusion == "concat"
    assert inductor_config.ddp_fusion is None


def test_is_part_of_the_config_hash() -> None:
    off = inductor_config.get_hash()
    inductor_config.ddp_fusion = "concat"
    concat = inductor_config.get_hash()
    inductor_config.ddp_fusion = FusionConfig(bucket_cap_mb=5)
    assert len({off, concat, inductor_config.get_hash()}) == 3


def test_what_others_have_put_around_a_replacement_stays() -> None:
    inductor: Any = torch._TorchCompileInductorWrapper
    before = inductor.__call__
    inductor_config.ddp_fusion = "concat"
    ours = inductor.__call__
    assert ours is not before

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    inductor.__call__ = theirs
    inductor_config.ddp_fusion = None
    assert inductor.__call__ is theirs
    inductor.__call__ = before


def test_what_others_have_put_around_a_replacement_works_when_it_is_undone() -> None:
    engine, calls = torch.autograd._engine_run_backward, []
    with fake_world():
        inductor_config.ddp_fusion = "concat"
        ours = torch.autograd._engine_run_backward

        def theirs(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return ours(*args, **kwargs)

        torch.autograd._engine_run_backward = theirs
        module: nn.Module = DistributedDataParallel(two_layers())
        inductor_config.ddp_fusion = None
        try:
            for number in range(2):
                module(torch.ones(2, 4)).sum().backward()
                assert all(parameter.grad is not None for parameter in module.parameters())
                assert len(calls) == number + 1
                module = two_layers()
                gc.collect()  # The managed module: torch's functions are restored.
        finally:
            torch.autograd._engine_run_backward = engine


@pytest.mark.parametrize("given", ["for all compiles", "for one"])
@pytest.mark.parametrize("graph", ["aot_autograd", "compiled_autograd"])
def test_other_peoples_passes_come_first_and_stay(
    monkeypatch: pytest.MonkeyPatch, given: str, graph: Any
) -> None:
    """A user's pass may be a ``CustomGraphPass`` or any other function."""
    ran: list[str] = []
    for ours in (StorePass, FusePass):
        monkeypatch.setattr(ours, "__call__", lambda self, _: ran.append(type(self).__name__))
    is_global = given == "for all compiles"
    theirs: Any = _UsersPass(ran) if is_global else lambda _: ran.append("theirs")
    flag = FusionConfig(backward_graph=graph)
    slot = {SLOT: theirs} if is_global else {}
    with one_rank(), without_kernels(), inductor_config.patch(ddp_fusion=flag, **NO_CACHE, **slot):
        ddp = DistributedDataParallel(two_layers())
        compiled = torch.compile(ddp, options=None if is_global else {SLOT: theirs})
        compiled(torch.ones(2, 4)).sum().backward()
        assert ran == ["theirs", "StorePass"] * 2, "of the forward, and of the backward"
        ran.clear()
        compiled(torch.ones(2, 4)).sum().backward()
        assert ran[-2:] == (["theirs", "FusePass"] if graph == "compiled_autograd" else [])
        assert getattr(inductor_config, SLOT) is (theirs if is_global else None)


def test_a_thread_keeps_the_value_that_it_has_set() -> None:
    """A thread that has set none sees the last one."""
    with inductor_config.patch(ddp_fusion="concat"), ThreadPoolExecutor(1) as thread:
        assert thread.submit(lambda: inductor_config.ddp_fusion).result() == "concat"
        thread.submit(setattr, inductor_config, "ddp_fusion", "coalesced").result()
        assert inductor_config.ddp_fusion == "concat"
        assert thread.submit(lambda: inductor_config.ddp_fusion).result() == "coalesced"


@pytest.mark.newest_torch
def test_environment_variable_gives_the_default() -> None:
    """A setting of the program's own takes precedence."""
    code = (
        "import fusion_passes, torch._inductor.config as c; print('flag', c.ddp_fusion);"
        "c.ddp_fusion = None; print('set', c.ddp_fusion)"
    )
    said = launch("-c", code, FUSION_PASSES_DDP_FUSION="coalesced").stdout
    assert said == "flag coalesced\nset None\n"
