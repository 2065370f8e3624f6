"""A compiler for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testing.cuda_codegen import CardCompiler, why_not


@pytest.fixture(scope="session")
def compiler() -> Iterator[CardCompiler]:
    why = why_not()
    if why is not None:
        pytest.skip(why)
    with CardCompiler() as started:
        yield started
