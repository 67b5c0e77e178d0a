"""A site of two processes on the CPU: its steps are those of one process, and it is one peer among others."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import HashStore, PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.utils.logging import enable_progress_bar, is_progress_bar_enabled

from dlc.cli import FAILED, main
from dlc.cli.interrupt import Interrupts, end_signals
from dlc.cli.site import TORCHRUN as TORCHRUN_SAYS
from dlc.cli.site import Rank, device_of, follow_on, launched, leading
from dlc.errors import ConfigError, UsageError
from dlc.runspec import InnerSpec, ModelSpec, RunSpec
from dlc.train.follower import follow
from dlc.train.group import Group, Order, SiteLost, part_of_this_start, torchruns_store
from dlc.train.heartbeat import LOOK_S_MAX, SILENCE_S_MAX, TOLD_S, Heartbeats, Silence
from dlc.train.inner import InnerLoop, placed
from dlc.train.parallel import Replica, SiteLoop, check_fits, pieces_of
from dlc.train.setup import model_of
from dlc.train.sharded import Sharded, check_layers, check_mean, layers_of
from dlc.train.site import SiteEngine
from tests.forked import AVAILABLE, Forked
from tests.swarm import DEADLINE_S, Event, Host, Process, free_addresses
from tests.train.site_steps import LLAMA, SPEC

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--max-restarts", "1"]


def places(size: int) -> list[dict[str, str]]:
    """What torchrun says to each process of a site on this host, for one that starts them itself."""
    host, _, port = free_addresses(1)[0].rpartition(":")
    return [dict(zip(TORCHRUN_SAYS, (str(i), str(size), str(i), host, port), strict=True)) for i in range(size)]


@given(n=st.integers(1, 40), size=st.integers(1, 6), batch=st.integers(1, 5))
def test_each_sequence_is_trained_once_and_all_ranks_meet_in_each_micro_batch(n: int, size: int, batch: int) -> None:
    ranks = [pieces_of(n, rank, size, batch) for rank in range(size)]
    assert len({len(pieces) for pieces in ranks}) == 1
    pieces = [(which, share) for pieces in ranks for which, share in pieces]
    assert [row for which, share in pieces if share for row in range(which.start, which.stop)] == list(range(n))
    assert all(1 <= which.stop - which.start <= batch for which, _ in pieces)
    assert all(share in (0.0, (which.stop - which.start) / n) for which, share in pieces)


def test_a_step_that_cannot_be_shared_evenly_is_refused() -> None:
    spec = RunSpec(inner=InnerSpec(batch_size=2, accumulate=3))
    check_fits(spec, 3, "fsdp")
    with pytest.raises(ConfigError, match=r"= 6 sequences, which 4 ranks .* divides 6"):
        check_fits(spec, 4, "ddp")


def test_fragments_do_not_go_with_a_site_of_several_processes() -> None:
    with pytest.raises(ConfigError, match=r"fragments = 2 .* gather the whole model"):
        check_fits(RunSpec(fragments=2), 2, "ddp")


@pytest.mark.parametrize("other", [{"inner": InnerSpec(optimizer="muon", batch_size=2)}, {"precision": "fp16"}])
def test_what_fsdp_cannot_do_is_refused(other: dict[str, Any]) -> None:
    check_fits(RunSpec(**other), 2, "ddp")
    with pytest.raises(ConfigError, match="--parallel ddp"):
        check_fits(RunSpec(**other), 2, "fsdp")


@pytest.mark.parametrize("strategy", ["data-parallel", "gossip", "moshpit"])
def test_strategies_for_peers_of_one_process_are_refused(strategy: str) -> None:
    with pytest.raises(ConfigError, match="without torchrun"):
        check_fits(RunSpec(strategy=strategy), 2, "ddp")


def test_a_run_that_is_none_for_a_site_is_refused_before_others_are_told_to_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def join_swarm(*_: object) -> None:
        raise AssertionError("it tells")

    group: Any = SimpleNamespace(size=3, parallel="ddp")
    monkeypatch.setattr("dlc.cli.join.join_swarm", join_swarm)
    monkeypatch.setattr("dlc.cli.site.leading", lambda *_: contextlib.nullcontext(group))
    (tmp_path / "RUN.toml").write_text("[inner]\nbatch_size = 4\n")
    words = ["join", "--config", str(tmp_path / "RUN.toml"), "--state-dir", str(tmp_path / "state"), "--insecure"]
    assert main(words) == 2
    assert "4 sequences, which 3 ranks" in capsys.readouterr().err


def test_the_layers_are_those_of_the_outermost_lists() -> None:
    experts = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    layers = [nn.ModuleDict({"experts": experts}), nn.Linear(1, 1)]
    assert layers_of(nn.ModuleDict({"embed": nn.Embedding(2, 1), "layers": nn.ModuleList(layers)})) == layers


def test_each_process_knows_its_place_and_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    place = dict(zip(TORCHRUN_SAYS, ("3", "8", "1", "localhost", "1"), strict=True))
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    rank = launched()
    assert rank == Rank(rank=3, size=8, local_rank=1) and device_of("cpu", rank).type == "cpu"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launched() is None
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("MASTER_PORT")
    assert launched() is None


def test_nobody_waits_for_a_rank_0_that_only_prints_the_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def follow_on(*_: object) -> None:
        raise AssertionError("there is no end to it")

    monkeypatch.setattr("dlc.cli.site.follow_on", follow_on)
    for name, value in zip(TORCHRUN_SAYS, ("1", "2", "1", "localhost", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert main(["join", "--print-config"]) == 0
    assert capsys.readouterr() == ("", "")


def test_the_others_draw_nothing_and_can_be_ended_until_rank_0_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    told, done = logging.getLogger("dlc").level, []
    monkeypatch.setattr(signal, "signal", lambda number, action: done.append((number, action)))
    monkeypatch.setattr("dlc.train.group.Group", lambda *_: done.append("group") or MagicMock())
    monkeypatch.setattr("dlc.cli.site.hand_signals_on", lambda group: done.append("signals"))
    monkeypatch.setattr("dlc.train.follower.follow", lambda group: done.append(is_progress_bar_enabled()))
    try:
        follow_on(Namespace(device="cpu", parallel=None), Rank(rank=1, size=2, local_rank=1))
    finally:
        logging.getLogger("dlc").setLevel(told)
        enable_progress_bar()
    ended = [(number, signal.SIG_DFL) for number in end_signals()]
    assert done == [*ended, "group", "signals", False]


def test_a_process_touches_no_gpu_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr("dlc.train.setup.pick_device", lambda name: done.append(name) or torch.device("cuda"))
    assert device_of("cuda", Rank(rank=3, size=8, local_rank=1)) == torch.device("cuda", 1) and done == [1, "cuda"]
    with pytest.raises(UsageError, match="process 2 of this host has no GPU, there are 2"):
        device_of("cuda", Rank(rank=2, size=8, local_rank=2))


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_wait_for_each_others_model_without_nccl(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """It gives up after ten minutes, and a model may take longer to download."""
    calls: list[str] = []
    made = model_of(SPEC)

    def named(name: str, value: object = None) -> Callable[..., Any]:
        return lambda *_: calls.append(name) or value

    told = json.dumps({"spec": SPEC.to_dict(), "peer": "me", "parallel": "fsdp", "batch_size": 2})
    group: Any = MagicMock(rank=rank, size=2, device=torch.device("cpu"), parallel="fsdp")
    group.meet, group.text.return_value, group.hear.return_value = named("meet"), told, (Order.RUN, [])
    for module in ("site", "follower"):
        monkeypatch.setattr(f"dlc.train.{module}.replica_of", named("replica", SimpleNamespace(model=made)))
    for module in ("engine", "follower"):
        monkeypatch.setattr(f"dlc.train.{module}.model_of", named("model", made))
    monkeypatch.setattr("dlc.train.follower._obey", lambda *_: None)
    if rank == 0:
        SiteEngine(SPEC, group, "me")
    else:
        follow(group)
    assert calls == ["model", "meet", "replica"]


def test_those_who_start_again_find_nothing_of_the_start_before() -> None:
    """torchrun keeps its store. Who was there before may have been ended at any moment, before the others came too."""
    store = HashStore()

    def ended(seconds: float) -> None:
        raise InterruptedError

    def all_start(size: int = 3) -> list[PrefixStore]:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(lambda rank: part_of_this_start(store, rank, size), reversed(range(size))))

    def told(part: PrefixStore) -> bytes:
        return bytes(part.get("told"))

    all_start()[0].set("told", "of the first start")
    for rank in (0, 0, 1):
        with pytest.raises(InterruptedError):
            part_of_this_start(store, rank, 3, wait=ended)
    parts = all_start()
    assert not any(part.check(["told"]) for part in parts)
    parts[0].set("told", "now")
    assert [told(part) for part in parts] == [b"now"] * 3


def test_whom_a_site_waits_for_at_its_start_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """One that hangs while it imports torch, say."""
    waited_s: list[float] = []

    def wait(seconds: float) -> None:
        waited_s.append(seconds)
        if sum(waited_s) > 3 * TOLD_S:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        part_of_this_start(HashStore(), 0, 3, wait)
    assert caplog.messages == ["waiting: of 3 processes of this site 2 have yet to begin (1, 2)"]


def test_a_torchrun_that_is_gone_is_told_apart_from_one_that_says_nothing() -> None:
    """Killed, it leaves its processes behind, which nobody would end."""

    def check(keys: list[str]) -> bool:
        raise torch.distributed.DistNetworkError("the connection is closed")

    group = object.__new__(Group)
    group._store = cast(Any, SimpleNamespace(check=lambda keys: False))
    assert not group.stop_asked()
    group._store = cast(Any, SimpleNamespace(check=check))
    with pytest.raises(SiteLost, match="torchrun is gone"):
        group.stop_asked()


def test_a_torchrun_that_cannot_be_reached_is_not_waited_for_half_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    (place,) = places(1)
    for name, value in {**place, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("dlc.train.group.CONNECT_MAX", timedelta(seconds=0.2))
    with pytest.raises(SiteLost, match=f"torchrun cannot be reached.*{place['MASTER_PORT']}"):
        torchruns_store()


@contextlib.contextmanager
def led(monkeypatch: pytest.MonkeyPatch, stop_asked: Callable[[], bool]) -> Iterator[tuple[list[str], Any]]:
    """What rank 0 does around a run, whose Interrupts is yielded with the list of what was done."""
    done: list[str] = []
    beats = itertools.count()
    group = SimpleNamespace(
        size=2,
        parallel="ddp",
        stop_asked=stop_asked,
        heartbeats=lambda: Heartbeats([1], lambda rank: next(beats), time.monotonic),
        close=lambda: done.append("closed"),
    )
    monkeypatch.setattr("dlc.train.group.Group", lambda *_: group)
    monkeypatch.setattr("dlc.cli.site.STOP_LOOK_S", 0.01)
    monkeypatch.setattr("dlc.cli.site.LAST_LOOK_S", 0.01)
    interrupts = Interrupts()
    interrupts.can_save = True
    with leading(Namespace(device="cpu", parallel=None), Rank(rank=0, size=2, local_rank=0), interrupts):
        yield done, interrupts


def test_a_site_without_its_torchrun_leaves_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone() -> bool:
        raise SiteLost("torchrun is gone")

    with led(monkeypatch, gone) as (done, interrupts):
        assert interrupts.stop.wait(DEADLINE_S)
    assert done == ["closed"] and "torchrun is gone: the site leaves the run" in caplog.text


def test_a_torchrun_that_is_suspended_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the store, which answers nothing then."""
    begun, goes_on = threading.Event(), threading.Event()

    def answers_nothing() -> bool:
        begun.set()
        return not goes_on.wait(DEADLINE_S)

    try:
        with led(monkeypatch, answers_nothing) as (done, _):
            assert begun.wait(DEADLINE_S)
        assert done == ["closed"] and not goes_on.is_set()
    finally:
        goes_on.set()


