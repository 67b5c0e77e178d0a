"""Every message of a peer, handed to the machine that it is for."""

from __future__ import annotations

from itertools import accumulate

from dlc.comm import messages as msg
from dlc.comm.addresses import ADDRESS_CHARS_MAX
from dlc.comm.applier import Applier
from dlc.comm.catalogue import KINDS, SERVICE_KINDS
from dlc.comm.early import Early
from dlc.comm.effects import Answer, Notify, Send
from dlc.comm.events import MemberDown, MemberLeft
from dlc.comm.ids import Voter
from dlc.comm.permit import greater_alive
from dlc.comm.service import Services
from dlc.comm.shapes import check_slot_message
from dlc.comm.wire import HEADER_BYTES_MAX, STRING_BYTES_MAX, pack, unpack
from dlc.errors import ProtocolError

SLOT_MESSAGES = (msg.Ready, msg.Prepare, msg.Promise, msg.Nack, msg.Coord, msg.Progress, msg.Plan, msg.Held)
MEMBERSHIP_MESSAGES = (msg.Ping, msg.Ack, msg.PingReq, msg.IndirectAck, msg.Leave, msg.Welcome)
WELCOME_BYTES_MAX = HEADER_BYTES_MAX - 2 * STRING_BYTES_MAX
"""Of the records in one answer to a newcomer, beside a RunSpec: thousands, or some hundreds that tell of many channels.
"""


