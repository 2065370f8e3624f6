"""The flag: what can be set, what setting it does to torch, and that unsetting it undoes all."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from fusion_passes import FusionConfig, FusionWarning
from fusion_passes.agreement import protocol
from fusion_passes.install.changes import value_of
from fusion_passes.install.pass_slot import pass_list
from fusion_passes.install.patch import Span
from fusion_passes.install.patches import PATCHES
from fusion_passes.torch_private.older_torch import takes_one_pass
from testing.fake_world import fake_world, one_rank, two_layers, without_kernels


@pytest.fixture(autouse=True)
def _flag_off() -> Iterator[None]:
    inductor_config.ddp_fusion = None
    yield
    inductor_config.ddp_fusion = None


def _torch_state() -> dict[str, object]:
    """Everything of torch that the flag changes, as long as it is set or during a call."""
    values = {
        patch.what: value_of(patch.what)
        for patch in PATCHES
        if patch.span in (Span.FLAG, Span.CALL)
    }
    return {what: set(v) if isinstance(v, set) else v for what, v in values.items()}


class _UsersPass(CustomGraphPass):
    def __call__(self, graph: torch.fx.Graph) -> None:
        pass

    def uuid(self) -> str:
        return "users pass"


@pytest.mark.parametrize(
    "value", ["concat", "coalesced", "auto", FusionConfig(bucket_cap_mb=5), None]
)
def test_takes_each_value(value: object) -> None:
    inductor_config.ddp_fusion = value
    assert inductor_config.ddp_fusion == value


@pytest.mark.parametrize("value", ["Auto", "concatenate", "", True, 25, ["concat"]])
def test_refuses_a_wrong_value_and_keeps_the_old_one(value: object) -> None:
    inductor_config.ddp_fusion = "coalesced"
    with pytest.raises(ValueError, match=r"ddp_fusion.*'concat', 'coalesced'"):
        inductor_config.ddp_fusion = value
    assert inductor_config.ddp_fusion == "coalesced"


@pytest.mark.parametrize("value", ["Auto", "concatenate", 25])
def test_refuses_a_wrong_option_of_one_compile(value: Any) -> None:
    with pytest.raises(ValueError, match=r"torch.compile\(options=.*'concat', 'coalesced'"):
        torch.compile(lambda x: x, options={"ddp_fusion": value})


def test_an_option_of_one_compile_alone_fuses_nothing_and_says_so() -> None:
    before = _torch_state()
    options: dict[str, Any] = {"ddp_fusion": "concat"}
    with one_rank(), without_kernels():
        ddp = DistributedDataParallel(two_layers())
        compiled = torch.compile(lambda x: ddp(x).sum(), options=options)
        with pytest.warns(FusionWarning, match="fuses nothing: it chooses"):
            loss = compiled(torch.ones(2, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("error", FusionWarning)
            loss.backward()
    assert _torch_state() == before
    assert not fusion_passes.reports()


def test_patch_sets_and_restores() -> None:
    with inductor_config.patch(ddp_fusion="concat"):
        assert inductor_config.ddp_fusion == "concat"
        with inductor_config.patch(ddp_fusion=None):
            assert inductor_config.ddp_fusion is None
        assert inductor_config.ddp_fusion == "concat"
    assert inductor_config.ddp_fusion is None


def test_patch_with_a_wrong_value_changes_nothing() -> None:
    before = _torch_state()
    with pytest.raises(ValueError, match="ddp_fusion"), inductor_config.patch(ddp_fusion="x"):
        pass
    assert inductor_config.ddp_fusion is None
    assert _torch_state() == before


def test_is_part_of_the_config_hash() -> None:
    off = inductor_config.get_hash()
    inductor_config.ddp_fusion = "concat"
    concat = inductor_config.get_hash()
    inductor_config.ddp_fusion = FusionConfig(bucket_cap_mb=5)
    assert len({off, concat, inductor_config.get_hash()}) == 3


def test_unsetting_leaves_torch_as_it_was() -> None:
    before = _torch_state()
    for value in ("concat", FusionConfig(mode="coalesced"), "coalesced"):
        inductor_config.ddp_fusion = value
        assert _torch_state() != before
    inductor_config.ddp_fusion = None
    assert _torch_state() == before


def test_what_others_have_put_around_a_replacement_stays() -> None:
    autograd: Any = torch._dynamo.compiled_autograd
    before = autograd.AutogradCompilerInstance
    inductor_config.ddp_fusion = "concat"
    theirs = type("Theirs", (autograd.AutogradCompilerInstance,), {})
    autograd.AutogradCompilerInstance = theirs
    inductor_config.ddp_fusion = None
    assert autograd.AutogradCompilerInstance is theirs
    autograd.AutogradCompilerInstance = before


def test_what_others_have_put_around_a_replacement_works_with_the_flag_unset() -> None:
    engine, calls = torch.autograd._engine_run_backward, []
    with fake_world():
        inductor_config.ddp_fusion = "concat"
        ours = torch.autograd._engine_run_backward

        def theirs(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return ours(*args, **kwargs)

        torch.autograd._engine_run_backward = theirs
        module = DistributedDataParallel(two_layers())
        inductor_config.ddp_fusion = None
        try:
            with pytest.warns(FusionWarning, match="reduced after their backward"):
                module(torch.ones(2, 4)).sum().backward()
        finally:
            torch.autograd._engine_run_backward = engine
        assert all(parameter.grad is not None for parameter in module.parameters())
        assert len(calls) == 1
        assert inductor_config.post_grad_custom_post_pass is None
        del module


@pytest.mark.slow
def test_modules_that_are_gone_leave_nothing_behind() -> None:
    with fake_world():
        inductor_config.ddp_fusion = "concat"
        for _ in range(3):
            module = DistributedDataParallel(two_layers())
            module(torch.ones(2, 4)).sum().backward()
            assert len(protocol.participants) == 1
            del module
            torch._dynamo.reset()  # Compiled code can keep what it was traced with.
            gc.collect()
            assert not protocol.participants
        inductor_config.ddp_fusion = None


def test_unsetting_after_a_module_was_constructed_leaves_torch_as_it_was() -> None:
    before = _torch_state()
    with fake_world():
        inductor_config.ddp_fusion = "concat"
        module = DistributedDataParallel(two_layers())
        del module
        inductor_config.ddp_fusion = None
    assert _torch_state() == before


def test_other_peoples_passes_stay_in_their_order() -> None:
    first, second = _UsersPass(), _UsersPass()
    with inductor_config.patch(post_grad_custom_post_pass=first):
        inductor_config.ddp_fusion = "concat"
        passes = _installed_passes()
        assert passes[0] is first
        assert [type(item).__name__ for item in passes[1:]] == ["DdpFusionPass"]
        inductor_config.ddp_fusion = None
        assert inductor_config.post_grad_custom_post_pass is first
    if not takes_one_pass():
        inductor_config.ddp_fusion = "concat"
        ours = _installed_passes()
        inductor_config.post_grad_custom_post_pass = [*ours, second]
        inductor_config.ddp_fusion = None
        assert inductor_config.post_grad_custom_post_pass is second
        inductor_config.post_grad_custom_post_pass = None


def _installed_passes() -> list[object]:
    return pass_list(inductor_config.post_grad_custom_post_pass)


def test_a_pass_that_was_thrown_away_comes_back_with_the_next_module() -> None:
    with fake_world():
        inductor_config.ddp_fusion = "concat"
        inductor_config.post_grad_custom_post_pass = _UsersPass()
        module = DistributedDataParallel(two_layers())
        assert len(_installed_passes()) == 2
        del module
    inductor_config.ddp_fusion = None
    inductor_config.post_grad_custom_post_pass = None


def test_another_thread_sees_the_flag() -> None:
    inductor_config.ddp_fusion = "concat"
    seen = []
    thread = threading.Thread(target=lambda: seen.append(inductor_config.ddp_fusion))
    thread.start()
    thread.join()
    assert seen == ["concat"]


def _import_with(value: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import fusion_passes, torch._inductor.config as c; print('flag', c.ddp_fusion);"
        "c.ddp_fusion = None; print('set', c.ddp_fusion)"
    )
    environment = {**os.environ, "FUSION_PASSES_DDP_FUSION": value}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.newest_torch
@pytest.mark.parametrize(
    ("value", "flag"),
    [
        ("coalesced", "coalesced"),
        pytest.param("", None, marks=pytest.mark.nightly),
        ("0", None),
    ],
)
def test_environment_variable_gives_the_default(value: str, flag: object) -> None:
    result = _import_with(value)
    assert result.returncode == 0, result.stderr
    assert f"flag {flag}" in result.stdout
    assert "set None" in result.stdout, "the program's own setting comes before the environment"


@pytest.mark.newest_torch
def test_environment_variable_with_a_wrong_value_is_refused() -> None:
    result = _import_with("yes")
    assert result.returncode != 0
    assert "ValueError: environment variable FUSION_PASSES_DDP_FUSION" in result.stderr
    assert "'concat', 'coalesced'" in result.stderr