def test_silence_is_told_once_and_counted_in_running_time() -> None:
    now, beats = 0.0, {1: 0, 2: 0}
    heartbeats = Heartbeats([1, 2], beats.__getitem__, lambda: now)

    def after(seconds: float, *beating: int) -> tuple[list[Silence], list[Silence]]:
        """What was told and who was given up meanwhile, with a look each second."""
        nonlocal now
        told: list[Silence] = []
        hung: list[Silence] = []
        for _ in range(int(seconds)):
            now += 1.0
            for rank in beating:
                beats[rank] += 1
            fresh, given_up = heartbeats.look()
            told += fresh
            hung += given_up
        return told, hung

    assert after(2 * SILENCE_S_MAX, 1, 2) == ([], [])
    assert after(TOLD_S - 1, 1) == ([], [])
    assert after(10, 1) == ([Silence(2, TOLD_S)], [])  # once
    assert after(1, 1, 2) == ([], [])
    assert after(TOLD_S, 1) == ([Silence(2, TOLD_S)], [])  # it had come back
    now += 10 * SILENCE_S_MAX  # a night in which nobody ran
    assert after(SILENCE_S_MAX - TOLD_S - LOOK_S_MAX, 1) == ([], [])
    assert after(1, 1) == ([], [Silence(2, SILENCE_S_MAX)])


