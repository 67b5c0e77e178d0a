"""The same code on CPU and CUDA: all-reduce of device tensors, DiLoCo on a device model, bf16 autocast inside.

The CUDA cases skip themselves where there is none (`make test-gpu` runs only them).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import dlc
from dlc.comm.codecs import CODECS
from dlc.comm.encoded import DEVICE_PART_ELEMS, Encoded, part_elems
from dlc.comm.grid import Grid
from dlc.runspec import InnerSpec, RunSpec
from dlc.train.data import BlockSource
from dlc.train.loader import Loader
from dlc.train.rng import load_random_state, random_state, seed_peer
from dlc.train.setup import inner_loop_of, model_of
from tests.helpers import benchmark_module
from tests.swarm import ROUND_S, swarm, together

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_all_reduce_of_device_tensors_of_mixed_dtypes(device: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    given = [[torch.full((5, 3), float(i), dtype=d, device=device) for d in dtypes] for i in (1, 3)]
    with swarm(2) as peers:
        together(peers, lambda p, i: p.all_reduce(given[i], timeout_s=ROUND_S))
    for tensors in given:
        assert [(t.dtype, t.device.type) for t in tensors] == [(d, device) for d in dtypes]
        assert all(torch.equal(t.float().cpu(), torch.full((5, 3), 2.0)) for t in tensors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codec", CODECS)
def test_a_vector_encoded_on_its_device_has_the_bytes_of_the_host(codec: str, device: str) -> None:
    """More parts than there are buffers, in memory that is used again at once, the last of them ragged; with elements
    beyond each format, and blocks of almost nothing."""
    numel = 5 * DEVICE_PART_ELEMS + 1031
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-3
    for i, extreme in enumerate((1e6, 3e38, 1e-44, 0.0)):
        vector[i * 10_000_000 // 4 :][:300] *= extreme
    grid = Grid(numel, 1 << 18, codec)
    elems = part_elems(grid, torch.device(device))
    memory = torch.empty(elems, device=device)
    encoded = Encoded(grid, (memory[: len(part)].copy_(part) for part in vector.split(elems)))
    wanted = (grid.coder.encode(vector[slice(*grid.span(chunk))]) for chunk in range(grid.n_chunks))
    assert all(encoded.payload(chunk) == payload for chunk, payload in enumerate(wanted))


@pytest.mark.parametrize("device", DEVICES)
def test_diloco_keeps_a_device_model_in_step_with_the_swarm(device: str) -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 8).to(device)
    with dlc.Peer.join() as peer:
        opt = dlc.DiLoCo(net, torch.optim.AdamW(net.parameters(), lr=1e-2), peer, sync_every=2)
        for step in range(4):
            net(torch.ones(2, 8, device=device)).square().mean().backward()
            report = opt.step()
            opt.zero_grad()
            assert (report is not None) == (step % 2 == 1)
        theta = torch.empty(72)
        peer.pull("train", theta)
    held = torch.cat([p.detach().cpu().flatten() for p in net.parameters()])
    assert torch.equal(held, theta)
    assert all(p.device.type == device for p in net.parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_inner_steps_lower_the_loss_and_use_bf16_on_cuda(device: str) -> None:
    spec = RunSpec()
    model = model_of(spec)
    inner = inner_loop_of(spec, model, torch.device(device))
    seen: list[torch.dtype] = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    batch = BlockSource("stdlib", 32).batch(list(range(8)))
    losses = [inner.train_step([batch], step).loss for step in range(40)]
    assert losses[-1] < losses[0] - 1.0
    assert set(seen) == {torch.bfloat16 if device == "cuda" else torch.float32}
    assert all(p.dtype == torch.float32 for p in model.parameters()), "master weights stay fp32"


@pytest.mark.parametrize("device", DEVICES)
def test_the_random_state_of_a_device_comes_back(device: str) -> None:
    """Dropout draws from it. Another peer has another stream."""
    where, draws = torch.device(device), []
    seed_peer(0, "me")
    saved = random_state(where)
    assert all(state.device.type == "cpu" for state in saved.values()), "it goes into a file"
    for peer in ("me", "another"):
        seed_peer(0, peer)
        draws.append(torch.nn.functional.dropout(torch.ones(64, device=where)).cpu())
    load_random_state(saved, where)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(64, device=where)).cpu(), draws[0])
    assert not torch.equal(*draws)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("fp16", {}),
        ("bf16", {"optimizer": "muon"}),
        ("bf16", {"compile": True}),
        ("bf16", {"checkpointing": True, "accumulate": 2}),
    ],
    ids=["fp16", "muon", "compile", "checkpointing"],
)
def test_every_way_of_an_inner_step_on_cuda_lowers_the_loss_and_survives_a_restart(
    precision: str, options: dict[str, Any]
) -> None:
    spec = RunSpec(precision=precision, inner=InnerSpec(**options))
    device = torch.device("cuda")
    model = model_of(spec)
    inner = inner_loop_of(spec, model, device)
    batches = [BlockSource("stdlib", 32).batch(list(range(8)))] * spec.inner.accumulate
    results = [inner.train_step(batches, step) for step in range(40)]
    assert results[-1].loss < results[0].loss - 1.0
    assert sum(result.applied for result in results) >= 35 and not any(result.diverged for result in results)
    twin = model_of(spec)
    twin.load_state_dict({name: tensor.cpu() for name, tensor in model.state_dict().items()})
    again = inner_loop_of(spec, twin, device)
    again.load({name: tensor.cpu() for name, tensor in inner.tensors().items()})
    assert again.train_step(batches, 40).loss == pytest.approx(inner.train_step(batches, 40).loss, rel=1e-3)
    assert again.train_step(batches, 41).loss == pytest.approx(inner.train_step(batches, 41).loss, rel=1e-2)


@pytest.mark.gpu
def test_adamw_is_one_kernel_on_cuda() -> None:
    spec = RunSpec()
    inner = inner_loop_of(spec, model_of(spec), torch.device("cuda"))
    assert all(group["fused"] for group in inner.optimizer.param_groups)


def test_the_benchmark_of_inner_steps_runs_at_a_small_size(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_inner = benchmark_module("gpu_inner")
    small = ["--cpu-small", "--steps", "2", "--blocks", "2", "--warm", "1", "--batch", "1"]
    assert gpu_inner.main([*small, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (size,) = result["sizes"]
    assert "CPU" in result["what"] and set(size["arms"]) == {"bare", "join", "diloco"} and size["round_s"] > 0
    assert all(arm["tokens_per_s"] > 0 and arm["mfu"] is None for arm in size["arms"].values())
    assert gpu_inner.table(result).count("| tiny, 0.1 M |") == 4


def test_the_benchmark_of_rounds_between_gpus_runs_at_a_small_size(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_allreduce = benchmark_module("gpu_allreduce")
    assert gpu_allreduce.main(["--cpu-small", "--rounds", "1", "--codecs", "fp16,int4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "CPU" in result["device"] and set(result["rounds"]) == {"fp16", "int4"}
    assert all(of["seconds"] >= of["exchange_s"] > 0 for of in result["rounds"].values())
    assert set(result["gb_per_s"]) == {"fp16", "bf16", "int8", "int4"}
    assert all(value > 0 for of in result["gb_per_s"].values() for value in of.values())
    assert gpu_allreduce.table(result).count("| int4 |") == 2


@pytest.mark.parametrize("device", DEVICES)
def test_batches_for_cuda_are_made_in_pinned_memory(device: str) -> None:
    source = BlockSource("stdlib", 32)
    loader = Loader(source, 4, pin=device == "cuda")
    batches = loader.take(range(8), [range(8, 16)])
    loader.close()
    assert [batch.is_pinned() for batch in batches] == [device == "cuda"] * 2
    assert torch.equal(torch.cat(batches), source.batch(range(8)))
