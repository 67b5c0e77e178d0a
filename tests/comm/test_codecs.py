"""Wire formats: exact sizes, stated rounding, fp16's power of two, clamping, reading frames where they lie.

What only int8 and int4 do is in test_blockcodecs.py.
"""

from __future__ import annotations

import gc
import math
import struct
import warnings
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlc import runspec
from dlc.comm import castcodecs
from dlc.comm.castcodecs import EXPONENT_MAX, EXPONENT_MIN, CastCodec, HalfCodec
from dlc.comm.codecbase import all_finite
from dlc.comm.codecs import CODECS, Codec, get_codec
from dlc.errors import ConfigError, ProtocolError

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
each_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
each_cast = pytest.mark.parametrize("codec", [get_codec(name) for name in DTYPES], ids=DTYPES.keys())
any_fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = st.lists(any_fp32, min_size=1, max_size=40)


def vector(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_the_names_of_the_codecs() -> None:
    assert set(CODECS) == {*DTYPES, "int8", "int4", "topk"} == set(runspec.CODECS)
    for name in CODECS:
        assert get_codec(name).name == name
        assert get_codec(name) is get_codec(name)


def test_an_unknown_codec_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="'fp8'.*fp32, fp16, bf16"):
        get_codec("fp8")


def test_a_big_endian_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(ConfigError, match="little-endian"):
        get_codec("fp32")


@each_cast
@pytest.mark.parametrize("numel", [1, 2, 7, 997])
def test_size_is_what_wire_bytes_says(codec: Codec, numel: int) -> None:
    width, more = {"fp32": (4, 0), "fp16": (2, 2), "bf16": (2, 0)}[codec.name]
    payload = codec.encode(torch.randn(numel))
    assert payload.readonly
    assert len(payload) == codec.wire_bytes(numel) == width * numel + more


@each_codec
def test_no_payload_has_less_than_one_element(codec: Codec) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        codec.wire_bytes(0)
    with pytest.raises(ValueError, match="at least 1"):
        codec.encode(torch.empty(0))


def test_bytes_on_the_wire_are_little_endian() -> None:
    x = vector([1.0, -2.5, 0.15625])
    assert get_codec("fp32").encode(x) == struct.pack("<3f", 1.0, -2.5, 0.15625)
    assert get_codec("fp16").encode(x) == struct.pack("<3eh", 1.0, -2.5, 0.15625, 0)
    assert get_codec("fp16").encode(x * 2.0**-30) == struct.pack("<3eh", 8192.0, -20480.0, 1280.0, -43)
    assert get_codec("bf16").encode(x) == b"".join(struct.pack("<f", v)[2:] for v in (1.0, -2.5, 0.15625))


@each_cast
@given(values=vectors)
def test_finite_stays_finite_and_as_near_as_the_type_allows(codec: Codec, values: list[float]) -> None:
    x = vector(values)
    info = torch.finfo(DTYPES[codec.name])
    payload = codec.encode(x)
    y = codec.decode(payload, x.numel())
    assert y.dtype is torch.float32
    assert codec.finite(payload, x.numel())
    greatest, least = info.max, info.smallest_normal
    if codec.name == "fp16":
        a = float(x.abs().max())
        greatest = 65504.0 * 2.0**112
        least = 6.1e-5 if 1.0 <= a <= 65504.0 else max(a * 2.0**-28, 2.0**-86 * 2.0 / info.eps)
    target = x.double().clamp(-greatest, greatest)
    bound = target.abs() * info.eps / 2 + least * info.eps / 2
    assert bool(((y.double() - target).abs() <= bound).all())
    assert torch.equal(torch.signbit(y), torch.signbit(x)), "also of zero"


def test_fp32_keeps_every_bit() -> None:
    bits = torch.tensor([0, 1, -1 << 31, 0x7F7FFFFF, 0x3F800001], dtype=torch.int32)
    codec = get_codec("fp32")
    assert torch.equal(codec.decode(codec.encode(bits.view(torch.float32)), 5).view(torch.int32), bits)


@each_cast
@given(values=vectors)
def test_encoding_what_was_decoded_changes_nothing(codec: Codec, values: list[float]) -> None:
    payload = codec.encode(vector(values))
    assert codec.encode(codec.decode(payload, len(values))) == payload


