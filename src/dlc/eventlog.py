"""What the log says of events that whoever runs a peer should hear of, with what to do about it."""

from __future__ import annotations

import logging

from dlc.channels import why_of
from dlc.comm.events import Apart, BadImage, BulkLost, HistoryLost, LeftAhead, StateMisfit, Waiting
from dlc.joining import Introduction

log = logging.getLogger(__name__)


def log_event(event: object, intro: Introduction, heard: bool) -> None:
    """heard: somebody listens to events, and tells of those that are a part of training."""
    match event:
        case BulkLost():
            _bulk_lost(event, intro)
        case Apart():
            log.warning(
                "%s and this host do not reach each other directly: messages go by way of %s, but no vectors, so "
                "others reduce for both where they can, which may take longer; does a firewall stand between?",
                event.voter.peer[:8],
                event.relay[:8],
            )
        case HistoryLost() if event.rounds and not heard:
            log.warning(
                "the swarm goes by another history, as after a split: %d rounds of ours, of weight %g in all, are "
                "set aside",
                event.rounds,
                event.tokens,
            )
        case LeftAhead() if not heard:
            log.warning(
                "%s left with rounds of weight %g that nobody here has: the run goes on from here without them, and "
                "their checkpoints hold them",
                ", ".join(voter.peer[:8] for voter in event.voters),
                event.tokens,
            )
        case BadImage():
            log.warning("the state that %s sent is not the one it named; another is asked", event.donor.peer[:8])
        case StateMisfit():
            log.warning("the run's state of channel %r cannot be taken here: %s", event.channel, event.why)
        case Waiting():
            log.warning("waiting: %s", why_of(event))


def _bulk_lost(event: BulkLost, intro: Introduction) -> None:
    """Whose port it may be; others may have found that it is ours."""
    others = [v.peer for v in event.voters if v.peer != intro.voter.peer]
    if others:
        names = ", ".join(peer[:8] for peer in others)
        log.warning("%s answers pings, but its bulk does not pass: is its second port (control + 1) open?", names)
    if len(others) < len(event.voters):
        log.warning(
            "no bulk passes between others and this peer, or not in time: does a firewall let TCP port %d in?",
            intro.bulk_port,
        )
