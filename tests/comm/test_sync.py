"""Fetching a state: from several donors, past deaths and silences, while the state moves on; and what is given away."""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from blake3 import blake3

from dlc.comm import donations as donations_module
from dlc.comm import images
from dlc.comm import messages as msg
from dlc.comm.donations import IN_USE_S, STEPS_MAX
from dlc.comm.download import SILENCES_MAX, Download, Staged
from dlc.comm.entries import LogState
from dlc.comm.events import BadImage, StateMisfit
from dlc.comm.ids import Voter
from dlc.comm.imageoffers import IMAGE_BYTES_MAX
from dlc.comm.images import PIECE_BYTES, PIECES_MAX, Image, PieceLimits
from dlc.comm.lanes import BULK_FRAME_BYTES_MAX
from dlc.comm.log import CHAIN_SENT_MAX, HISTORY_ROUNDS_MAX
from dlc.comm.wire import HEADER_BYTES_MAX, pack
from dlc.errors import CheckpointError
from dlc.runspec import OuterSpec
from dlc.sim.network import Weather
from dlc.sim.schedule import TRAIN, Scenario, Start
from dlc.sim.toy import ToyState
from dlc.sim.world import Host, Process, World
from dlc.train.outer import OuterState

torch.set_num_threads(1)

PIECE = 64
LIMITS = PieceLimits(PIECE, hash_pieces=4, copy_pieces=2)
A, B, C = (Voter(name, 1) for name in "abc")
PATIENCE_S = 4.0


# ------------------------------------------------------------------ the newcomer's side, without any network


def image_of(data: bytes, channel: str = "train", piece_bytes: int = PIECE) -> msg.ImageOffer:
    hashes = tuple(blake3(data[i : i + piece_bytes]).digest() for i in range(0, len(data), piece_bytes))
    return msg.ImageOffer(channel, blake3(data).digest(), len(data), piece_bytes, hashes)


class Fetch:
    """A download from donors of given speeds (bytes/s) on a virtual clock."""

    def __init__(self, data: bytes, rates_Bps: dict[Voter, float], kept: dict[str, Staged] | None = None) -> None:
        self.data, self.rates_Bps = data, dict(rates_Bps)
        image = image_of(data)
        self.download = Download(msg.Offer(LogState(), (), (), (image,)), [image], LIMITS, kept or {})
        self.now = 0.0
        self.sent: Counter[Voter] = Counter()
        self.silent: set[Voter] = set()
        self.wrong: set[Voter] = set()
        self._free_at = dict.fromkeys(rates_Bps, 0.0)
        self._coming: list[tuple[float, int, Voter, msg.Piece]] = []
        self._serial = 0

    def ask(self) -> None:
        for voter, request in self.download.ask(list(self.rates_Bps), PATIENCE_S, self.now):
            for index in request.pieces:
                payload = self.data[index * PIECE : (index + 1) * PIECE]
                if voter in self.wrong:
                    payload = bytes(len(payload))
                self.sent[voter] += 1
                if voter in self.silent:
                    continue
                self._free_at[voter] = max(self.now, self._free_at[voter]) + len(payload) / self.rates_Bps[voter]
                self._serial += 1
                piece = msg.Piece(request.channel, request.digest, index, payload)
                heapq.heappush(self._coming, (self._free_at[voter] + 0.01, self._serial, voter, piece))

    def run(self, until: Callable[[], object], limit_s: float = 1000.0) -> None:
        self.ask()
        while not until():
            assert self.now < limit_s, f"{len(self.download.staged['train'].missing)} pieces are missing"
            tick = self.now + 0.25
            if self._coming and self._coming[0][0] <= tick:
                self.now, _, voter, piece = heapq.heappop(self._coming)
                if voter in self.rates_Bps:
                    self.download.receive(voter, piece, self.now)
            else:
                self.now = tick
            self.ask()

    def finish(self) -> bytes:
        self.run(lambda: self.download.complete)
        while not self.download.verified:
            self.download.verify()
        staged = self.download.staged["train"]
        assert staged.sound
        return bytes(staged.memory)


DATA = bytes(torch.randint(0, 256, (400 * PIECE - 7,), generator=torch.Generator().manual_seed(0)).tolist())


