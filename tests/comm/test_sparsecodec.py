"""topk: exact sizes, what is chosen and sent, joined results, and a round of peers that all hold the same mean."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlc.comm.codecs import get_codec
from dlc.comm.entries import Part
from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.messages import Contrib, Result
from dlc.comm.reducer import ChunkReducer
from dlc.comm.sparsecodec import BLOCK, CARRY, FACTOR, LEVELS_BYTES, TopKCodec
from dlc.errors import ProtocolError
from dlc.peer import Peer, UsageError
from dlc.sim.schedule import Scenario, Start
from dlc.sim.world import World
from dlc.train.feedback import Feedback

CODEC = TopKCodec()
SIZES = [1, 2, 63, 64, 65, 4095, 4096, 4097, 8192, 8256, 10_000]
each_size = pytest.mark.parametrize("numel", SIZES)


def n_sent(numel: int) -> int:
    return sum(math.ceil(min(BLOCK, numel - start) / 64) for start in range(0, numel, BLOCK))


def numbers(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(numel).astype(np.float32))


def bf16(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).to(torch.bfloat16))


def oracle(x: np.ndarray) -> np.ndarray:
    """What is decoded of x, block by block, by the steps of the docstring."""
    y = np.zeros_like(x)
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        chosen = np.sort(np.argsort(-np.abs(block), kind="stable")[: math.ceil(len(block) / 64)])
        sizes = np.abs(block[chosen]).astype(np.float64)
        high = sizes > sizes.mean()
        low_size = bf16(sizes[~high].mean())
        high_size = bf16(sizes[high].mean()) if high.any() else low_size
        y[start + chosen] = np.where(block[chosen] < 0, -1, 1) * np.where(high, high_size, low_size)
    return y


@each_size
def test_the_size_is_exact_and_a_141st_of_fp32(numel: int) -> None:
    blocks, sent = math.ceil(numel / BLOCK), n_sent(numel)
    size = LEVELS_BYTES * blocks + math.ceil(2 * sent / 8) + math.ceil(12 * sent / 8)
    assert CODEC.wire_bytes(numel) == size == len(CODEC.encode(numbers(numel)))
    assert CODEC.wire_bytes(1 << 18) == 64 * 116 and (1 << 20) / CODEC.wire_bytes(1 << 18) > 141


@each_size
def test_the_greatest_elements_are_sent_with_the_nearer_of_two_sizes(numel: int) -> None:
    x = numbers(numel)
    payload = CODEC.encode(x)
    y = CODEC.decode(payload, numel)
    assert CODEC.finite(payload, numel)
    assert int((y != 0).sum()) == n_sent(numel)
    assert np.array_equal(y.numpy(), oracle(x.numpy()))
    into = torch.full((numel,), math.nan)
    assert torch.equal(CODEC.decode(payload, numel, into), y) and torch.equal(into, y)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3e38, 1e-42])
def test_equal_elements_come_back(value: float) -> None:
    payload = CODEC.encode(torch.full((5000,), value))
    y = CODEC.decode(payload, 5000)
    assert CODEC.finite(payload, 5000)
    assert y[y != 0].tolist() == [bf16(value)] * (n_sent(5000) if bf16(value) else 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 4096, 4999])
def test_what_is_not_finite_is_seen(bad: float, place: int) -> None:
    x = numbers(5000)
    x[place] = bad
    assert not CODEC.finite(CODEC.encode(x), 5000)


@given(st.binary(min_size=CODEC.wire_bytes(5000), max_size=CODEC.wire_bytes(5000)))
def test_no_bytes_write_beyond_the_chunk(payload: bytes) -> None:
    CODEC.finite(payload, 5000)
    memory = torch.full((5001,), 7.0)
    CODEC.decode(payload, 5000, memory[:5000])
    assert memory[5000] == 7.0


@pytest.mark.parametrize(
    ("at", "mask"),
    [
        (0, 0),  # as it is
        (1, 0x80),  # a negative size
        (1, 0xFF),  # one that is no number, or above the other
        (LEVELS_BYTES * 2 + 19, 0xF0),  # bits after the last of 79 codes: 19 whole bytes, and three codes
        (-1, 0x70),  # after the last place: 79 are 118.5 bytes
        (-1, 0x0F),  # a place beyond the last block, which has 960
        (LEVELS_BYTES * 2 + 20, 0xFF),  # out of order
    ],
)
def test_what_no_encoder_writes_is_refused(at: int, mask: int) -> None:
    numel = BLOCK + 15 * 64
    assert n_sent(numel) == 79
    payload = bytearray(CODEC.encode(numbers(numel)))
    before = bytes(payload)
    payload[at] |= mask
    assert CODEC.finite(payload, numel) == (bytes(payload) == before)


@pytest.mark.parametrize(
    ("levels", "places", "good"),
    [
        ((1.0, 2.0), (0, 99), True),
        ((0.0, torch.finfo(torch.bfloat16).max), (98, 99), True),
        ((2.0, 1.0), (0, 99), False),
        ((-1.0, 1.0), (0, 99), False),
        ((1.0, math.inf), (0, 99), False),
        ((math.nan, 1.0), (0, 99), False),
        ((1.0, math.nan), (0, 99), False),
        ((1.0, 2.0), (0, 100), False),
        ((1.0, 2.0), (7, 7), False),
        ((1.0, 2.0), (8, 7), False),
    ],
)
def test_levels_and_places_that_no_encoder_writes_are_refused(
    levels: tuple[float, float], places: tuple[int, int], good: bool
) -> None:
    """Of a hundred elements, of which two are sent."""
    sizes = torch.tensor(levels, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    payload = sizes + b"\0" + (places[0] | places[1] << 12).to_bytes(3, "little")
    assert CODEC.finite(payload, 100) is good


def roster_of(*weights: float) -> tuple[Part, ...]:
    return tuple(Part(Voter(f"peer{i}", 1 << 32), weight, 0) for i, weight in enumerate(weights))


@pytest.mark.parametrize("present", [[0, 1, 2], [2, 0], [1]])
def test_a_result_is_the_parts_in_roster_order_and_their_weighted_sum(present: list[int]) -> None:
    grid, weights = Grid(6000, 5000, "topk"), (3.0, 1.0, 4.0)
    xs = [numbers(6000, seed) for seed in range(3)]
    for chunk in range(grid.n_chunks):
        start, stop = grid.span(chunk)
        payloads = [bytes(CODEC.encode(x[start:stop])) for x in xs]
        results = []
        for order in (present, present[::-1]):
            reducer = ChunkReducer(grid, chunk, roster_of(*weights))
            assert [reducer.offer(i, payloads[i]) for i in order] == [None] * len(order)
            results.append(reducer.close())
        (result, included), again = results
        assert again == (result, included) and included == tuple(sorted(present))
        assert len(result) == grid.result_bytes(chunk, len(present))
        assert CODEC.finite_result(result, stop - start)
        total = sum(weights[i] for i in included)
        expected = np.zeros(stop - start, dtype=np.float32)
        for i in included:
            factor = np.float32(weights[i] / total)
            expected += factor * CODEC.decode(payloads[i], stop - start).numpy()
        mean = CODEC.decode_result(result, stop - start)
        assert np.array_equal(mean.numpy(), expected)


def test_norms_clip_joined_parts_too() -> None:
    grid = Grid(BLOCK, BLOCK, "topk")
    reducer = ChunkReducer(grid, 0, roster_of(1.0, 1.0, 1.0), norms=(1.0, 1.0, 4.0))
    x = numbers(BLOCK)
    for i in range(3):
        assert reducer.offer(i, CODEC.encode(x * (4 if i == 2 else 1))) is None
    mean = CODEC.decode_result(reducer.close()[0], BLOCK)
    assert torch.allclose(mean, CODEC.decode(CODEC.encode(x), BLOCK), rtol=1e-6)


def test_the_factor_of_a_clipped_part_is_rounded_as_in_any_other_codec() -> None:
    """fp32(fp32(v c) / sum of v), with v = 1/4 for each of three."""
    grid, payload = Grid(64, 64, "topk"), CODEC.encode(numbers(64))
    for norm in (1 + k / 7 for k in range(1, 41)):
        reducer = ChunkReducer(grid, 0, roster_of(1.0, 1.0, 1.0), norms=(1.0, 1.0, norm))
        for i in range(3):
            reducer.offer(i, payload)
        (factor,) = FACTOR.unpack_from(reducer.close()[0], 2 * grid.result_bytes(0, 1))
        assert factor == np.float32(float(np.float32(0.25 * (1 / norm))) / 0.75)


def test_results_of_a_wrong_length_or_with_a_bad_part_are_refused() -> None:
    one = CODEC.combine([(CODEC.encode(numbers(100)), 1.0)], 1.0, torch.empty(100), torch.empty(100))
    for wrong in (b"", bytes(one)[:-1], bytes(one) + b"\0"):
        with pytest.raises(ProtocolError, match="joined parts of 100 elements of topk"):
            CODEC.decode_result(wrong, 100)
        with pytest.raises(ProtocolError):
            CODEC.finite_result(wrong, 100)
    bad = CODEC.encode(torch.full((100,), math.nan))
    assert not CODEC.finite_result(CODEC.combine([(bad, 1.0)], 1.0, torch.empty(100), torch.empty(100)), 100)
    for factor, good in ((1.0, True), (-1.0, False), (math.inf, False), (math.nan, False)):
        assert CODEC.finite_result(FACTOR.pack(factor) + bytes(one)[FACTOR.size :], 100) is good


def test_the_largest_numbers_do_not_overflow() -> None:
    x = torch.full((64,), torch.finfo(torch.float32).max)
    assert CODEC.finite(CODEC.encode(x), 64)
    joined = CODEC.combine([(CODEC.encode(x), 0.5)] * 2, 0.5, torch.empty(64), torch.empty(64))
    assert bool(torch.isfinite(CODEC.decode_result(joined, 64)).all())


def test_what_is_not_sent_comes_later_and_fades() -> None:
    """SparseLoCo's error feedback: a = beta e + d, e = a - Q(a)."""
    grid = Grid(BLOCK, BLOCK, "topk")
    feedback, e, sent = Feedback(grid), torch.zeros(BLOCK), torch.zeros(BLOCK)
    d = numbers(BLOCK)
    for _ in range(40):
        v = feedback.added(d)
        assert torch.equal(v, torch.add(d, e, alpha=CARRY))
        q = CODEC.decode(CODEC.encode(v), BLOCK)
        e, sent = v - q, sent + q
        feedback.over(v, [True])
        assert torch.equal(feedback.residual, e)
    assert int((sent != 0).sum()) > 10 * 64, "elements take turns"
    cosine = float(torch.nn.functional.cosine_similarity(sent, d, dim=0))
    assert cosine > 0.8, "what was delivered in forty rounds points the same way as what was to be"


