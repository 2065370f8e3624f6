"""Traced backwards that torch cannot compile: they run as they are, operator by operator.

Compiled autograd calls functions of autograd's with symbolic sizes, which some do not take (on
torch 2.11 to 2.15 that of ``nn.Upsample``, called eagerly with a second batch size), or a machine
has no compiler of C++: the compile ends in an error of torch's. Eager DDP trains such a model. What
is traced can be run without a compile: it makes the same gradients, and DDP's hooks run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from torch import fx

from fusion_passes.agreement.launches import shown_list
from fusion_passes.ddp.hooks import traced_hooks
from fusion_passes.reporting.warnings import warn_once
from fusion_passes.torch_private.compiled_backward import is_error_of_a_compile

_Compile = Callable[[fx.GraphModule], Any]


@dataclass
class Uncompiled:
    """Whether the backward that runs is such a one.

    Attributes:
        why: the error of its compile, in a line; empty if it has none.
    """

    why: str = ""

    def or_as_it_is(self, compiler: _Compile) -> _Compile:
        """Compile traced backwards, or run them as they are.

        Args:
            compiler: compiles them, when they are called.
        """

        def compile_or_run(traced: fx.GraphModule) -> Any:
            compiled, why = compiler(traced), ""

            def run(*arguments: Any) -> Any:
                nonlocal why
                if not why:
                    try:
                        return compiled(*arguments)
                    except Exception as error:
                        if not is_error_of_a_compile(error) or _is_ours(error):
                            raise
                        if _has_run(traced, error.__traceback__):
                            raise
                        why = _in_a_line(error)
                traced_hooks.take()  # In a graph that nobody runs.
                self.why = why
                with traced_hooks.untraced():
                    return traced.forward(*arguments)

            return run

        return compile_or_run

    def warn(self, labels: Sequence[str]) -> None:
        """Warn of a backward that has run as it is.

        Args:
            labels: the DDP modules, for people.
        """
        modules = shown_list(labels)
        warn_once(
            f"uncompiled {modules}",
            f"Gradients of {modules} are reduced after their backward, with no compute beside "
            "them: torch cannot compile what compiled autograd has traced of it, and it runs "
            f"operator by operator ({self.why}). A forward that is compiled has its backward "
            "compiled with it: call torch.compile on all of the model.",
        )


def _files(trace: TracebackType | None) -> Iterator[str]:
    """The files of the functions that ran when an error was raised, the innermost last."""
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename
        trace = trace.tb_next


def _has_run(traced: fx.GraphModule, trace: TracebackType | None) -> bool:
    """Whether a part of a traced backward was running when an error was raised: what it has done
    must not be done twice. Dynamo compiles its first part before anything of it runs."""
    return traced.forward.__code__.co_filename in _files(trace)


def _is_ours(error: Exception) -> bool:
    """Whether the package itself has raised an error, in a pass or a lowering: it refuses
    something, or is wrong. All compiles go through the functions that are around them."""
    package = Path(__file__).parent.parent
    inner = [Path(file) for file in _files(error.__traceback__) if package in Path(file).parents]
    return bool(inner) and inner[-1].relative_to(package).as_posix() not in _AROUND


def _in_a_line(error: Exception) -> str:
    """What an error of a compile says, without its advice."""
    error = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    explained = [line for line in lines if line.startswith("Explanation:")]
    text = (explained or lines or [type(error).__name__])[0]
    return f"{type(error).__name__}: {text.removeprefix('Explanation: ')[:_SHOWN]}"


_AROUND: Final = (
    *("ddp/uncompiled.py", "ddp/traced_inputs.py", "ddp/sparse_backwards.py"),
    "install/forward_compile.py",
)
"""Files of what is around a compile."""

_SHOWN: Final = 240
"""Characters of an error that a warning has."""
