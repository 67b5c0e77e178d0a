"""`dlc status`: who is in a run."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from dlc.addresses import addresses_of
from dlc.cli.console import Stdout
from dlc.cli.places import run_key
from dlc.comm.addresses import ADDRESS_CHARS_MAX

if TYPE_CHECKING:
    from dlc.survey import Member


WIDTHS = {"peer": 0, "address": 64, "state": 0, "round": 30, "step": 38, "tokens/s": 54, "loss": 46, "head": 72}
"""Of the terminal, below which a column is left out."""
CELL_CHARS_MAX = 40
"""Of what another host says of itself; its address, which is to be typed elsewhere, is shown as a whole."""


def show_status(args: argparse.Namespace) -> int:
    """Print the members as a table, or as a JSON list."""
    peers, key = addresses_of(args.peers), run_key(args.key_file)
    from dlc.survey import status

    members = status(peers, key=key, run=args.run, timeout_s=args.timeout)
    if args.json:
        print(json.dumps([dataclasses.asdict(member) for member in members]), flush=True)
    else:
        console = Stdout()
        console.print(member_table(members, console.width))
    return 0


def member_table(members: list[Member], width: int) -> Table:
    """One row per peer; with fewer columns where they do not fit `width`: half a number would be a wrong one."""
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    heads = [head for head, least in WIDTHS.items() if width >= least]
    for head in heads:
        right = head in ("round", "step", "tokens/s", "loss")
        grid.add_column(head, justify="right" if right else "left", no_wrap=head != "address", overflow="fold")
    for member in members:
        said = member.status
        state = "left" if member.left else str(said.get("phase", member.role)) if member.alive else "no answer"
        cells = {
            "peer": member.id[:8] + ("*" if member.me else ""),
            "address": member.address,
            "state": state,
            "round": said.get("t", ""),
            "step": f"{said['inner']}/{said['of']}" if {"inner", "of"} <= said.keys() else "",
            "tokens/s": round(member.speed) or "",
            "loss": said.get("loss", ""),
            "head": member.head[:8],
        }
        most = {"address": ADDRESS_CHARS_MAX}
        grid.add_row(*(_plain(cells[head], most.get(head, CELL_CHARS_MAX)) for head in heads))
    return grid


def _plain(cell: object, most: int) -> Text:
    """Text of another host: no markup, and nothing that a terminal would obey."""
    shown = str("" if cell is None else cell)[:most]
    return Text("".join(c if c.isprintable() else "?" for c in shown))
