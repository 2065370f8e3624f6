"""The blocks that random models are made of."""

from fuzzing.blocks import layers, parameters, program
from fuzzing.blocks.base import BLOCKS

__all__ = ["BLOCKS", "layers", "parameters", "program"]