class Inbox:
    def __init__(
        self, applier: Applier, services: Services, run: str, spec: bytes, spec_hash: bytes, log: bool
    ) -> None:
        self.services, self.has_log = services, log
        self.applier, self.ctx, self.log = applier, applier.ctx, applier.log
        self.exchange, self.slot = applier.exchange, applier.slot
        self.coordinator, self.sync = applier.coordinator, applier.sync
        self.run, self.spec, self.spec_hash = run, spec, spec_hash
        self._early: Early[msg.Message] = Early(self.exchange.room)
        """For the slot after the one at hand."""
        self._early_for = b""
        """The head of that."""

    def check_sender(self, sender: Voter, message: msg.Message) -> None:
        """ProtocolError for a slot message that comes from another and says that it is mine: mine are not checked, and
        go by no network. Other messages do: to my own address, or to the process that I was before."""
        if sender == self.ctx.me and isinstance(message, SLOT_MESSAGES):
            raise ProtocolError(f"a {type(message).__name__} that names this peer as its sender")

    def receive(self, sender: Voter, message: msg.Message) -> None:
        if isinstance(message, MEMBERSHIP_MESSAGES):  # nine of ten
            self._membership(sender, message)
        elif type(message) in self.services.kinds:
            self.ctx.out.extend(self.services.receive(sender, message, self.ctx.now))
        elif type(message) in SERVICE_KINDS:
            return  # this peer carries no such service: whoever asked finds out by its own patience
        elif isinstance(message, msg.Hello):
            self._answer_hello(message)
        elif isinstance(message, msg.Relay):
            self._relay(sender, message)
        elif self.has_log:
            self._log_message(sender, message)
        else:
            raise ProtocolError(f"{type(message).__name__} is of the log, and this run has none")

    def _log_message(self, sender: Voter, message: msg.Message) -> None:
        if self._keeps(sender, message):
            return
        if isinstance(message, SLOT_MESSAGES):
            self._slot_message(sender, message)
        elif isinstance(message, msg.Contrib):
            self.exchange.receive_contrib(sender, message)
            self.slot.advance()
        elif isinstance(message, msg.Result):
            if not self.exchange.receive_result(message) or self.sync.busy:
                self.sync.receive_result(message)
            self.slot.advance()
            self.applier.received()
        elif isinstance(message, msg.Commit):
            self.applier.receive_commit(sender, message)
        elif isinstance(message, msg.Fetch):
            if message.head == self.log.head:
                self.slot.receive_fetch(sender, message)
            else:
                self.sync.donations.receive_fetch(sender, message)
        else:
            self._sync_message(sender, message)

    def catch_up(self) -> None:
        """After an event: what was kept for the slot that has begun is handed on now."""
        if not self._early or (self._early_for != self.log.head and self._early_for == self._next_head):
            return
        early = self._early.take()
        if self._early_for == self.log.head:
            for sender, message in early:
                try:
                    self.receive(sender, message)
                except ProtocolError as error:
                    self.exchange.dropped.note(sender, str(error), bad=True)

    @property
    def _next_head(self) -> bytes:
        entry = self.applier.next_entry
        return entry.hash if entry is not None else b""

    def _keeps(self, sender: Voter, m: msg.Message) -> bool:
        """It is for the slot after the one at hand, of which others have the last results, which are on their way here:
        it is kept, as if it came later."""
        if isinstance(m, msg.Result):
            head = b"" if self.sync.busy else m.header.head
        elif isinstance(m, msg.Contrib):
            head = m.base
        elif isinstance(m, msg.Commit):
            head = m.entry.parent
        else:
            head = m.head if isinstance(m, SLOT_MESSAGES) else b""
        if head in (b"", self.log.head) or head != self._next_head:
            return False
        self._early_for = head
        self._early.keep(sender, m)
        return True

    def _membership(self, sender: Voter, message: msg.Message) -> None:
        if isinstance(message, msg.Welcome) and message.record is not None and message.address in self.slot.listed:
            self.slot.answers[message.address] = message.record.voter.peer
        effects = self.ctx.members.receive(sender, message, self.ctx.now)
        self.ctx.out.extend(effects)
        if not self.has_log:
            return
        if any(isinstance(e, Notify) and isinstance(e.event, MemberDown | MemberLeft) for e in effects):
            self._fewer()
        if not self.sync.busy and greater_alive(self.ctx, self.log):
            self.sync.start()

    def _fewer(self) -> None:
        """Somebody is gone, and a round may be waiting for it: look at once and not at the next tick."""
        self.exchange.close_due()
        self.slot.advance()
        if not self.ctx.leaving:
            self.coordinator.tick()

    def _slot_message(self, sender: Voter, m: msg.Message) -> None:
        head = m.head  # type: ignore[attr-defined]
        if head != self.log.head:
            # The sender is behind by the last entry: show it. Anything else is mended by records and sync.
            if self.log.past and self.log.past[-1].entry.parent == head and sender != self.ctx.me:
                self.ctx.send(sender, self.applier.last_decision())
            return
        if sender != self.ctx.me:
            check_slot_message(m, self.log.state, self.slot.seen)
        slot, coordinator = self.slot, self.coordinator
        if isinstance(m, msg.Ready):
            coordinator.receive_ready(sender, m)
        elif isinstance(m, msg.Prepare):
            if m.ballot.voter != self.ctx.me and m.ballot > coordinator.ballot:
                coordinator.drop()
            slot.receive_prepare(sender, m)
        elif isinstance(m, msg.Promise):
            coordinator.receive_promise(sender, m)
        elif isinstance(m, msg.Nack):
            slot.receive_nack(sender, m)
            coordinator.receive_nack(sender, m)
        elif isinstance(m, msg.Coord):
            if m.ballot.voter != self.ctx.me and m.ballot > coordinator.ballot:
                coordinator.drop()
            slot.receive_coord(sender, m)
        elif isinstance(m, msg.Progress):
            coordinator.receive_progress(sender, m)
        elif isinstance(m, msg.Plan):
            if m.ballot.voter != self.ctx.me and m.ballot > coordinator.ballot:
                coordinator.drop()
            slot.receive_plan(sender, m)
            coordinator.agenda.silent(m.mute)
            if slot.plan is not None and slot.plan.ballot == m.ballot:  # of an outdated ballot it is nobody's word
                self.applier.check_digest(sender, m)
        elif isinstance(m, msg.Held):
            coordinator.receive_held(sender, m)
            slot.receive_held(sender, m)

    def _sync_message(self, sender: Voter, m: msg.Message) -> None:
        sync = self.sync
        if isinstance(m, msg.SyncReq):
            sync.donations.receive_request(sender, m)
        elif isinstance(m, msg.Steps):
            sync.receive_steps(sender, m)
        elif isinstance(m, msg.Offer):
            sync.receive_offer(sender, m)
        elif isinstance(m, msg.NoOffer):
            sync.receive_no_offer(sender, m)
        elif isinstance(m, msg.PieceReq):
            sync.donations.receive_piece_request(sender, m)
        elif isinstance(m, msg.Piece):
            sync.receive_piece(sender, m)
            self.slot.advance()
        elif isinstance(m, msg.NoPiece):
            sync.receive_no_piece(sender, m)
        else:
            raise ProtocolError(f"{type(m).__name__} is not for a peer")

    def _relay(self, sender: Voter, m: msg.Relay) -> None:
        if m.target != self.ctx.me.peer:
            # One hop: where another process has the target's address, maybe this one, it would go round for ever.
            if sender == m.origin:
                self.ctx.out.append(Send(m.target, m))
            return
        kind = KINDS.get(m.code)
        if kind is None:
            raise ProtocolError(f"no message has the code {m.code}")
        if kind is msg.Relay or issubclass(kind, msg.Bulk):
            raise ProtocolError(f"{kind.__name__} is not relayed")
        message: msg.Message = unpack(m.message, kind)
        self.check_sender(m.origin, message)
        self.receive(m.origin, message)

    def _answer_hello(self, m: msg.Hello) -> None:
        if len(m.address) > ADDRESS_CHARS_MAX:
            raise ProtocolError(f"a Hello to an address of {len(m.address)} characters")
        if m.record is not None and m.spec_hash == self.spec_hash:
            self.ctx.out.extend(self.ctx.members.learn(m.record, self.ctx.now))
        own = self.ctx.members.own
        self.ctx.out.append(
            Answer(
                msg.Welcome(
                    msg.PROTOCOL_VERSION,
                    self.run,
                    self.spec,
                    own,
                    self._records_to_tell(),
                    m.address,
                    "",
                )
            )
        )

    def _records_to_tell(self) -> tuple[msg.Record, ...]:
        """Of all whom I know; where a message has no room for so many, of the living before the dead."""
        members = self.ctx.members
        records, sizes = members.records(), [len(pack(record)) for record in members.records()]
        if sum(sizes) <= WELCOME_BYTES_MAX:
            return tuple(records)
        order = sorted(range(len(records)), key=lambda i: not members.alive(records[i].voter))
        ends = accumulate(sizes[i] for i in order)
        return tuple(records[i] for i, end in zip(order, ends, strict=True) if end <= WELCOME_BYTES_MAX)
