"""The owner's mean against an exact float64 mean, with bounds derived from the formats; order, absence, refusal.

The bound of an encoded mean. With u_c the unit roundoff of the codec and s_c half its least positive number, each
contribution is off by at most u_c |x_i| + s_c when it arrives; summing adds (k + 5) u mean|x_i| (see reducer.py) and
a few least numbers of fp32; encoding the mean adds u_c |mean| + s_c. With int8 and int4 half a step of the block (and a
little for the rounding of scale, quotient and product) takes the place of u_c |x| + s_c.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlc.comm import reducer as reducer_module
from dlc.comm.blockcodecs import BLOCK, SCALE_MIN, BlockCodec
from dlc.comm.codecs import CODECS, Codec, Payload, get_codec
from dlc.comm.entries import Part
from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.reducer import WEIGHT_MAX, ChunkReducer, Workspace, clip_factors, scaled_weights
from dlc.errors import ProtocolError

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FP32_MAX = torch.finfo(torch.float32).max
each_codec = pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if not codec.sparse])


def roster_of(weights: list[float]) -> tuple[Part, ...]:
    return tuple(Part(Voter(f"peer{i}", 1 << 32), weight, 0) for i, weight in enumerate(weights))


def decoded(grid: Grid, chunk: int, payload: bytes | memoryview) -> torch.Tensor:
    return grid.coder.decode_result(payload, grid.elems(chunk))


@dataclass
class Round:
    """Contributions of whole vectors to one grid."""

    grid: Grid
    weights: list[float]
    xs: list[torch.Tensor]

    def payload(self, i: int, chunk: int) -> bytes:
        start, stop = self.grid.span(chunk)
        return bytes(self.grid.coder.encode(self.xs[i][start:stop]))

    def reduce(
        self, chunk: int, arrivals: list[int], workspace: Workspace | None = None
    ) -> tuple[bytes, tuple[int, ...]]:
        reducer = ChunkReducer(self.grid, chunk, roster_of(self.weights))
        for i in arrivals:
            assert reducer.offer(i, self.payload(i, chunk)) is None
        payload, included = reducer.close(workspace)
        return bytes(payload), included

    def mean(self, present: list[int]) -> torch.Tensor:
        """Of all chunks, decoded."""
        workspace = Workspace(self.grid)
        payloads = [self.reduce(chunk, present, workspace)[0] for chunk in range(self.grid.n_chunks)]
        return torch.cat([decoded(self.grid, chunk, payload) for chunk, payload in enumerate(payloads) if payload])

    def lost(self, size: torch.Tensor) -> torch.Tensor:
        """By how much encoding is off at most, for each element of a vector of these sizes."""
        coder = self.grid.coder
        if not isinstance(coder, BlockCodec):
            info = torch.finfo(DTYPES[coder.name])
            u_c, s_c = (0.0, 0.0) if coder.name == "fp32" else (info.eps / 2, info.smallest_normal * info.eps / 2)
            return u_c * size + s_c
        bound = torch.empty_like(size)
        for chunk in range(self.grid.n_chunks):
            start, stop = self.grid.span(chunk)
            for block in range(start, stop, BLOCK):
                here = slice(block, min(block + BLOCK, stop))
                bound[here] = size[here].max() * ((0.5 + 1e-4) / coder.limit) + coder.limit * SCALE_MIN
        return bound

    def exact(self, present: list[int], xs: list[torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted means of x and |x| in float64."""
        total = math.fsum(self.weights[i] for i in present)
        shares = [(self.weights[i] / total, (xs or self.xs)[i].double()) for i in present]
        zero = torch.zeros(self.grid.numel, dtype=torch.float64)
        return sum((w * x for w, x in shares), zero), sum((w * x.abs() for w, x in shares), zero)

    def assert_close(self, present: list[int]) -> None:
        k = len(present)
        exact, size = self.exact(present)
        arrival = self.exact(present, [self.lost(x.double().abs()) for x in self.xs])[0]
        summing = (k + 5) * 2.0**-24 * (size + arrival) + 2 * (k + 1) * 2.0**-149
        bound = arrival + summing
        bound = bound + self.lost(exact.abs() + bound)
        error = (self.mean(present).double() - exact).abs()
        assert bool((error <= bound).all()), f"worst {float((error / bound).max())} of the bound"


