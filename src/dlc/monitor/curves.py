"""The loss of a swarm and of one peer alone against inner steps per peer, as numbers and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlc.monitor.verdict import Record, of_role

SMOOTH_SHARE = 0.05
"""Steps that one point of the smoothed curve averages, as a part of all steps."""
ENLARGED_FROM = 0.3
"""Where the enlarged part starts, as a part of all steps."""
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
    """Mean over `window` points around each (an odd number), fewer at both ends."""
    half, losses = window // 2, curve.losses
    parts = [losses[max(0, i - half) : i + half + 1] for i in range(len(losses))]
    return Curve(curve.steps, [sum(part) / len(part) for part in parts])


def save_picture(path: Path, all_curves: Curves, marks: Sequence[tuple[int, str]], title: str) -> str:
    """Write a PNG: the whole run, and its second part enlarged. `marks` are (step, text) to be drawn.

    Returns "" or the reason why there is none.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "matplotlib is not installed; for the picture: pip install 'dlc[plots]'"
    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    whole, part = figure.subplots(1, 2, width_ratios=(1, 1.25))
    for axes in (whole, part):
        _draw(axes, all_curves.swarm, all_curves.swarm_validation, SWARM, "swarm, mean of its peers")
        _draw(axes, all_curves.alone, all_curves.alone_validation, ALONE, "one peer alone")
        axes.set(xlabel="inner steps per peer", ylabel="loss, nats per byte")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    whole.set_xlim(left=0)
    whole.legend(loc="upper right", fontsize=9, framealpha=1, edgecolor="none")
    _enlarge(part, all_curves)
    for axes in (whole, part):
        _draw_marks(axes, marks)
    figure.suptitle(title)
    try:
        figure.savefig(path)
    except OSError as error:
        return f"{path} cannot be written: {error.strerror or error}"
    return ""


def _draw(axes: Any, training: Curve, validation: Curve, colour: str, name: str) -> None:
    axes.plot(*training, color=colour, alpha=0.15, linewidth=0.8)
    axes.plot(*_smoothed(training), color=colour, linewidth=1.4, alpha=0.8, label=f"training: {name}")
    style = {"linestyle": ":", "linewidth": 1.2, "marker": "o", "markersize": 5, "markeredgecolor": "white"}
    axes.plot(*validation, color=colour, label=f"validation: {name.partition(',')[0]}", zorder=3, **style)


def _smoothed(training: Curve) -> Curve:
    return smooth(training, 1 + 2 * round(SMOOTH_SHARE * len(training.steps) / 2))


def _enlarge(axes: Any, found: Curves) -> None:
    """Show the part in which the losses differ by less than the start hides, with the last validation losses."""
    last = max((curve.steps[-1] for curve in found if curve.steps), default=0)
    first = ENLARGED_FROM * last
    drawn = (_smoothed(found.swarm), _smoothed(found.alone), found.swarm_validation, found.alone_validation)
    losses = [loss for curve in drawn for step, loss in zip(*curve, strict=True) if step >= first]
    if not losses or last == 0:
        return
    margin = 0.12 * (max(losses) - min(losses)) + 0.01
    axes.set_xlim(first, last + 0.14 * (last - first))
    axes.set_ylim(min(losses) - 2 * margin, max(losses) + margin)
    ends = [(c.losses[-1], c.steps[-1], colour) for c, colour in zip(found[2:], (SWARM, ALONE), strict=True) if c.steps]
    for i, (loss, step, colour) in enumerate(sorted(ends)):
        lift = 5 if i else -5  # the lower of two a little down, the upper a little up
        at = {"xytext": (7, lift), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{loss:.3f}", (step, loss), color=colour, fontsize=10, fontweight="bold", **at)


def _draw_marks(axes: Any, marks: Sequence[tuple[int, str]]) -> None:
    together: dict[int, list[str]] = {}
    for step, text in marks:
        together.setdefault(step, []).append(text)
    height = 6  # each text above the one before: the marks may stand close together
    for step, texts in together.items():
        axes.axvline(step, color=NOTE, linewidth=1, linestyle="--")
        at = {"xytext": (4, height), "textcoords": "offset points", "va": "bottom"}
        height += 13 * len(texts)
        where = ("data", "axes fraction")
        text = axes.annotate("\n".join(texts), (step, 0), xycoords=where, color=NOTE, fontsize=9, **at)
        text.set_in_layout(False)  # it may lie outside, where a run ended early


def _mean(records: Sequence[Record], kind: str, key: str, scale: int) -> Curve:
    """Mean of the losses at each step, over all records that have one there."""
    at: dict[int, list[float]] = {}
    for record in records:
        for event in record.all(kind):
            if event.get("loss") is not None and event.get(key) is not None:
                at.setdefault(int(event[key]) * scale, []).append(float(event["loss"]))
    steps = sorted(at)
    return Curve(steps, [sum(at[step]) / len(at[step]) for step in steps])
