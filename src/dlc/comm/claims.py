"""Who serves a span: views, who may change them, and what all others have promised. Pure bookkeeping.

A *view* names a span's owner and standby and has a term. It changes by a *claim* for the next term, which is asked of
all trainers and helpers that are alive, and is *established* once a majority of those known has granted it. Everybody
grants one view per term only, and none below what was granted before, so two views of one term are never both
established while majorities meet. Who may claim:

    the owner                           another standby, nobody as standby, or to hand over to its standby
    the standby, once the owner died    itself as the owner
    the first choice of the span,       itself, from what a trainer pulled last
        once both are gone

*Known* are the trainers and helpers that have not left and were seen within T_evict. So a minority that is cut off
changes nothing for that long, and then goes on by itself; when the cut heals, the greater (term, owner) holds and the
other side's updates are set aside. An owner that is cut off from the majority serves nothing meanwhile.

Why no push that was acknowledged is lost by a takeover: an owner acknowledges only what its standby holds, and no
standby becomes part of a view before it holds everything that was acknowledged.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from dlc.comm.ids import Voter
from dlc.comm.servermessages import Granted, Refused, SpanView

CLAIM_S = 5.0
"""A claim without a majority after this long is dropped; whoever still has reason to makes another."""
ASK_S = 0.5
"""How often those that have not answered are asked."""


def order(view: SpanView) -> tuple[int, Voter]:
    return view.term, view.owner


class Witness:
    """What one peer, trainer or helper, knows of the views, and what it has granted."""

    def __init__(self) -> None:
        self.established: dict[int, SpanView] = {}
        self._granted: dict[int, SpanView] = {}

    def asked(self, view: SpanView) -> Granted | Refused:
        """The answer to a claim."""
        known, granted = self.established.get(view.span), self._granted.get(view.span)
        if known is not None and known.term >= view.term:
            return Granted(view.span, view.term) if known == view else Refused(known, True)
        if granted is not None and granted.term >= view.term and granted != view:
            return Refused(granted, False)
        self._granted[view.span] = view
        return Granted(view.span, view.term)

    def learn(self, view: SpanView) -> bool:
        """An established view; True if it is news."""
        known = self.established.get(view.span)
        if known is not None and order(known) >= order(view):
            return False
        self.established[view.span] = view
        return True

    def forget_beyond(self, n_spans: int) -> None:
        """There are only so many: what was told of others before that was known is of no use."""
        for views in (self.established, self._granted):
            for span in [span for span in views if span >= n_spans]:
                del views[span]

    def term_after(self, span: int) -> int:
        """The next term that nobody was granted, as far as I know."""
        views = (self.established.get(span), self._granted.get(span))
        return 1 + max((view.term for view in views if view is not None), default=0)


@dataclass
class Claiming:
    """A claim of mine on its way."""

    view: SpanView
    began: float
    granted: set[Voter] = field(default_factory=set)
    asked_at: float = float("-inf")

    def won(self, known: Collection[Voter]) -> bool:
        return 2 * len(self.granted.intersection(known)) > len(known)
