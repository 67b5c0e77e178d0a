"""How an observer finds out that its state is wrong: no plan goes to it, so it listens to what voters tell of theirs.

Records come late, so what they say of a head is held to what this state was there (`Attached.passed`).
"""

from __future__ import annotations

from collections.abc import Callable

from dlc.comm.context import Context
from dlc.comm.log import Attached, Log
from dlc.comm.records import told_digest
from dlc.comm.roles import OBSERVER


class Observing:
    def __init__(self, ctx: Context, log: Log, diverged: Callable[[str, bytes], None]) -> None:
        self.ctx, self.log = ctx, log
        self.diverged = diverged
        """Called with a channel and the digest that most voters tell where mine was another."""

    def tick(self) -> None:
        if self.ctx.members.own.role != OBSERVER:
            return
        for channel, attached in self.log.attached.items():
            digest = self._outvoted_by(channel, attached) if self.log.holds(channel) else b""
            if digest:
                self.diverged(channel, digest)

    def _outvoted_by(self, channel: str, attached: Attached) -> bytes:
        """What more than half of the voters that may hold this state tell, and live, if mine was another there."""
        mine, members = dict(attached.passed), self.ctx.members
        others: list[bytes] = []
        holders = 0
        for voter in self.log.state.electorate:
            record = members.record(voter.peer)
            if record is None or record.voter != voter:
                holders += 1  # who was not heard of may have spoken for me; so may who is not alive
                continue
            told = told_digest(record, record.head, channel)
            holders += told != b""
            if told and members.alive(voter) and told != mine.get(record.head, told):
                others.append(told)
        return others[-1] if 2 * len(others) > holders else b""
