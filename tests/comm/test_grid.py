"""Chunks cover the vector exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlc import runspec
from dlc.comm import sparsecodec
from dlc.comm.blockcodecs import BLOCK
from dlc.comm.choose import HOLDERS_MAX
from dlc.comm.codecs import CODECS, get_codec
from dlc.comm.donations import STEPS_MAX
from dlc.comm.entries import ROUND, Entry, Part
from dlc.comm.grid import (
    CHUNK_ELEMS_MAX,
    LOOPBACK_CHUNK_ELEMS,
    N_CHUNKS_MAX,
    RESULT_BYTES_MAX,
    RESULT_PARTS,
    Grid,
    usual_chunk_elems,
)
from dlc.comm.identity import peer_id
from dlc.comm.ids import Ballot, Voter
from dlc.comm.lanes import BULK_FRAME_BYTES_MAX, CONTROL_FRAME_BYTES_MAX
from dlc.comm.messages import Decree, Fetch, FixedChunk, HeldChunk, Plan, Promise, Step, Steps
from dlc.comm.slot import ROSTER_PARTS_MAX
from dlc.comm.wire import HEADER_BYTES_MAX, pack
from dlc.errors import ConfigError


@given(
    numel=st.integers(1, 5000),
    chunk_elems=st.integers(1, 600),
    name=st.sampled_from(list(CODECS)),
)
def test_spans_cover_every_element_once(numel: int, chunk_elems: int, name: str) -> None:
    grid = Grid(numel, chunk_elems, name)
    spans = [grid.span(c) for c in range(grid.n_chunks)]
    assert spans[0][0] == 0
    assert spans[-1][1] == numel
    assert all(stop == start for (_, stop), (start, _) in zip(spans, spans[1:], strict=False))
    assert all(stop - start == chunk_elems for start, stop in spans[:-1])
    assert 1 <= spans[-1][1] - spans[-1][0] <= chunk_elems
    assert [grid.elems(c) for c in range(grid.n_chunks)] == [stop - start for start, stop in spans]
    assert sum(grid.wire_bytes(c) for c in range(grid.n_chunks)) == grid.total_wire_bytes
    codec = get_codec(name)  # the last block of each chunk is a short one:
    blocks = codec.feedback and chunk_elems % (sparsecodec.BLOCK if codec.sparse else BLOCK)
    each = 2 * (grid.n_chunks - 1) if name == "fp16" else 0  # its power of two
    assert blocks or grid.total_wire_bytes == get_codec(name).wire_bytes(numel) + each


@pytest.mark.parametrize(
    ("numel", "chunk_elems", "n_chunks"), [(1, 1, 1), (1, 4096, 1), (8, 4, 2), (9, 4, 3), (997, 31, 33)]
)
def test_number_of_chunks(numel: int, chunk_elems: int, n_chunks: int) -> None:
    assert Grid(numel, chunk_elems, "fp16").n_chunks == n_chunks


@pytest.mark.parametrize("chunk", [-1, 3])
def test_there_is_no_such_chunk(chunk: int) -> None:
    grid = Grid(9, 4, "fp32")
    for method in (grid.span, grid.elems, grid.wire_bytes):
        with pytest.raises(IndexError, match="of 3"):
            method(chunk)


@pytest.mark.parametrize(
    ("numel", "chunk_elems", "codec", "message"),
    [
        (0, 4, "fp32", "at least 1 element"),
        (-1, 4, "fp32", "at least 1 element"),
        (4, 0, "fp32", "chunk_elems"),
        (4, -4, "fp32", "chunk_elems"),
        (4, CHUNK_ELEMS_MAX + 1, "fp32", "chunk_elems"),
        (N_CHUNKS_MAX * 4 + 1, 4, "fp32", "raise chunk_elems to 5"),
        (4, 4, "fp61", "unknown codec .fp61.; .*did you mean .fp16.?"),
        (4, 4, "zz", "unknown codec .zz.; known: [a-z0-9, ]*topk$"),
        (1 << 21, 1 << 21, "topk", "where 256 contribute"),
    ],
)
def test_bad_grids_are_refused(numel: int, chunk_elems: int, codec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Grid(numel, chunk_elems, codec)


def test_all_that_a_promise_can_tell_of_the_largest_grid_fits_a_message() -> None:
    """Else whoever takes over where a large model's round failed would stop over its own message."""
    voters = tuple(Voter(peer_id(bytes([i]) * 32), (1 << 63) + i) for i in range(HOLDERS_MAX))
    ballot, digest = Ballot((1 << 31) - 1, voters[0]), bytes(32)
    hashes = (digest,) * N_CHUNKS_MAX
    roster = tuple(Part(v, 1e9, 1 << 40) for v in voters)
    entry = Entry(ROUND, digest, 9, "train", 9, voters, voters, roster, 1, 1, "fp16", digest, b"", 0)
    fixed = tuple(FixedChunk(c, digest, voters) for c in range(N_CHUNKS_MAX))
    assignment = (len(voters) - 1,) * N_CHUNKS_MAX
    plan = Plan(digest, ballot, voters, entry, digest, voters, assignment, fixed, voters, (1.0,) * len(voters))
    held = tuple(HeldChunk(c, ballot, digest, 0) for c in range(N_CHUNKS_MAX))
    rosters = (roster,) * (ROSTER_PARTS_MAX // len(roster))
    promise = Promise(digest, ballot, ballot, Decree(entry, hashes), plan, held, rosters, ())
    steps = Steps(digest, tuple(Step(entry, hashes) for _ in range(STEPS_MAX)))
    assert len(pack(promise)) < 0.95 * HEADER_BYTES_MAX
    for message in (plan, steps, Fetch(digest, ballot, tuple(range(N_CHUNKS_MAX)), hashes)):
        assert len(pack(message)) < 0.75 * HEADER_BYTES_MAX, type(message).__name__
    assert HEADER_BYTES_MAX < CONTROL_FRAME_BYTES_MAX


def test_the_largest_grid_is_allowed() -> None:
    assert Grid(N_CHUNKS_MAX * CHUNK_ELEMS_MAX, CHUNK_ELEMS_MAX, "bf16").n_chunks == N_CHUNKS_MAX


@pytest.mark.parametrize(
    ("numel", "most", "elems"),
    [
        (25_000_000, LOOPBACK_CHUNK_ELEMS, LOOPBACK_CHUNK_ELEMS),
        (4_000_000, LOOPBACK_CHUNK_ELEMS, 1 << 16),  # some dozens are left to share
        (100_000, LOOPBACK_CHUNK_ELEMS, 1 << 14),
        (100, LOOPBACK_CHUNK_ELEMS, 100),
        (4_000_000, 1000, 1000),
        (25_000_000, 1000, 1 << 12),  # at most 8,192 chunks
        (7_000_000_000, LOOPBACK_CHUNK_ELEMS, 1 << 20),
        (10_000_000_000, 1, 1 << 21),
        (25_000_000, CHUNK_ELEMS_MAX, 1 << 19),
    ],
)
def test_a_run_may_say_how_large_chunks_may_be(numel: int, most: int, elems: int) -> None:
    assert Grid(numel, usual_chunk_elems(numel, "fp16", most), "fp16").chunk_elems == elems


@pytest.mark.parametrize("codec", list(CODECS))
def test_the_largest_chunk_fits_a_frame(codec: str) -> None:
    assert get_codec(codec).wire_bytes(CHUNK_ELEMS_MAX) <= BULK_FRAME_BYTES_MAX
    assert RESULT_BYTES_MAX <= BULK_FRAME_BYTES_MAX
    assert Grid(1 << 20, 1 << 20, codec).result_bytes(0, RESULT_PARTS) <= RESULT_BYTES_MAX
    assert CHUNK_ELEMS_MAX == runspec.CHUNK_ELEMS_MAX


@pytest.mark.parametrize(
    ("numel", "chunks", "elems"),
    [
        (1, 1, 1),
        (16_384, 1, 16_384),
        (840_000, 52, 1 << 14),
        (25_000_000, 382, 1 << 16),
        (1_100_000_000, 4197, 1 << 18),
        (7_000_000_000, 6676, 1 << 20),
        (N_CHUNKS_MAX * CHUNK_ELEMS_MAX, N_CHUNKS_MAX, CHUNK_ELEMS_MAX),
    ],
)
def test_the_usual_chunk_is_small_against_the_vector(numel: int, chunks: int, elems: int) -> None:
    grid = Grid(numel, usual_chunk_elems(numel, "fp16"), "fp16")
    assert (grid.n_chunks, grid.chunk_elems) == (chunks, elems)


@pytest.mark.parametrize(
    ("codec", "chunks"), [("fp32", 382), ("fp16", 382), ("bf16", 382), ("int8", 191), ("int4", 96), ("topk", 96)]
)
def test_a_codec_that_makes_few_bytes_has_fewer_chunks(codec: str, chunks: int) -> None:
    """Between four sites a round of int4 took half as long again with chunks of 8 kB: each costs all peers work."""
    assert Grid(25_000_000, usual_chunk_elems(25_000_000, codec), codec).n_chunks == chunks


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_what_a_codec_cannot_say_is_the_rest_in_whatever_memory(codec: str) -> None:
    grid = Grid(300, 256, codec)
    vector = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 1e-5
    memory = torch.full((256,), torch.nan)
    for chunk in range(grid.n_chunks):
        own = vector[slice(*grid.span(chunk))].clone()
        rest = grid.unsaid(chunk, own)
        assert torch.equal(rest, own - grid.coder.decode(grid.coder.encode(own), len(own)))
        assert torch.equal(own, vector[slice(*grid.span(chunk))])
        into = grid.unsaid(chunk, own, memory)
        assert torch.equal(into, rest) and into.data_ptr() == memory.data_ptr()
