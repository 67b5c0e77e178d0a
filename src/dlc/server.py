"""The parameter server as library objects: `ParameterServer` on helpers, `ServerClient` on trainers.

Both stand beside the log: their peers join with `log=False`, helpers with `role="helper"`. A helper needs no model: how
the vector is cut it learns from the trainers, how the parameters move it is told here, alike on all helpers.

    helper                                              trainer
    peer = Peer.join(..., role="helper", log=False)     peer = Peer.join(..., log=False)
    server = ParameterServer(peer)                      client = ServerClient(peer, theta)
                                                        client.exchange()                 the swarm's theta
                                                        client.exchange(theta - local)    push, and pull what came of it
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from blake3 import blake3
from torch import Tensor

from dlc.arguments import instance, joined, number, seconds, whole
from dlc.comm.codecbase import all_finite
from dlc.comm.effects import Effect
from dlc.comm.grid import Grid, usual_chunk_elems
from dlc.comm.ids import Voter
from dlc.comm.node import Node
from dlc.comm.reducer import WEIGHT_MAX
from dlc.comm.roles import HELPER
from dlc.comm.server import SpanServer
from dlc.comm.serverclient import SpanClient
from dlc.comm.serverexchange import ExchangeFailed, ExchangeOver, History, Outcome, Paused, check_history
from dlc.comm.servermessages import BEGINNING_MAX, COUNTED, DEAD, LATE, LEFT, NOT_FINITE
from dlc.comm.serverpeer import Notice
from dlc.comm.service import ServiceNews
from dlc.comm.spanowner import Rules
from dlc.comm.spans import Spans
from dlc.comm.spanstate import Optimizer
from dlc.comm.wire import pack, unpack
from dlc.errors import DlcError, ProtocolError, RoundTimeout, SwarmClosed, UsageError
from dlc.flat import check_writable
from dlc.handles import Flag
from dlc.peer import Peer
from dlc.report import Missing, Reason, RoundReport, Share
from dlc.runspec import OuterSpec
from dlc.served import Stopped
from dlc.strategyspec import ServerSpec
from dlc.train.outer_step import outer_lr, rule_of

log = logging.getLogger(__name__)

DIGEST_BYTES = 16
REASONS: dict[str, Reason] = {LATE: "late", DEAD: "dead", LEFT: "left", NOT_FINITE: "refused: not finite"}


@dataclass(frozen=True)
class ServerReport:
    """What became of one exchange. Shares of the vector are fractions above 0 and at most 1."""

    step: int
    """Newest round that all of theta is of."""
    outcomes: Mapping[str, float]
    """What became of the push, to the share of the vector; "counted" alone where all went well. "stale": based on
    parameters that were too old; "late": its round went on without it; "refused: not finite"; "lost": it was counted,
    and everybody who held it died, or was on the losing side of a partition. Empty where nothing was pushed."""
    contributors: tuple[Share, ...]
    """Whose pushes the same updates hold, with their weights, in the order of ids."""
    missing: tuple[Missing, ...]
    """Trainers that rounds went on without, and why."""
    owned: Mapping[str, float]
    """Helper to the share that it owns."""
    staleness: int
    """Asynchronous: most updates that came between the base of a push and itself, over the spans."""
    version: int
    """Updates that the least moved span has seen."""
    bytes_sent: int
    bytes_received: int
    seconds: float
    set_aside: int = 0
    """Pushes of mine, in earlier exchanges, that had counted and are no part of the parameters any more (the most over
    the spans): after a partition of more than `timeouts.evict_s` the other side's updates hold."""
    set_aside_weight: float = 0.0
    """The sum of their weights, each by its share of the vector."""
    rounds_lost: int = 0
    """Of the first exchange of a client with a `history`: rounds that the theta it was made with holds, and the swarm's
    does not, as that went on from an older one (the most over the spans)."""

    @property
    def counted(self) -> float:
        """Share of the vector in which the push counted."""
        return self.outcomes.get(COUNTED, 0.0)

    def to_round(self, channel: str, head: str) -> RoundReport:
        """The same as other strategies tell it, under that channel and name."""
        weight = sum(share.weight for share in self.contributors)
        return RoundReport(
            channel=channel,
            t=self.step,
            head=head,
            contributors=self.contributors,
            missing=self.missing,
            weight=weight,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            seconds=self.seconds,
            waiting_s=0.0,
            reduce_s=self.seconds,
            ballots=1,
            owned=self.owned,
        )


