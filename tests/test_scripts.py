"""Scripts that end by an exception, Ctrl-C or sys.exit leave nothing behind; forked children harm nobody. With a peer
alone, and inside Hivemind's and OpenDiLoCo's optimizers, transformers.Trainer and Lightning.

One interpreter imports what they need, and forks for each script before any peer exists; a script is a session of its
own, and its end is the interpreter's own, which takes the longer the more was imported: what few need comes last.
`survivor` is a member that stays, in this process.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlc.peer import Peer
from tests.helpers import wait_until
from tests.swarm import free_addresses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the runner forks after torch was imported")

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 900.0
"""For all of them: some seconds on an idle machine."""
RUNNER = """\
import json, os, sys
import torch, torch.utils.data, dlc.peer, dlc.compat.hivemind.peer_swarm, dlc.compat.opendiloco
for line in sys.stdin.read().splitlines():
    name, script, *modules = json.loads(line)
    for module in modules:
        __import__(module)
    child = os.fork()
    if not child:
        os.setsid()
        file = os.open(name + ".log", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1), os.dup2(file, 2), os.close(file)
        del child, file, line, modules
        exec(script)
        sys.exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        os.killpg(child, 0)
        left = True
    except ProcessLookupError:
        left = False
    print(json.dumps([name, status, left]), flush=True)
"""
JOIN = """\
import os, signal, sys, threading, torch
from dlc.peer import Peer
peer = Peer.join(["ADDRESS"], listen="LISTEN", join_timeout_s=180.0)
print("joined", peer.id, peer.address, flush=True)
"""
NET = """\
class Net(torch.nn.Linear):
    def forward(self, x):
        return {"loss": super().forward(x).square().mean()}
net, rows = Net(4, 1), torch.randn(64, 4)
def step(opt):
    opt.zero_grad(), net(rows)["loss"].backward(), opt.step()
"""
HIVEMIND = (
    """\
import os, sys, torch
import dlc.compat.hivemind as hivemind
dht = hivemind.DHT([], host_maddrs=["LISTEN"], start=True)
print("joined", dht.peer_id, dht.swarm.address, flush=True)
"""
    + NET
    + """\
opt = hivemind.Optimizer(dht=dht, run_id="run", target_batch_size=4, batch_size_per_step=2, matchmaking_time=1.0,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), params=net.parameters(), use_local_updates=True,
    delay_state_averaging=True)
for _ in range(5):
    step(opt)
"""
)
SCRIPTS = {
    "hivemind": HIVEMIND + "raise RuntimeError('out of ideas')",
    "hivemind-forks": HIVEMIND
    + """\
from dlc.errors import UsageError
if not (child := os.fork()):
    try:
        opt.load_state_from_peers()
        sys.exit(1)
    except UsageError:
        pass
    opt.shutdown(), dht.shutdown()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
epoch = opt.local_epoch
for _ in range(4):
    step(opt)
assert opt.local_epoch > epoch and dht.is_alive()
""",
    "opendiloco": """\
import os, signal, sys, threading, torch
from functools import partial
from dlc.compat.opendiloco import DHT, DiLoCoOptimizer
dht = DHT([], host_maddrs=["LISTEN"], start=True)
print("joined", dht.peer_id, dht.peer.address, flush=True)
"""
    + NET
    + """\
opt = DiLoCoOptimizer(dht=dht, run_id="run", batch_size=2, num_inner_steps=2, params=net.parameters(),
    inner_optimizer=partial(torch.optim.SGD, lr=0.1),
    outer_optimizer=partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True))
begun = threading.Event()
threading.Thread(target=lambda: (begun.wait(), os.kill(os.getpid(), signal.SIGINT))).start()
while True:
    step(opt)
    if opt.local_epoch > 1:
        begun.set()
""",
    "transformers": JOIN.replace('["ADDRESS"]', "[]")
    + NET
    + """\
import tempfile
from transformers import Trainer, TrainerCallback, TrainingArguments
from dlc.integrations.transformers import DiLoCoCallback

class Bad(TrainerCallback):
    def on_step_end(self, args, state, control, **of_trainer):
        if state.global_step == 5:
            raise RuntimeError("out of ideas")

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(folder, max_steps=9, per_device_train_batch_size=2, report_to="none", disable_tqdm=True,
        use_cpu=True, save_strategy="no", dataloader_num_workers=2, dataloader_persistent_workers=True)
    data = [{"x": x} for x in rows]
    Trainer(model=net, args=args, train_dataset=data, callbacks=[DiLoCoCallback(peer, 2), Bad()]).train()
""",
    "lightning": JOIN.replace('["ADDRESS"]', "[]")
    + NET
    + """\
