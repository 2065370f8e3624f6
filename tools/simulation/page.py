"""The results of a simulation as a page, with plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from simulation.cases import NOISE, RANKS, STEPS, Result
from simulation.rivals import CAPS_MIB

OTHERS: Final = ("best cap", "25 MiB", "MG-WFBP", "bound")
COLORS: Final = {
    "auto": "#1f6fb4",
    "best cap": "#2e7d32",
    "25 MiB": "#9aa5b1",
    "MG-WFBP": "#b8860b",
    "bound": "black",
}

_Value = Callable[[Result], float]


def as_markdown(results: Sequence[Result], quiet: Sequence[Result], picture: str) -> str:
    """The page.

    Args:
        results: of steps with noise.
        quiet: of the same cases without.
        picture: name of the file with the plots.
    """
    lines = [
        "# Simulated: auto beside other ways to choose buckets",
        "",
        "    python tools/simulate.py --page docs/simulation.md",
        "",
        "makes this page and its plots. `tools/simulation/networks.py` says what",
        "an all-reduce costs and by which source, `tools/simulation/models.py` which",
        "gradients there are and when. Nothing here is measured: it shows what the choice of",
        "buckets is worth where costs are known, on networks that nobody has at hand.",
        "",
        f"Each case is a model, a network, and one of {', '.join(map(str, RANKS))} ranks.",
        "Auto plans from a table of costs whose sizes double, and from ready times of the slowest",
        f"rank. Then each of {STEPS} steps has ranks that are normally distributed, {NOISE:.0%} of",
        "a backward wide, and a collective begins when its last rank is ready. *Best cap* is the",
        f"best of {', '.join(map(str, CAPS_MIB))} MiB in hindsight, for each case by",
        "itself; *25 MiB* is DDP's default; the *bound* are the best buckets of each step, its",
        "noise known before. Auto and the bound keep to auto's bound of memory (less than an",
        "eighth of the gradients, or than 100 MiB where that is more, wait with a bucket). MG-WFBP",
        "has none: where it is better, it sends larger buckets. Collectives take nothing from",
        "compute here: what they take is known where it was measured.",
        "",
        "## All cases",
        "",
        "Exposed communication (what collectives add after the backward) of auto over that of the",
        "others: the median case, and the worst for auto.",
        "",
        "| auto over | median | worst | worst case | median, no noise | worst, no noise |",
        "| --- | ---: | ---: | --- | ---: | ---: |",
    ]
    lines += [_summary(other, _over(other), results, quiet) for other in OTHERS]
    lines.append(_summary("bound, whole backward", Result.step_over_bound, results, quiet))
    lines += [
        "",
        "## By model and network",
        "",
        "Median over the numbers of ranks, with noise; exposed milliseconds are auto's.",
        "",
        f"| model | network | backward ms | exposed ms | {' | '.join(OTHERS)} | caps |",
        f"| --- | --- | ---: | ---: | {'---: | ' * len(OTHERS)}--- |",
    ]
    for key in dict.fromkeys((r.model, r.network) for r in results):
        lines.append(_line([r for r in results if (r.model, r.network) == key]))
    lines += [
        "",
        "*Caps*: the smallest and the largest that are best for some number of ranks. No cap is",
        "right for all networks; where compute hides all but the last bucket, small ones are, and",
        "where latency counts, large ones.",
        "",
        f"![Exposed communication over that of the bound, by number of ranks]({picture})",
        "",
    ]
    return "\n".join(lines)


def _over(other: str) -> _Value:
    return lambda result: result.over(other)


def _summary(name: str, value: _Value, results: Sequence[Result], quiet: Sequence[Result]) -> str:
    worst = max(results, key=value)
    where = f"{worst.model}, {worst.network}, {worst.ranks}"
    return (
        f"| {name} | {_median(results, value):.3f} | {value(worst):.3f} | {where} | "
        f"{_median(quiet, value):.3f} | {max(map(value, quiet)):.3f} |"
    )


def _median(results: Sequence[Result], value: _Value) -> float:
    values = sorted(map(value, results))
    return values[len(values) // 2]


def _line(results: Sequence[Result]) -> str:
    ratios = [f"{_median(results, _over(other)):.3f}" for other in OTHERS]
    caps = sorted({result.best_cap_mib for result in results})
    shown = f"{caps[0]} to {caps[-1]}" if len(caps) > 1 else f"{caps[0]}"
    backward = _median(results, lambda r: r.backward_us / 1e3)
    exposed = _median(results, lambda r: r.exposed_us["auto"] / 1e3)
    head = f"| {results[0].model} | {results[0].network} | {backward:.1f} | {exposed:.2f} | "
    return head + " | ".join([*ratios, shown]) + " |"


def draw(results: Sequence[Result], path: Path) -> None:
    """Write a PNG: a plot for each model and network."""
    # Without a display, and without a window's state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(result.model for result in results))
    networks = list(dict.fromkeys(result.network for result in results))
    size = (2.9 * len(networks), 2.1 * len(models) + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(models), len(networks), squeeze=False, sharex=True)
    for row, model in enumerate(models):
        for column, network in enumerate(networks):
            axes = grid[row][column]
            cells = [r for r in results if (r.model, r.network) == (model, network)]
            for name, color in COLORS.items():
                values = [cell.exposed_us[name] / cell.exposed_us["bound"] for cell in cells]
                style = "--" if name == "bound" else "-"
                axes.plot([r.ranks for r in cells], values, style, color=color, label=name)
            axes.set_xscale("log", base=2)
            axes.tick_params(labelsize=7)
            axes.set_title(f"{model}, {network}", fontsize=8)
    for axes in grid[-1]:
        axes.set_xlabel("ranks", fontsize=8)
    for line in grid:
        line[0].set_ylabel("exposed / bound", fontsize=8)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(COLORS), fontsize=8)
    figure.savefig(path, dpi=80)
