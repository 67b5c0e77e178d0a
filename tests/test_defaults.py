"""What PyTorch's defaults are in the process or in the caller's thread changes no mean, and stops no peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, init_device_mesh

import dlc
from dlc.comm.castcodecs import write_rows
from dlc.comm.codecs import get_codec
from dlc.comm.sketch import sketch
from dlc.errors import UsageError
from dlc.peer import Peer
from dlc.sim.toy import ToyState
from tests.swarm import JOIN_S, ROUND_S, swarm, together

CODECS = ("fp32", "fp16", "bf16", "int8", "int4")


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Call it to change the default; put back afterwards."""
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(before)


def vectors() -> list[Tensor]:
    return [torch.randn(1000, generator=torch.Generator().manual_seed(i), dtype=torch.float32) for i in range(2)]


def test_the_default_dtype_is_of_no_account_to_means_and_states(default_dtype: Callable[[], None]) -> None:
    """Means were decoded into bf16 buffers: rounded in silence; with float64 every owner's driver stopped."""
    with swarm(2) as peers:

        def means() -> list[list[Tensor]]:
            made = []
            for codec in CODECS:
                given = vectors()
                together(peers, lambda p, i, g=given, c=codec: p.all_reduce(g[i], name=c, codec=c, timeout_s=ROUND_S))
                made.append(given)
            return made

        before = means()
        default_dtype()
        for was, now in zip(before, means(), strict=True):
            for a, b in zip(was, now, strict=True):
                assert torch.equal(a, b)
        states = [ToyState(1000, 0) for _ in peers]
        with ThreadPoolExecutor(2) as pool:
            opened = partial(Peer.open, channel="train", codec="fp32", chunk_elems=256, timeout_s=JOIN_S)
            list(pool.map(lambda p, s: opened(p, state=s), peers, states))
        start = states[0].theta.clone()
        pending = [p.contribute("train", v, weight=1.0) for p, v in zip(peers, vectors(), strict=True)]
        assert all(p.wait(ROUND_S) is not None for p in pending)
        theta = peers[0]._ask(lambda node, now: states[0].theta.clone())
        torch.testing.assert_close(theta, start + sum(vectors()) / 2, rtol=0, atol=1e-6)


@pytest.mark.parametrize("codec", ["int8", "int4", "topk"])
def test_codecs_work_in_fp32_whatever_the_default_is(codec: str, default_dtype: Callable[[], None]) -> None:
    coder, x = get_codec(codec), torch.cat(vectors() * 3)
    payload = coder.encode(x)
    plain = coder.decode(payload, x.numel())
    default_dtype()
    again = coder.encode(x)
    assert bytes(again) == bytes(payload)
    decoded = coder.decode(again, x.numel())
    assert decoded.dtype == torch.float32 and torch.equal(decoded, plain)


def test_a_device_writes_fp16_whatever_the_default_is(default_dtype: Callable[[], None]) -> None:
    """Where the limit of the greatest numbers was one of bf16, others refused the chunk as not finite."""
    x = torch.tensor([[3.4028234e38, 1.0], [-3.4028234e38, 3.3e38], [70000.0, -65504.0]], dtype=torch.float32)
    payloads = [bytes(get_codec("fp16").encode(row)) for row in x]
    default_dtype()
    out = torch.empty((3, 6), dtype=torch.uint8)
    write_rows(x, out)
    assert [bytes(row.tolist()) for row in out] == payloads


def test_a_default_device_of_the_caller_is_of_no_account() -> None:
    """As of a program that sets "cuda": its CPU tensors were refused, and `barrier` with them."""
    with swarm(2) as peers:

        def act(peer: Peer, i: int) -> dlc.RoundReport:
            with torch.device("meta"):
                peer.barrier(timeout_s=ROUND_S)
                return peer.all_reduce([given[i][:500], given[i][500:]], codec="fp32", timeout_s=ROUND_S)

        given = vectors()
        together(peers, act)
        torch.testing.assert_close(given[0], sum(vectors()) / 2, rtol=0, atol=1e-6)

        def train(peer: Peer, i: int) -> dlc.RoundReport | None:
            model = torch.nn.Linear(4, 4)
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.ones(2, 4)
            with torch.device("meta"):
                diloco = dlc.DiLoCo(model, inner, peer=peer, sync_every=1, timeout_s=ROUND_S)
                model(x).sum().backward()
                return diloco.step()

        reports = together(peers, train)  # type: ignore[arg-type]
        assert all(report is not None and len(report.contributors) == 2 for report in reports)


def test_gossip_under_a_default_device_of_the_caller() -> None:
    """The signs of its sketch were drawn there: a generator of the CPU cannot."""
    (given, _) = vectors()
    expected = sketch(given)
    with Peer.join() as peer, torch.device("meta"):
        assert dlc.Gossip(peer, "walk", codec="fp32").step(given, wait_s=0.0).t == 1
        assert torch.equal(sketch(given), expected)
    torch.testing.assert_close(given, vectors()[0])


def test_calls_under_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is in no such mode and could not write what was made in it: it stopped."""
    with swarm(2) as peers:

        def act(peer: Peer, i: int) -> dlc.RoundReport:
            with torch.inference_mode():
                peer.barrier(timeout_s=ROUND_S)
                one, many = vectors()[i].clone(), [vectors()[i][:500].clone(), vectors()[i][500:].clone()]
                assert one.is_inference()
                report = peer.all_reduce(one, codec="fp32", timeout_s=ROUND_S)
                peer.all_reduce(many, codec="fp32", timeout_s=ROUND_S)
                peer.broadcast_state({"x": one}, peers[0].id, timeout_s=ROUND_S)
            means.extend([one, torch.cat(many)])
            return report

        means: list[Tensor] = []
        together(peers, act)
        for mean in means:
            torch.testing.assert_close(mean, sum(vectors()) / 2, rtol=0, atol=1e-6)
        with pytest.raises(UsageError, match="clone"):
            peers[0].all_reduce(means[0])


def test_a_training_that_is_made_under_inference_mode() -> None:
    """Its outer state was made in that, and the first round stopped the drivers of all peers."""
    with swarm(2) as peers:

        def train(peer: Peer, i: int) -> dlc.RoundReport | None:
            model = torch.nn.Linear(4, 4)
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            with torch.inference_mode():
                diloco = dlc.DiLoCo(model, inner, peer=peer, sync_every=1, timeout_s=ROUND_S, patience_s=ROUND_S)
            model(torch.ones(2, 4)).sum().backward()
            diloco.step()
            return diloco.step()

        reports = together(peers, train)  # type: ignore[arg-type]
        assert all(report is not None and report.t == 2 and len(report.contributors) == 2 for report in reports)


def test_a_dtensor_is_refused_by_name() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        part = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (1,)))
        with Peer.join() as peer, pytest.raises(UsageError, match="full_tensor"):
            peer.all_reduce(part)
    finally:
        torch.distributed.destroy_process_group()
