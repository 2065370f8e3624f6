"""Summary at the end of a run, besides pytest's own counts."""

from __future__ import annotations

import pytest

from torch_tests_run.known import read_known


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print in how many passing tests the flag had an effect, and which known differences were run
    and no longer differ."""
    passed, differing = (terminalreporter.stats.get(kind, []) for kind in ("passed", "xfailed"))
    runs = [dict(report.user_properties) for report in passed]
    averaged = sum(run["averaged"] > 0 for run in runs)
    terminalreporter.write_line(f"{averaged} of {len(runs)} that passed were averaged by us")
    reasons = [report.wasxfail for report in differing]
    for entry in read_known():
        is_left = any(str(entry) in reason for reason in reasons)
        if not is_left and any(entry.concerns(run["test"], run["models"]) for run in runs):
            terminalreporter.write_line(f"no longer differs: {entry}")
