"""Whom a peer knew when it was last here: addresses of members, kept in its state directory for the next start."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable

from dlc.comm.addresses import parse_address
from dlc.comm.messages import Record
from dlc.comm.node import Node
from dlc.comm.permit import can_vote
from dlc.errors import UsageError
from dlc.statedir import PeerState

log = logging.getLogger(__name__)


class AddressBook:
    """Of one peer. `state` holds it; what is in there may be damaged, or of somebody else's making."""

    def __init__(self, state: PeerState) -> None:
        self._state = state
        self._stays = False
        """It could not be written, and that was told."""

    def known(self) -> dict[str, str]:
        """HOST:PORT by peer id, where those were that this peer knew, but for those that left: whom it looks for when
        it starts; those that `awaited` names come first."""
        return self.awaited() | {peer: address for peer, (address, _) in self._read().items()}

    def awaited(self) -> dict[str, str]:
        """Those of `known` that the run had not gone on without: it does not do so now either."""
        return {peer: address for peer, (address, lost) in self._read().items() if not lost}

    def _read(self) -> dict[str, tuple[str, bool]]:
        """By peer id of those that have not left: HOST:PORT, and whether it was lost."""
        found: dict[str, tuple[str, bool]] = {}
        for peer, known in self._state.load_address_book().items():
            try:
                address = known["addresses"][0]
                parse_address(address)
            except (TypeError, KeyError, IndexError, AttributeError, UsageError):
                continue  # not of our making
            if not known.get("left"):
                found[peer] = address, bool(known.get("lost"))
        return found

    def save(self, others: Iterable[Record], lost: Container[str] = ()) -> None:
        """In place of what it held. lost: ids of those that the run has gone on without. Where it cannot be written,
        that is told once, and what it held stays."""
        book = {
            r.voter.peer: {"addresses": list(r.control), "left": r.left, "lost": r.voter.peer in lost} for r in others
        }
        try:
            self._state.save_address_book(book)
            self._stays = False
        except (OSError, UsageError) as error:  # a full disk, another's folder: the run is worth more than the book
            if not self._stays:
                log.warning("the address book could not be written (%s); the old one stays", error)
            self._stays = True


def known_to(node: Node) -> tuple[list[Record], set[str]]:
    """(the others, ids of those whom the run had gone on without, or would have): as `AddressBook.save` takes them."""
    members, electorate = node.members, node.log.state.electorate
    others = [r for r in members.records() if r.voter != node.me]

    def lost(r: Record) -> bool:
        # T_evict grows while this peer is slow; the log has gone on without somebody all the same
        gone_on = node.config.log and r.voter not in electorate
        patience_s = members.timeouts.evict_s if gone_on else members.t_evict_s
        return not can_vote(r) or members.unseen_s(r.voter) >= patience_s

    return others, {r.voter.peer for r in others if lost(r)}
