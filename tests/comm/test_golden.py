"""The very bits of payloads and means: a change of any of them would part a run of old and new peers."""

from __future__ import annotations

import pytest
import torch
from blake3 import blake3

from dlc.comm.codecs import get_codec
from dlc.comm.entries import Part
from dlc.comm.exchange import result_hash
from dlc.comm.grid import Grid
from dlc.comm.ids import Ballot, Voter
from dlc.comm.messages import ChunkHeader, Excluded, Result
from dlc.comm.reducer import ChunkReducer, Workspace

ROSTER = tuple(Part(Voter(f"peer{i}", 1 << 32), weight, 0) for i, weight in enumerate((3.0, 1.0, 2.0)))
NUMEL, CHUNK = 1000, 300


def vector(seed: int) -> torch.Tensor:
    """Fractions without rounding, from -8 to 8, with zeros of both signs, small ones, and some beyond 65504."""
    count = torch.arange(NUMEL, dtype=torch.int64)
    x = ((count * 2654435761 + seed * 40503) % (1 << 24)).to(torch.float32).div_(1 << 20).sub_(8.0)
    x[seed::97] = 7e4 * (seed - 1)
    x[seed + 1 :: 89] = -0.0
    x[seed + 2 :: 83] = 3e-6
    return x


@pytest.mark.parametrize(
    ("codec", "norms", "digest"),
    [
        ("fp32", (), "f80c0b9de0519ffd6da9e19d573b95e9"),
        ("fp32", (1.0, 2.0, 4.0), "fe0e8ff6562fecc909a2eefb722128cb"),
        ("fp16", (), "d16dad253fd79480f3c6a0f3884283fb"),
        ("fp16", (1.0, 2.0, 4.0), "27ac44a4e848dd885bc5408b72688f17"),
        ("bf16", (), "a311ef61d7a366a7a1b25678647ae1b9"),
        ("bf16", (1.0, 2.0, 4.0), "3e890c3ce612a276d8098b0f95db1daa"),
        ("int8", (), "b05964bfd86bbaa10a0220def701658b"),
        ("int8", (1.0, 2.0, 4.0), "af3e1044b7b19ee477be303be60d2285"),
        ("int4", (), "3f924cf9305f35e604346947e4e4550a"),
        ("int4", (1.0, 2.0, 4.0), "6684e715083c6c87976bb36d647439ad"),
    ],
)
def test_payloads_means_and_what_is_decoded_keep_their_bits(codec: str, norms: tuple[float, ...], digest: str) -> None:
    grid, workspace, hasher = Grid(NUMEL, CHUNK, codec), Workspace(Grid(NUMEL, CHUNK, codec)), blake3()
    for chunk in range(grid.n_chunks):
        start, stop = grid.span(chunk)
        reducer = ChunkReducer(grid, chunk, ROSTER, norms)
        for i in (2, 0, 1):
            payload = get_codec(codec).encode(vector(i)[start:stop])
            hasher.update(payload)
            assert reducer.offer(i, payload) is None
        mean, _ = reducer.close(workspace)
        hasher.update(mean)
        hasher.update(get_codec(codec).decode(mean, stop - start).numpy().tobytes())
    assert hasher.hexdigest(16) == digest


def test_the_identity_of_a_result() -> None:
    first, _, third = ROSTER
    header = ChunkHeader(
        bytes(32), 3, b"\1" * 32, Ballot(2, first.voter), third.voter, (first, third), (Excluded(third.voter, "late"),)
    )
    payload = bytes(range(256))
    assert result_hash(Result(header, payload)).hex() == RESULT
    assert result_hash(Result(header, memoryview(payload))).hex() == RESULT


RESULT = "4246a53a33b5bc337ee566e2609b9da654fac3759d82dee02ba152fd69d80595"
