"""What training needs of a peer, as protocols: `dlc.Peer` has it, and so has the stand-in that the tests use.

Only `contribute` and `pull` move vectors; everything else is small and may be called between two inner steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from dlc.comm.encoded import Encoded
from dlc.comm.filling import Filling
from dlc.comm.ledger import Lease
from dlc.comm.state import State
from dlc.report import RoundReport
from dlc.runspec import RunSpec


class Position(Protocol):
    """Where the swarm's state of one channel stands on this peer. A frozen value."""

    @property
    def t(self) -> int:
        """Rounds applied."""

    @property
    def tokens(self) -> float:
        """Tokens committed by all peers together."""

    @property
    def head(self) -> bytes:
        """Hash of the channel's last round, as in its report."""

    @property
    def lease(self) -> Lease | None:
        """The blocks that this peer may train; None while it has no vote."""

    @property
    def digest(self) -> bytes:
        """BLAKE3 of the state after round `t`."""

    @property
    def chunk_elems(self) -> int:
        """Elements per chunk in all rounds of the channel; 0 while nobody has opened it, and without a log."""


class Pending(Protocol):
    """A contribution that was offered to the next round; `report` and `counted` are set before `wait` returns."""

    @property
    def done(self) -> bool:
        """Its round is over, or nothing was offered: `wait` returns at once."""

    @property
    def counted(self) -> bool:
        """Once waited for: the contribution is part of that round."""

    @property
    def included(self) -> tuple[bool, ...]:
        """Once waited for: for each chunk whether the contribution is in its mean; empty where it is in none."""

    @property
    def report(self) -> RoundReport | None:
        """Once waited for: of that round; None if it was dropped: this peer's state was replaced, or its samples went
        to others."""

    @property
    def misfit(self) -> str:
        """Once waited for: what its round averaged, where that is of other elements or another codec; else empty."""

    @property
    def overtaken(self) -> bool:
        """Nothing was offered, because a round had been committed that the caller had not seen."""

    def wait(self, timeout_s: float | None = None) -> RoundReport | None:
        """Block until done; RoundTimeout leaves the contribution offered, so that one may wait again."""


class Frozen(Protocol):
    """A consistent copy of a channel for a checkpoint."""

    @property
    def log(self) -> bytes:
        """What `Resume` needs of the log."""

    @property
    def t(self) -> int:
        """Rounds applied."""

    @property
    def tokens(self) -> float:
        """Tokens committed by all peers together."""

    @property
    def digest(self) -> bytes:
        """BLAKE3 of the state."""

    @property
    def image(self) -> memoryview:
        """`State.export()`."""


class MemberView(Protocol):
    """What this peer knows of one member, itself included."""

    @property
    def id(self) -> str:
        """Peer id."""

    @property
    def role(self) -> str:
        """One of `dlc.comm.roles.ROLES`."""

    @property
    def alive(self) -> bool:
        """Whether it answers."""

    @property
    def away(self) -> bool:
        """Whether it stopped to answer a short while ago, and may come back."""

    @property
    def left(self) -> bool:
        """Whether it announced its leave."""

    @property
    def depth(self) -> int:
        """Entries of the log that it has applied."""

    @property
    def tokens(self) -> float:
        """What has counted in its history."""

    @property
    def channels(self) -> tuple[str, ...]:
        """Whose states it holds, as they are after these entries."""

    @property
    def me(self) -> bool:
        """Whether it is this peer."""

    @property
    def status(self) -> Mapping[str, Any]:
        """What it last said with `describe`. It came from another host: check before use."""


class TrainPeer(Protocol):
    """The part of `dlc.Peer` that a `DiLoCo` uses."""

    @property
    def id(self) -> str:
        """Peer id."""

    @property
    def role(self) -> str:
        """One of `dlc.comm.roles.ROLES`."""

    def describe(
        self, *, speed: float | None = None, eta_s: float | None = None, status: dict[str, Any] | None = None
    ) -> None:
        """What others see of this peer."""

    def open(
        self,
        channel: str,
        state: State,
        *,
        codec: str,
        chunk_elems: int,
        lease_len: int = 0,
        timeout_s: float | None = None,
    ) -> Position:
        """Attach a replicated state; block until it equals the swarm's and this peer has a vote."""

    def abandon(self, channel: str, state: State) -> None:
        """This state is of no more use: `open` may put another in its place."""

    def take_seat(self, timeout_s: float | None = None) -> None:
        """Block until this peer has a vote and knows all rounds so far."""

    def pull(self, channel: str, out: Tensor) -> Position:
        """Copy theta into `out`, together with the position it belongs to."""

    def position(self, channel: str) -> Position:
        """Where the channel stands now. Cheap."""

    def resumed_at(self, channel: str) -> int:
        """The round at which this peer resumed the run, while no other has come on the channel; 0: it did not."""

    def contribute(
        self,
        channel: str,
        vector: Tensor | Encoded,
        *,
        weight: float,
        upto: int = 0,
        norm: float = 0.0,
        after: int | None = None,
        patience_s: float = 0.0,
        filling: Filling | None = None,
    ) -> Pending:
        """Offer a flat fp32 CPU vector to the next round; it must not change until the round is done. Or one that is
        encoded, in the channel's grid.

        `norm`: of the vector, which is then clipped to the median of the norms told for this round; 0: it is not.
        `upto`: the position in the lease up to which it was trained; 0: it brings no samples that are not counted yet.
        `after`: the round that the caller has seen last; if another one is past by now, nothing is offered.
        `patience_s`: how long the round may wait for others that are alive; 0: as long as it pays.
        `filling`: the vector becomes final meanwhile, from its end to its front.
        """

    def counts(self, channel: str) -> bool:
        """Whether the round that moves the channel's state just now is sure to count what this peer offered: to be
        asked by the state, in its `step`."""

    def withdraw(self, channel: str) -> bool:
        """Take back what was offered, so that it may change. False: its round is running or over."""

    def checkpoint(self, channel: str) -> Frozen:
        """A consistent copy of log and state."""


class TrainerPeer(TrainPeer, Protocol):
    """The part of `dlc.Peer` that a `Trainer` uses."""

    @property
    def spec(self) -> RunSpec:
        """The swarm's RunSpec."""

    def members(self, departed: bool = False) -> Sequence[MemberView]:
        """Everybody known; with `departed` those that have left, too."""

    def needed_by(self) -> Sequence[str]:
        """Ids of those who may still need something of an exchange that has ended here."""

    def leave(self, timeout_s: float = 5.0) -> None:
        """Announce the leave and end."""
