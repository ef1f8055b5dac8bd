"""A timing report as a picture: what steps are made of, as stacked bars, and the tokens per second they give.

Needs matplotlib, which comes with the extra `bench`; it is loaded when a picture is asked for.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from specpilot_rs.bench.plot import require_matplotlib
from specpilot_rs.bench.timing_report import STAGES

_SIZE_INCHES = (11.0, 4.2)
_DOTS_PER_INCH = 100


def draw_timing(report: Mapping[str, Any]) -> bytes:
    """Returns the picture of a report, as PNG.

    Raises:
        OptionError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    presets = report["presets"]
    names = [item["name"] for item in presets]
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    bottoms = [0.0] * len(presets)
    for colour, stage in enumerate(STAGES):
        heights = [(item["stages_ms"] or {}).get(stage, 0.0) for item in presets]
        left.bar(names, heights, bottom=bottoms, label=stage, color=f"C{colour}")
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    left.set_ylabel("ms of a step, stages waited for one by one")
    left.legend(fontsize="x-small", ncols=2)
    rates = [item["tokens_per_s"] for item in presets]
    medians = [rate["median"] for rate in rates]
    errors = [
        [abs(rate["median"] - rate["interval"][0]) for rate in rates],
        [abs(rate["interval"][1] - rate["median"]) for rate in rates],
    ]
    right.bar(names, medians, yerr=errors, capsize=3, color="0.6")
    for place, item in enumerate(presets):
        label = f"{medians[place]:.0f}\ntau {item['tau']:.2f}"
        right.annotate(label, (place, medians[place]), ha="center", va="bottom", fontsize="x-small")
    right.set_ylim(0, 1.25 * max(medians))
    right.set_ylabel(f"tokens per second, {report['acceptance']} acceptance")
    for axes in (left, right):
        axes.tick_params(axis="x", labelsize="small", rotation=20)
        axes.grid(axis="y", alpha=0.3)
    figure.suptitle(
        f"{report['target']} on {report['gpu'] or report['device']}"
        + ("" if report["complete"] else " (stopped before the end)"),
        fontsize="medium",
    )
    picture = io.BytesIO()
    # No version of matplotlib inside: the same report gives the same picture.
    figure.savefig(picture, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return picture.getvalue()
