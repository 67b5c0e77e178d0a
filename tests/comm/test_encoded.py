"""A contribution that is encoded once is, to the exchange, the vector that it was made of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dlc.comm.codecs import CODECS
from dlc.comm.encoded import Encoded, part_elems
from dlc.comm.grid import Grid
from dlc.comm.landing import Landing

EDGES = [0.0, -0.0, 1e-45, -1e-40, 5.96e-8, 2.9e-8, 6.1e-5, 65504.0, -65519.9, 65520.0, 1e30, -3.4e38, 1 / 3]


def vector_of(numel: int) -> Tensor:
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(1)) * 1e-4
    vector[: len(EDGES)] = torch.tensor(EDGES)
    return vector


def payloads_of(vector: Tensor, grid: Grid) -> list[bytes]:
    return [bytes(grid.coder.encode(vector[slice(*grid.span(chunk))])) for chunk in range(grid.n_chunks)]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("chunk_elems", "parts"), [(7, 7), (7, 21), (256, 768), (300, 300), (300, 900), (1000, 1000)])
def test_each_chunk_has_the_bytes_that_the_vector_would(codec: str, chunk_elems: int, parts: int) -> None:
    vector, grid = vector_of(1000), Grid(1000, chunk_elems, codec)
    wanted = payloads_of(vector, grid)
    encoded = Encoded(grid, vector.split(parts))
    vector.fill_(float("nan"))  # what it was made of may change at once
    for _ in range(2):  # a chunk may be asked for again
        for chunk in reversed(range(grid.n_chunks)):
            assert bytes(encoded.payload(chunk)) == wanted[chunk]
    with pytest.raises(TypeError, match="read-only"):
        encoded.payload(0)[0] = 7
    with pytest.raises(IndexError):
        encoded.payload(grid.n_chunks)
    assert encoded.numel() == 1000 and encoded.clone() is encoded


def test_parts_that_share_memory_are_taken_one_by_one() -> None:
    """As a view of the parameters gives them."""
    grid, shared = Grid(10, 4, "fp32"), torch.zeros(4)
    encoded = Encoded(grid, (shared[: grid.elems(c)].fill_(c + 1.0) for c in range(3)))
    got = [grid.coder.decode(encoded.payload(c), grid.elems(c)).tolist() for c in range(3)]
    assert got == [[1.0] * 4, [2.0] * 4, [3.0] * 2]


@pytest.mark.parametrize("codec", CODECS)
def test_what_a_device_made_lands_in_its_place(codec: str) -> None:
    """The way of a GPU's payloads, on a host that has none: more parts than buffers, and all longer than the last."""
    grid = Grid(10_000, 300, codec)
    vector, out = vector_of(10_000), torch.zeros(grid.total_wire_bytes, dtype=torch.uint8)
    landing = Landing(torch.device("cpu"), 3 * grid.wire_bytes(0))
    at, encoded = 0, b"".join(payloads_of(vector, grid))
    for size in (3, 1, 3, 3, 2, 1):
        n_bytes = size * grid.wire_bytes(0)

        def encode(there: Tensor, start: int = at) -> None:
            there.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8)[start : start + len(there)])

        landing.take(encode, out[at : at + n_bytes])
        at += n_bytes
    landing.finish()
    assert bytes(out[:at].tolist()) == encoded[:at] and not out[at:].any()


def test_a_device_waits_with_what_follows_until_the_payload_is_made_and_with_that_for_what_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is queued next may overwrite what the payload is made of."""
    said: list[object] = []

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = "own" if isinstance(name, torch.device) else name

        def wait_stream(self, other: Stream) -> None:
            said.append((self.name, "waits for", other.name))

        def record_event(self) -> str:
            said.append("noted")
            return "noted"

        def wait_event(self, event: str) -> None:
            said.append((self.name, "waits for", event))

    class Event:
        def record(self, stream: Stream) -> None:
            said.append("copied")

        def synchronize(self) -> None:
            said.append("here")

    module = SimpleNamespace(
        Stream=Stream, Event=Event, current_stream=lambda _: Stream("usual"), stream=lambda _: contextlib.nullcontext()
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    landing, out = Landing(torch.device("cpu"), 4), torch.zeros(4, dtype=torch.uint8)
    landing.take(lambda there: said.append("encoded"), out)
    landing.finish()
    before, after = ("own", "waits for", "usual"), ("usual", "waits for", "noted")
    assert said == [before, "encoded", "noted", "copied", after, "here"]


def test_parts_are_whole_chunks_of_a_size_that_suits_the_processor() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert part_elems(Grid(10**7, 1 << 14, "fp16"), cpu) == 1 << 18
    assert part_elems(Grid(10**7, 1 << 14, "fp16"), cuda) == 1 << 22
    assert part_elems(Grid(10**6, 1000, "fp16"), cpu) == 262_000
    assert part_elems(Grid(10**7, 1 << 20, "fp16"), cpu) == 1 << 20


@pytest.mark.parametrize("sizes", [[], [4, 4], [4, 4, 1], [4, 4, 2, 2], [12]])
def test_parts_of_another_length_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="not 10"):
        Encoded(Grid(10, 4, "fp16"), [torch.zeros(size) for size in sizes])


def test_a_part_that_begins_within_a_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="element 6, within a chunk of 4"):
        Encoded(Grid(10, 4, "fp16"), [torch.zeros(6), torch.zeros(4)])


def test_without_values_nothing_of_it_is_sent() -> None:
    encoded = Encoded(Grid(10, 4, "fp16"))
    with pytest.raises(RuntimeError, match="no values yet"):
        encoded.payload(0)

    def parts() -> Iterator[Tensor]:
        yield torch.zeros(4)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encoded.fill(parts())
    with pytest.raises(RuntimeError, match="no values yet"):
        encoded.payload(0)
