"""The benchmark's own judge: what a codec may do to a mean passes, and whatever else was done to it shows."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from dlc.bench.pattern import PIECE_ELEMS, Pattern
from dlc.comm.codecs import get_codec
from dlc.comm.grid import usual_chunk_elems

CODECS = ["fp32", "fp16", "bf16", "int8", "int4"]
LARGE = 5 * PIECE_ELEMS + 77


def coded(vector: Tensor, codec: str) -> Tensor:
    coder, parts = get_codec(codec), vector.split(usual_chunk_elems(vector.numel(), codec))
    return torch.cat([coder.decode(coder.encode(part), part.numel()) for part in parts])


def filled(pattern: Pattern, numel: int, peers: list[str]) -> list[Tensor]:
    vectors = [torch.empty(numel) for _ in peers]
    for vector, peer in zip(vectors, peers, strict=True):
        pattern.fill(vector, peer)
    return vectors


def mean_of(vectors: list[Tensor], codec: str) -> Tensor:
    return coded(torch.stack([coded(vector, codec) for vector in vectors]).sum(0) / len(vectors), codec)


def names(trial: int, n: int) -> list[str]:
    return [f"{trial}/{i}" for i in range(n)]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("numel", [1, 2, 100, PIECE_ELEMS + 1])
def test_what_the_codec_loses_is_no_fault(codec: str, numel: int) -> None:
    pattern = Pattern(numel, codec)
    for trial in range(40):
        peers = names(trial, (2, 3, 4, 8, 16)[trial % 5])
        assert pattern.wrong(mean_of(filled(pattern, numel, peers), codec), peers) == ""


@pytest.mark.parametrize("codec", CODECS)
def test_any_other_vector_is(codec: str) -> None:
    pattern = Pattern(LARGE, codec)
    for trial in range(4):
        peers = names(trial, 4)
        vectors = filled(pattern, LARGE, peers)
        right = mean_of(vectors, codec)
        noise = 0.3 * torch.randn(LARGE, generator=torch.Generator().manual_seed(trial))
        hole = right.clone()
        hole[: PIECE_ELEMS // 2] = vectors[0][: PIECE_ELEMS // 2]
        spoilt = right.clone()
        spoilt[LARGE // 2] = float("nan")
        for what, mean in {
            "nothing was done": vectors[0],
            "one is lacking": mean_of(vectors[1:], codec),
            "one is in it twice": mean_of([*vectors, vectors[0]], codec),
            "noise": right + noise,
            "half a piece is what it was": hole,
            "a number is none": spoilt,
            "another peer's": mean_of(filled(pattern, LARGE, [*peers[:3], "another"]), codec),
        }.items():
            assert pattern.wrong(mean, peers), what
        assert pattern.wrong(right, peers) == ""


def test_what_is_told_of_a_wrong_mean_is_the_bound_that_it_broke() -> None:
    pattern = Pattern(LARGE, "fp32")
    mean = mean_of(filled(pattern, LARGE, ["a", "b"]), "fp32") * 1.001
    told = re.fullmatch(r".* (\S+) where the codec may lose (\S+)", pattern.wrong(mean, ["a", "b"]))
    assert told is not None and 0 < float(told[2]) < float(told[1])
