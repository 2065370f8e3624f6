"""The texts written for ``tlparse``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from torch._logging._internal import trace_log


@contextlib.contextmanager
def traced_artifacts() -> Iterator[dict[str, str]]:
    """The package's texts in torch's structured trace, by name, in order."""
    texts: dict[str, str] = {}

    def note(record: Any) -> None:
        name = record.metadata.get("artifact", {}).get("name", "")
        if name.startswith("ddp_fusion_"):
            texts[name] = record.payload

    handler = logging.Handler()
    handler.emit = note  # type: ignore[method-assign]
    trace_log.addHandler(handler)
    try:
        yield texts
    finally:
        trace_log.removeHandler(handler)
