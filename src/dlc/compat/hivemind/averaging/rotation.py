"""Where a peer of a grid of groups goes after a round (Moshpit all-reduce, arXiv:2103.03239, section 3.1).

The bits of a peer are its coordinates on a grid of side M but for the one in which its group lies. After a round its
place in the group is its coordinate there; the oldest coordinate is dropped, and is that of the next group. With M^d
peers, each group of M, everybody holds the mean of all after d rounds.
"""

from __future__ import annotations

from collections.abc import Sequence


def rotated(bits: str, members: Sequence[str], me: str, target: int | None) -> str:
    """The next group bits of `me`; `members` in the same order on all of them. Without bits there is but one group."""
    side = target or len(members)
    new = (side - 1).bit_length()
    place = format(list(members).index(me), f"0{new}b") if new else ""
    return (bits + place)[-len(bits) :] if bits else ""


__all__ = ["rotated"]