@pytest.mark.parametrize(("name", "limit", "one"), [("fp16", 65504.0 * 2.0**112, 0.0), ("bf16", 3.3895314e38, 1.0)])
def test_overflow_is_clamped(name: str, limit: float, one: float) -> None:
    codec, largest = get_codec(name), torch.finfo(torch.float32).max
    x = vector([largest, -largest, limit, -limit, 1.0])
    payload = codec.encode(x)
    assert codec.finite(payload, 5)
    assert codec.decode(payload, 5).tolist() == vector([limit, -limit, limit, -limit, one]).tolist()


@pytest.mark.parametrize(
    ("greatest", "s"),
    [
        (0.0, 0),
        (1e-45, 0),
        (2.0**-87, 0),
        (2.0**-86, -100),
        (2.0**-86 * (2 - 2.0**-11), -99),  # it is rounded up
        (6e-8, -38),
        (2.0**-14 * (1 - 2.0**-11), -29),
        (2.0**-14 * (1 - 2.0**-12 - 2.0**-24), -29),  # fp16 as it is would round it up
        (2.0**-14 * (1 - 2.0**-12), -28),
        (2.0**-14, -28),
        (0.25, -16),
        (1 - 2.0**-11, -15),
        (1 - 2.0**-12, 0),
        (1.0, 0),
        (65504.0, 0),
        (65519.9, 0),
        (65520.0, 2),
        (1e5, 2),
        (3.3e38, 113),
        (3.4028234e38, 113),
    ],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_power_of_two_of_a_chunk_of_fp16(greatest: float, s: int, sign: float) -> None:
    x = sign * greatest * vector([2.0**-20, -1.0 / 3.0, 1.0, 0.0])
    payload = get_codec("fp16").encode(x)
    h = struct.unpack("<4eh", payload)
    assert h[4] == s
    assert not s or 2.0**14 <= max(map(abs, h[:4])) < 2.0**15
    assert get_codec("fp16").finite(payload, 4)
    out = torch.zeros((1, len(payload)), dtype=torch.uint8)
    castcodecs.write_rows(x[None], out)
    assert bytes(out[0].tolist()) == payload


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_a_device_that_is_not_waited_for_writes_the_same_fp16(values: list[float]) -> None:
    """NaN has many forms, which a conversion need not keep."""
    x = vector(values)
    out = torch.zeros((1, 2 * len(values) + 2), dtype=torch.uint8)
    castcodecs.write_rows(x[None], out)
    mine, theirs = (bytearray(payload) for payload in (get_codec("fp16").encode(x), out[0].tolist()))
    for at in torch.isnan(x).nonzero()[:, 0].tolist():
        mine[2 * at : 2 * at + 2] = theirs[2 * at : 2 * at + 2] = b"\0\x7e"
    assert mine == theirs


def test_fp16_keeps_what_is_small_beside_nothing_great() -> None:
    codec, x = get_codec("fp16"), torch.randn(5000, generator=torch.Generator().manual_seed(0))
    for size in (1e-9, 1e-20, 1e7, 1e30):
        y = codec.decode(codec.encode(x * size), 5000) / size
        torch.testing.assert_close(y, x, rtol=2.0**-11, atol=2.0**-37)


@pytest.mark.parametrize(
    ("halves", "s"),
    [
        ((0.5, 0.0), 0),  # to be multiplied by 2^15
        ((6e-8, 0.0), 0),
        ((16376.0, 0.0), -20),
        ((32768.0, 0.0), 20),
        ((0.0, 0.0), 1),
        ((20000.0, 0.0), EXPONENT_MIN - 1),
        ((20000.0, 0.0), EXPONENT_MAX + 1),
        ((20000.0, 0.0), 32767),
        ((20000.0, 0.0), -32768),
        ((20000.0, math.inf), 3),
        ((20000.0, math.nan), 3),
    ],
)
def test_what_fp16_never_writes_is_refused(halves: tuple[float, float], s: int) -> None:
    codec, payload = HalfCodec(), struct.pack("<2eh", *halves, s)
    assert not codec.finite(payload, 2)
    acc, sound = torch.empty(2), codec.encode(vector([1.0, 2.0]))
    if not EXPONENT_MIN <= s <= EXPONENT_MAX:
        assert codec.decode(payload, 2).isnan().all()
        assert codec.combine_usual([(sound, 0.5), (payload, 0.5)], 1.0, acc, torch.empty(2)) is None


@given(values=vectors, s=st.integers(-60, 60), weight=st.floats(0, 2.0**60, width=32))
def test_a_power_of_two_changes_nothing_of_a_mean_of_fp16(values: list[float], s: int, weight: float) -> None:
    """As where each step is made for itself, on both sides of where they are one."""
    codec = HalfCodec()
    x = vector(values).clamp(-1e18, 1e18)
    payload = codec.encode(x * 2.0**s)
    out, n = torch.empty(len(values)), len(values)
    codec.scaled(out, payload, weight)
    assert torch.equal(out, codec.decode(payload, n) * weight)


@each_cast
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("numel", [1, 3, 1031])
def test_non_finite_stays_non_finite_wherever_it_stands(codec: Codec, bad: float, numel: int) -> None:
    for position in {0, numel // 2, numel - 1}:
        x = torch.full((numel,), 1e6)  # beyond fp16: the clamped path, too
        x[position] = bad
        payload = codec.encode(x)
        assert not codec.finite(payload, numel)
        y = codec.decode(payload, numel)
        assert math.isnan(y[position]) if math.isnan(bad) else y[position] == bad
        assert bool(torch.isfinite(y).sum() == numel - 1), "its neighbours are clamped as ever"


@each_codec
def test_scratch_does_not_change_the_bytes(codec: Codec) -> None:
    x = torch.randn(513) * 1e5
    before = x.clone()
    assert codec.encode(x, torch.full((600,), math.nan)) == codec.encode(x)
    assert torch.equal(x, before)


@each_codec
@pytest.mark.parametrize("numel", [1, 5, 255, 256, 513, 1031])
def test_rows_are_encoded_to_the_same_bytes_one_by_one(codec: Codec, numel: int) -> None:
    """Each row has another fate: usual numbers, too great ones, too small ones, none at all."""
    x = torch.randn(6, numel, generator=torch.Generator().manual_seed(numel))
    for row, factor in enumerate((1e-4, 1e6, 1e38, 1e-38, 1.0, 0.0)):
        x[row] *= factor
    x[4, numel // 2] = math.inf
    x[5, -1] = math.nan
    for rows in (x, x[:1], x[2:4]):
        out = torch.zeros((len(rows), codec.wire_bytes(numel)), dtype=torch.uint8)
        before = rows.clone()
        codec.encode_rows(rows, out)
        assert [bytes(payload.tolist()) for payload in out] == [bytes(codec.encode(row)) for row in rows]
        assert torch.equal(rows.view(torch.int32), before.view(torch.int32))


@each_codec
def test_rows_of_another_form_are_our_error(codec: Codec) -> None:
    x, out = torch.zeros(2, 6), torch.zeros((2, codec.wire_bytes(6)), dtype=torch.uint8)
    for rows, payloads in (
        (x[0], out),
        (x.double(), out),
        (x.t().contiguous().t(), out),
        (x, out[:1]),
        (x, out[:, :-1]),
        (x, out.to("meta")),
        (x, out.view(torch.int8)),
    ):
        with pytest.raises(ValueError, match="rows are contiguous fp32"):
            codec.encode_rows(rows, payloads)


@each_codec
@pytest.mark.parametrize("difference", [-1, 1, 4])
def test_a_payload_of_another_length_is_their_error(codec: Codec, difference: int) -> None:
    payload = bytes(codec.wire_bytes(5) + difference)
    acc = torch.ones(5)
    with pytest.raises(ProtocolError, match=f"5 elements of {codec.name}"):
        codec.decode(payload, 5)
    with pytest.raises(ProtocolError):
        codec.finite(payload, 5)
    with pytest.raises(ProtocolError):
        codec.accumulate(acc, payload, 1.0, torch.empty(5))
    assert acc.tolist() == [1.0] * 5


@pytest.mark.parametrize(
    "x",
    [torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2), torch.zeros(8)[::2], torch.zeros(4, device="meta")],
    ids=["fp64", "matrix", "stride", "device"],
)
def test_other_tensors_are_our_error(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous fp32"):
        get_codec("fp16").encode(x)


def test_a_tensor_with_gradient_is_encoded() -> None:
    x = torch.ones(3, requires_grad=True)
    for codec in CODECS.values():
        kept = [1.0, 0.0, 0.0] if codec.sparse else [1.0] * 3
        assert sorted(codec.decode(codec.encode(x), 3).tolist(), reverse=True) == kept


@each_codec
def test_every_kind_of_buffer_is_read_without_a_warning_and_never_written(codec: Codec) -> None:
    x = torch.randn(101)
    payload = codec.encode(x)
    odd = bytearray(b"\0" + payload)  # a frame need not be aligned
    buffers = [payload, bytearray(payload), memoryview(payload), memoryview(bytearray(payload)), memoryview(odd)[1:]]
    expected = codec.decode(payload, 101)
    torch.set_warn_always(True)  # else torch warns once per process, and the test would depend on its neighbours
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for buffer in buffers:
                acc, scratch = torch.zeros(101), torch.empty(101)
                codec.accumulate(acc, buffer, 1.0, scratch)
                assert torch.equal(acc, expected)
                assert codec.finite(buffer, 101)
                codec.decode(buffer, 101).fill_(7.0)  # memory of its own
                assert bytes(buffer) == payload
    finally:
        torch.set_warn_always(False)


@each_codec
def test_decoding_into_memory_that_is_there_gives_the_same(codec: Codec) -> None:
    payload = codec.encode(torch.randn(513) * 1e3)
    out = torch.full((600,), 7.0)
    assert codec.decode(payload, 513, out[:513]).data_ptr() == out.data_ptr()
    assert torch.equal(out[:513], codec.decode(payload, 513)) and out[513:].eq(7.0).all()


@each_codec
@pytest.mark.parametrize("weight", [0.0, 0.25, 0.3])
def test_the_first_term_of_a_sum_is_as_if_added_to_nothing(codec: Codec, weight: float) -> None:
    """-0 is nothing: the sign of a zero stays."""
    payload = codec.encode(vector([0.0, -0.0, 1.0, -2.5, 3e-6, -6e4, 1e-40]))
    weight = float(np.float32(weight))
    summed, first = torch.full((7,), -0.0), torch.full((7,), math.nan)
    codec.accumulate(summed, payload, weight, torch.empty(7))
    codec.scaled(first, payload, weight)
    assert torch.equal(first.view(torch.int32), summed.view(torch.int32))


@each_codec
@pytest.mark.parametrize(("size", "weight"), [(1.0, 0.3), (2.0**-84, 0.3 * 2.0**-30)])
def test_a_term_is_rounded_before_it_is_added(codec: Codec, size: float, weight: float) -> None:
    """In one step, as many processors can, it would be another sum; and so where the power of two of fp16 times the
    weight is too small a number to have all bits."""
    acc, x = torch.randn(2, 300, generator=torch.Generator().manual_seed(4))
    acc, payload, factor = acc * (size * weight), codec.encode(x * size), np.float32(weight)
    stepwise = acc.numpy() + codec.decode(payload, 300).numpy() * factor
    codec.accumulate(acc, payload, float(factor), torch.empty(300))
    assert np.array_equal(acc.numpy(), stepwise)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_numbers_of_16_bits_are_told_finite_or_not(dtype: torch.dtype) -> None:
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    finite = torch.isfinite(numbers)
    assert all_finite(numbers[finite])
    assert not any(all_finite(numbers[i : i + 1]) for i in (~finite).nonzero()[:, 0].tolist())
    assert not all_finite(numbers)


def test_numbers_whose_sum_overflows_are_finite() -> None:
    x = torch.full((9,), torch.finfo(torch.float32).max)
    assert all_finite(x) and all_finite(-x)
    for bad in (math.inf, -math.inf, math.nan):
        x[4] = bad
        assert not all_finite(x) and not all_finite(x[4:5])
    assert not all_finite(vector([math.inf, -math.inf]))


class Watched(bytearray):
    """A buffer whose end can be watched."""


@pytest.mark.parametrize("readonly", [True, False])
def test_a_view_keeps_its_payload_alive(readonly: bool) -> None:
    codec = CastCodec("bf16", torch.bfloat16)
    frame = Watched(codec.encode(torch.ones(8)))
    ref = weakref.ref(frame)
    buffer = memoryview(frame).toreadonly() if readonly else memoryview(frame)
    view = codec._view(buffer, 8)
    del frame, buffer
    gc.collect()
    assert ref() is not None
    assert view.tolist() == [1.0] * 8
    del view
    gc.collect()
    assert ref() is None


@each_codec
@given(values=vectors, start=any_fp32, weight=st.floats(0, 1, width=32))
def test_accumulate_rounds_product_and_sum_separately(
    codec: Codec, values: list[float], start: float, weight: float
) -> None:
    payload = codec.encode(vector(values))
    acc, scratch = torch.full((len(values),), start), torch.full((len(values) + 3,), math.nan)
    x = codec.decode(payload, len(values)).numpy()
    with np.errstate(over="ignore"):
        expected = np.float32(start) + np.float32(weight) * x  # numpy has no fused multiply-add
    codec.accumulate(acc, payload, weight, scratch)
    assert acc.numpy().tobytes() == expected.astype("<f4").tobytes()