def test_donors_give_in_proportion_to_their_speed() -> None:
    fetch = Fetch(DATA, {A: 100 * PIECE, B: 10 * PIECE, C: 40 * PIECE})
    assert fetch.finish() == DATA
    assert fetch.now < 1.15 * 400 / 150
    assert fetch.sent[B] < 0.12 * 400 and fetch.sent[A] > 0.55 * 400
    assert sum(fetch.sent.values()) < 1.03 * 400, "hardly a piece is asked for twice"


def test_a_donor_that_crawls_does_not_hold_up_the_end() -> None:
    fetch = Fetch(DATA, {A: 100 * PIECE, B: 0.2 * PIECE})
    assert fetch.finish() == DATA
    assert fetch.now < 1.15 * 4


def test_a_donor_dies_and_the_others_send_what_it_owed() -> None:
    fetch = Fetch(DATA, {A: 50 * PIECE, B: 50 * PIECE})
    fetch.run(lambda: len(fetch.download.staged["train"].missing) < 200)
    del fetch.rates_Bps[A]
    assert fetch.finish() == DATA
    assert fetch.sent[B] >= 200


def test_a_donor_that_is_silent_is_left_and_asked_again_later() -> None:
    fetch = Fetch(DATA, {A: 10 * PIECE, B: 10 * PIECE})
    fetch.silent = {A}
    assert fetch.finish() == DATA
    assert fetch.now < 1.15 * 40 + PATIENCE_S
    assert LIMITS.in_flight_first < fetch.sent[A] < 20


def test_what_a_silent_donor_owes_is_sent_by_one_that_was_never_measured() -> None:
    fetch = Fetch(DATA[: 2 * PIECE], {A: 10 * PIECE, B: 10 * PIECE})
    fetch.silent = {A}
    assert fetch.finish() == DATA[: 2 * PIECE]
    assert fetch.now < PATIENCE_S + 1.0 and fetch.sent[A] == 2


def test_nobody_is_waited_for_where_all_are_silent() -> None:
    fetch = Fetch(DATA, {A: 10 * PIECE, B: 10 * PIECE})
    fetch.silent = {A, B}
    fetch.run(fetch.download.hopeless, limit_s=4 * PATIENCE_S)


def test_a_donor_that_stays_silent_is_asked_less_and_less_until_something_comes() -> None:
    image, now = image_of(DATA), 0.0
    download = Download(msg.Offer(LogState(), (), (), (image,)), [image], LIMITS, {})

    def silence_s() -> float:
        """Until it is asked again."""
        nonlocal now, request
        since = now
        while not (requests := download.ask([A], PATIENCE_S, now)):
            now += 0.25
        ((_, request),) = requests
        return now - since

    ((_, request),) = download.ask([A], PATIENCE_S, now)
    borne_s = [PATIENCE_S * 2 ** min(n, SILENCES_MAX) for n in range(SILENCES_MAX + 3)]
    assert [silence_s() for _ in borne_s] == [s + 0.25 for s in borne_s]
    assert download.hopeless()
    start = request.pieces[0] * PIECE
    piece = msg.Piece(request.channel, request.digest, request.pieces[0], DATA[start : start + PIECE])
    assert download.receive(A, piece, now) and not download.hopeless()
    assert [silence_s(), silence_s()] == [0.0, PATIENCE_S + 0.25]


def test_wrong_bytes_are_not_taken_and_their_sender_not_asked_again() -> None:
    fetch = Fetch(DATA, {A: 50 * PIECE, B: 50 * PIECE})
    fetch.wrong = {A}
    assert fetch.finish() == DATA
    assert fetch.sent[A] <= LIMITS.in_flight_first


def test_who_lacks_the_image_is_not_asked_again_and_without_anybody_it_is_hopeless() -> None:
    fetch = Fetch(DATA, {A: 50 * PIECE, B: 50 * PIECE})
    fetch.ask()
    digest = fetch.download.staged["train"].image.digest
    fetch.download.refuse(A, "train", digest)
    asked = fetch.sent[A]
    fetch.run(lambda: len(fetch.download.staged["train"].missing) < 300)
    assert fetch.sent[A] == asked and not fetch.download.hopeless()
    fetch.download.refuse(B, "train", digest)
    assert fetch.download.hopeless()


