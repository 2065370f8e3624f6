"""Generates a graph's code for an H100 on a machine without a GPU, and compiles its kernels.

Inductor asks torch and Triton about the GPU; stand-ins answer. Their answers stay in caches all
over torch, so all of this happens in a process of its own::

    with CardCompiler() as compiler:
        generated = compiler.generate(backward, [tensor(64, 32), tensor(32)])
        print(generated.code)
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_passes.config import FusionConfig
from fusion_passes.layout.caps import BucketCaps
from fusion_passes.layout.layout import InputPosition
from fusion_passes.reducer.communication import REDUCE_DTYPE_OF
from fusion_passes.stored.flat_buffer import FlatBuffer
from fusion_passes.stored.lowering import register_store_lowerings
from fusion_passes.stored.pieces import StoredInput
from fusion_passes.stored.store import StoreGradients
from fusion_passes.traced.pack import register_lowerings
from tests.support.codegen import read_kernels
from tests.support.fake_world import fake_world
from tests.support.graphs import TensorSpec, pipeline

_H100: Final = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    regs_per_multiprocessor=64 << 10,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=50 << 20,
)


@dataclass(frozen=True)
class Generated:
    """Generated code of a graph.

    Attributes:
        code: the wrapper and its kernels, as Inductor writes them.
        copies: for each bucket, the reasons why gradients are copied into it, by index.
        ptx: the PTX of each Triton kernel, by name.
    """

    code: str
    copies: tuple[Mapping[int, str], ...]
    ptx: Mapping[str, str]


def fuse(graph: fx.Graph, config: FusionConfig | None = None) -> None:
    """Run the package's passes, with all gradients of a module in one bucket per dtype."""
    config = config or FusionConfig()
    dtype = REDUCE_DTYPE_OF[config.reduce_dtype]
    pipeline(config.reduces_by, reduce_dtype=dtype, scaling=config.scaling)(graph)(graph)


def store_gradients(graph: fx.Graph) -> None:
    """A pass that stores the gradients that a graph returns in memory of a reducer, in one
    piece."""
    next(iter(graph.nodes))._rename("tangents_1")  # AOTAutograd's name in a backward.
    gradients: Any = graph.output_node().args[0]
    inputs = []
    for number, node in enumerate(gradients):
        value = node.meta["val"]
        dense = tuple(torch.empty(value.shape, device="meta").stride())
        places = (number, InputPosition(number), 0, tuple(value.shape), dense)
        inputs.append(StoredInput(*places, value.dtype, value.device))
    whole = BucketCaps(2**40, 2**40)
    assert StoreGradients(tuple(inputs), len(inputs), (whole,))(graph), "it stores them"


