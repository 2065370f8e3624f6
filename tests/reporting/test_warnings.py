"""Of what is warned, and how often."""

from __future__ import annotations

import re

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fusion_passes import FusionWarning
from testing.fake_world import fake_world, two_layers


def test_modules_of_equal_names_on_other_groups_are_warned_of_by_themselves() -> None:
    with fake_world(), inductor_config.patch(ddp_fusion="concat"):
        modules = []
        for group in (dist.group.WORLD, dist.new_group([0, 1])):
            model = two_layers()
            model[0].weight.requires_grad_(False)
            modules.append(DistributedDataParallel(model, process_group=group))
            model[0].weight.requires_grad_(True)
        for ddp in modules:
            name = f"DDP 0 (Sequential) on group {ddp.process_group.group_name}"
            said = re.escape(f"Gradients of {name} (1: '0.weight') stay")
            with pytest.warns(FusionWarning, match=said):
                ddp(torch.ones(2, 4)).sum().backward()