def test_another_offer_of_the_same_image_goes_on_where_the_first_ended() -> None:
    first = Fetch(DATA, {A: 50 * PIECE})
    first.run(lambda: len(first.download.staged["train"].missing) < 150)
    left = len(first.download.staged["train"].missing)
    second = Fetch(DATA, {B: 50 * PIECE}, first.download.staged)
    assert second.finish() == DATA
    assert second.sent[B] == left
    other = Fetch(DATA[::-1], {B: 50 * PIECE}, first.download.staged)
    assert other.finish() == DATA[::-1] and other.sent[B] == 400


def test_an_image_that_is_not_what_its_digest_says_is_not_sound() -> None:
    image = image_of(DATA)
    staged = Staged(msg.ImageOffer("train", bytes(32), image.image_bytes, PIECE, image.piece_hashes))
    for index in range(400):
        assert staged.take(index, DATA[index * PIECE : (index + 1) * PIECE])
    staged.verify(400)
    assert staged.verified and not staged.sound


@pytest.mark.parametrize(("size", "index"), [(2 * PIECE, 0), (PIECE + 1, 1), (PIECE - 1, 0), (PIECE, 1)])
def test_a_piece_of_another_length_than_it_must_have_is_not_taken(size: int, index: int) -> None:
    """Though it has the hash that was offered: it would not fit, or leave a hole."""
    length = 2 * PIECE - 7
    pieces = [bytes([number] * size) for number in range(2)]
    hashes = tuple(blake3(piece).digest() for piece in pieces)
    download = Fetch(bytes(length), {A: 50 * PIECE}).download
    download.staged["train"] = Staged(msg.ImageOffer("train", bytes(32), length, PIECE, hashes))
    download.ask([A], PATIENCE_S, 0.0)
    assert not download.receive(A, msg.Piece("train", bytes(32), index, pieces[index]), 0.1)
    assert download.staged["train"].missing == {0, 1} and download.donors[A].lacks == {"train"}


# ------------------------------------------------------------------ the donor's side


@pytest.mark.parametrize("make", [lambda: ToyState(500, 3), lambda: OuterState(torch.randn(500), OuterSpec())])
@pytest.mark.parametrize("copied", [0, 1, 5, 1000])
def test_an_image_stays_what_it_was_while_the_state_moves(make: Callable[[], Any], copied: int) -> None:
    state = make()
    before, digest = bytes(state.export()), state.digest()
    image = Image(state, digest, LIMITS, 0.0)
    asked = bytes(image.piece(7))
    image.hash(3)
    image.copy(copied)
    image.finish()
    state.step(1, [(0, 500, torch.ones(500))])
    assert bytes(state.export()) != before and state.digest() != digest
    image.hash(image.n_pieces)
    pieces = [bytes(image.piece(i)) for i in range(image.n_pieces)]
    assert b"".join(pieces) == before and pieces[7] == asked
    assert image.hashes == [blake3(p).digest() for p in pieces] and image.hashed
    assert blake3(before).digest() == digest, "a digest is that of the image"
    while image.give_back():
        pass


def test_an_image_needs_its_state_until_the_last_piece_is_copied() -> None:
    image = Image(ToyState(500, 3), bytes(32), LIMITS, 0.0)
    image.copy(image.n_pieces - 1)
    assert not image.copied
    image.copy(1)
    assert image.copied and not image.hashed


def test_a_writable_image_becomes_the_memory_of_the_state() -> None:
    state, other = (OuterState(torch.randn(500), OuterSpec()) for _ in range(2))
    state.step(1, [(0, 500, torch.ones(500))])
    image = bytearray(state.export())
    other.restore(memoryview(image))
    assert other.digest() == state.digest()
    for s in (state, other):
        s.step(2, [(0, 500, torch.full((500,), 0.1))])
    assert other.digest() == state.digest() and bytes(other.export()) == bytes(image[:8]) + bytes(state.export())[8:]
    assert image[64:] == bytes(other.export())[64:], "no second copy was made"


# ------------------------------------------------------------------ swarms


def swarm(n: int, inner_s: float = 1.0, **more: Any) -> World:
    """n peers that train a state of 32 pieces, each with an uplink of some 190 pieces a second."""
    starts = (Start(0.0, ()), *(Start(0.1 * i, (0,)) for i in range(1, n)))
    weather = Weather(latency_max_s=0.05, spike=0.0)
    world = World(
        Scenario(0, starts, weather=weather, n_chunks=4, chunk_elems=64, inner_s=inner_s, piece_bytes=PIECE, **more)
    )
    until(world, lambda: world.checker.rounds > 2 and all(synced(p) for p in world.running()))
    world.run_until(world.now + IN_USE_S + 1.0)  # what they fetched themselves is offered no more
    return world