@pytest.mark.skipif(not AVAILABLE or sys.platform == "win32", reason="this system has no forkserver, or no SIGSTOP")
@pytest.mark.parametrize("hangs", [0, 1])
def test_a_site_ends_though_a_process_of_it_hangs(tmp_path: Path, hangs: int) -> None:
    """In the midst of what all do together, which would wait for it for half an hour, or for ever."""
    log, store = tmp_path / "log", dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    here = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env = {**os.environ, "TORCHELASTIC_RESTART_COUNT": "0"}
    ranks = [Forked("tests.train.site_hangs", [str(hangs)], log, env | place | here) for place in places(2)]
    try:
        assert ranks[1 - hangs].wait(DEADLINE_S) == FAILED, log.read_text()[-6000:]
        said = log.read_text()
        told = re.search(rf"process {hangs} of this site has not run for \d s: it was suspended", said)
        assert bool(told) == (hangs == 1)  # rank 0 tells
        assert re.search(rf"process {hangs} of this site has not run for \d s: the site ends", said)
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), OSError(28, "disk full"), KeyboardInterrupt()])
def test_after_an_error_in_the_midst_of_a_step_nobody_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The others wait for this process, in a collective: an order, which they do not hear, would have no end."""
    calls: list[object] = []
    for name in ("broadcast", "destroy_process_group"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, name=name, **__: calls.append(name))
    group = object.__new__(Group)
    group.rank, group.size, group._orders, group._lost = 0, 2, None, False
    group._over, group._beating = threading.Event(), MagicMock()
    with pytest.raises(type(error)), group.together():
        raise error
    group.close()
    assert not calls
    group._lost = False
    with pytest.raises(ConfigError), group.together():
        raise ConfigError("which all of them find")
    group.close()
    assert calls == ["broadcast", "destroy_process_group"]


def test_a_model_is_taken_to_the_device_layer_by_layer_where_each_rank_holds_a_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a whole it may have no room on one GPU; "meta" stands for that."""
    model = nn.ModuleDict({"embed": nn.Embedding(2, 1), "layers": nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])})
    met: list[tuple[nn.Module, set[str]]] = []
    checked: list[int] = []

    def fully_shard(module: nn.Module, mesh: object) -> nn.Module:
        met.append((module, {p.device.type for p in module.parameters()}))
        return module.to("meta")

    monkeypatch.setattr("dlc.train.sharded.init_device_mesh", lambda *_: None)
    monkeypatch.setattr("dlc.train.sharded.fully_shard", fully_shard)
    monkeypatch.setattr("dlc.train.sharded.check_mean", lambda *_: checked.append(len(met)))
    group: Any = SimpleNamespace(device=torch.device("meta"), size=2, give=lambda tensor: tensor)
    Sharded(RunSpec(), group, model, 2)
    first, second = layers_of(model)
    assert met == [(first, {"cpu"}), (second, {"cpu"}), (model, {"cpu", "meta"})]
    assert checked == [0]  # before anything is cut


