"""A graph as text: one line per node, with dtype and shape, for goldens and invariants."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fusion_passes.torch_private import OpOverload, dtype_abbrs
from fusion_passes.torch_private.autograd import schema


def graph_text(graph: fx.Graph) -> str:
    """The graph with one line per node: ``name: dtype[shape] = operator(arguments)``.

    The strides follow the shape if the tensor is not contiguous. The text depends only on the
    graph.
    """
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name}: {value_text(node.meta.get('val'))}")
        elif node.op == "output":
            lines.append(f"return {_argument_text(node.args[0])}")
        else:
            arguments = [_argument_text(value) for value in node.args]
            arguments += [f"{name}={_argument_text(value)}" for name, value in node.kwargs.items()]
            value = value_text(node.meta.get("val"))
            lines.append(f"{node.name}: {value} = {_target_text(node)}({', '.join(arguments)})")
    return "\n".join(lines) + "\n"


def value_text(value: Any) -> str:
    """A value as ``f32[2, 3]``, with strides if it is not contiguous; ``(...)`` for a list."""
    if isinstance(value, torch.Tensor):
        text = f"{dtype_abbrs[value.dtype]}{list(value.shape)}"
        if value.layout is torch.strided and not value.is_contiguous():
            text += f"strides{list(value.stride())}"
        return text
    if isinstance(value, list | tuple):
        return f"({', '.join(value_text(item) for item in value)})"
    return "?" if value is None else str(value)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without ``torch.``: ``float32``."""
    return str(dtype).removeprefix("torch.")


def _target_text(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        return schema(target).name.partition("::")[2]
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _argument_text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, list | tuple):
        inner = ", ".join(_argument_text(item) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return repr(value) if isinstance(value, str) else str(value)
