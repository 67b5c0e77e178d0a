"""What `test_site` starts as torchrun would: rank 0 compares a site's inner steps with those of one process, and then
hears that the other one, which waits for an order, was told to stop.

The others only follow. Rank 0 alone tells, by its exit status, and by the line "equal".
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time

import torch

from dlc.cli.site import hand_signals_on
from dlc.flat import FlatView
from dlc.runspec import DataSpec, InnerSpec, ModelSpec, RunSpec
from dlc.train import follower
from dlc.train.engine import Engine
from dlc.train.group import Group, Order
from dlc.train.inner import InnerLoop
from dlc.train.setup import model_of
from dlc.train.site import SiteEngine

LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}
SPEC = RunSpec(
    model=ModelSpec(config=LLAMA),
    data=DataSpec(seq_len=8),
    inner=InnerSpec(optimizer="sgd", lr=0.5, batch_size=2, accumulate=3, warmup_steps=0, clip_norm=0.5),
)

PEGASUS = {
    "model_type": "pegasus",
    "is_decoder": True,
    "vocab_size": 256,
    "d_model": 16,
    "decoder_ffn_dim": 24,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 16,
    "dropout": 0.0,
}
LEAVING_OUT = dataclasses.replace(SPEC, model=ModelSpec(config=PEGASUS))
"""Its positions are frozen, and without an encoder the attention to it is in no step."""
ADAM = dataclasses.replace(SPEC, inner=InnerSpec(batch_size=2, accumulate=3, warmup_steps=0))


def held(view: FlatView) -> torch.Tensor:
    return view.gather(torch.empty(view.numel))


def batches(seed: int, rows: int) -> list[torch.Tensor]:
    ids = torch.randint(256, (rows, 8), generator=torch.Generator().manual_seed(seed))
    return list(ids.split(2))


def same_steps(site: InnerLoop, plain: InnerLoop, views: tuple[FlatView, FlatView], sizes: list[int]) -> None:
    """Loss, gradient norm and parameters after each of the steps, but for rounding."""
    for step, rows in enumerate(sizes):
        given = batches(step, rows)
        ours, theirs = site.train_step(given, step), plain.train_step(given, step)
        assert ours.tokens == theirs.tokens and ours.applied
        assert abs(ours.loss - theirs.loss) < 1e-5 and abs(ours.grad_norm - theirs.grad_norm) < 1e-5
        torch.testing.assert_close(held(views[0]), held(views[1]), rtol=0, atol=1e-6)


def same_validation(site: Engine, plain: Engine) -> None:
    given = batches(9, 4)
    assert abs(site.evaluate(given) - plain.evaluate(given)) < 1e-6


def compare(group: Group, spec: RunSpec, micro_batch: int = 0) -> None:
    site, plain = SiteEngine(spec, group, "peer", micro_batch), Engine(spec, torch.device("cpu"))
    at_once = list[int]()
    site.model.register_forward_pre_hook(
        lambda module, args, named: at_once.append(len(named["input_ids"])), with_kwargs=True
    )
    views = site.view, plain.view
    assert site.view.layout() == plain.view.layout() and torch.equal(held(site.view), held(plain.view))
    loops = site.inner_loop(), plain.inner_loop()
    same_steps(*loops, views, [6, 6, 5, 1])  # the last two as at the end of a lease
    assert max(at_once) == (micro_batch or spec.inner.batch_size)
    same_validation(site, plain)
    theta = torch.linspace(-0.1, 0.1, plain.view.numel)  # a round
    for view in views:
        view.scatter(theta)
        assert torch.equal(held(view), theta)
    same_validation(site, plain)
    assert torch.equal(held(FlatView.of(site.whole_model())), theta)
    same_steps(*loops, views, [6])


def by_one(group: Group, spec: RunSpec) -> None:
    """All ranks have room for one sequence at once."""
    compare(group, spec, 1)


def compare_state(group: Group, spec: RunSpec) -> None:
    """A site goes on from the checkpoint of one process, and what it saves is what that one would."""
    plain = Engine(spec, torch.device("cpu"))
    alone = plain.inner_loop()
    for step in range(3):
        alone.train_step(batches(step, 6), step)
    site = SiteEngine(spec, group, "peer")
    site.view.scatter(held(plain.view))
    together = site.inner_loop()
    together.load(alone.tensors())
    same_steps(together, alone, (site.view, plain.view), [6, 6])
    saved = together.tensors()
    assert saved.keys() == alone.tensors().keys()
    for name, tensor in alone.tensors().items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-3, atol=1e-6)


def of_another_host(spec: RunSpec) -> torch.nn.Module:
    """The model whose folder has other weights there: those of rank 0 count, frozen ones too."""
    model = model_of(spec)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(1.0)
    return model


def agreed(group: Group) -> None:
    assert group.agree([True, False])
    assert not group.agree([True, group.rank == 0])


def stopped(group: Group) -> None:
    """Rank 1 is told to stop, in the midst of the wait for an order or before it."""
    pid = torch.tensor(os.getpid())
    torch.distributed.broadcast(pid, 1)
    if group.rank:
        follower.follow(group)
        return
    assert not group.stop_asked()
    os.kill(int(pid), signal.SIGTERM)
    end = time.monotonic() + 60.0
    while not group.stop_asked():
        assert time.monotonic() < end, "rank 0 heard nothing of it"
    group.tell(Order.END)


def main() -> None:
    torch.set_num_threads(1)
    follower.model_of = of_another_host
    group = Group(torch.device("cpu"))
    for parallel, run, spec in [
        (p, *what)
        for p in ("ddp", "fsdp")
        for what in ((compare, SPEC), (by_one, SPEC), (compare, LEAVING_OUT), (compare_state, ADAM))
    ]:
        group.parallel = parallel
        if group.rank:
            follower.follow(group)
        else:
            run(group, spec)
            group.tell(Order.END)
    agreed(group)
    if group.rank:
        hand_signals_on(group)
    stopped(group)
    if group.rank == 0:
        print("equal")
    group.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "dlc-beat"]  # Python may end


if __name__ == "__main__":
    main()