@pytest.fixture
def lone() -> Iterator[DeviceMesh]:
    """The mesh of a group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_a_torch_that_gives_no_mean_of_gradients_is_refused(lone: DeviceMesh) -> None:
    """As that of torch 2.7 and 2.8 over Gloo; here a mean of one rank stands for a wrong one of two."""
    one: Any = SimpleNamespace(device=torch.device("cpu"), rank=0, size=1)
    state = torch.get_rng_state()
    check_mean(lone, one)
    assert torch.equal(torch.get_rng_state(), state)
    one.size = 2
    with pytest.raises(ConfigError, match="does not average gradients right .* on cpu: update torch, or start"):
        check_mean(lone, one)


def test_a_part_of_a_state_shares_no_memory_with_the_whole(lone: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch 2.9 what is distributed is a view."""
    whole, like = torch.arange(4.0), distribute_tensor(torch.zeros(4), lone, [Shard(0)])
    monkeypatch.setattr("dlc.train.sharded.distribute_tensor", lambda x, at, how, **_: DTensor.from_local(x, at, how))
    here: Any = SimpleNamespace(group=SimpleNamespace(device=torch.device("cpu")))
    part = Sharded.placed(here, whole, like)
    whole.zero_()
    assert isinstance(part, DTensor) and part.to_local().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_nobody_keeps_the_parameters_that_a_site_cuts_into_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they are whole."""

    def replica_of(parallel: str, spec: RunSpec, group: object, model: nn.Module, batch_size: int) -> Any:
        before = weakref.ref(head := model.lm_head.weight)
        model.lm_head.weight = nn.Parameter(torch.empty(1))
        del head
        raise InterruptedError(before())

    monkeypatch.setattr("dlc.train.site.replica_of", replica_of)
    group: Any = MagicMock(size=1, device=torch.device("cpu"), parallel="fsdp")
    with pytest.raises(InterruptedError) as raised:
        SiteEngine(replace(SPEC, model=ModelSpec(config={**LLAMA, "tie_word_embeddings": False})), group, "peer")
    assert raised.value.args == (None,)


def test_only_rank_0_holds_the_whole_state_of_the_optimizer_on_its_host() -> None:
    def loop(rank: int) -> SiteLoop:
        model = nn.Linear(3, 2)
        replica: Any = SimpleNamespace(
            group=SimpleNamespace(rank=rank, size=2), forward=model, whole=lambda t: t, placed=placed
        )
        made = SiteLoop(
            replica, model, torch.optim.AdamW(model.parameters()), None, 0.0, torch.device("cpu"), "fp32", False
        )
        model(torch.ones(1, 3)).sum().backward()
        made.optimizer.step()
        return made

    saved, follower = loop(0).tensors(), loop(1)
    assert len(saved) == 6 and not follower.tensors()
    sent: list[weakref.ref[Tensor]] = []

    def one_after_the_other() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in saved.items():
            assert all(before() is None for before in sent[:-1]), "all of them at once take the memory that is lacking"
            copy = tensor * 2
            sent.append(weakref.ref(copy))
            yield name, copy
            del copy

    follower.take(one_after_the_other())
    state = InnerLoop.tensors(follower)
    assert len(sent) == 6 and all(torch.equal(state[name], tensor * 2) for name, tensor in saved.items())


def test_what_is_loaded_of_an_optimizer_goes_to_the_device_at_once() -> None:
    like = torch.empty(2, device="meta")
    assert placed(torch.ones(2), like).device == like.device and placed(torch.tensor(3.0), like).device.type == "cpu"


def test_a_step_whose_gradients_ddp_did_not_average_is_not_taken() -> None:
    """Each rank would go on from its own, and the round take rank 0's for the site's."""
    replica, model = object.__new__(Replica), nn.Linear(2, 1)
    replica.tensors, replica._finds_unused = [model.weight, model.bias], False
    model(torch.ones(1, 2)).sum().backward()
    replica.check_averaged()
    model.bias.grad = None
    with pytest.raises(RuntimeError, match="left parameters out of a step"):
        replica.check_averaged()
    replica._finds_unused = True
    replica.check_averaged()


@pytest.mark.parametrize(("drops", "unused"), [(0.0, False), (0.1, True)])
def test_ddp_looks_for_layers_that_are_dropped_at_random_though_the_first_pass_drops_none(
    monkeypatch: pytest.MonkeyPatch, drops: float, unused: bool
) -> None:
    """The first step that dropped one ended the site."""
    found: list[bool] = []
    monkeypatch.setattr(Replica, "_reaches_all", lambda self: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(
        "dlc.train.parallel.DistributedDataParallel",
        lambda *_, **options: found.append(options["find_unused_parameters"]),
    )
    model = nn.Linear(3, 2)
    model.config = cast(Any, SimpleNamespace(layerdrop=drops))
    Replica(SPEC, cast(Any, SimpleNamespace(device=torch.device("cpu"))), model, 2)
    assert found == [unused]


@pytest.mark.parametrize("same", [True, False])
def test_a_step_in_which_fsdp_averaged_gradients_of_different_parameters_is_not_taken(same: bool) -> None:
    """Of experts of one size it would take one for the other."""
    sharded, model, told = object.__new__(Sharded), nn.Linear(2, 1), []
    sharded.tensors = [model.weight, model.bias]
    sharded.group = cast(Group, SimpleNamespace(agree=lambda flags: told.append(flags) or same))
    with contextlib.nullcontext() if same else pytest.raises(RuntimeError, match="different parameters .* ddp"):
        with sharded.meanwhile(last=False):
            F.linear(torch.ones(1, 2), model.weight).sum().backward()
    assert told == [[True, False]]


@pytest.mark.parametrize("name", ["layerdrop", "decoder_layerdrop"])
def test_a_model_that_drops_layers_at_random_is_not_cut_into_parts(name: str) -> None:
    model = nn.Linear(2, 1)
    model.config = cast(Any, SimpleNamespace(layerdrop=0.0))
    check_layers(model)
    model.config = cast(Any, SimpleNamespace(**{name: 0.1}))
    with pytest.raises(ConfigError, match=rf"{name} = 0\.1.* --parallel ddp"):
        check_layers(model)


needs_fsdp = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9), reason="FSDP2 averages over Gloo from torch 2.9 on"
)


@needs_fsdp
@pytest.mark.skipif(not AVAILABLE, reason="this system has no forkserver")
def test_the_steps_of_a_site_are_those_of_one_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ranks = [Forked("tests.train.site_steps", [], log, {**os.environ, **place}) for place in places(2)]
    try:
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [0, 0], log.read_text()[-6000:]
        assert [rank.stdout.read() for rank in ranks] == [b"equal\n", b""]
    finally:
        for rank in ranks:
            rank.kill()


class Site:
    """`torchrun ... dlc join`."""

    def __init__(self, host: Host, *words: str) -> None:
        launcher = [*TORCHRUN, "--log-dir", str(host.folder / "torchrun"), "-m"]  # else it leaves a folder in /tmp
        self.run = host.start("site", *words, launcher=launcher)
        self.leader = 0
        self.started()

    def started(self) -> None:
        """Waits for a rank 0 that was not there before."""
        self.leader = int(self.run.event("started", lambda e: e["pid"] != self.leader)["pid"])

    def others(self) -> list[int]:
        """The processes of the site other than rank 0's."""
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        parent_of = {int(pid): int(parent) for pid, parent in (line.split() for line in listed.splitlines())}
        return [pid for pid, parent in parent_of.items() if parent == parent_of[self.leader] and pid != self.leader]

    def close(self) -> None:
        """torchrun's processes outlive it where it is killed; without rank 0 the others end."""
        if self.run.running:
            os.kill(self.leader, signal.SIGKILL)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[tuple[Host, Callable[..., Site]]]:
    """A host, and what starts a site on it; nothing outlives the test."""
    with contextlib.ExitStack() as stack:
        host = Host(tmp_path)
        stack.callback(host.close)
        yield host, lambda *words: stack.enter_context(contextlib.closing(Site(host, *words)))