def synced(process: Process) -> bool:
    attached = process.node.log.attached.get(TRAIN)
    return attached is not None and attached.synced and process.node.log.is_open(TRAIN)


def until(world: World, condition: Callable[[], object], limit_s: float = 60.0) -> None:
    end = world.now + limit_s
    while not condition():
        assert world.now < end and world.clock.step(), "it does not come to that"


class Wire:
    """Hears all that is sent from now on; keeps back pieces while `closed`, as a stalled connection does."""

    def __init__(self, world: World, stalls: Any = msg.Piece) -> None:
        self.stalls = stalls
        self.heard: list[tuple[str, str, Any]] = []
        """(source, target, message)."""
        self.closed = False
        self._waiting: list[tuple[Any, ...]] = []
        self._carry = world.network.carry
        world.network.carry = self._carried  # type: ignore[method-assign]

    def _carried(self, source: str, target: str, deliver: Any, *args: Any, bulk: bool = False) -> None:
        self.heard.append((source, target, args[-1]))
        if self.closed and isinstance(args[-1], self.stalls):
            self._waiting.append((source, target, deliver, *args))
        else:
            self._carry(source, target, deliver, *args, bulk=bulk)

    def open(self) -> None:
        self.closed = False
        for source, target, deliver, *args in self._waiting:
            self._carry(source, target, deliver, *args, bulk=True)

    def givers(self, to: Process) -> Counter[str]:
        return Counter(s for s, t, m in self.heard if isinstance(m, msg.Piece) and t == to.host.name)

    def answers(self, to: Process, kind: type) -> int:
        return sum(isinstance(m, kind) and t == to.host.name for _, t, m in self.heard)


def newcomer(world: World) -> Process:
    return world.start(Host(f"p{len(world.hosts)}"), ("sim:p0", "sim:p1"))


def staged(process: Process) -> int:
    """Pieces that have come."""
    download = process.node.sync._download
    return sum(len(s.image.piece_hashes) - len(s.missing) for s in download.staged.values()) if download else 0


def agree(world: World, who: Sequence[Process]) -> None:
    """All of them come to stand at one head with equal bits, and all vote."""

    def together() -> bool:
        return len({p.node.log.head for p in who}) == 1 and all(synced(p) for p in who)

    until(world, lambda: together() and {p.voter for p in who} <= set(who[0].node.log.state.electorate), 120.0)
    assert len({bytes(p.node.log.attached[TRAIN].state.export()) for p in who}) == 1
    assert len({p.node.log.attached[TRAIN].digest for p in who}) == 1


def depth_of(world: World) -> int:
    return max(p.node.log.state.depth for p in world.running())


def test_a_newcomer_loads_from_all_at_once() -> None:
    world = swarm(3, inner_s=3.0)
    wire = Wire(world)
    late = newcomer(world)
    until(world, lambda: synced(late))
    shares = wire.givers(late)
    assert len(shares) == 3 and min(shares.values()) >= 5 and sum(shares.values()) <= 36
    agree(world, world.running())


def test_the_offer_of_the_largest_image_fits_a_message() -> None:
    """Else a newcomer to a run of a very large model would end one donor after the other."""
    limits = PieceLimits()
    size = limits.piece_bytes_of(IMAGE_BYTES_MAX)
    assert PIECE_BYTES == limits.piece_bytes_of(PIECES_MAX * PIECE_BYTES) < size <= BULK_FRAME_BYTES_MAX - 4096
    assert size * PIECES_MAX >= IMAGE_BYTES_MAX
    image = msg.ImageOffer("train", bytes(32), IMAGE_BYTES_MAX, size, (bytes(32),) * PIECES_MAX)
    offer = msg.Offer(LogState(), (bytes(32),) * CHAIN_SENT_MAX, (1e12,) * CHAIN_SENT_MAX, (image,))
    assert len(pack(offer)) < 0.75 * HEADER_BYTES_MAX


def test_a_large_image_is_cut_into_larger_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "PIECES_MAX", 9)
    world = swarm(3, inner_s=3.0)
    wire = Wire(world)
    late = newcomer(world)
    until(world, lambda: synced(late))
    pieces = [m for _, t, m in wire.heard if isinstance(m, msg.Piece) and t == late.host.name]
    assert max(m.piece for m in pieces) == 7 and max(len(m.payload) for m in pieces) == 4 * PIECE
    agree(world, world.running())


