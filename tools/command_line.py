"""What the command lines of the tools share."""

from __future__ import annotations

import argparse


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a tool's docstring, as it stands there."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
