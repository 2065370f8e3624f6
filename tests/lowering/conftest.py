"""A compiler for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.lowering.cuda_codegen import CardCompiler


@pytest.fixture(scope="session")
def compiler() -> Iterator[CardCompiler]:
    if torch.version.cuda is None:
        pytest.skip(f"torch {torch.__version__} is a build without CUDA")
    pytest.importorskip("triton")
    with CardCompiler() as started:
        yield started