def test_a_donor_dies_in_the_middle() -> None:
    world = swarm(3, inner_s=3.0)
    wire = Wire(world)
    late = newcomer(world)
    until(world, lambda: staged(late) >= 8)
    asked_first = late.node.sync.donor
    assert asked_first is not None
    world.crash(next(p for p in world.running() if p.voter == asked_first))
    until(world, lambda: synced(late))
    assert wire.answers(late, msg.Offer) == 1, "the offer outlives who made it"
    agree(world, world.running())


def test_all_donors_but_one_die_in_the_middle() -> None:
    world = swarm(3, inner_s=3.0)
    late = newcomer(world)
    until(world, lambda: staged(late) >= 8)
    for process in [p for p in world.running() if p is not late][:-1]:
        world.crash(process)
    until(world, lambda: synced(late))
    agree(world, world.running())  # after the time for a forced ballot


def test_the_state_moves_on_in_the_middle() -> None:
    """Nobody waits for the newcomer; the image that it fetches stays, and so do the entries that it will need."""
    world = swarm(3, inner_s=0.3)
    wire = Wire(world)
    late = newcomer(world)
    until(world, lambda: staged(late) >= 4)
    wire.closed, begun = True, depth_of(world)
    until(world, lambda: depth_of(world) >= begun + 4)
    assert not synced(late)
    assert all(len(p.node.sync.donations._images) <= 1 for p in world.running())
    wire.open()
    until(world, lambda: synced(late))
    assert wire.answers(late, msg.Offer) == 1
    until(world, lambda: late.node.log.state.depth > begun + 4)
    assert wire.answers(late, msg.Offer) == 1 and wire.answers(late, msg.Steps) >= 1
    agree(world, world.running())


def test_what_follows_an_image_is_kept_by_its_donors_until_who_has_it_has_followed() -> None:
    """Entry by entry, whose results take a while to come. After IN_USE_S what was left of them was kept no longer, and
    the newcomer had to begin with another image, again and again."""
    world = swarm(2, inner_s=0.3)
    wire = Wire(world)
    late = newcomer(world)
    until(world, lambda: staged(late) >= 4)
    wire.closed, begun = True, depth_of(world)
    until(world, lambda: depth_of(world) >= begun + 2 * HISTORY_ROUNDS_MAX)
    for process in world.running():
        process.trainer.inner_s = 5.0
    wire.open()
    carry = world.network.carry

    def slowly(source: str, target: str, deliver: Any, *args: Any, bulk: bool = False) -> None:
        to_late = target == late.host.name and isinstance(args[-1], msg.Result)
        world.clock.at(world.now + 3.0 * to_late, lambda: carry(source, target, deliver, *args, bulk=bulk))

    world.network.carry = slowly  # type: ignore[method-assign]
    loaded = world.now
    agree(world, world.running())
    assert world.now > loaded + IN_USE_S and wire.answers(late, msg.Offer) == 1


def test_a_second_newcomer_does_not_take_the_image_from_the_first() -> None:
    """The state moves between them. A donor keeps one image; whoever comes later is offered it, or asks another."""
    world = swarm(3, inner_s=0.3)
    wire = Wire(world)
    first = newcomer(world)
    until(world, lambda: staged(first) >= 4)
    wire.closed, begun = True, depth_of(world)
    until(world, lambda: depth_of(world) >= begun + 2)
    second = newcomer(world)
    until(world, lambda: second.node.sync._download is not None)
    assert all(len(p.node.sync.donations._images) <= 1 for p in world.running())
    wire.open()
    until(world, lambda: synced(first) and synced(second))
    assert wire.answers(first, msg.Offer) == 1
    agree(world, world.running())


@pytest.mark.parametrize("history_bytes", [100, 1 << 30])
def test_a_sleeper_catches_up_by_steps_or_by_an_image(history_bytes: int) -> None:
    """With equal bits; by steps where the history reaches back to it."""
    world = swarm(3, history_bytes=history_bytes)
    sleeper = world.running()[-1]
    depth = sleeper.node.log.state.depth
    wire = Wire(world)
    world.freeze(sleeper, 10.0)
    until(world, lambda: not sleeper.frozen)
    assert depth_of(world) > depth + 2
    agree(world, world.running())
    assert (wire.answers(sleeper, msg.Offer) > 0) == (history_bytes == 100)


