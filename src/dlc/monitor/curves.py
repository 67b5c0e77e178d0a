"""The loss of a swarm and of one peer alone against inner steps per peer, as numbers and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlc.monitor.verdict import Record, of_role

SMOOTH_SHARE = 0.05
"""Steps that one point of the smoothed curve averages, as a part of all steps."""
SWARM, ALONE, NOTE = "#1f5fbf", "#d9822b", "#777777"


class Curve(NamedTuple):
    """Points in the order of steps."""

    steps: list[int]
    losses: list[float]


class Curves(NamedTuple):
    swarm: Curve
    """Training loss per global step, mean over the peers that did that step."""
    alone: Curve
    swarm_validation: Curve
    alone_validation: Curve


def curves(records: Sequence[Record], sync_every: int) -> Curves:
    """Read the curves from the events; rounds become steps by `sync_every`."""
    swarm, alone = of_role(records, "peer", "victim", "newcomer"), of_role(records, "alone")
    return Curves(
        _mean(swarm, "step", "step", 1),
        _mean(alone, "step", "step", 1),
        _mean(swarm, "validation", "t", sync_every),
        _mean(alone, "validation", "t", sync_every),
    )


def smooth(curve: Curve, window: int) -> Curve:
    """Mean over the last `window` points, fewer at the start."""
    losses = [
        sum(part) / len(part)
        for i in range(len(curve.losses))
        if (part := curve.losses[max(0, i + 1 - window) : i + 1])
    ]
    return Curve(curve.steps, losses)


def save_picture(path: Path, all_curves: Curves, marks: Sequence[tuple[int, str]], title: str) -> str:
    """Write a PNG; `marks` are (step, text) to be drawn. Returns "" or the reason why there is none."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "matplotlib is not installed; for the picture: pip install 'dlc[plots]'"
    figure = Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw(axes, all_curves.swarm, all_curves.swarm_validation, SWARM, "swarm", "mean over its peers")
    _draw(axes, all_curves.alone, all_curves.alone_validation, ALONE, "one peer alone", "")
    _draw_marks(axes, marks)
    axes.set(title=title, xlabel="inner steps per peer", ylabel="loss, nats per byte")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    try:
        figure.savefig(path)
    except OSError as error:
        return f"{path} cannot be written: {error.strerror or error}"
    return ""


def _draw(axes: Any, training: Curve, validation: Curve, colour: str, name: str, note: str) -> None:
    window = max(1, round(SMOOTH_SHARE * len(training.steps)))
    axes.plot(*training, color=colour, alpha=0.18, linewidth=0.8)
    label = f"{name}: training{f', {note}' if note else ''}"
    axes.plot(*smooth(training, window), color=colour, linewidth=1.4, alpha=0.8, label=label)
    axes.plot(*validation, color=colour, linewidth=1.2, linestyle=":", marker="o", markersize=5,
              markeredgecolor="white", label=f"{name}: validation")  # fmt: skip
    if validation.steps:
        axes.annotate(f"{validation.losses[-1]:.3f}", (validation.steps[-1], validation.losses[-1]), color=colour,
                      xytext=(6, 0), textcoords="offset points", va="center", fontsize=9,
                      annotation_clip=False)  # fmt: skip


def _draw_marks(axes: Any, marks: Sequence[tuple[int, str]]) -> None:
    for i, (step, text) in enumerate(marks):
        axes.axvline(step, color=NOTE, linewidth=1, linestyle="--")
        axes.annotate(text, (step, 0.02 + 0.05 * i), xycoords=("data", "axes fraction"), xytext=(4, 0),
                      textcoords="offset points", color=NOTE, fontsize=9)  # fmt: skip


def _mean(records: Sequence[Record], kind: str, key: str, scale: int) -> Curve:
    """Mean of the losses at each step, over all records that have one there."""
    at: dict[int, list[float]] = {}
    for record in records:
        for event in record.all(kind):
            if event.get("loss") is not None and event.get(key) is not None:
                at.setdefault(int(event[key]) * scale, []).append(float(event["loss"]))
    steps = sorted(at)
    return Curve(steps, [sum(at[step]) / len(at[step]) for step in steps])
