"""A value in the text of a graph; the goldens of the passes cover the rest."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from fusion_passes.graph.text import value_text


def test_the_text_of_a_value() -> None:
    texts = [
        value_text(value)
        for value in (
            torch.empty(2, 3),
            torch.empty(2, 3).t(),
            torch.empty(()),
            torch.empty(0, 4, dtype=torch.bfloat16),
            torch.empty(1, dtype=torch.float16),
            torch.empty(1, dtype=torch.complex64),
            torch.empty(1, dtype=torch.uint8),
            torch.empty(1, dtype=torch.bool),
            torch.eye(2).to_sparse(),
            (torch.empty(1, dtype=torch.float64), [torch.empty(1, dtype=torch.int64)]),
            None,
            3,
        )
    ]
    assert_expected_inline(
        "\n".join(texts),
        """\
f32[2, 3]
f32[3, 2]strides[1, 3]
f32[]
bf16[0, 4]
f16[1]
c64[1]
u8[1]
b8[1]
f32[2, 2]
(f64[1], (i64[1]))
?
3""",
    )