def voter_without_state(world: World) -> tuple[Process, Callable[[], None]]:
    """A helper that was given a vote before it attached its state, as by programs that build their model after they
    joined; and what attaches it. Rounds go on without it."""
    attach = world._attach
    world._attach = lambda process, *args: world.act(process, process.node.tick)  # type: ignore[method-assign]
    late = world.start(Host(f"p{len(world.hosts)}", "helper"), ("sim:p0",))
    until(world, lambda: late.voter in late.node.log.state.electorate)
    return late, lambda: attach(late, TRAIN, None)


def test_an_offer_of_a_head_that_the_taker_has_passed_is_taken() -> None:
    world = swarm(1, inner_s=2.0)
    late, attach = voter_without_state(world)
    wire = Wire(world, stalls=msg.Offer)
    wire.closed = True
    attach()
    until(world, lambda: wire.answers(late, msg.Offer) == 2)  # asked again: the image is in use
    wire.stalls = msg.Offer | msg.SyncReq  # asked from the new head, the donor would make an image of that
    depth = late.node.log.state.depth
    until(world, lambda: late.node.log.state.depth > depth)
    wire.open()
    wire.closed = True
    until(world, lambda: synced(late))
    wire.open()
    agree(world, world.running())


def test_what_follows_an_image_is_kept_by_its_taker_until_it_has_come() -> None:
    world = swarm(1, inner_s=0.3)
    late, attach = voter_without_state(world)
    wire = Wire(world)
    attach()
    until(world, lambda: staged(late) >= 4)
    wire.closed, begun = True, depth_of(world)
    until(world, lambda: late.node.log.state.depth > begun + HISTORY_ROUNDS_MAX)
    wire.open()
    until(world, lambda: synced(late))
    assert wire.answers(late, msg.Offer) == 1
    until(world, lambda: len(late.node.log.past) <= HISTORY_ROUNDS_MAX)
    agree(world, world.running())


def test_an_answer_holds_few_steps_and_the_rest_follows() -> None:
    """What a taker will need is kept beyond the usual eight entries, and given in several answers."""
    world = swarm(2, inner_s=0.3)
    donor = world.running()[0]
    log = donor.node.log
    head, depth = log.head, log.state.depth
    log.pin("given", head)
    donor.node.sync.donations.tick = lambda: None  # type: ignore[method-assign]
    until(world, lambda: log.state.depth > depth + 20)
    past = log.after(head)
    assert past is not None and len(past) == log.state.depth - depth
    asker = Voter("q", 1)
    donor.node.ctx.out = []
    donor.node.sync.donations.receive_request(asker, msg.SyncReq(head, depth, False, ()))
    (effect,) = donor.node.ctx.out
    assert len(effect.message.steps) == STEPS_MAX  # type: ignore[union-attr]
    log.pin("given", b"")
    assert len(log.past) <= 8


def test_an_image_that_is_not_what_its_donor_named_is_told_of_and_had_from_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bit of the donor's memory has flipped since its last digest. Nothing else is asked of it for that digest."""
    world = swarm(2)
    for process in world.running():
        monkeypatch.setattr(process.trainer, "_offer", lambda: None)  # no round finds it out
    until(world, lambda: not any(p.node.exchange.offered for p in world.running()))
    faulty = world.running()[0]
    state = faulty.node.log.attached[TRAIN].state
    assert isinstance(state, ToyState)
    state.flip()
    told: list[BadImage] = []
    notify = world._notify

    def noted(process: Process, event: object) -> None:
        if isinstance(event, BadImage):
            told.append(event)
        notify(process, event)

    monkeypatch.setattr(world, "_notify", noted)
    wire = Wire(world)
    late = newcomer(world)
    start = late.node.sync.start
    monkeypatch.setattr(late.node.sync, "start", lambda hint=None: start(hint or faulty.voter))
    until(world, lambda: told)
    monkeypatch.setattr(late.node.sync, "start", start)
    until(world, lambda: synced(late))
    assert {event.donor for event in told} == {faulty.voter} and len(told) == 1
    assert wire.answers(late, msg.Offer) >= 2
    assert late.node.log.attached[TRAIN].state.digest() == world.running()[1].node.log.attached[TRAIN].state.digest()


