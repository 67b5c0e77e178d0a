"""A contribution that is encoded once is, to the exchange, the vector that it was made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dlc.comm.codecs import CODECS
from dlc.comm.encoded import Encoded
from dlc.comm.grid import Grid

CASTS = [name for name, codec in CODECS.items() if not codec.feedback]
EDGES = [0.0, -0.0, 1e-45, -1e-40, 5.96e-8, 2.9e-8, 6.1e-5, 65504.0, -65519.9, 65520.0, 1e30, -3.4e38, 1 / 3]


def parts_of(vector: Tensor, grid: Grid) -> list[Tensor]:
    return [vector[slice(*grid.span(chunk))] for chunk in range(grid.n_chunks)]


def test_the_codecs_without_feedback_are_known() -> None:
    assert sorted(CASTS) == ["bf16", "fp16", "fp32"]


@pytest.mark.parametrize("codec", CASTS)
@pytest.mark.parametrize("chunk_elems", [7, 1000])
@pytest.mark.parametrize("parts", [1, 300, 1000])
def test_each_chunk_encodes_to_the_bytes_that_the_vector_would(codec: str, chunk_elems: int, parts: int) -> None:
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 1e-4
    vector[: len(EDGES)] = torch.tensor(EDGES)
    grid = Grid(1000, chunk_elems, codec)
    wanted = [bytes(grid.coder.encode(part)) for part in parts_of(vector, grid)]
    encoded = Encoded(grid, vector.split(parts))
    vector.fill_(float("nan"))  # what it was made of may change at once
    for _ in range(2):  # a chunk may be asked for again
        for chunk in reversed(range(grid.n_chunks)):
            got = encoded[slice(*grid.span(chunk))]
            assert bytes(grid.coder.encode(got)) == wanted[chunk]
            got.fill_(7.0)  # what was decoded is no part of it
    assert encoded.numel() == 1000 and encoded.clone() is encoded


def test_parts_that_share_memory_are_taken_one_by_one() -> None:
    """As a view of the parameters gives them."""
    grid, shared = Grid(10, 4, "fp32"), torch.zeros(4)
    encoded = Encoded(grid, (shared[: grid.elems(c)].fill_(c + 1.0) for c in range(3)))
    assert [encoded[slice(*grid.span(c))].tolist() for c in range(3)] == [[1.0] * 4, [2.0] * 4, [3.0] * 2]


@pytest.mark.parametrize("codec", ["int8", "int4", "topk"])
def test_what_may_not_encode_to_the_same_again_is_refused(codec: str) -> None:
    with pytest.raises(ValueError, match="other bytes"):
        Encoded(Grid(64, 64, codec), [torch.zeros(64)])


@pytest.mark.parametrize("sizes", [[], [4, 4], [4, 4, 1], [4, 4, 2, 2], [11]])
def test_parts_of_another_length_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="not 10"):
        Encoded(Grid(10, 4, "fp16"), [torch.zeros(size) for size in sizes])