import lightning.pytorch as pl
from dlc.integrations.lightning import DLCStrategy

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def training_step(self, batch, index):
        if self.global_step == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return self.net(batch)["loss"]
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

pl.Trainer(strategy=DLCStrategy(peer, 2), accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
).fit(Module(), torch.utils.data.DataLoader(rows, batch_size=2, num_workers=2))
""",
    "exception": JOIN
    + """\
peer.on_member_change(print)
raise RuntimeError("out of ideas")
""",
    "ctrl-c": JOIN
    + """\
def interrupt():
    while not peer._pending:
        threading.Event().wait(0.01)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
peer.all_reduce(torch.ones(3), timeout_s=1000.0)
""",
    "exit": JOIN
    + """\
with peer:
    handle = peer.all_reduce(torch.ones(3), timeout_s=1000.0, async_op=True)
    sys.exit(3)
""",
    "forks": """\
import os, sys, torch
from concurrent.futures import ThreadPoolExecutor
from torch.utils.data import DataLoader, Dataset
from dlc.errors import UsageError
from dlc.peer import Peer

class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        try:
            one.members()
        except UsageError as error:
            return str(error)

def average():
    for _ in range(10):  # a busy machine may find one of them dead for a moment
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(p.all_reduce, torch.ones(3), timeout_s=240.0) for p in (one, two)]
            if all(call.result().complete for call in calls):
                return
    sys.exit("no round of both")

with Peer.join(listen="LISTEN") as one, Peer.join([one.address], join_timeout_s=180.0) as two:
    for batch in DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
        assert all("join in the child" in text for text in batch), batch
        average()
    if not (child := os.fork()):
        sys.exit(7)  # through the ends of both `with` blocks, and the interpreter's own
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    average()
    print("joined", one.id, one.address, flush=True)
""",
}


EXTRAS = {"transformers": ("accelerate", "transformers.trainer"), "lightning": ("lightning", "lightning.pytorch")}
"""What a script needs besides dlc, and what is imported of it for all."""


def lacking(name: str) -> bool:
    return name in EXTRAS and importlib.util.find_spec(EXTRAS[name][0]) is None


@pytest.fixture(scope="module")
def survivor() -> Iterator[Peer]:
    with Peer.join() as peer:
        yield peer


@pytest.fixture(scope="module")
def ends(survivor: Peer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, bool, str]]:
    """By script: exit status, whether one of its processes is left, and what it printed."""
    folder = tmp_path_factory.mktemp("scripts")
    there = sorted((name for name in SCRIPTS if not lacking(name)), key=lambda name: name in EXTRAS)
    lines = []
    for name, listen in zip(there, free_addresses(len(there)), strict=True):
        script = SCRIPTS[name].replace("ADDRESS", survivor.address).replace("LISTEN", listen)
        lines.append(json.dumps([f"{folder}/{name}", script, *EXTRAS.get(name, ())[1:]]))
    done = subprocess.run(
        [sys.executable, "-c", RUNNER], input="\n".join(lines), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    found: list[list[Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    return {Path(n).name: (status, left, Path(f"{n}.log").read_text()) for n, status, left in found}


@pytest.mark.parametrize(
    ("name", "status", "told"),
    [
        ("exception", 1, "out of ideas"),
        ("ctrl-c", -signal.SIGINT, "KeyboardInterrupt"),
        ("exit", 3, "joined"),
        ("forks", 0, "joined"),
        ("hivemind", 1, "out of ideas"),
        ("hivemind-forks", 0, "joined"),
        ("opendiloco", -signal.SIGINT, "KeyboardInterrupt"),
        ("transformers", 1, "out of ideas"),
        ("lightning", 1, "KeyboardInterrupt"),
    ],
)
def test_a_script_ends_as_it_should_and_leaves_no_process_and_no_port(
    name: str, status: int, told: str, ends: dict[str, tuple[int, bool, str]]
) -> None:
    if lacking(name):
        pytest.skip(f"needs {EXTRAS[name][0]}, which is not installed")
    found, left, text = ends[name]
    assert found == status and told in text, text
    assert not left, "a process of it is still there"
    for peer in (line.split() for line in text.splitlines() if line.startswith("joined")):
        host, _, port = peer[2].rpartition(":")
        with socket.socket() as caller, pytest.raises(ConnectionRefusedError):  # nobody else listens at that port
            caller.connect((host, int(port)))


@pytest.mark.parametrize("name", ["exception", "ctrl-c", "exit"])
def test_the_others_are_told_that_it_left(name: str, survivor: Peer, ends: dict[str, tuple[int, bool, str]]) -> None:
    (peer,) = (line.split()[1] for line in ends[name][2].splitlines() if line.startswith("joined"))
    wait_until(lambda: all(m.left and not m.alive for m in survivor.members() if m.id == peer))