def make_round(codec: str, n_peers: int, numel: int, chunk_elems: int, seed: int = 0, equal: bool = False) -> Round:
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(numel, generator=generator) * 10.0 ** (i % 3 - 2) for i in range(n_peers)]
    weights = [4096.0 if equal else float(1000 + 37 * i * i) for i in range(n_peers)]
    return Round(Grid(numel, chunk_elems, codec), weights, xs)


# ------------------------------------------------------------------ accuracy


@each_codec
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "unequal"])
@pytest.mark.parametrize("n_peers", [1, 2, 3, 5, 16])
@pytest.mark.parametrize(("numel", "chunk_elems"), [(1, 64), (2, 1), (13, 5), (64, 64), (997, 101)])
def test_mean_against_float64(codec: str, n_peers: int, equal: bool, numel: int, chunk_elems: int) -> None:
    make_round(codec, n_peers, numel, chunk_elems, equal=equal).assert_close(list(range(n_peers)))


@each_codec
@given(data=st.data())
def test_mean_against_float64_for_any_numbers(codec: str, data: st.DataObject) -> None:
    limit = torch.finfo(DTYPES.get(codec, torch.float32)).max
    n_peers, numel = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    element = st.floats(-limit, limit, width=32)
    rows = [data.draw(st.lists(element, min_size=numel, max_size=numel)) for _ in range(n_peers)]
    weights = [data.draw(st.one_of(st.floats(1e-3, 1e9), st.integers(1, 10**9).map(float))) for _ in range(n_peers)]
    xs = [torch.tensor(row, dtype=torch.float32) for row in rows]
    Round(Grid(numel, 3, codec), weights, xs).assert_close(list(range(n_peers)))


def test_the_bits_are_those_of_the_stated_steps() -> None:
    """An oracle in numpy, one rounding per operation: what any host must compute."""
    turn = make_round("fp32", 5, 211, 211, seed=3)
    e = math.ceil(math.log2(sum(turn.weights)))
    v = [np.float32(weight / 2.0**e) for weight in turn.weights]
    acc = np.full(211, -0.0, dtype=np.float32)
    for weight, x in zip(v, turn.xs, strict=True):
        acc = acc + weight * x.numpy()
    expected = acc / np.float32(math.fsum(float(weight) for weight in v))
    payload, _ = turn.reduce(0, [0, 1, 2, 3, 4])
    assert payload == expected.astype("<f4").tobytes()


def test_a_contribution_is_clipped_to_the_median_norm_of_the_roster() -> None:
    turn = make_round("fp32", 3, 300, 100, seed=4, equal=True)  # of sizes 0.01, 0.1 and 1
    norms = [float(x.norm()) for x in turn.xs]
    assert clip_factors(norms) == [1.0, 1.0, norms[1] / norms[2]]
    third = turn.xs[2] * (norms[1] / norms[2])
    expected = (turn.xs[0] + turn.xs[1] + third) / 3
    for chunk in range(turn.grid.n_chunks):
        reducer = ChunkReducer(turn.grid, chunk, roster_of(turn.weights), norms)
        for i in range(3):
            reducer.offer(i, turn.payload(i, chunk))
        start, stop = turn.grid.span(chunk)
        mean = decoded(turn.grid, chunk, reducer.close()[0])
        torch.testing.assert_close(mean, expected[start:stop], rtol=1e-5, atol=1e-7)


