"""What the keys of torch's caches hold of the package, so that no graph is taken for another."""

from __future__ import annotations

import itertools

import torch
import torch._functorch.config
import torch._inductor.config as inductor_config
from torch.nn.parallel import DistributedDataParallel

from fusion_passes import FusionConfig
from fusion_passes.ddp.aot_forward import compiling, find_reduced_inputs
from fusion_passes.install.inductor_pass import DdpFusionPass
from testing.fake_world import one_rank, two_layers


def _identity(config: FusionConfig, order: list[tuple[int, int]]) -> str:
    """Of the backward of a forward with these parameters of these modules as its inputs."""
    with one_rank(), inductor_config.patch(ddp_fusion=config):
        modules = [DistributedDataParallel(two_layers()) for _ in range(2)]
        inputs = [list(modules[module].parameters())[number] for module, number in order]
        graph = torch.fx.Graph()
        for number in range(len(inputs)):
            graph.placeholder(f"input_{number}")
        if config.backward_graph == "compiled_autograd":
            return DdpFusionPass().uuid()
        found = find_reduced_inputs(graph, inputs, config)
        assert found is not None
        with compiling(found):
            return DdpFusionPass().uuid()


def test_names_order_instances_and_the_graph_that_reduces_are_in_it() -> None:
    first = [(0, number) for number in range(4)]
    second = [(1, number) for number in range(4)]
    orders = [first, second, first + second, second + first, [first[2], first[3], *first[:2]]]
    auto, traced = FusionConfig(), FusionConfig(backward_graph="compiled_autograd")
    identities = [_identity(auto, order) for order in orders]
    assert identities == [_identity(auto, order) for order in orders], "in each process the same"
    identities.append(_identity(traced, first))
    assert all(one != other for one, other in itertools.combinations(identities, 2))


def test_donated_buffers_are_in_it() -> None:
    """In the key of torch's cache they are not: see :mod:`tests.install.test_cache`."""
    with inductor_config.patch(ddp_fusion="concat"):
        identities = set()
        for donates in (True, False):
            with torch._functorch.config.patch(donated_buffer=donates):
                identities.add(DdpFusionPass().uuid())
    assert len(identities) == 2