def test_peers_of_a_round_hold_the_same_means_and_results_are_longer_than_parts() -> None:
    """The simulated world checks digests, the true means (oracle) and all other invariants after every event."""
    starts = (Start(0.0, ()), Start(0.1, (0,)), Start(0.2, (0,)))
    scenario = Scenario(0, starts, n_chunks=3, chunk_elems=200, codec="topk", inner_s=1.0)
    world, lengths = World(scenario), set()
    carry = world.network.carry

    def watched(source: str, target: str, deliver: object, *args: object, bulk: bool = False) -> None:
        message = args[-1]
        if isinstance(message, Contrib | Result):
            lengths.add((type(message), len(message.payload)))
        carry(source, target, deliver, *args, bulk=bulk)  # type: ignore[arg-type]

    world.network.carry = watched  # type: ignore[method-assign,assignment]
    world.run_until(30.0)
    assert world.checker.rounds >= 4
    part = CODEC.wire_bytes(200)
    assert (Contrib, part) in lengths and (Result, 3 * (4 + part)) in lengths


def test_a_library_all_reduce_refuses_it() -> None:
    with Peer.join() as peer, pytest.raises(UsageError, match="use it with DiLoCo"):
        peer.all_reduce(torch.zeros(10), codec="topk", timeout_s=5)


@pytest.mark.parametrize("seed", range(3))
def test_results_of_fewer_parts_are_shorter(seed: int) -> None:
    n = random.Random(seed).randint(1, 9)
    assert CODEC.result_bytes(5000, n) == n * CODEC.result_bytes(5000, 1) > n * CODEC.wire_bytes(5000)
    assert get_codec("fp16").result_bytes(5000, n) == get_codec("fp16").wire_bytes(5000)
