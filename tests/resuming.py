"""A peer in a process of its own, which trains as a program of a user would, saves, is stopped, and resumes.

`start` forks it from a server that has imported everything once. Through a pipe it tells ("joined",), ("saved",),
("round", t, peers, digest) and ("end", t, hash of the parameters), and hears "go" and "stop".
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dlc
from dlc.comm.timeouts import Timeouts
from dlc.compat.opendiloco import DiLoCoOptimizer
from dlc.train.checkpoint import load_checkpoint, save_checkpoint
from tests.forked import CONTEXT
from tests.helpers import wait_until
from tests.swarm import DEADLINE_S, JOIN_S, PATIENT

H, SAVE_AT, STEPS = 4, 6, 12
"""A checkpoint lies in the middle between two rounds; OpenDiLoCo's, which has nothing for that, at a round."""
PATIENCE_S = 120.0
"""Rounds wait for everybody who is alive, however slow."""
LR = 0.05
OUTER = dlc.OuterSpec(lr=0.5, momentum=0.9)
KINDS = ("native", "opendiloco", "transformers", "lightning")
EXTRAS = {"transformers": "accelerate", "lightning": "lightning"}


@dataclass(frozen=True)
class Plan:
    """What one process is to do."""

    kind: str
    index: int
    folder: Path
    """Of its own, for its state directory, its checkpoint and its log."""
    listen: str
    peers: tuple[str, ...] = ()
    """None: it founds the run."""
    resumes: bool = False
    """From the checkpoint in its folder."""
    told_to_stop: bool = False
    """It trains until then; otherwise so many steps in all."""
    holds_once_saved: bool = False
    timeouts: Timeouts = PATIENT

    @property
    def checkpoint(self) -> Path:
        if self.kind == "transformers":
            return self.folder / f"checkpoint-{SAVE_AT}"
        return self.folder / "checkpoint.ckpt"


class Run:
    """A process that was started, and what it told."""

    def __init__(self, plan: Plan, process: BaseProcess, pipe: Connection) -> None:
        self.plan, self.process, self._pipe = plan, process, pipe
        self.told: list[tuple[Any, ...]] = []
        self._over = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.told.append(self._pipe.recv())
        self._over = True

    def wait(self, name: str, where: Callable[[tuple[Any, ...]], bool] = lambda word: True) -> tuple[Any, ...]:
        """The first word of that name that fits; what was told before counts too."""

        def found() -> tuple[Any, ...] | None:
            over = self._over
            word = next((word for word in self.told if word[0] == name and where(word)), None)
            assert word is not None or not over, f"it ended without {name!r}\n{self.log()}"
            return word

        wait_until(found, DEADLINE_S, f"{name!r} of {self.plan}")
        word = found()
        assert word is not None
        return word

    def say(self, word: str) -> None:
        self._pipe.send(word)

    def ends(self) -> tuple[Any, ...]:
        """Its last word, and it ends without an error."""
        word = self.wait("end")
        self.process.join(DEADLINE_S)
        assert self.process.exitcode == 0, self.log()
        return word

    def rounds(self) -> dict[int, tuple[int, bytes]]:
        """By number: how many took part, and the digest of the state after it."""
        return {word[1]: (word[2], word[3]) for word in self.told if word[0] == "round"}

    def log(self) -> str:
        log = self.plan.folder / "log"
        return log.read_text("utf-8", "replace")[-4000:] if log.exists() else "it has not begun"


@contextmanager
def runs() -> Iterator[Any]:
    """A function that starts a plan; none outlives the test."""
    started: list[Run] = []

    def start(plan: Plan) -> Run:
        plan.folder.mkdir(parents=True, exist_ok=True)
        here, there = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_main, args=(plan, there), daemon=True)
        process.start()
        there.close()
        started.append(Run(plan, process, here))
        return started[-1]

    try:
        yield start
    except BaseException as error:
        for run in started:
            error.add_note(f"--- process {run.plan.index} last told {run.told[-3:]}, its log ends in\n{run.log()}")
        raise
    finally:
        for run in started:
            run.process.kill()
            run.process.join()


# ------------------------------------------------------------------ in the process


@dataclass
class Self:
    """The process, as its program sees it."""

    plan: Plan
    pipe: Connection
    peer: dlc.Peer
    seen: dlc.RoundReport | None = None

    def stepped(self, step: int, report: dlc.RoundReport | None, channel: str = "train") -> bool:
        """After each step: tell the round that it ended with. Whether the training is over."""
        if report is not None and report is not self.seen:
            self.seen, position = report, self.peer.position(channel)
            if position.t == report.t and position.digest:  # no other round has passed since
                self.pipe.send(("round", report.t, len(report.contributors), position.digest))
        if self.plan.told_to_stop:
            return self.pipe.poll() and self.pipe.recv() == "stop"
        return step >= STEPS

    def saved(self) -> None:
        self.pipe.send(("saved",))
        if self.plan.holds_once_saved:
            self.pipe.recv()  # which never comes


def _main(plan: Plan, pipe: Connection) -> None:
    log = os.open(plan.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        resume = dlc.Resume.of(_saved_state(plan)) if plan.resumes and plan.kind != "opendiloco" else None
        with dlc.Peer.join(
            plan.peers,
            found=not plan.peers,
            listen=plan.listen,
            state_dir=plan.folder / "peer",
            resume=resume,
            join_timeout_s=JOIN_S,
            timeouts=plan.timeouts,
        ) as peer:
            pipe.send(("joined",))
            assert pipe.recv() == "go"
            t, model = PROGRAMS[plan.kind](Self(plan, pipe, peer))
            pipe.send(("end", t, flat(model)))
    except BaseException:
        traceback.print_exc()
        raise


def flat(model: nn.Module) -> str:
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    return hashlib.sha256(parameters.numpy().tobytes()).hexdigest()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x) - x.sum(-1, keepdim=True)).square().mean()}