def test_who_tells_no_norm_is_not_clipped_and_does_not_count() -> None:
    assert clip_factors([0.0, 2.0, 4.0, 0.0, 8.0]) == [1.0, 1.0, 1.0, 1.0, 0.5]
    assert clip_factors([2.0, 4.0]) == [1.0, 0.75], "of an even number the mean of the middle two"
    assert clip_factors([0.0, 0.0]) == [1.0, 1.0] and clip_factors([]) == []


def test_a_chunk_that_lacks_some_is_clipped_like_all_the_others_of_its_plan() -> None:
    turn = make_round("fp32", 5, 30, 30, seed=5, equal=True)
    norms = [1.0, 2.0, 8.0, 4.0, 16.0]
    assert clip_factors(norms) == [1.0, 1.0, 0.5, 1.0, 0.25]
    reducer = ChunkReducer(turn.grid, 0, roster_of(turn.weights), norms)
    for i in (4, 2):
        assert reducer.offer(i, turn.payload(i, 0)) is None
    payload, included = reducer.close()
    assert included == (2, 4)
    assert torch.equal(decoded(turn.grid, 0, payload), (turn.xs[2] * 0.5 + turn.xs[4] * 0.25) / 2)


@pytest.mark.parametrize("weight", [1.0, 3.0, 0.1, 5e-324, 999_999_999.0, WEIGHT_MAX])
@pytest.mark.parametrize("others_without_weight", [0, 2])
def test_a_lone_contribution_comes_back_bit_for_bit(weight: float, others_without_weight: int) -> None:
    x = torch.randn(300)
    x[:4] = torch.tensor([0.0, -0.0, FP32_MAX, 2.0**-149])
    xs = [x] + [torch.randn(300).abs() for _ in range(others_without_weight)]
    turn = Round(Grid(300, 300, "fp32"), [weight] + [0.0] * others_without_weight, xs)
    payload, included = turn.reduce(0, list(range(len(xs))))
    mean = decoded(turn.grid, 0, payload)
    assert torch.equal(mean, x)
    assert included == tuple(range(len(xs)))
    if not others_without_weight:
        assert payload == turn.payload(0, 0), "signs of zero, too"


@pytest.mark.parametrize(("codec", "n_peers"), [("fp32", 2), *itertools.product(["fp16", "bf16"], [2, 3, 5, 7, 16])])
def test_equal_contributions_with_equal_weights_come_back_bit_for_bit(codec: str, n_peers: int) -> None:
    """Half-width elements leave fp32 enough bits for exact sums; more than two of fp32 may round on the way."""
    turn = Round(Grid(50, 50, codec), [12345.0] * n_peers, [torch.randn(50)] * n_peers)
    assert turn.reduce(0, list(range(n_peers)))[0] == turn.payload(0, 0)


@each_codec
@pytest.mark.parametrize("n_peers", [2, 3, 5, 16])
def test_the_largest_numbers_do_not_overflow(codec: str, n_peers: int) -> None:
    limit = torch.finfo(DTYPES.get(codec, torch.float32)).max
    for weights in ([1e9] * n_peers, [1e9 - i for i in range(n_peers)], [3.0**i for i in range(n_peers)]):
        turn = Round(Grid(2, 2, codec), weights, [torch.tensor([limit, -limit])] * n_peers)
        mean = turn.mean(list(range(n_peers)))
        assert mean.tolist() == pytest.approx([limit, -limit], rel=1e-6)
        assert bool(torch.isfinite(mean).all())


def test_a_last_rounding_above_the_largest_number_is_clamped() -> None:
    weights = [657_019_496.0, 529_975_200.0]  # with these fp32 gives infinity without the clamp
    turn = Round(Grid(2, 2, "fp32"), weights, [torch.tensor([FP32_MAX, -FP32_MAX])] * 2)
    assert turn.mean([0, 1]).tolist() == [FP32_MAX, -FP32_MAX]


