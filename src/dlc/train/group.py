"""The processes of one site: rank 0 decides, the others do what it tells them.

A site is one `torchrun` group and one peer. Orders and samples go through Gloo on the CPU, where waiting costs nothing
and may last as long as a round does; gradients and parameters through NCCL between GPUs, else through Gloo too.

Every call of rank 0 has its counterpart on the others: `tell` and `hear`, and `give`, `text`, `meet`, `agree` on all.
Two things go the other way, through torchrun's store, whatever rank 0 does meanwhile: that a process was told to stop,
and that it runs (see `heartbeat`).
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from dlc.errors import DlcError
from dlc.train.heartbeat import BEAT_S, TOLD_S, Heartbeats

log = logging.getLogger(__name__)

WAIT_MAX = timedelta(days=365)
"""For an order: a site waits for its swarm as long as a peer alone does."""
CONNECT_MAX = timedelta(seconds=60)
"""To torchrun's store, which is there before what torchrun starts. torch tries twice, for an hour if not told."""
LOOK_S = 0.05
"""Between two looks for each other, at the start."""
LAST_BEAT_S = 5.0
"""For the last one to be over: a torchrun that is suspended (Ctrl-Z) answers none."""
STOP = "stop"
"""A key of the store: a process other than rank 0 was told to stop."""
BEATS = "beats"
"""Likewise, with a rank after it: how often that one has said that it runs."""
NAMED_MAX = 8
"""Ranks that are waited for, in the log."""
NUMBERS = 3
"""Of an order, at most."""


class Order(enum.IntEnum):
    """What rank 0 tells the others to do with it."""

    END = 0
    """Leave; no numbers."""
    RUN = 1
    """The run begins: its RunSpec and the peer's id come as text."""
    LOOP = 2
    """A new inner loop, with a fresh optimizer."""
    STEP = 3
    """One inner step: its global number, how many sequences, their length; then the sequences come."""
    SCATTER = 4
    """Take new parameters."""
    GATHER = 5
    """Put the whole parameters together on rank 0."""
    SAVE = 6
    """Put the optimizer's whole state together on rank 0."""
    LOAD = 7
    """Take the optimizer's state, which comes as named tensors."""
    EVALUATE = 8
    """Forward only, on batches that come as named tensors."""


class SiteLost(DlcError):
    """Another process of this site has ended, and so must this one."""