def rows(index: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(index))


def _saved_state(plan: Plan) -> Any:
    if plan.kind == "transformers":
        from dlc.integrations.transformers import saved_state

        return saved_state(plan.checkpoint)
    if plan.kind == "lightning":
        from dlc.integrations.lightning import saved_state

        return saved_state(plan.checkpoint)
    tensors, meta = load_checkpoint(plan.checkpoint)
    return _built(meta["tree"], tensors)


def _save(path: Path, tree: Any) -> None:
    tensors: dict[str, Tensor] = {}
    save_checkpoint(path, tensors, {"tree": _taken_down(tree, tensors)})


def _taken_down(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """As JSON has it; the tensors apart."""
    if isinstance(tree, Tensor):
        tensors[name := str(len(tensors))] = tree
        return {"tensor": name}
    if isinstance(tree, dict):
        return {"items": [[key, _taken_down(value, tensors)] for key, value in tree.items()]}
    return [_taken_down(value, tensors) for value in tree] if isinstance(tree, list | tuple) else tree


def _built(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        named = tree.get("tensor")
        return tensors[named] if named else {key: _built(value, tensors) for key, value in tree["items"]}
    return [_built(value, tensors) for value in tree] if isinstance(tree, list) else tree


def _native(me: Self) -> tuple[int, nn.Module]:
    net, state = Net(), _saved_state(me.plan) if me.plan.resumes else None
    inner = torch.optim.AdamW(net.parameters(), lr=LR)
    options: dict[str, Any] = {"outer": OUTER, "codec": "int8", "patience_s": PATIENCE_S}
    opt = dlc.DiLoCo(net, inner, me.peer, H, resume=state, **options)
    if state is not None:
        opt.load_state_dict(state)
    for step in itertools.count(SAVE_AT + 1 if state is not None else 1):
        net(rows(me.plan.index))["loss"].backward()
        report = opt.step()
        opt.zero_grad()
        if step == SAVE_AT and state is None:
            _save(me.plan.checkpoint, opt.state_dict(outer=True))
            me.saved()
        if me.stepped(step, report):
            break
    opt.finish()
    return opt.t, net


def _opendiloco(me: Self) -> tuple[int, nn.Module]:
    net, save_at = Net(), 2 * H
    optimizer = DiLoCoOptimizer(
        dht=me.peer,
        run_id="run",
        batch_size=8,
        num_inner_steps=H,
        params=net.parameters(),
        inner_optimizer=partial(torch.optim.AdamW, lr=LR),
        outer_optimizer=partial(torch.optim.SGD, lr=OUTER.lr, momentum=OUTER.momentum, nesterov=True),
    )
    if me.plan.resumes:
        saved = _saved_state(me.plan)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    optimizer.load_state_from_peers()
    for step in itertools.count(save_at + 1 if me.plan.resumes else 1):
        optimizer.zero_grad()
        net(rows(me.plan.index))["loss"].backward()
        optimizer.step()
        if step == save_at and not me.plan.resumes:
            _save(me.plan.checkpoint, {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
            me.saved()
        if me.stepped(step, optimizer.last_report, "run"):
            break
    return optimizer.local_epoch, net


def _transformers(me: Self) -> tuple[int, nn.Module]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from dlc.integrations.transformers import DiLoCoCallback

    own = DiLoCoCallback(me.peer, H, outer=OUTER, codec="int8", patience_s=PATIENCE_S)

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
            if me.stepped(state.global_step, own.diloco.last_report):
                control.should_training_stop = True

    class Saved(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
            if state.global_step == SAVE_AT and not me.plan.resumes:
                me.saved()

    args = TrainingArguments(
        str(me.plan.folder),
        max_steps=10**6 if me.plan.told_to_stop else STEPS,
        per_device_train_batch_size=2,
        learning_rate=LR,
        lr_scheduler_type="constant",
        save_strategy="no" if me.plan.resumes else "steps",
        save_steps=SAVE_AT,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"x": x} for x in rows(me.plan.index)]
    net = Net()
    trainer = Trainer(model=net, args=args, train_dataset=data, callbacks=[Watch(), own, Saved()])
    trainer.train(resume_from_checkpoint=str(me.plan.checkpoint) if me.plan.resumes else None)
    return own.diloco.t, net


def _lightning(me: Self) -> tuple[int, nn.Module]:
    import lightning.pytorch as pl

    from dlc.integrations.lightning import DLCStrategy

    own = DLCStrategy(me.peer, H, outer=OUTER, codec="int8", patience_s=PATIENCE_S)

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.net(batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LR)

    class Watch(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == SAVE_AT and not me.plan.resumes:
                trainer.save_checkpoint(me.plan.checkpoint)
                me.saved()
            if me.stepped(trainer.global_step, own.diloco.last_report):
                trainer.should_stop = True

    module = Module()
    trainer = pl.Trainer(
        strategy=own,
        accelerator="cpu",
        max_steps=-1 if me.plan.told_to_stop else STEPS,
        max_epochs=-1,
        callbacks=[Watch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=me.plan.folder,
    )
    # A plain DataLoader starts anew where its epoch was left, so all batches are the same.
    data = torch.utils.data.DataLoader(rows(me.plan.index)[:1].repeat(8, 1), batch_size=2)
    trainer.fit(module, data, ckpt_path=me.plan.checkpoint if me.plan.resumes else None)
    return own.diloco.t, module


PROGRAMS = {"native": _native, "opendiloco": _opendiloco, "transformers": _transformers, "lightning": _lightning}
