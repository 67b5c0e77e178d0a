"""What remains of a demo: tables on the screen, and the files of its folder.

result.json    checks and figures; what `dlc demo --json` prints
events.jsonl   every event of every process, from which `verdict` gives the checks again
loss.png       the loss curves, where matplotlib is installed
RUN.toml, logs/NAME.log    written while it ran
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dlc.monitor.curves import Curves, curves, save_picture
from dlc.monitor.verdict import (
    Check,
    Expected,
    Record,
    died_in,
    exit_text,
    loss_after,
    loss_before,
    loss_text,
    of_role,
    reports_of_kill_round,
    verdict,
)
from dlc.runspec import RunSpec


def write_outcome(
    out: Path, spec: RunSpec, records: Sequence[Record], expected: Expected, elapsed_s: float, console: Console
) -> dict[str, Any]:
    """Judge, print and save; returns the result, whose "held" says whether every check did."""
    checks = verdict(records, expected, elapsed_s)
    drawn = curves(records, spec.sync_every)
    picture = out / "loss.png"
    no_picture = save_picture(picture, drawn, _marks(records, expected, spec.sync_every), _title(records, spec))
    result = _result(checks, records, expected, elapsed_s, drawn)
    try:
        (out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        with (out / "events.jsonl").open("w", encoding="utf-8") as lines:
            for record in records:
                lines.writelines(json.dumps({"from": record.name, **event}) + "\n" for event in record.events)
    except OSError as error:
        console.print(f"{out} is not complete: {error.strerror or error}", markup=False, style="red")
    _print(result, checks, records, expected, console)
    console.print(no_picture or f"loss curves: {picture}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"result, events and logs: {out}", markup=False, highlight=False, soft_wrap=True)
    return result


def _result(
    checks: Sequence[Check], records: Sequence[Record], expected: Expected, elapsed_s: float, drawn: Curves
) -> dict[str, Any]:
    return {
        "held": all(check.held for check in checks),
        "checks": [{"name": check.name, "held": check.held, "detail": check.detail} for check in checks],
        "elapsed_s": round(elapsed_s, 2),
        "validation_loss": {
            "before": loss_before(records),
            "swarm": loss_after(records, "peer", "newcomer"),
            "alone": loss_after(records, "alone"),
        },
        "kill_round": {
            "t": died_in(records, expected),
            "reports": {name: r.to_dict() for name, r in reports_of_kill_round(records, expected).items()},
        },
        "peers": [_figures(record) for record in records],
        "curves": {
            name: [list(point) for point in zip(*curve, strict=True)] for name, curve in drawn._asdict().items()
        },
    }


def _figures(record: Record) -> dict[str, Any]:
    """One process in numbers. A killed one has no "end": its figures are sums over its rounds."""
    end, rounds = record.last("end"), list(record.all("round"))
    return {
        "name": record.name,
        "role": record.role,
        "id": record.id,
        "exit": exit_text(record.exit_code),
        "rounds": end.get("t", rounds[-1].get("t") if rounds else 0),
        "digest": end.get("digest", rounds[-1].get("digest") if rounds else None),
        "validation_loss": end.get("validation_loss"),
        "bytes_sent": end.get("bytes_sent", sum(event.get("bytes_sent", 0) for event in rounds)),
        "bytes_received": end.get("bytes_received", sum(event.get("bytes_received", 0) for event in rounds)),
        "waited_s": end.get("waited_s", sum(event.get("own_waiting_s") or 0.0 for event in rounds)),
        "steps": sum(1 for _ in record.all("step")),
        "rounds_counted": sum(bool(event.get("counted")) for event in rounds),
    }


def _print(
    result: dict[str, Any], checks: Sequence[Check], records: Sequence[Record], expected: Expected, console: Console
) -> None:
    peers = Table(title="peers", title_justify="left", box=SIMPLE_HEAD)
    for head in ("peer", "ended", "rounds", "counted", "MB out/in", "waited", "validation", "digest"):
        peers.add_column(head, justify="left" if head in ("peer", "ended", "digest") else "right", no_wrap=True)
    for row in result["peers"]:
        peers.add_row(
            row["name"],
            row["exit"],
            str(row["rounds"]),
            str(row["rounds_counted"]),
            f"{row['bytes_sent'] / 1e6:.1f}/{row['bytes_received'] / 1e6:.1f}",
            f"{row['waited_s']:.1f} s",
            "" if row["validation_loss"] is None else loss_text(row["validation_loss"]),
            (row["digest"] or "")[:12],
        )
    loss = result["validation_loss"]
    losses = Table(title="validation loss, nats per byte", title_justify="left", box=SIMPLE_HEAD)
    for head in ("before", "swarm, after", "one peer alone, after"):
        losses.add_column(head, justify="right")
    losses.add_row(*(loss_text(loss[name]) for name in ("before", "swarm", "alone")))
    console.print(peers, losses)
    names = {record.id: record.name for record in records if record.id}
    for name, report in reports_of_kill_round(records, expected).items():
        text = report.summary()
        for peer, known in names.items():
            text = text.replace(peer[:8], known)
        console.print(f"the round of the kill, by {name}: {text}", markup=False, highlight=False, soft_wrap=True)
    for check in checks:
        style = "green" if check.held else "bold red"
        console.print(f"{'ok    ' if check.held else 'FAILED'}", style=style, end="  ")
        console.print(f"{check.name}: {check.detail}", markup=False, highlight=False, soft_wrap=True)


def _marks(records: Sequence[Record], expected: Expected, sync_every: int) -> list[tuple[int, str]]:
    """What happened at which step."""
    at = died_in(records, expected) * sync_every
    marks = [(at, f"{r.name} killed") for r in of_role(records, "victim") if r.exit_code]
    for record in of_role(records, "newcomer"):
        if record.last("synced"):
            first = next(iter(record.all("synced")))
            marks.append((int(first.get("t", 0)) * sync_every, "newcomer joins"))
    return marks


def _title(records: Sequence[Record], spec: RunSpec) -> str:
    count = len(of_role(records, "peer", "victim"))
    return f"{count} peers, {spec.rounds} rounds of {spec.sync_every} steps, against one peer alone"
