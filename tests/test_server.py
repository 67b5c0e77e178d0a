"""The parameter server over real sockets: library objects in this process, and `dlc join` in processes of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

import dlc
from dlc.cli.helping import help_out
from dlc.comm.ids import Voter
from dlc.comm.serverclient import SpanClient
from dlc.comm.serverexchange import ExchangeFailed, ExchangeOver, History, Mark, Outcome
from dlc.comm.servermessages import NUMBER_MAX, PAST_MAX, Left, Origin
from dlc.comm.wire import pack, unpack
from dlc.errors import RoundTimeout, UsageError
from dlc.runspec import OuterSpec, RunSpec, TimeoutsSpec
from dlc.server import _report as report_of
from dlc.strategyspec import ServerSpec
from dlc.train.outer import theta_of
from dlc.train.saves import newest
from dlc.train.trainer import Trainer
from tests.helpers import TICK_S, wait_until
from tests.swarm import DEADLINE_S, JOIN_S, RUN, Event, Host, lines_interrupted

PLAIN = OuterSpec(optimizer="sgd", lr=1.0)
ENDS_S = 60.0


def interrupted(*args: object) -> bool:
    raise KeyboardInterrupt


def test_ctrl_c_at_any_line_of_a_wait_for_an_exchange_leaves_the_driver_nothing_to_wait_for() -> None:
    peer = dlc.Peer.join(log=False)
    client = dlc.ServerClient(peer, torch.zeros(8))
    another = ExchangeOver(-1, 0, (), 0, 0, 0.0)
    lines = lines_interrupted(peer, lambda: client.poll(TICK_S), lambda: client._heard(another))
    assert lines > 10, "as a wait has some lines"


def test_a_client_is_not_made_with_a_beginning_that_helpers_would_pass_over_without_a_word() -> None:
    """It waited for them for ever."""
    founder = Voter("h", 1)
    sound = Mark(Origin(b"?", 1, founder, (Left(founder, 1),)), 1, 1)
    origins = [
        dataclasses.replace(sound.origin, version=-1),
        dataclasses.replace(sound.origin, past=(Left(founder, NUMBER_MAX + 1),)),
        dataclasses.replace(sound.origin, past=(Left(founder, 1),) * (PAST_MAX + 1)),
    ]
    marks = [dataclasses.replace(sound, origin=origin) for origin in origins]
    marks += [dataclasses.replace(sound, term=NUMBER_MAX + 1), dataclasses.replace(sound, version=-1)]
    with dlc.Peer.join(log=False) as peer:
        for history in (b"?", pack(History(())), *(pack(History((mark,))) for mark in marks)):
            with pytest.raises(UsageError, match="the history is damaged"):
                dlc.ServerClient(peer, torch.zeros(8), history=history)
        with pytest.raises(UsageError, match="history is str"):
            dlc.ServerClient(peer, torch.zeros(8), history="?")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="it must be 0 to"):
            dlc.ServerClient(peer, torch.zeros(8), step=NUMBER_MAX)
        dlc.ServerClient(peer, torch.zeros(8), history=pack(History((sound,)))).close()


def test_pushes_of_two_trainers_become_a_round_and_one_waits_while_there_is_no_helper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numel = 5000
    with dlc.Peer.join(log=False) as first, dlc.Peer.join([first.address], log=False, join_timeout_s=JOIN_S) as second:
        spec = ServerSpec(patience_s=DEADLINE_S)
        a = dlc.ServerClient(first, torch.zeros(numel), spec=spec, chunk_elems=512)
        b = dlc.ServerClient(second, torch.ones(numel), spec=spec, chunk_elems=512)
        with pytest.raises(UsageError, match="NaN or infinite"):
            dlc.ServerClient(first, torch.tensor([0.0, float("nan")]))
        with pytest.raises(UsageError, match=r"weight is 1.8.*: it must be a number from 0 to 2\^53"):
            a.exchange(torch.zeros(numel), weight=2.0**54, timeout_s=0.2)
        wrong: tuple[tuple[str, Callable[[], object]], ...] = (
            ("theta is list: give the parameters", lambda: dlc.ServerClient(first, [0.0])),  # type: ignore[arg-type]
            ("step is -1: it must be 0 to", lambda: dlc.ServerClient(first, torch.zeros(numel), step=-1)),
            ("SpanClient of this peer takes .* already: close it", lambda: dlc.ServerClient(first, torch.zeros(numel))),
            ("vector is list: give what is pushed", lambda: a.exchange([0.0])),  # type: ignore[arg-type]
            ("timeout_s is 'soon'", lambda: a.exchange(timeout_s="soon")),  # type: ignore[arg-type]
            ("cannot be read into torch.float32 \\(3,\\)", lambda: a.read(torch.empty(3))),
            ("its elements share memory", lambda: a.read(torch.empty(1).expand(numel))),
            ("cannot be read into list", lambda: a.read([])),  # type: ignore[arg-type]
        )
        for why, call in wrong:
            with pytest.raises(UsageError, match=why):
                call()
        with pytest.raises(RoundTimeout, match="longer than 0.2 s"):
            a.exchange(timeout_s=0.2)
        with pytest.raises(UsageError, match='join with role="helper"'):
            dlc.ParameterServer(first)
        with monkeypatch.context() as patch:
            patch.setattr(a, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                a.exchange(torch.ones(numel))
        with dlc.Peer.join([first.address], role="helper", log=False, join_timeout_s=JOIN_S) as third:
            server = dlc.ParameterServer(third, outer=PLAIN, spec=spec)
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda client: client.exchange(timeout_s=math.inf), (a, b)))
                began = [client.read(torch.empty(numel)) for client in (a, b)]
                assert torch.equal(began[0], began[1]) and began[0].unique().numel() == 1, "all spans of one beginning"
                pushes = [pool.submit(c.exchange, torch.full((numel,), -1.0), weight=w, timeout_s=DEADLINE_S)
                          for c, w in ((a, 1.0), (b, 3.0))]  # fmt: skip
                reports = [push.result() for push in pushes]
            assert torch.equal(a.read(torch.empty(numel, requires_grad=True)), began[0] + 1)
            assert torch.equal(b.read(torch.empty(numel)), began[0] + 1)
            for report in reports:
                assert report.counted == 1.0 and report.step == 1 and not report.missing
                assert {(s.peer, s.weight, s.fraction) for s in report.contributors} == {
                    (first.id, 1.0, 1.0),
                    (second.id, 3.0, 1.0),
                }
                assert report.owned == {third.id: 1.0} and report.bytes_sent >= 2 * numel
            held = a.history()
            for _ in range(2):
                a.close()
            for use in (a.exchange, a.history, lambda: a.wait(DEADLINE_S), lambda: a.read(torch.empty(numel))):
                with pytest.raises(UsageError, match="closed: make another one"):
                    use()
            a = dlc.ServerClient(first, torch.ones(numel), spec=spec, chunk_elems=512, step=1, history=held)
            again = a.exchange(timeout_s=DEADLINE_S)
            assert (again.step, again.rounds_lost) == (1, 0) and a.history() == held
            owned, backed = server.spans()
            assert len(owned) == 10 and not backed and server.step() == 1
            for _ in range(2):
                server.close()
            with pytest.raises(UsageError, match="closed: make another one"):
                server.spans()


def test_a_report_tells_the_least_of_what_all_have_and_the_most_of_what_is_lost() -> None:
    outcomes = (
        Outcome(0, 0.75, "h0", "counted", None, 2, 7, 1, 10.0, 0),
        Outcome(1, 0.25, "h1", "late", None, 0, 5, 3, 4.0, 2),
    )
    report = report_of(ExchangeOver(1, 4, outcomes, 10, 20, 1.5))
    assert (report.step, report.version, report.staleness, report.rounds_lost) == (4, 5, 2, 2)
    assert (report.set_aside, report.set_aside_weight) == (3, 0.75 * 10.0 + 0.25 * 4.0)
    assert report.outcomes == {"counted": 0.75, "late": 0.25} and report.owned == {"h0": 0.75, "h1": 0.25}
    assert (report.bytes_sent, report.bytes_received, report.seconds) == (10, 20, 1.5)


def test_an_exchange_that_is_over_just_as_it_is_given_up_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had counted was told as dropped."""
    with dlc.Peer.join(log=False) as peer:
        client = dlc.ServerClient(peer, torch.zeros(5000))
        over = ExchangeOver(1, 7, (Outcome(0, 1.0, "helper", "counted", None, 0, 3, 0, 0.0, 0),), 0, 0, 0.1)
        client.begin()
        monkeypatch.setattr(client, "_cancel", lambda: client._heard(over))
        assert client.wait(0.0).counted == 1.0