class CardCompiler(ProcessPoolExecutor):
    """The process in which the stand-ins answer. Functions that it calls are pickled."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        super().__init__(1, mp_context=context, initializer=_hide_real_cards)
        self.submit(os.getpid).result()  # The process has started when the first test begins.

    def generate(
        self,
        function: Callable[..., Any],
        inputs: Sequence[TensorSpec],
        rewrite: Callable[[fx.Graph], Any] | None = fuse,
        *,
        has_kernels: bool = True,
        fastest: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> Generated:
        """The code of a tensor function for an H100.

        Args:
            function: a backward that calls :func:`tests.support.graphs.reduce`.
            inputs: inputs of the function, on the CPU; the graph is moved to the GPU after it is
                traced.
            rewrite: function that changes the graph before it is lowered.
            has_kernels: whether the kernels are compiled too.
            fastest: part of the name of the kernels that ``max_autotune`` shall choose: there is no
                GPU to time them on.
            settings: settings of ``torch._inductor.config``.
        """
        settings = {"post_grad_custom_post_pass": rewrite, **(settings or {})}
        return self.submit(_generate, function, inputs, has_kernels, fastest, settings).result()


# --- In the process of its own -----------------------------------------------------------------


def _hide_real_cards() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _generate(
    function: Callable[..., Any],
    inputs: Sequence[TensorSpec],
    has_kernels: bool,
    fastest: str,
    settings: Mapping[str, Any],
) -> Generated:
    import torch._inductor.config as inductor_config

    copies: list[Mapping[int, str]] = []
    fill = FlatBuffer.fill

    def fill_and_note(buffer: FlatBuffer, places: Any) -> dict[int, str]:
        reasons = fill(buffer, places)
        copies.append(dict(reasons))
        return reasons

    register_lowerings(lambda _, __: None)
    register_store_lowerings()
    # Nothing is launched, and choices of an earlier graph must not come from a cache.
    settings = {"use_static_triton_launcher": False, "autotune_local_cache": False, **settings}
    noting = mock.patch.object(FlatBuffer, "fill", fill_and_note)
    with noting, fake_world(), inductor_config.patch(settings):
        module, mode = _trace_on_card(function, inputs)
        with _on_h100(), _autotuned(fastest):
            code = _lower(module, mode)
            is_compiled = has_kernels and not inductor_config.cpp_wrapper
            ptx = _compile(read_kernels(code)) if is_compiled else {}
    return Generated(code, tuple(copies), ptx)


def _trace_on_card(
    function: Callable[..., Any], inputs: Sequence[TensorSpec]
) -> tuple[fx.GraphModule, FakeTensorMode]:
    """The graph of a function on fake CUDA tensors. Autograd needs a CUDA stream, so the function
    is traced on the CPU, and its graph again on the GPU."""
    from torch._inductor.decomposition import select_decomp_table

    card = torch.device("cuda", 0)
    with FakeTensorMode() as mode:
        fake = [spec.fake() for spec in inputs]
        module = make_fx(function)(*fake)
        for node in module.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": card}
        module.recompile()
        moved = [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=card)
            for value in fake
        ]
        module = make_fx(module, decomposition_table=select_decomp_table())(*moved)
    module.graph.eliminate_dead_code()
    return module, mode


def _lower(module: fx.GraphModule, mode: FakeTensorMode) -> str:
    """Inductor's code of a graph, from its post-grad passes on."""
    import torch._inductor.config as inductor_config
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with V.set_fake_mode(mode), DebugContext():
        view_to_reshape(module)
        post_grad_passes(module, is_inference=False)
        in_cpp = inductor_config.cpp_wrapper
        graph = GraphLowering(module, example_inputs=inputs, cpp_wrapper=in_cpp)
        with V.set_graph_handler(graph):
            graph.run(*inputs)
            wrapper, _ = graph.codegen()
    return str(wrapper.value)


def _compile(kernels: Mapping[str, str]) -> dict[str, str]:
    """PTX of Triton kernels, each with the first configuration that Inductor would try;
    ``triton.compile`` also assembles it."""
    from torch._inductor.codecache import PyCodeCache

    ptx = {}
    for name, source in kernels.items():
        autotuner = getattr(PyCodeCache.load(source), name)
        compiled = autotuner._precompile_config(autotuner.configs[0])
        ptx[name] = compiled.kernel.asm["ptx"]
    return ptx


# --- Stand-ins -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _on_h100() -> Iterator[None]:
    """Make torch and Triton answer as if there was an H100. Cached answers stay."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    of_card = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )

    def properties(_: Any = None) -> Any:
        return _H100

    answers: list[tuple[Any, dict[str, Any]]] = [
        (torch.cuda, {"is_available": lambda: True, "device_count": lambda: 1}),
        (torch.cuda, {"current_device": lambda: 0, "get_device_properties": properties}),
        (torch.cuda, {"get_device_capability": lambda _=None: (_H100.major, _H100.minor)}),
        (CudaInterface, {"get_device_properties": staticmethod(properties)}),
        (CudaInterface.Worker, {"get_device_properties": staticmethod(properties)}),
        (triton_helpers, {"set_driver_to_gpu": lambda: None}),
        (driver, {"_active": of_card}),
    ]
    with contextlib.ExitStack() as stack:
        for place, replaced in answers:
            stack.enter_context(mock.patch.multiple(place, **replaced))
        yield


@contextlib.contextmanager
def _autotuned(fastest: str) -> Iterator[None]:
    """Make autotuning choose by the names of the kernels, and fusion of choices always
    profitable."""
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    def benchmark(choices: Sequence[Any]) -> dict[Any, float]:
        return {choice: 2.0 - (fastest in type(choice).__name__) for choice in choices}

    replaced: dict[str, Any] = {
        "make_benchmark_fn": lambda *_, **__: benchmark,
        "make_precompile_fn": lambda *_, **__: dict,
    }
    with (
        mock.patch.multiple(AlgorithmSelectorCache, **replaced),
        mock.patch.object(TritonScheduling, "benchmark_codegened_module", return_value=(1.0, "")),
    ):
        yield
