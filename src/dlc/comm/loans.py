"""Bytes that one peer holds under a name, and another fetches: parcels of a vector that is no vector.

    lend(name, data)                      held until give_back(name), or its time is over, or it is lent anew
    borrow(name, n_bytes, of a member)    pulled chunk by chunk; ended(why) is called once, with "" where all is here

The bytes travel as fp32 elements, whose codec copies them as they are, with up to three more of zero at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dlc.comm.effects import Effect
from dlc.comm.grid import Grid, usual_chunk_elems
from dlc.comm.holdings import Holding
from dlc.comm.ids import PeerId
from dlc.comm.mesh import Mesh
from dlc.comm.meshmessages import Key, Parcel
from dlc.comm.parcels import Intake

_CODEC = "fp32"

ELEM_BYTES = 4
UNKNOWN = "it is no member"
"""Why nothing can be borrowed of a peer."""


def lend(mesh: Mesh, name: str, data: bytes, ttl_s: float, now: float) -> list[Effect]:
    """Hold `data`, at least one byte, for whoever borrows it within `ttl_s` seconds."""
    grid = _grid(len(data))
    memory = bytearray(grid.numel * ELEM_BYTES)
    memory[: len(data)] = data
    vector = torch.frombuffer(memory, dtype=torch.float32)
    mesh.ground.wake(now)
    key = _key(name)
    mesh.parcels.holdings.release(key)
    mesh.parcels.holdings.hold(key, Holding(grid, mesh.ground.running_s + ttl_s, vector=vector))
    return mesh.ground.drain()


def give_back(mesh: Mesh, name: str, now: float) -> list[Effect]:
    """Hold it no longer."""
    mesh.ground.wake(now)
    mesh.parcels.holdings.release(_key(name))
    return mesh.ground.drain()


def borrow(
    mesh: Mesh, name: str, holder: PeerId, out: bytearray, limit_s: float, ended: Callable[[str], None], now: float
) -> list[Effect]:
    """Fill `out`, whose length is that of what `holder` has lent. ended: called once, here or later, with why it failed
    ("": it has not)."""
    mesh.ground.wake(now)
    record = mesh.ground.members.record(holder)
    if record is None:
        ended(UNKNOWN)
        return mesh.ground.drain()
    grid, left = _grid(len(out)), 0

    def taken(parcel: Parcel) -> None:
        nonlocal left
        start = grid.span(parcel.chunk)[0] * ELEM_BYTES
        out[start : start + len(parcel.payload)] = memoryview(parcel.payload)[: len(out) - start]
        left -= 1
        if not left:
            mesh.parcels.stop(intake)
            ended("")

    until_run = mesh.ground.running_s + limit_s
    intake = Intake(_key(name), record.voter, grid, until_run, 1, taken, ended)
    left = grid.n_chunks
    mesh.parcels.want(intake, range(grid.n_chunks))
    return mesh.ground.drain()


def _key(name: str) -> Key:
    return Key(name, 0, 0)


def _grid(n_bytes: int) -> Grid:
    numel = -(-n_bytes // ELEM_BYTES)
    return Grid(numel, usual_chunk_elems(numel, _CODEC), _CODEC)


__all__ = ["borrow", "give_back", "lend"]
