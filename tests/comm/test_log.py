"""The applied log: how states move with it, what is kept of the past, what is set aside where two histories part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dlc.comm.codecs import get_codec
from dlc.comm.entries import CONFIG, EMPTY, OPEN, ROUND, Entry, LogState, Part
from dlc.comm.grid import Grid
from dlc.comm.ids import LOWEST, Voter
from dlc.comm.log import HISTORY_PINNED_MAX, HISTORY_ROUNDS_MAX, HISTORY_STATELESS_MAX, Log, Past, counted_of, means
from dlc.comm.messages import ChunkHeader, Result
from dlc.sim.toy import ToyState

ME, OTHER = Voter("a", 1), Voter("b", 1)
GRID = Grid(10, 4, "fp32")
ROSTER = (Part(ME, 1.0, 1), Part(OTHER, 1.0, 1))


def entry(log: Log, kind: str, channel: str = "", **changes: object) -> Entry:
    """One that follows."""
    t = log.state.round_of(channel) + 1 if kind == ROUND else 0
    numel, elems, codec = (0, 0, "") if kind == CONFIG else (GRID.numel, GRID.chunk_elems, GRID.codec)
    roster = ROSTER if kind == ROUND else ()
    plain = Entry(
        kind, log.head, log.state.depth + 1, channel, t, (ME,), (ME,), roster, numel, elems, codec, b"", b"", 0
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def results(value: float = 1.0, without: int = -1) -> tuple[Result, ...]:
    """Means that are this value everywhere; nobody contributed to chunk `without`."""
    made = []
    for chunk in range(GRID.n_chunks):
        start, stop = GRID.span(chunk)
        included = () if chunk == without else ROSTER
        payload = bytes(get_codec("fp32").encode(torch.full((stop - start,), value))) if included else b""
        made.append(Result(ChunkHeader(EMPTY, chunk, EMPTY, LOWEST, ME, included, ()), payload))
    return tuple(made)


def founded() -> Log:
    log = Log()
    log.commit(entry(log, CONFIG), (), (), None)
    return log


def with_state(seed: int = 0) -> tuple[Log, ToyState]:
    """A state that waits for the opening of its channel."""
    log, state = founded(), ToyState(GRID.numel, seed)
    log.attach("train", state, GRID, 0)
    return log, state


def opened() -> tuple[Log, ToyState]:
    log, state = with_state()
    log.commit(entry(log, OPEN, "train", digest=state.digest()), (), (), None)
    return log, state


def goes_on(log: Log, channel: str = "train", value: float = 1.0) -> None:
    log.commit(entry(log, ROUND, channel), (), results(value), None)


def log_opening(state_of: ToyState) -> Entry:
    return entry(founded(), OPEN, "train", digest=state_of.digest())


def after_one_round() -> bytes:
    log, state = opened()
    goes_on(log)
    return state.digest()


# ------------------------------------------------------------------ states


def test_an_opening_is_in_step_with_the_state_that_it_names_and_no_other() -> None:
    log, state = with_state()
    attached = log.attached["train"]
    assert log.servable("train") == state.digest() and log.digest("train") == b"" and not log.holds("train")
    assert log.synced, "what is not open yet nobody lacks"
    attached.misfit = "another kind"
    log.commit(entry(log, OPEN, "train", digest=b"x" * 32), (), (), None)
    assert not attached.synced and attached.misfit, "that is so of another state too"
    assert log.servable("train") == log.digest("train") == b""
    assert log.lacking() == {"train"} and not log.synced
    log, state = with_state()
    attached = log.attached["train"]
    attached.misfit = "another kind"
    log.commit(entry(log, OPEN, "train", digest=state.digest()), (), (), None)
    assert attached.synced and not attached.misfit
    assert log.servable("train") == log.digest("train") == state.digest() and log.holds("train") and log.synced


def test_a_state_of_another_kind_is_lacked_until_it_is_given_up() -> None:
    log, _ = opened()
    attached = log.attached["train"]
    attached.synced = False
    assert log.lacking() == {"train"}
    attached.abandoned = True
    assert log.lacking() == {"train"}, "it is on its way, and may be taken by the next who attaches one"
    attached.abandoned, attached.misfit = False, "another model"
    assert log.lacking() == {"train"}
    attached.abandoned = True
    assert not log.lacking()


def test_a_round_moves_the_state_that_is_in_step_and_is_told_before() -> None:
    log, state = opened()
    twin, told = state.copy(), list[str]()
    log.before_change = told.append
    goes_on(log, value=2.0)
    twin.step(1, [(start, stop, torch.full((stop - start,), 2.0)) for start, stop in map(GRID.span, range(3))])
    assert told == ["train"] and state.digest() == twin.digest() == log.digest("train")
    assert list(log.attached["train"].passed)[-1] == (log.head, state.digest())
    log.attached["train"].synced = False
    goes_on(log)
    assert state.digest() == twin.digest() and told == ["train"]
    assert len(log.attached["train"].passed) == 2, "its opening, and one round"


def test_where_nobody_contributed_nothing_moves() -> None:
    log, state = opened()
    before = state.theta.clone()
    log.commit(entry(log, ROUND, "train"), (), results(without=1), None)
    moved = state.theta != before
    start, stop = GRID.span(1)
    assert not moved[start:stop].any() and moved[:start].all() and moved[stop:].all()


class Kept:
    def __init__(self, out: Tensor | None) -> None:
        self.out = out
        self.seen: list[tuple[int, int, int]] = []

    def step(self, t: int, means: Iterator[tuple[int, int, Tensor | None]]) -> None:
        for start, stop, mean in means:
            assert mean is not None and mean.numel() == stop - start
            self.seen.append((t, start, stop))
            if self.out is not None:
                assert mean.data_ptr() == self.out[start:].data_ptr()


@pytest.mark.parametrize("out", [None, torch.zeros(GRID.numel)], ids=["looked at", "kept"])
def test_a_round_of_a_channel_without_state_goes_to_its_sink(out: Tensor | None) -> None:
    log, sink = founded(), Kept(out)
    log.commit(entry(log, ROUND, "sum"), (), results(3.0), sink)
    assert sink.seen == [(1, 0, 4), (1, 4, 8), (1, 8, 10)]
    assert out is None or bool((out == 3.0).all())


def test_one_memory_serves_all_means_that_are_not_kept() -> None:
    log = founded()
    pointers = {mean.data_ptr() for *_, mean in means(entry(log, ROUND, "sum"), results()) if mean is not None}
    assert len(pointers) == 1


def test_a_state_that_came_late_follows_with_the_rounds_of_its_own_channel() -> None:
    log, state = opened()
    late, late_state = opened()
    older = log.head
    goes_on(log)
    goes_on(log, "other")
    goes_on(log, value=2.0)
    later = log.after(older)
    assert later is not None and len(later) == 3
    late.attached["train"].synced = False
    late.follow("train", later)
    assert late_state.t == 0, "it is not what these rounds were made for"
    late.attached["train"].synced = True
    late.follow("train", later)
    assert late.attached["train"].digest == late_state.digest() == state.digest()
    opening = Past(entry(late, OPEN, "train", digest=b"x" * 32), (), ())
    late.follow("train", [opening])
    assert not late.attached["train"].synced, "another first state opened it"
    early, first = with_state()
    steps_before = first.t
    early.follow("train", [later[0], dataclasses.replace(opening, entry=log_opening(state_of=first)), later[0]])
    assert early.attached["train"].synced and first.t == later[0].entry.t and steps_before == 0
    assert first.digest() == early.attached["train"].digest == after_one_round(), "only what follows its opening"


def test_who_is_counted_is_in_more_than_half_of_the_elements() -> None:
    """The last chunk is shorter: of 10 elements, 4 and 2 are more than half, and 4 are not."""
    log = founded()
    roster, made = entry(log, ROUND, "sum"), list(results())
    for lacking, counted in (((0, 2), (ME,)), ((1,), (ME, OTHER)), ((0, 1), (ME,))):
        headers = [
            dataclasses.replace(r.header, included=ROSTER[:1] if c in lacking else ROSTER) for c, r in enumerate(made)
        ]
        parts = counted_of(roster, [dataclasses.replace(r, header=h) for r, h in zip(made, headers, strict=True)])
        assert tuple(part.voter for part in parts) == counted, lacking
    half = dataclasses.replace(roster, numel=8)
    first, second, _ = made
    first = dataclasses.replace(first, header=dataclasses.replace(first.header, included=ROSTER[:1]))
    assert [part.voter for part in counted_of(half, [first, second])] == [ME], "half is not more than half"
    shorter = dataclasses.replace(roster, numel=6)
    last = dataclasses.replace(second, header=dataclasses.replace(first.header, chunk=1))
    assert [part.voter for part in counted_of(shorter, [made[0], last])] == [ME, OTHER], "that has half as many"
    assert counted_of(entry(log, CONFIG), ()) == ()


# ------------------------------------------------------------------ the past


def test_tokens_are_those_of_counted_samples() -> None:
    """A contribution that brings none is averaged, and counts for nothing."""
    log, _ = opened()
    spent = (Part(ME, 5.0, -1), Part(OTHER, 7.0, 1))
    made = [dataclasses.replace(r, header=dataclasses.replace(r.header, included=spent)) for r in results()]
    log.commit(entry(log, ROUND, "train", roster=spent), (), tuple(made), None)
    assert log.state.tokens == log.totals[-1] == 7.0 and log.totals[-2] == 0.0
    assert (log.chain[-1], len(log.chain)) == (log.head, len(log.totals))


def test_what_follows_a_head_is_told_as_far_as_it_is_kept() -> None:
    log, _ = opened()
    heads = [log.head]
    for _ in range(HISTORY_ROUNDS_MAX + 1):
        goes_on(log)
        heads.append(log.head)
    assert log.after(log.head) == [] and log.after(b"x" * 32) is None and log.after(heads[0]) is None
    after = log.after(heads[1])
    assert after is not None and [past.entry.hash for past in after] == heads[2:]
    last = log.after(heads[-2])
    assert last is not None and [past.entry.hash for past in last] == heads[-1:]
    assert log.recent() == set(heads[1:-1])


def test_a_pin_keeps_more_until_it_is_taken_out() -> None:
    log, _ = opened()
    pinned = log.head
    log.pin("given", pinned)
    for _ in range(2 * HISTORY_ROUNDS_MAX):
        goes_on(log)
    after = log.after(pinned)
    assert log.holds_pinned and after is not None and len(after) == 2 * HISTORY_ROUNDS_MAX
    log.pin("given", b"")
    assert len(log.past) == HISTORY_ROUNDS_MAX and not log.holds_pinned


def test_a_pin_keeps_no_more_than_so_many_entries() -> None:
    log = founded()
    log.pin("given", log.head)
    for _ in range(HISTORY_PINNED_MAX):
        log.commit(entry(log, CONFIG), (), (), None)
    assert log.holds_pinned and len(log.past) == HISTORY_PINNED_MAX
    log.commit(entry(log, CONFIG), (), (), None)
    assert len(log.past) == HISTORY_ROUNDS_MAX, "what it was for is no more, and it keeps nothing"


def test_no_more_bytes_are_kept_than_are_allowed_but_for_the_newest() -> None:
    log, _ = opened()
    size = sum(len(r.payload) for r in results())
    log.history_bytes_max = 3 * size
    for _ in range(5):
        goes_on(log)
    assert [past.payload_bytes for past in log.past] == [size] * 3
    log.history_bytes_max = size - 1
    goes_on(log)
    assert len(log.past) == 1


def test_rounds_without_state_are_kept_for_a_straggler_only() -> None:
    """Each holds memory that the next would reuse. Others are kept, unless they stand before one that is dropped."""
    log, _ = opened()
    for _ in range(3):
        goes_on(log)
    assert len(log.past) == 5
    for _ in range(HISTORY_STATELESS_MAX):
        goes_on(log, "sum")
    log.commit(entry(log, CONFIG), (), (), None)
    kinds = [(past.entry.kind, past.entry.channel) for past in log.past]
    assert kinds[-3:] == [(ROUND, "sum")] * 2 + [(CONFIG, "")] and len(kinds) == 8
    goes_on(log, "sum")
    kinds = [(past.entry.kind, past.entry.channel) for past in log.past]
    assert kinds == [(ROUND, "sum"), (CONFIG, ""), (ROUND, "sum")]


def test_after_a_jump_nothing_is_left_of_the_history_before() -> None:
    log, _ = opened()
    goes_on(log)
    log.install(LogState(head=b"n" * 32, tokens=9.0), (b"m" * 32, b"n" * 32), (4.0, 9.0))
    assert not log.past and list(log.chain) == [b"m" * 32, b"n" * 32] and list(log.totals) == [4.0, 9.0]
    assert log.after(b"m" * 32) is None


def test_who_decided_by_force_is_told_of_that_head_only() -> None:
    log = founded()
    log.fellows = (log.head, frozenset({ME, OTHER}))
    assert log.fellows_here == {ME, OTHER}
    log.commit(entry(log, CONFIG), (), (), None)
    assert not log.fellows_here


def test_what_a_lost_history_had_after_the_split_is_told_in_rounds_and_tokens() -> None:
    """Two training rounds and a config entry since the common ancestor; the entries before it are not lost."""
    mine, shared = [bytes([i]) * 32 for i in range(1, 7)], 3
    log = Log()
    log.install(LogState(tokens=900.0), (EMPTY, *mine), (0.0, 0.0, 200.0, 500.0, 700.0, 700.0, 900.0))
    theirs = (EMPTY, *mine[:shared], b"x" * 32, b"y" * 32)
    assert log.beyond(theirs) == (2, 400.0)
    assert log.beyond((EMPTY, *mine)) == (0, 0.0)