class ParameterServer:
    """Owns spans of the parameters and the optimizer's state, and is the standby of others, until `close`.

    outer: how the parameters move; "adam" with `spec.weight_decay` is AdamW.
    spec: rounds or not, and the rest.

    Both are the same on all helpers. One per peer, which must be a helper (UsageError).
    """

    def __init__(self, peer: Peer, *, outer: OuterSpec | None = None, spec: ServerSpec | None = None) -> None:
        joined(peer)
        spec = spec or ServerSpec()
        optimizer = optimizer_of(outer or OuterSpec(), spec)
        rules = Rules(spec.async_, spec.max_staleness, spec.patience_s)

        def make(node: Node) -> SpanServer:
            if node.members.own.role != HELPER:
                raise UsageError('a parameter server runs on a helper: join with role="helper"')
            return SpanServer(node.members, optimizer, rules, node.ctx.now)

        self.peer = peer
        self.error: SwarmClosed | None = None
        self.ended = Flag()
        """The peer has left, or its driver thread has ended."""
        self._served = peer.serve(make)
        self._served.listen(self._heard)

    def spans(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Spans that this helper owns, and those of which it is the standby."""
        return self._served.ask(lambda server, now: (tuple(server.owned), tuple(server.backed)))

    def step(self) -> int:
        """Newest round of any span that this helper holds; 0 where it holds none."""
        return self._served.ask(lambda server, now: server.step)

    def moved(self) -> tuple[int, int]:
        """Bytes sent and received: pushes, parameters, and what keeps a standby in step."""
        return self._served.ask(lambda server, now: (server.shelf.sent_bytes, server.fetches.received_bytes))

    def close(self) -> None:
        """Serve no longer. The others see that when the peer leaves: do that next. Once more changes nothing."""
        self._served.unlisten(self._heard)
        self._served.close()

    def _heard(self, news: ServiceNews) -> None:
        _log_notice(news)
        if isinstance(news, Stopped):
            self.error = news.error
            self.ended.set()


class ServerClient:
    """A trainer's side: one exchange at a time with the helpers that own the parameters.

    theta: the parameters that it would begin with, flat fp32 on the CPU; copied. Where nobody has begun yet, those of
    one trainer become everybody's.
    spec: as on the helpers.
    codec: how pushes travel: "fp32", "fp16" or "bf16". Parameters are pulled as fp32.
    chunk_elems: elements per part of a push; 0: some hundreds of parts.
    step: the round that theta is of. Where no helper holds the parameters any more, those of the greatest are taken.
    history: what `history` gave of the client whose `read` gave theta; without it nobody is told that the swarm has no
    more some of its rounds.

    All but `theta`, `step` and `history` are the same on all trainers. UsageError: theta is not such a vector, not
    finite, or too short; the history is none.
    """

    def __init__(
        self,
        peer: Peer,
        theta: Tensor,
        *,
        spec: ServerSpec | None = None,
        codec: str = "fp16",
        chunk_elems: int = 0,
        step: int = 0,
        history: bytes = b"",
    ) -> None:
        joined(peer)
        instance("theta", theta, Tensor, "give the parameters as one flat torch tensor")
        spec, step = spec or ServerSpec(), whole("step", step, 0, BEGINNING_MAX)
        instance("history", history, bytes, "give what the history() of a client returned")
        before = _history_of(history) if history else None
        if theta.dtype is not torch.float32 or theta.device.type != "cpu" or theta.dim() != 1 or not theta.numel():
            raise UsageError(f"theta must be 1-D float32 on the CPU, not {theta.dim()}-D {theta.dtype} {theta.device}")
        if not all_finite(theta):
            raise UsageError("theta has elements that are NaN or infinite: everybody would begin with them")
        grid = Grid(theta.numel(), chunk_elems or usual_chunk_elems(theta.numel(), codec), codec)
        layout = Spans.usual(grid, spec.spans)
        own = theta.detach().clone()
        digest = blake3(own.numpy().data.cast("B")).digest(DIGEST_BYTES)
        self.peer, self.numel = peer, theta.numel()
        self._told = Flag()
        """Up where `done`."""
        self._over: ExchangeOver | None = None
        self._failed: UsageError | None = None
        self._stopped: DlcError | None = None
        self._number, self._step = 0, step
        self._unread = False
        """What became of the newest exchange is still to be asked for, by `wait`, or to be given up."""
        self._served = peer.serve(
            lambda node: SpanClient(node.members, layout, own, digest, spec.async_, node.ctx.now, step, before)
        )
        self._served.listen(self._heard)

    def exchange(
        self, vector: Tensor | None = None, *, weight: float = 1.0, timeout_s: float | None = None
    ) -> ServerReport:
        """Push a pseudo-gradient (flat fp32, CPU), wait until it counts or is refused, and pull the parameters; without
        one: pull only. `read` gives them.

        weight: of the push in its round, in tokens; without effect where pushes are applied one by one.

        Waits as long as there is no helper; the log tells it. RoundTimeout: it took longer than `timeout_s`; the push
        may be counted all the same. UsageError: the swarm's parameters are another vector, or not finite. SwarmClosed.
        Ctrl-C gives the exchange up as a time-out does.
        """
        if timeout_s is not None:
            timeout_s = seconds("timeout_s", timeout_s)
        self._served.check_may_wait()
        try:
            self.begin(vector, weight=weight)
            return self.wait(timeout_s)
        except DlcError:
            raise  # it is over, or never began
        except BaseException:
            with contextlib.suppress(DlcError):  # what was raised first is told
                self._cancel()
            raise

    def begin(self, vector: Tensor | None = None, *, weight: float = 1.0) -> None:
        """The same in two steps: `wait` for the end. The vector must not change until then.

        UsageError: what became of the exchange before was not asked for yet, by `wait`.
        """
        weight = number("weight", weight, 0, WEIGHT_MAX, "0 to 2^53")
        if vector is not None:
            instance("vector", vector, Tensor, "give what is pushed as one flat torch tensor")
            if vector.dtype is not torch.float32 or vector.device.type != "cpu" or vector.shape != (self.numel,):
                raise UsageError(
                    f"a push is float32 ({self.numel},) on the CPU, not {vector.dtype} {tuple(vector.shape)}"
                )
            vector = vector.detach().contiguous()

        def begin(client: SpanClient, now: float) -> list[Effect]:
            if self._unread:
                raise UsageError(
                    "the exchange before is over, and what became of its push was not asked for: call wait() first"
                    if self.done
                    else "an exchange with the parameter server is under way already: wait() for it first"
                )
            effects = client.begin(vector, weight, now)
            self._over = self._failed = None
            self._told.clear()
            self._number, self._unread = client.number, True
            return effects

        self._served.act(begin)

    def wait(self, timeout_s: float | None = None) -> ServerReport:
        """The report of the exchange that `begin` began. RoundTimeout, which gives it up; UsageError, SwarmClosed."""
        if timeout_s is not None:
            timeout_s = seconds("timeout_s", timeout_s)
        if not self.done:
            self._served.check_may_wait()
            if not self._unread:
                raise UsageError("no exchange is under way: begin() one first; one that took too long is given up")
            self._told.wait(timeout_s)
        if not self.done:
            self._cancel()  # and it may be over before that is heard
        self._unread = False
        if self._over is None:
            if self._failed is not None:
                raise self._failed
            if self._stopped is not None:
                raise self._stopped
            raise RoundTimeout(f"the exchange with the parameter server took longer than {timeout_s:g} s")
        report = _report(self._over)
        if report.set_aside:
            log.warning(
                "another part of the swarm holds the parameters: %d pushes of ours are set aside", report.set_aside
            )
        if report.rounds_lost:
            log.warning(
                "the swarm went on from older parameters than ours of round %d: %d rounds of ours are no part of its",
                self._step,
                report.rounds_lost,
            )
        return report

    def _cancel(self) -> None:
        self._served.ask(lambda client, now: client.cancel())
        self._unread = False

    def poll(self, timeout_s: float) -> bool:
        """Wait for at most this long; True: the exchange is over."""
        if not self.done:
            self._served.check_may_wait()
            self._told.wait(timeout_s)
        return self.done

    @property
    def done(self) -> bool:
        """The exchange is over: `wait` does not wait."""
        return self._over is not None or self._failed is not None or self._stopped is not None

    def read(self, out: Tensor) -> Tensor:
        """Copy the parameters that were pulled last into `out` (fp32, as long as theta), and return it. UsageError: it
        is another one."""
        if not isinstance(out, Tensor) or out.dtype is not torch.float32 or out.shape != (self.numel,):
            what = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise UsageError(f"the parameters are float32 ({self.numel},), and cannot be read into {what}")
        check_writable(out)
        self._served.ask(lambda client, now: out.detach().copy_(client.theta))
        return out

    def history(self) -> bytes:
        """What the parameters that were pulled last are part of: to be kept with them, for a client that begins so."""
        return self._served.ask(lambda client, now: pack(client.history))

    def close(self) -> None:
        """Take part no longer; who waits for an exchange gets a UsageError. Once more changes nothing."""
        self._over, self._stopped = None, UsageError("the client was closed: make another one")
        self._told.set()
        self._served.unlisten(self._heard)
        self._served.close()

    def _heard(self, news: ServiceNews) -> None:
        """On the driver thread."""
        _log_notice(news)
        if isinstance(news, ExchangeOver | ExchangeFailed | Stopped):
            if isinstance(news, Stopped):
                self._stopped = news.error
            elif isinstance(news, ExchangeFailed):
                self._failed = UsageError(news.why)
            elif news.number == self._number:
                self._over = news
            if self.done:
                self._told.set()


def optimizer_of(outer: OuterSpec, spec: ServerSpec) -> Optimizer:
    """How the helpers of these options move theta. `outer` names its end if it has one (`OuterSpec.ending`)."""
    momentum = {"nesterov": outer.momentum, "sgd": 0.0}.get(outer.optimizer) if spec.async_ else None
    name = f"{outer}, async {spec.async_}, weight decay {spec.weight_decay}"
    return Optimizer(name, rule_of(outer), lambda t: outer_lr(outer, t), spec.async_, momentum, spec.weight_decay)


def _history_of(given: bytes) -> History:
    """UsageError: no client gave it. Helpers would pass over what begins with it, and nobody would be told."""
    try:
        history = unpack(given, History)
        check_history(history)
    except ProtocolError as error:
        raise UsageError(
            f"the history is damaged, or was changed after a client gave it ({error}): leave it away, and nobody is "
            "told of rounds that the swarm has no more"
        ) from None
    return history


def _log_notice(news: ServiceNews) -> None:
    if isinstance(news, Notice):
        log.log(logging.WARNING if news.serious else logging.INFO, "%s", news.text)
    elif isinstance(news, Paused) and news.spans:
        what = f"span {news.spans[0]}" if len(news.spans) == 1 else f"{len(news.spans)} spans"
        start = "dlc join --peers HOST:PORT --role helper"
        log.warning("training pauses: no helper serves %s of the parameters; start one: %s", what, start)
    elif isinstance(news, Paused):
        log.info("all parameters are served again")


def _report(over: ExchangeOver) -> ServerReport:
    outcomes: dict[str, float] = {}
    owned: dict[str, float] = {}
    shares: dict[tuple[Voter, float], float] = {}
    missing: dict[tuple[str, str], float] = {}
    for o in over.outcomes:
        owned[o.owner] = owned.get(o.owner, 0.0) + o.share
        if o.outcome:
            outcomes[o.outcome] = outcomes.get(o.outcome, 0.0) + o.share
        _count(o, shares, missing)
    return ServerReport(
        step=over.step,
        outcomes={what: _fraction(share) for what, share in outcomes.items()},
        contributors=tuple(Share(v.peer, w, _fraction(share)) for (v, w), share in sorted(shares.items())),
        missing=tuple(Missing(p, REASONS[r], _fraction(share)) for (p, r), share in sorted(missing.items())),
        owned={helper: _fraction(share) for helper, share in sorted(owned.items())},
        staleness=max((o.staleness for o in over.outcomes), default=0),
        version=min(o.version for o in over.outcomes),
        bytes_sent=over.bytes_sent,
        bytes_received=over.bytes_received,
        seconds=over.seconds,
        set_aside=max((o.set_aside for o in over.outcomes), default=0),
        rounds_lost=max((o.rounds_lost for o in over.outcomes), default=0),
        set_aside_weight=sum(o.share * o.set_aside_weight for o in over.outcomes),
    )


def _count(o: Outcome, shares: dict[tuple[Voter, float], float], missing: dict[tuple[str, str], float]) -> None:
    """Shares by process: a round may have two of one peer, which was started again meanwhile."""
    if o.update is None or o.outcome != COUNTED:
        return
    for push in o.update.pushes:
        key = (push.voter, push.weight)
        shares[key] = shares.get(key, 0.0) + o.share
    for absent in o.update.missing:
        reason = (absent.voter.peer, absent.reason)
        missing[reason] = missing.get(reason, 0.0) + o.share


def _fraction(share: float) -> float:
    """Sums of shares are 1 but for rounding."""
    return 1.0 if share > 1 - 1e-9 else share