def test_what_became_of_an_exchange_is_not_lost_by_the_next_and_nothing_is_waited_for_that_nobody_began() -> None:
    """A second `begin` threw the report of the first away, and `wait` after a time-out never ended."""
    over = ExchangeOver(1, 7, (Outcome(0, 1.0, "helper", "counted", None, 0, 3, 0, 0.0, 0),), 0, 0, 0.1)
    with dlc.Peer.join(log=False) as peer:
        client = dlc.ServerClient(peer, torch.zeros(5000))

        def end(machine: SpanClient, now: float) -> None:
            machine.cancel()
            client._heard(over)

        begins: tuple[Callable[[], object], ...] = client.begin, client.exchange
        with pytest.raises(UsageError, match="no exchange is under way"):
            client.wait(DEADLINE_S)
        client.begin()
        for call in begins:
            with pytest.raises(UsageError, match="under way already"):
                call()
        client._served.ask(end)
        for call in begins:
            with pytest.raises(UsageError, match="was not asked for"):
                call()
        assert client.done and client.wait().counted == 1.0 and client.wait().counted == 1.0
        client.begin()
        assert not client.done
        with pytest.raises(RoundTimeout):
            client.wait(0.0)
        with pytest.raises(UsageError, match="no exchange is under way"):
            client.wait(DEADLINE_S)
        client.begin()
        client._heard(ExchangeFailed(2, "of another vector"))
        with pytest.raises(UsageError, match="was not asked for"):
            client.begin()
        with pytest.raises(UsageError, match="of another vector"):
            client.wait()