class Elsewhere(ToyState):
    """Of another outer step, as its image says."""

    def restore(self, image: memoryview) -> None:
        raise CheckpointError("lr 0.7, here 0.5")


@pytest.mark.parametrize("why", ["lr 0.7, here 0.5", "it has 2048 bytes, the one here 1024"])
def test_a_state_of_another_kind_than_the_runs_is_told_once_and_fetched_no_more(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """It was fetched again for ever, in silence."""
    world = swarm(2)
    others = world.running()
    grid = world.grids[TRAIN]
    odd = Elsewhere(grid.numel, 9) if "lr" in why else ToyState(grid.numel // 2, 9)

    def attach(process: Process, channel: str, disk: Any) -> None:
        world.act(process, lambda now: process.node.attach(channel, odd, grid, 0, now))

    told: list[object] = []
    notify = world._notify

    def noted(process: Process, event: object) -> None:
        told.extend([event] if isinstance(event, StateMisfit) else [])
        notify(process, event)

    monkeypatch.setattr(world, "_attach", attach)
    monkeypatch.setattr(world, "_notify", noted)
    wire = Wire(world)
    late = newcomer(world)
    until(world, lambda: told)
    before, depth = bytes(odd.export()), depth_of(world)
    until(world, lambda: depth_of(world) >= depth + 12 and late.node.log.head == others[0].node.log.head, 120.0)
    assert told == [StateMisfit(TRAIN, why)] and late.node.log.attached[TRAIN].misfit == why
    assert sum(wire.givers(late).values()) <= (36 if "lr" in why else 0)
    assert not synced(late) and bytes(odd.export()) == before
    assert late.voter not in others[0].node.log.state.electorate


def test_who_stands_here_without_the_state_that_is_lacking_is_asked_in_vain_once_a_second() -> None:
    """Its offer had nothing to fetch: fetched at once, and asked for again at once."""
    world, lacking = beside_helpers(1)
    world.crash(world.running()[0])
    wire = Wire(world)
    begun = world.now
    world.run_until(begun + 6.0)
    asked = [t for _, t, m in wire.heard if isinstance(m, msg.SyncReq)]
    assert not synced(lacking) and 2 <= len(asked) <= 7


def test_who_has_the_state_is_asked_before_those_who_lack_it() -> None:
    """They are more than are asked in turn, and were known before."""
    world, lacking = beside_helpers(5, holder_last=True)
    until(world, lambda: synced(lacking), 10.0)


def beside_helpers(n: int, holder_last: bool = False) -> tuple[World, Process]:
    """A trainer, n helpers without a state, and a helper that has just attached one."""
    starts = (Start(0.0, ()), *(Start(0.1 * i, (0,), "helper") for i in range(1, n + 2)))
    weather = Weather(latency_max_s=0.05, spike=0.0)
    world = World(Scenario(0, starts, weather=weather, n_chunks=4, chunk_elems=64, inner_s=1.0, piece_bytes=PIECE))
    attach = world._attach

    def some(process: Process, channel: str, disk: Any) -> None:
        if process.host.role == "trainer":
            attach(process, channel, disk)
        else:
            world.act(process, process.node.tick)

    world._attach = some  # type: ignore[method-assign]
    trainer = world.running
    until(world, lambda: len(trainer()) == n + 2 and world.checker.rounds > 2)
    first, *helpers = trainer()
    until(world, lambda: all(p.voter in first.node.log.state.electorate for p in helpers))
    first.trainer._offer = lambda: None  # type: ignore[method-assign]
    until(world, lambda: not first.node.exchange.offered)
    if holder_last:
        last = newcomer(world)
        last.trainer._offer = lambda: None  # type: ignore[method-assign]
        until(world, lambda: synced(last) and last.voter in first.node.log.state.electorate)
        world.leave(first)
    until(world, lambda: len({p.node.log.head for p in world.running()}) == 1)
    world.run_until(world.now + 5.0)
    attach(helpers[-1], TRAIN, None)
    return world, helpers[-1]


def test_an_asker_whose_offer_is_being_prepared_is_not_forgotten() -> None:
    """The state moves while its image is hashed, and another one asks: both are offered the image that is begun."""
    world = swarm(2, inner_s=1.0)
    donor = world.running()[0]
    donations, log = donor.node.sync.donations, donor.node.log
    until(world, lambda: not donations._images)
    donations.limits = PieceLimits(PIECE, hash_pieces=1, copy_pieces=1)
    x, y = Voter("x", 1), Voter("y", 1)
    donations.receive_request(x, msg.SyncReq(bytes(32), 0, True, ()))
    assert set(donations._pending) == {x}
    depth = log.state.depth
    donations.tick = lambda: None  # type: ignore[method-assign]
    until(world, lambda: log.state.depth > depth)
    donor.node.ctx.out = []
    donations.receive_request(y, msg.SyncReq(bytes(32), 0, True, ()))
    assert set(donations._pending) == {x, y} and not donor.node.ctx.out
    for _ in range(100):
        donations._work()
    assert [type(e.message) for e in donor.node.ctx.out] == [msg.Offer, msg.Offer]  # type: ignore[union-attr]


def test_an_image_that_is_hashed_for_long_is_kept_for_who_asks_for_it_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The state moves meanwhile. It was given up and begun anew, again and again: nobody was ever offered a state that
    takes longer to hash than an image is kept, and of a lesser one what follows it was forgotten."""
    monkeypatch.setattr(donations_module, "IMAGE_KEEP_S", 3.0)
    monkeypatch.setattr(donations_module, "IN_USE_S", 2.0)
    world, asker = swarm(2, inner_s=0.3), Voter("x", 1)
    donor = world.running()[0]
    donations, log = donor.node.sync.donations, donor.node.log
    until(world, lambda: not donations._images)
    hashed = Image.hash
    monkeypatch.setattr(Image, "hash", lambda image, n_pieces: None)
    request, begun = msg.SyncReq(bytes(32), 0, True, ()), log.state.depth
    while log.state.depth < begun + 2 * HISTORY_ROUNDS_MAX:
        donor.node.ctx.out = []
        donations.receive_request(asker, request)
        assert asker in donations._pending and not donor.node.ctx.out
        world.run_until(world.now + 1.0)
    (key,) = donations._pending[asker].images
    assert key[1] != log.digest(TRAIN)
    monkeypatch.setattr(Image, "hash", hashed)
    donor.node.ctx.out = []
    while asker in donations._pending:
        donations.tick()
    (offer,) = (e.message for e in donor.node.ctx.out)  # type: ignore[union-attr]
    assert isinstance(offer, msg.Offer) and len(log.after(offer.state.head) or ()) >= 2 * HISTORY_ROUNDS_MAX


def test_who_waits_for_an_image_that_is_given_up_is_told() -> None:
    world = swarm(2)
    donor = world.running()[0]
    donations = donor.node.sync.donations
    donations.limits = PieceLimits(PIECE, hash_pieces=1, copy_pieces=1)
    donations.receive_request(Voter("x", 1), msg.SyncReq(bytes(32), 0, True, ()))
    donor.node.ctx.out = []
    for key in list(donations._images):
        donations._give_up(key)
    assert not donations._pending
    assert [(e.to, type(e.message)) for e in donor.node.ctx.out] == [("x", msg.NoOffer)]  # type: ignore[union-attr]


def test_one_wrong_word_about_a_states_size_is_not_believed() -> None:
    """Nothing proves it. The newcomer took its own state for one of another kind, and asked for no other."""
    world, bad, told = swarm(4), list[msg.ImageOffer](), list[object]()
    carry, notify = world.network.carry, world._notify

    def carried(source: str, target: str, deliver: Any, *args: Any, bulk: bool = False) -> None:
        offer = args[-1]
        if isinstance(offer, msg.Offer) and offer.images and not bad:
            image = offer.images[0]
            n_bytes = 2 * image.image_bytes
            hashes = (image.piece_hashes * 3)[: -(-n_bytes // image.piece_bytes)]
            bad.append(dataclasses.replace(image, image_bytes=n_bytes, piece_hashes=hashes))
            args = (*args[:-1], dataclasses.replace(offer, images=tuple(bad)))
        carry(source, target, deliver, *args, bulk=bulk)

    def noted(process: Process, event: object) -> None:
        told.extend([event] if isinstance(event, StateMisfit) else [])
        notify(process, event)

    world.network.carry, world._notify = carried, noted  # type: ignore[method-assign, assignment]
    late = newcomer(world)
    until(world, lambda: synced(late), 60.0)
    assert bad and not told