@given(st.lists(st.floats(0, WEIGHT_MAX), min_size=1, max_size=16))
def test_scaled_weights_keep_the_ratios(weights: list[float]) -> None:
    scaled, divisor = scaled_weights(weights)
    total = math.fsum(weights)
    if total == 0:
        assert (scaled, divisor) == ([0.0] * len(weights), 0.0)
        return
    assert 0.5 - 1e-6 <= divisor <= 1 + 1e-6
    for weight, v in zip(weights, scaled, strict=True):
        assert v == float(np.float32(v))
        if weight > total * 1e-30:  # below that fp32 runs out of exponents
            assert v / divisor == pytest.approx(weight / total, rel=3 * 2.0**-24)


@pytest.mark.parametrize("weights", [[3.0, 5.0, 7.0], [16_777_215.0, 1.0], [2048.0, 4096.0, 100_000.0]])
def test_token_counts_below_2_to_the_24_enter_exactly(weights: list[float]) -> None:
    scaled, divisor = scaled_weights(weights)
    assert [v / scaled[0] for v in scaled] == [w / weights[0] for w in weights]
    assert divisor / scaled[0] == sum(weights) / weights[0]


@pytest.mark.parametrize(
    ("large", "first", "divisor"),
    [([1.0, 2.0**-24], 0.5, 0.5 + 2.0**-24), ([0.5, 0.5], 0.25, 0.5)],
    ids=["of those scaled", "of those that came"],
)
def test_sums_of_weights_are_exact(large: list[float], first: float, divisor: float) -> None:
    """Not so where each is added to a float: it loses all of the small ones. How `sum` adds depends on the Python."""
    small = [2.0**-53] * 3
    for weights in (large + small, small + large):
        scaled, total = scaled_weights(weights)
        assert scaled[weights.index(large[0])] == first and total == divisor


# ------------------------------------------------------------------ order and absence


@each_codec
def test_every_order_of_arrival_gives_the_same_bits(codec: str) -> None:
    turn = make_round(codec, 4, 101, 101)
    results = {turn.reduce(0, list(arrivals)) for arrivals in itertools.permutations(range(4))}
    assert len(results) == 1
    assert results.pop()[1] == (0, 1, 2, 3)


def test_orders_of_sixteen_and_of_summing() -> None:
    turn = make_round("fp32", 16, 997, 997)
    rng = random.Random(5)
    in_order = turn.reduce(0, list(range(16)))
    for _ in range(5):
        assert turn.reduce(0, rng.sample(range(16), 16)) == in_order
    backwards = Round(turn.grid, turn.weights[::-1], turn.xs[::-1])
    assert backwards.reduce(0, list(range(16)))[0] != in_order[0], "the data must be able to show a wrong order"


@each_codec
@pytest.mark.parametrize("present", [[0], [1], [0, 2], [1, 3, 4], [4, 0]])
def test_weights_of_those_present_are_renormalised(codec: str, present: list[int]) -> None:
    turn = make_round(codec, 5, 37, 10, seed=1)
    turn.assert_close(sorted(present))
    fewer = Round(turn.grid, [turn.weights[i] for i in sorted(present)], [turn.xs[i] for i in sorted(present)])
    for chunk in range(turn.grid.n_chunks):
        payload, included = turn.reduce(chunk, present)
        assert included == tuple(sorted(present))
        assert payload == fewer.reduce(chunk, list(range(len(present))))[0], "as if the others had never been"


def test_what_is_missing_and_what_is_held() -> None:
    turn = make_round("fp16", 3, 10, 4)
    reducer = ChunkReducer(turn.grid, 2, roster_of(turn.weights))
    assert (reducer.missing(), reducer.held_bytes) == ((0, 1, 2), 0)
    assert reducer.offer(1, turn.payload(1, 2)) is None
    assert (reducer.missing(), reducer.held_bytes) == ((0, 2), 6)
    assert reducer.offer(0, turn.payload(0, 2)) is None
    assert reducer.offer(2, turn.payload(2, 2)) is None
    assert (reducer.missing(), reducer.held_bytes) == ((), 18)
    reducer.close()
    assert reducer.held_bytes == 0


