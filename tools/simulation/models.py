"""Gradients of the simulated models: sizes from their published shapes, in the order in which a
backward gives them, and when.

A layer's backward takes two products of the size of its forward: ``4 * weights * rows`` operations.
The card has 312 TFLOP/s of bf16 and 1.5 TB/s of memory (A100, NVIDIA's data sheet), of which models
reach 40 %; a kernel takes 5 us to start. Gradients are fp32, of Llama bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

FLOPS_PER_S: Final = 0.4 * 312e12
BYTES_PER_S: Final = 0.4 * 1.5e12
KERNEL_S: Final = 5e-6


@dataclass
class Model:
    """The gradients of a model, filled in the order of a backward.

    Attributes:
        name: for people.
        itemsize: of a gradient's element, in bytes.
        num_bytes: of each gradient.
        ready_s: seconds from the start of the backward.
        elapsed_s: of the backward so far.
    """

    name: str
    itemsize: int = 4
    num_bytes: list[int] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0

    def compute(self, flops: float, num_bytes: float = 0.0) -> None:
        """A kernel that gives no gradient of a parameter."""
        self.elapsed_s += KERNEL_S + max(flops / FLOPS_PER_S, num_bytes / BYTES_PER_S)

    def gradient(self, numel: int, flops: float = 0.0) -> None:
        """A gradient with so many elements, and the operations that it takes."""
        self.compute(flops, 3 * numel * self.itemsize)
        self.num_bytes.append(numel * self.itemsize)
        self.ready_s.append(self.elapsed_s)

    def linear(self, inputs: int, outputs: int, rows: int, *, bias: bool = True) -> None:
        """A linear layer's gradients."""
        if bias:
            self.gradient(outputs, rows * outputs)
        self.gradient(inputs * outputs, 4 * inputs * outputs * rows)

    def norm(self, width: int, parameters: int = 2) -> None:
        """The gradients of a normalisation."""
        for _ in range(parameters):
            self.gradient(width)


def gpt2() -> Model:
    """GPT-2 with 124 M parameters (Radford et al. 2019): 12 layers of 768; 16 times 1024 tokens."""
    model, width, tokens = Model("GPT-2"), 768, 16 * 1024
    model.compute(4 * 50257 * width * tokens)  # The head, whose weight is the embedding's.
    model.norm(width)
    for _ in range(12):
        model.linear(4 * width, width, tokens)
        model.linear(width, 4 * width, tokens)
        model.norm(width)
        model.linear(width, width, tokens)
        model.compute(10 * 1024 * width * tokens)
        model.linear(width, 3 * width, tokens)
        model.norm(width)
    model.gradient(1024 * width)
    model.gradient(50257 * width)
    return model


def bert() -> Model:
    """BERT-base (Devlin et al. 2018): 12 layers of 768; 32 times 512 tokens."""
    model, width, tokens = Model("BERT"), 768, 32 * 512
    model.compute(4 * 30522 * width * tokens)
    model.norm(width)
    model.linear(width, width, tokens)
    for _ in range(12):
        model.norm(width)
        model.linear(4 * width, width, tokens)
        model.linear(width, 4 * width, tokens)
        model.norm(width)
        model.linear(width, width, tokens)
        model.compute(10 * 512 * width * tokens)
        for _ in range(3):
            model.linear(width, width, tokens)
    model.norm(width)
    for rows in (2, 512, 30522):
        model.gradient(rows * width)
    return model


def llama() -> Model:
    """Llama 7B (Touvron et al. 2023): 32 layers of 4096 and 11008; 4096 tokens."""
    model, width, hidden, tokens = Model("Llama 7B", itemsize=2), 4096, 11008, 4096
    model.linear(width, 32000, tokens, bias=False)
    model.norm(width, 1)
    for _ in range(32):
        model.linear(hidden, width, tokens, bias=False)
        for _ in range(2):
            model.linear(width, hidden, tokens, bias=False)
        model.norm(width, 1)
        model.linear(width, width, tokens, bias=False)
        model.compute(10 * 4096 * width * tokens)
        for _ in range(3):
            model.linear(width, width, tokens, bias=False)
        model.norm(width, 1)
    model.gradient(32000 * width)
    return model


def resnet() -> Model:
    """ResNet-50 (He et al. 2015): 128 pictures of 224 pixels."""
    model, pictures = Model("ResNet-50"), 128

    def convolution(inputs: int, outputs: int, kernel: int, pixels: int) -> None:
        model.norm(outputs)
        weights = inputs * outputs * kernel**2
        model.gradient(weights, 4 * weights * pixels**2 * pictures)

    model.linear(2048, 1000, pictures)
    for blocks, width, pixels in ((3, 512, 7), (6, 256, 14), (4, 128, 28), (3, 64, 56)):
        for block in reversed(range(blocks)):
            first = width if width == 64 else 2 * width
            inputs = 4 * width if block else first
            if not block:
                convolution(inputs, 4 * width, 1, pixels)
            convolution(width, 4 * width, 1, pixels)
            convolution(width, width, 3, pixels)
            convolution(inputs, width, 1, pixels)
    convolution(3, 64, 7, 112)
    return model


def dlrm() -> Model:
    """DLRM of MLPerf (Naumov et al. 2019): its two stacks of layers, and eight tables of 10,000
    rows that each rank has; larger tables are spread over the ranks. 8192 examples."""
    model, examples = Model("DLRM"), 8192
    for inputs, outputs in ((256, 1), (512, 256), (1024, 512), (1024, 1024), (480, 1024)):
        model.linear(inputs, outputs, examples)
    model.compute(4 * 27 * 27 * 128 * examples)
    for inputs, outputs in ((256, 128), (512, 256), (13, 512)):
        model.linear(inputs, outputs, examples)
    for _ in range(8):
        model.gradient(10_000 * 128)
    return model


MODELS: Final[tuple[Callable[[], Model], ...]] = (gpt2, bert, llama, resnet, dlrm)