def test_a_trainer_with_another_vector_is_told_so() -> None:
    """It waited for ever."""
    with (
        dlc.Peer.join(log=False, role="helper") as first,
        dlc.Peer.join([first.address], log=False, join_timeout_s=JOIN_S) as second,
    ):
        server = dlc.ParameterServer(first, outer=PLAIN)
        dlc.ServerClient(second, torch.zeros(5000)).exchange(timeout_s=DEADLINE_S)
        with dlc.Peer.join([first.address], log=False, join_timeout_s=JOIN_S) as third:
            odd = dlc.ServerClient(third, torch.zeros(5001))
            for vector in (None, torch.ones(5001)):
                with pytest.raises(UsageError, match="numel=5000.*numel=5001"):
                    odd.exchange(vector, timeout_s=DEADLINE_S)
        assert server.step() == 0


def test_a_killed_helpers_spans_go_on_at_the_other(tmp_path: Path) -> None:
    """Helpers are processes of their own, trainers peers of this one; no push is lost, none counts twice."""
    numel = 5000
    waits, calm = ServerSpec(patience_s=DEADLINE_S), TimeoutsSpec(probe_s=1.0, chunk_s=30.0)
    spec = RunSpec(strategy="parameter-server", outer=PLAIN, server=waits, timeouts=calm)
    with contextlib.closing(Host(tmp_path)) as host, contextlib.ExitStack() as stack:
        key = host.key.read_text()
        first = stack.enter_context(dlc.Peer.join(spec=spec, key=key))
        second = stack.enter_context(dlc.Peer.join([first.address], key=key, join_timeout_s=JOIN_S))
        words = ("--peers", first.address, "--key-file", str(host.key), "--role", "helper")
        killed, left = (host.start(name, *words) for name in ("h0", "h1"))
        clients = [
            dlc.ServerClient(peer, torch.zeros(numel), spec=spec.server, chunk_elems=256) for peer in (first, second)
        ]
        rounds = 0
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda client: client.exchange(timeout_s=DEADLINE_S), clients))
            for helper in (killed, left):
                helper.event("serving", lambda event: event["owned"] and event["standby"])
            while rounds < 8:
                pushes = [pool.submit(c.exchange, torch.full((numel,), -1.0), timeout_s=DEADLINE_S) for c in clients]
                if rounds == 3:
                    killed.kill()
                assert all(push.result().counted == 1.0 for push in pushes)
                rounds += 1
        for client in clients:
            assert torch.equal(client.read(torch.empty(numel)), torch.full((numel,), float(rounds)))
        assert len(left.event("serving", lambda event: len(event["owned"]) == 16)["standby"]) == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_trainer_of_the_strategy_trains_and_its_checkpoint_goes_on(tmp_path: Path, asynchronous: bool) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 50)
    config = tmp_path / "RUN.toml"
    table = RUN.format(rounds=4, text=text.as_posix())
    config.write_text(f'strategy = "parameter-server"\n{table}[server]\nasync = {str(asynchronous).lower()}\n')
    spec = RunSpec.from_toml(config)
    events: list[Event] = []
    with (
        dlc.Peer.join(spec=spec, role="helper") as helper,
        dlc.Peer.join([helper.address], hold=True, join_timeout_s=JOIN_S) as peer,
    ):
        server = dlc.ParameterServer(helper, outer=spec.outer, spec=spec.server)
        summary = Trainer(peer, tmp_path / "t", device="cpu", on_event=events.append).run(threading.Event())
        assert server.step() == 4
    rounds = [event for event in events if event["event"] == "round"]
    assert [event["t"] for event in rounds] == [1, 2, 3, 4] and all(event["counted"] for event in rounds)
    assert summary.reason == "rounds" and summary.t == 4 and summary.setbacks.tokens_dropped == 0
    assert rounds[-1]["digest"] == "" and summary.digest
    saved = newest(tmp_path / "t", spec)
    assert saved is not None and saved.t == 4 and theta_of(saved.image).numel() > 0
    marks = unpack(saved.own["history"].numpy().tobytes(), History).marks
    assert len({mark.origin for mark in marks}) == 1 and marks[0].origin.founder == helper.voter


