"""An acceptance report as a picture: tau with its interval and oracles, and what each position accepts.

Needs matplotlib, which comes with the extra `bench`; it is loaded when a picture is asked for.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specpilot_rs.bench.report import overall
from specpilot_rs.bench.rounds import CHAIN_ORACLE, ORACLE_POSITIONS, top_oracle
from specpilot_rs.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ORACLE_SHOWN = top_oracle(ORACLE_POSITIONS[-1])
_WIDTH_INCHES, _LEAST_HEIGHT_INCHES, _INCHES_PER_CONFIGURATION = 11.0, 3.6, 0.22
_DOTS_PER_INCH = 100


def require_matplotlib() -> None:
    """Raises unless pictures can be made.

    Raises:
        OptionError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise OptionError(
            "a plot needs matplotlib, which is not installed: pip install 'specpilot-rs[bench]'"
        ) from error


def draw(report: Mapping[str, Any]) -> bytes:
    """Returns the picture of a report over all its prompts, as PNG.

    Raises:
        OptionError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    num_rows = len(report["configurations"])
    height = max(_LEAST_HEIGHT_INCHES, 1.4 + _INCHES_PER_CONFIGURATION * num_rows)
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    drafters = list(dict.fromkeys(item["drafter"] for item in report["configurations"]))
    colours = {drafter: f"C{index % 10}" for index, drafter in enumerate(drafters)}
    _draw_taus(left, report, colours)
    _draw_positions(right, report, colours)
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    num_prompts = overall(report["configurations"][0])["num_prompts"]
    figure.suptitle(
        f"{report['target']}: {num_prompts} prompts, up to {report['max_tokens']} tokens each"
        + ("" if report["complete"] else " (stopped before the end)"),
        fontsize="medium",
    )
    picture = io.BytesIO()
    # No version of matplotlib inside: the same report gives the same picture.
    figure.savefig(picture, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return picture.getvalue()


def _draw_taus(axes: Axes, report: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    configurations = report["configurations"]
    for place, item in enumerate(configurations):
        result, colour = overall(item), colours[item["drafter"]]
        (low, high), tau = result["interval"], result["tau"]
        axes.errorbar(
            tau, place, xerr=[[tau - low], [high - tau]], fmt="o", color=colour, markersize=4, capsize=2
        )
        axes.plot(result["oracles"][CHAIN_ORACLE], place, "|", color="0.4", markersize=9)
        axes.plot(result["oracles"][_ORACLE_SHOWN], place, "D", color="0.4", markersize=4, fillstyle="none")
    axes.plot([], [], "ko", markersize=4, label="tau, 95 % interval")
    axes.plot([], [], "|", color="0.4", markersize=9, linestyle="none", label="chain oracle")
    label = f"top-16 oracle at {ORACLE_POSITIONS[-1]} positions"
    axes.plot([], [], "D", color="0.4", markersize=4, fillstyle="none", linestyle="none", label=label)
    axes.set_yticks(range(len(configurations)), [item["name"] for item in configurations], fontsize="small")
    axes.set_ylim(len(configurations) - 0.5, -0.5)
    axes.set_xlim(left=1)
    axes.set_xlabel("tokens per exact pass")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize="x-small", loc="best")


def _draw_positions(axes: Axes, report: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    """Draws, per drafter, the configurations that accept most without and with Q passes."""
    for drafter, colour in colours.items():
        for has_q_passes in (False, True):
            candidates = [
                item
                for item in report["configurations"]
                if item["drafter"] == drafter and (item["q_passes"] > 0) == has_q_passes
            ]
            if not candidates:
                continue
            best = max(candidates, key=lambda item: float(overall(item)["tau"]))
            lengths = overall(best)["accepted_lengths"]
            shares = [sum(lengths[position:]) / sum(lengths) for position in range(1, len(lengths))]
            style = "--" if has_q_passes else "-"
            axes.plot(range(1, len(shares) + 1), shares, style, color=colour, label=best["name"])
    axes.set_xlabel("position after the last committed token")
    axes.set_ylabel("share of all passes that accepted a draft there")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", loc="best")