class Group:
    """The group that torchrun's environment names; blocks until all its processes are there. One in a process.

    parallel: how they share a model, "ddp" or "fsdp"; what rank 0 has counts. SiteLost: torchrun has ended, or this
    host cannot reach it.
    """

    def __init__(self, device: torch.device, parallel: str = "ddp") -> None:
        cuda = device.type == "cuda"
        store, rank, size = torchruns_store()
        self._store = part_of_this_start(store, rank, size)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=self._store,
            rank=rank,
            world_size=size,
            device_id=device if cuda else None,
        )
        self._orders = dist.new_group(backend="gloo", timeout=WAIT_MAX)
        self.parallel = parallel
        self.device, self.rank, self.size = device, dist.get_rank(), dist.get_world_size()
        self._lost = False
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True, name="dlc-beat")
        self._beating.start()

    def _beat(self) -> None:
        """On a thread of its own, until `close`, or until the store is gone."""
        with contextlib.suppress(dist.DistError):
            while not self._over.wait(BEAT_S):
                self._store.add(f"{BEATS}/{self.rank}", 1)

    def heartbeats(self) -> Heartbeats:
        """For any thread: on rank 0 of the others, on these of rank 0. Looking at them raises SiteLost as `stop_asked`
        does."""

        def beats(rank: int) -> int:
            with _of_torchrun():
                return int(self._store.add(f"{BEATS}/{rank}", 0))

        return Heartbeats((0,) if self.rank else range(1, self.size), beats, time.monotonic)

    def tell(self, order: Order, *numbers: int) -> None:
        """On rank 0."""
        padded = (*numbers, *(0,) * (NUMBERS - len(numbers)))
        dist.broadcast(torch.tensor((order, *padded), dtype=torch.int64), 0, group=self._orders)

    def hear(self) -> tuple[Order, list[int]]:
        """On the others: the next order, waited for."""
        told = torch.empty(1 + NUMBERS, dtype=torch.int64)
        dist.broadcast(told, 0, group=self._orders)
        order, *numbers = told.tolist()
        return Order(order), numbers

    def give(self, tensor: Tensor) -> Tensor:
        """From rank 0 to all, on the CPU, in place; the others bring memory of the same shape and dtype."""
        dist.broadcast(tensor, 0, group=self._orders)
        return tensor

    def text(self, text: str = "") -> str:
        """From rank 0, which has it, to all."""
        raw = text.encode()
        size = int(self.give(torch.tensor(len(raw))))
        data = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(size, dtype=torch.uint8)
        return bytes(self.give(data).tolist()).decode()

    def meet(self) -> None:
        """All wait for each other: NCCL gives up after ten minutes, and one of them may be downloading a model."""
        dist.all_reduce(torch.zeros(1), group=self._orders)

    def agree(self, flags: list[bool]) -> bool:
        """Whether all bring the same flags, equally many."""
        seen = torch.tensor([flags, [not flag for flag in flags]], dtype=torch.uint8)
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=self._orders)
        return not bool((seen[0] & seen[1]).any())

    def ask_for_stop(self) -> None:
        """On the others, from any thread."""
        with contextlib.suppress(dist.DistError):  # where the store is gone, the site has ended
            self._store.set(STOP, "")

    def stop_asked(self) -> bool:
        """On rank 0, from any thread: whether one of the others has asked. SiteLost: torchrun has ended, and would end
        no process of this site any more."""
        with _of_torchrun():
            return bool(self._store.check([STOP]))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do at once. SiteLost: one of them is gone.

        What fails on this rank alone (its memory or its disk is full, Ctrl-C) leaves the others in the middle of it:
        they hear no orders, so that an order would wait for them for ever, as NCCL's own end would.
        """
        try:
            yield
        except DlcError:
            raise  # they have found the same, or wait for an order
        except BaseException as error:
            self._lost = True
            if not (isinstance(error, RuntimeError) and _is_loss(error)):
                raise
            raise SiteLost(
                f"a process of this site of {self.size} has ended, and the site with it (torchrun names the first that "
                "failed); the same command goes on from the newest checkpoint"
            ) from error

    def close(self) -> None:
        """On rank 0 tells the others to leave; the group can be used no more.

        Before Python ends no thread may be in the store any more: that would abort the process.
        """
        self._over.set()
        self._beating.join(LAST_BEAT_S)
        if self._lost:
            return  # nothing would answer: torchrun ends the others once this process has ended
        with contextlib.suppress(SiteLost), self.together():
            if self.rank == 0:
                self.tell(Order.END)
            dist.destroy_process_group()


@contextlib.contextmanager
def _of_torchrun() -> Iterator[None]:
    """Around what is asked of the store. SiteLost: it is gone."""
    try:
        yield
    except dist.DistError as error:
        raise SiteLost("torchrun is gone") from error


def torchruns_store() -> tuple[Store, int, int]:
    """What all processes of the site write to and read from, this one's rank, and their number. SiteLost: it is out of
    reach."""
    timeout = CONNECT_MAX if dist.is_torchelastic_launched() else default_pg_timeout
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    except dist.DistError as error:
        raise SiteLost(
            "torchrun cannot be reached: it has ended, or this host does not know that of rank 0 by its name, or may "
            f"not dial its port ({str(error).splitlines()[0]})"
        ) from error
    store.set_timeout(default_pg_timeout)
    return store, rank, size


def part_of_this_start(store: Store, rank: int, size: int, wait: Callable[[float], None] = time.sleep) -> PrefixStore:
    """A part of `store` in which nothing was written before the processes of now began; blocks until all are there.

    torchrun keeps one store for all its restarts (--max-restarts), and those who began anew would look for each other
    where those before them were. Each process counts the starts of its rank, and rank 0's names the part. Whom rank 0
    answers has counted, and so is alive: torchrun ends all processes before it starts any again.
    """

    def starts(of: int, more: int) -> int:
        return int(store.add(f"dlc/starts/{of}", more))

    mine = starts(rank, 1)
    if rank == 0:
        others, waited_s, told = set(range(1, size)), 0.0, False
        while others:
            for other in others:
                store.set(f"dlc/answers/{other}/{starts(other, 0)}", str(mine))
            others = {other for other in others if not store.check([f"dlc/heard/{mine}/{other}"])}
            if others and waited_s >= TOLD_S and not told:
                told = True
                which = ", ".join(map(str, sorted(others)[:NAMED_MAX])) + (", ..." if len(others) > NAMED_MAX else "")
                log.warning("waiting: of %d processes of this site %d have yet to begin (%s)", size, len(others), which)
            if others:
                wait(LOOK_S)
                waited_s += LOOK_S
        return PrefixStore(f"dlc/{mine}", store)
    while not store.check([answer := f"dlc/answers/{rank}/{mine}"]):
        wait(LOOK_S)
    leaders = int(store.get(answer))
    store.set(f"dlc/heard/{leaders}/{rank}", "")
    return PrefixStore(f"dlc/{leaders}", store)


def send_tensors(group: Group, tensors: dict[str, Tensor]) -> None:
    """On rank 0: names, dtypes and shapes as text, then each tensor."""
    group.text(json.dumps([(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]))
    for tensor in tensors.values():
        group.give(tensor.detach().cpu().contiguous())


def receive_tensors(group: Group) -> Iterator[tuple[str, Tensor]]:
    """On the others, what `send_tensors` sends, one after the other; on the CPU. All of them must be taken."""
    for name, dtype, shape in json.loads(group.text()):
        yield name, group.give(torch.empty(shape, dtype=getattr(torch, dtype)))


def _is_loss(error: RuntimeError) -> bool:
    """Whether a collective failed, and not the arithmetic: Gloo names itself only in the text."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()