def test_who_only_looks_on_keeps_no_helper_in_a_run_that_is_over() -> None:
    spec = RunSpec(strategy="parameter-server", outer=PLAIN, rounds=1)
    ended, stop = threading.Event(), threading.Event()

    def help_on(helper: dlc.Peer) -> None:
        help_out(helper, queue.SimpleQueue(), stop, False, lambda take: None)
        ended.set()

    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        helper = stack.enter_context(dlc.Peer.join(spec=spec, role="helper"))
        join = partial(dlc.Peer.join, [helper.address], join_timeout_s=JOIN_S)
        stack.callback(stop.set)
        helps = pool.submit(help_on, helper)
        looker = stack.enter_context(join(role="observer"))
        with join() as trainer:
            client = dlc.ServerClient(trainer, torch.zeros(50), spec=spec.server)
            assert client.exchange(torch.ones(50), timeout_s=DEADLINE_S).step == 1
            wait_until(lambda: looker.id in {m.id for m in helper.members() if m.alive}, JOIN_S)
            assert not ended.is_set()
        wait_until(ended.is_set, ENDS_S)
        helps.result()


def test_a_helper_that_is_stopped_says_what_it_has_served(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log just ended."""
    caplog.set_level("INFO", logger="dlc")
    spec, stop = RunSpec(strategy="parameter-server", outer=PLAIN), threading.Event()
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        helper = stack.enter_context(dlc.Peer.join(spec=spec, role="helper"))
        trainer = stack.enter_context(dlc.Peer.join([helper.address], join_timeout_s=JOIN_S))
        stack.callback(stop.set)
        helps = pool.submit(help_out, helper, queue.SimpleQueue(), stop, True, lambda take: None)
        client = dlc.ServerClient(trainer, torch.zeros(1 << 20), spec=spec.server)
        client.exchange(timeout_s=DEADLINE_S)
        wait_until(lambda: "owner of 16 spans" in caplog.text, DEADLINE_S)
        assert client.exchange(torch.ones(1 << 20), timeout_s=DEADLINE_S).step == 1
        stop.set()
        helps.result(DEADLINE_S)
    (last,) = [record.message for record in caplog.records if record.message.startswith("left the run")]
    assert "; round 1, 1 of them served here; owner of 16 spans, standby of 0; sent 8.4 MB, received 6.3 MB" in last
    end = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (end["event"], end["t"], end["rounds"], end["bytes_received"]) == ("end", 1, 1, (6 << 20) + 128)


def test_a_helper_of_a_run_with_another_strategy_is_told_so(tmp_path: Path) -> None:
    with contextlib.closing(Host(tmp_path)) as host:
        helper = host.start("h", "--role", "helper")
        assert helper.exit_code() != 0
        assert "leave out --role helper" in helper.log()