def counted_with(run: Process, n: int, since: int = 0) -> Event:
    """The first round after round `since` that counted the peer, of n contributors."""
    return run.event("round", lambda e: e["t"] > since and e["counted"] and len(e["contributors"]) == n)


def told_by_both(run: Process, other: Process, since: int) -> tuple[Event, Event]:
    """A round after round `since` that counted both, with its digest: who sleeps through a round, or through the next
    one before it looks at its state, tells none."""
    while True:
        first = counted_with(run, 2, since)
        since = first["t"]
        second = other.event("round", lambda e, since=since: e["t"] >= since)
        if second["t"] == since and first["digest"] and second["digest"]:
            return first, second


@needs_fsdp
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL and ps")
def test_a_site_is_one_peer_that_ends_as_a_whole_while_the_swarm_goes_on(
    start: tuple[Host, Callable[..., Site]],
) -> None:
    host, start_site = start
    run = ("--config", host.config(rounds=100000))
    alone = start_site(*run, "--checkpoint-every", "1")
    counted_with(alone.run, 1)
    alone.run.signal(signal.SIGINT)
    end = alone.run.event("end")
    assert end["reason"] == "interrupted" and end["model"] and end["checkpoint"]
    alone.run.exit_code()
    assert alone.run.log().count("Traceback") == 1  # torchrun's own, which tells the signal so

    (address,) = free_addresses(1)
    plain = host.start("plain", "--peers", address)
    site = start_site(*run, "--listen", address, "--parallel", "fsdp")  # goes on from what DDP saved
    ours, theirs = told_by_both(site.run, plain, since=end["t"])
    assert ours["digest"] == theirs["digest"]

    (other,) = site.others()
    os.kill(other, signal.SIGKILL)
    without = counted_with(plain, 1, since=plain.all("round")[-1]["t"])
    site.started()  # once more, by torchrun
    assert counted_with(plain, 2, since=without["t"])
    (other,) = site.others()
    os.kill(other, signal.SIGKILL)
    assert site.run.exit_code() != 0
    assert counted_with(plain, 1, since=plain.all("round")[-1]["t"])