def test_nobody_contributed() -> None:
    grid = Grid(5, 5, "bf16")
    for roster in ((), roster_of([1.0, 2.0])):
        assert ChunkReducer(grid, 0, roster).close() == (b"", ())
    assert ChunkReducer(grid, 0, ()).missing() == ()


def test_only_contributions_without_weight_are_as_none() -> None:
    turn = Round(Grid(4, 4, "fp32"), [0.0, 7.0], [torch.ones(4), torch.ones(4)])
    assert turn.reduce(0, [0]) == (b"", ())


def test_a_contribution_without_weight_changes_nothing_beside_one_with() -> None:
    turn = Round(Grid(4, 4, "fp32"), [0.0, 7.0], [torch.full((4,), 1e30), torch.full((4,), 0.3)])
    payload, included = turn.reduce(0, [0, 1])
    assert (payload, included) == (turn.payload(1, 0), (0, 1))


# ------------------------------------------------------------------ refusal


@each_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_contributions_are_refused(codec: str, bad: float) -> None:
    turn = make_round(codec, 3, 33, 33)
    turn.xs[1][17] = bad
    reducer = ChunkReducer(turn.grid, 0, roster_of(turn.weights))
    answers = [reducer.offer(i, turn.payload(i, 0)) for i in range(3)]
    assert reducer.missing() == (), "nothing to wait for"
    if turn.grid.coder.sum_tells:
        assert answers == [None, None, None], "the sum will tell"
    else:
        assert answers == [None, "refused: not finite", None]
        assert reducer.held_bytes == 2 * turn.grid.wire_bytes(0)
    payload, included = reducer.close()
    assert reducer.refused == {1: "refused: not finite"}
    assert (payload, included) == turn.reduce(0, [0, 2])


