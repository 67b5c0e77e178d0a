"""Scenarios and sweeps as files: plain JSON, replaced atomically, so that an interrupted run leaves a whole file."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from dlc.comm.timeouts import Timeouts
from dlc.sim.network import Weather
from dlc.sim.schedule import Fault, Scenario, Start


def to_plain(plan: Scenario) -> dict[str, Any]:
    """Dicts, lists, strings and numbers that make the same scenario again."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(plan)))
    return plain


def from_plain(plain: dict[str, Any]) -> Scenario:
    """The other way. TypeError or KeyError where it is not of this version."""
    starts = tuple(Start(**{**start, "listed": tuple(start["listed"])}) for start in plain["starts"])
    made = {
        "starts": starts,
        "faults": tuple(Fault(**fault) for fault in plain["faults"]),
        "weather": Weather(**plain["weather"]),
        "timeouts": Timeouts(**plain["timeouts"]),
        "channels": tuple(plain["channels"]),
    }
    return Scenario(**{**plain, **made})


def load(path: Path) -> Scenario:
    return from_plain(json.loads(path.read_text()))


def save_json(path: Path, plain: object) -> None:
    """Write beside it, then rename: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    beside.write_text(json.dumps(plain, indent=1) + "\n")
    beside.replace(path)
