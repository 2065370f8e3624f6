"""Simulated steps: what the models and networks are, and what auto must reach on them."""

from __future__ import annotations

import pytest
import simulate as command

from fusion_passes.plan.queue import Queue
from fusion_passes.profile.tables import MIB, CostTable
from simulation.cases import simulate
from simulation.models import MODELS, dlrm
from simulation.networks import NETWORKS
from simulation.rivals import merged_greedily, with_cap


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_auto_is_at_the_bound_without_noise(network) -> None:
    result = simulate(dlrm(), network, 64, noise=0.0)
    assert result.over("best cap") <= 1.005
    assert result.over("MG-WFBP") <= 1.005
    assert 1.0 <= result.step_over_bound() <= 1.02


def test_models_have_the_sizes_that_were_published() -> None:
    millions = {
        model.name: sum(model.num_bytes) / model.itemsize / 1e6
        for model in (make() for make in MODELS)
    }
    assert millions["GPT-2"] == pytest.approx(124.4, abs=0.1)
    assert millions["BERT"] == pytest.approx(109.5, abs=0.7)
    assert millions["Llama 7B"] == pytest.approx(6738, abs=2)
    assert millions["ResNet-50"] == pytest.approx(25.557, abs=0.01)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_costs_grow_with_size_and_ranks(network) -> None:
    costs = [
        [network.seconds(size, ranks) for size in (2**10, 2**20, 2**30)] for ranks in (8, 4096)
    ]
    for few, many in zip(*costs, strict=True):
        assert few < many
    assert all(of_size == sorted(of_size) for of_size in costs)


def test_others_choose_as_they_are_known_to() -> None:
    queue = Queue((0, 0, 0, 0, 0), (MIB, MIB, 2 * MIB, MIB, MIB))
    assert [(r.begin, r.end) for r in with_cap(queue, 3 * MIB)] == [(0, 1), (1, 3), (3, 5)]
    # 100 ns of latency: a gradient that comes 50 ns after the first is worth waiting for.
    costs = CostTable((100, 1000), (200, 1100))
    queue = Queue((0, 50, 1000), (100, 100, 100))
    assert [(r.begin, r.end) for r in merged_greedily(queue, costs)] == [(0, 2), (2, 3)]


def test_the_command_makes_a_page(tmp_path, capsys) -> None:
    page = tmp_path / "page.md"
    assert command.main(["--models", "dlrm", "--ranks", "8", "--page", str(page)]) == 0
    assert "| DLRM | 1 Gbit Ethernet |" in page.read_text()
    assert page.with_suffix(".png").stat().st_size > 10_000