@each_codec
@pytest.mark.parametrize("weights", [[7.0, 7.0, 7.0], [3.0, 0.0, 5.0]], ids=["equal", "unequal"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_of_contributions_that_are_not_finite_none_is_in_the_mean(codec: str, weights: list[float], bad: float) -> None:
    """Also where infinities of both signs meet, where one has no weight, and where another is beyond the wire type."""
    turn = make_round(codec, 3, 40, 40)
    turn.weights = weights
    turn.xs[0][3] = FP32_MAX
    turn.xs[1][[0, 39]] = bad
    turn.xs[2][0] = -bad
    reducer = ChunkReducer(turn.grid, 0, roster_of(weights))
    for i in (2, 1, 0):
        reducer.offer(i, turn.payload(i, 0))
    payload, included = reducer.close()
    assert (payload, included) == turn.reduce(0, [0])
    assert reducer.refused == {1: "refused: not finite", 2: "refused: not finite"}


@each_codec
def test_where_no_contribution_is_finite_there_is_no_mean(codec: str) -> None:
    turn = make_round(codec, 2, 8, 8)
    reducer = ChunkReducer(turn.grid, 0, roster_of(turn.weights))
    for i in range(2):
        turn.xs[i][i] = math.nan
        reducer.offer(i, turn.payload(i, 0))
    assert reducer.close() == (b"", ())
    assert reducer.refused == {0: "refused: not finite", 1: "refused: not finite"}


@each_codec
def test_of_very_many_contributions_each_is_looked_at(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounding adds to their sum could be more than the wire type rounds away."""
    turn = make_round(codec, 3, 40, 40)
    usual = turn.reduce(0, [0, 1, 2])
    asked: list[int] = []
    coder = type(turn.grid.coder)
    looks = coder.finite

    def finite(self: Codec, payload: Payload, numel: int) -> bool:
        asked.append(numel)
        return looks(self, payload, numel)

    monkeypatch.setattr(coder, "finite", finite)
    monkeypatch.setattr(reducer_module, "SUM_TELLS_PARTS_MAX", 3)
    assert turn.reduce(0, [0, 1, 2]) == usual
    assert len(asked) == 3


@pytest.mark.parametrize("difference", [-4, -1, 1, 4])
def test_a_wrong_size_is_refused_for_good(difference: int) -> None:
    turn = make_round("fp32", 2, 6, 6)
    reducer = ChunkReducer(turn.grid, 0, roster_of(turn.weights))
    assert reducer.offer(0, bytes(24 + difference)) == "wrong size"
    assert reducer.offer(0, turn.payload(0, 0)) == "wrong size"
    assert reducer.refused == {0: "wrong size"}
    assert reducer.missing() == (1,)
    assert reducer.close() == (b"", ())


def test_the_payload_of_another_chunk_has_the_wrong_size() -> None:
    turn = make_round("fp16", 1, 10, 4)
    reducer = ChunkReducer(turn.grid, 2, roster_of(turn.weights))
    assert reducer.offer(0, turn.payload(0, 0)) == "wrong size"


def test_a_duplicate_does_not_replace_the_first() -> None:
    turn = make_round("fp32", 2, 6, 6)
    reducer = ChunkReducer(turn.grid, 0, roster_of(turn.weights))
    assert reducer.offer(0, turn.payload(0, 0)) is None
    assert reducer.offer(0, turn.payload(1, 0)) == "duplicate"
    assert reducer.refused == {}
    assert reducer.close() == turn.reduce(0, [0])


def test_an_owner_closes_once() -> None:
    turn = make_round("fp32", 2, 6, 6)
    reducer = ChunkReducer(turn.grid, 0, roster_of(turn.weights))
    reducer.offer(0, turn.payload(0, 0))
    reducer.close()
    assert reducer.offer(1, turn.payload(1, 0)) == "late"
    assert reducer.held_bytes == 0
    with pytest.raises(RuntimeError, match="closed already"):
        reducer.close()


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_outside_the_roster_is_our_error(index: int) -> None:
    with pytest.raises(IndexError, match="roster of 2"):
        ChunkReducer(Grid(1, 1, "fp32"), 0, roster_of([1.0, 1.0])).offer(index, bytes(4))


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, WEIGHT_MAX * 2])
def test_weights_that_cannot_work(weight: float) -> None:
    with pytest.raises(ValueError, match="peer1"):
        ChunkReducer(Grid(1, 1, "fp32"), 0, roster_of([1.0, weight]))


def test_a_result_of_another_length_is_their_error() -> None:
    with pytest.raises(ProtocolError):
        decoded(Grid(6, 4, "fp16"), 1, bytes(8))


# ------------------------------------------------------------------ memory


class Frame(bytearray):
    """A payload whose end can be watched."""


@each_codec
def test_payloads_are_kept_as_they_came_and_freed_on_closing(codec: str) -> None:
    turn = make_round(codec, 2, 64, 64)
    reducer = ChunkReducer(turn.grid, 0, roster_of(turn.weights))
    frames = [Frame(turn.payload(i, 0)) for i in range(2)]
    watched = [weakref.ref(frame) for frame in frames]
    for i in range(2):
        reducer.offer(i, memoryview(frames[i]))
    frames.clear()
    gc.collect()
    assert all(ref() is not None for ref in watched)
    reducer.close()
    gc.collect()
    assert all(ref() is None for ref in watched)


@each_codec
def test_a_used_workspace_leaves_no_trace(codec: str) -> None:
    turn = make_round(codec, 3, 25, 10)
    workspace = Workspace(turn.grid)
    workspace.acc.fill_(math.nan)
    workspace.scratch.fill_(math.nan)
    for chunk in (0, 2, 1):  # the last chunk is shorter
        assert turn.reduce(chunk, [0, 1, 2], workspace) == turn.reduce(chunk, [0, 1, 2])


def test_what_everybody_decodes_is_what_the_owner_sent() -> None:
    turn = make_round("fp16", 3, 25, 10)
    payload, _ = turn.reduce(1, [0, 1, 2])
    mean = decoded(turn.grid, 1, memoryview(payload))
    assert get_codec("fp16").encode(mean) == payload
