"""What a program of Hivemind finds under which name, and what it is told where a thing is not offered."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import logging
import signal
import subprocess
import sys
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

import dlc.compat
import dlc.compat.hivemind as hivemind
from dlc.compat import opendiloco
from dlc.compat.hivemind.compression import CompressionInfo, TensorRole
from dlc.compat.hivemind.p2p import Multiaddr, PeerID, initial_of, parse_multiaddr, tcp_of
from dlc.compat.hivemind.utils.serializer import DEPTH_MAX, MSGPackSerializer
from dlc.compat.opendiloco import DHT as OpenDiLoCoDHT
from dlc.errors import JoinError, UsageError
from dlc.peer import Peer
from tests.helpers import wait_until

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 120.0
INSTALLED = """
import dlc.compat
dlc.compat.install()
import hivemind, hivemind.optim.optimizer, hivemind.averaging.control
from hivemind import DHT, DecentralizedAverager, Optimizer, TrainingAverager
from hivemind.averaging.averager import DecentralizedAverager as same
from hivemind.dht.dht import DHT as same_dht
from hivemind.compression.base import CompressionBase
from hivemind.compression.quantization import Uniform8BitQuantization
assert same_dht is DHT and issubclass(Uniform8BitQuantization, CompressionBase)
from hivemind.averaging.partition import AllreduceException
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.optimizer import logger
from hivemind.optim.progress_tracker import ProgressTracker
from hivemind.optim.state_averager import LRSchedulerBase, TrainingStateAverager
from hivemind.utils import get_dht_time, get_logger
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.networking import log_visible_maddrs
from hivemind.compression import Float16Compression
assert same is DecentralizedAverager and hivemind.Optimizer is Optimizer is hivemind.optim.optimizer.Optimizer
try:
    from hivemind.moe import Server
except NotImplementedError as error:
    print(error)
dlc.compat.uninstall()
import sys
assert "hivemind" not in sys.modules and "hivemind.optim" not in sys.modules
sys.modules["hivemind"] = type(sys)("hivemind")
try:
    dlc.compat.install()
except Exception as error:
    print(error)
"""


FROM_HIVEMIND = {
    "": "DHT DecentralizedAverager GradScaler Optimizer TrainingAverager PeerID BlockwiseQuantization CompressionBase "
    "CompressionInfo Float16Compression NoCompression PerTensorCompression Quantile8BitQuantization "
    "RoleAdaptiveCompression ScaledFloat16Compression SizeAdaptiveCompression TensorRole Uniform8BitQuantization "
    "DHTExpiration MSGPackSerializer PerformanceEMA SerializerBase ValueWithExpiration get_dht_time get_logger "
    "log_visible_maddrs use_hivemind_log_handler",
    "averaging.averager": "DecentralizedAverager",
    "averaging.control": "AveragingStage StepControl",
    "averaging.allreduce": "AllreduceException AveragingMode",
    "averaging.partition": "AllreduceException",
    "compression.base": "CompressionBase CompressionInfo Key NoCompression TensorRole",
    "compression.floating": "Float16Compression ScaledFloat16Compression",
    "compression.quantization": "BlockwiseQuantization Quantile8BitQuantization Uniform8BitQuantization",
    "compression.adaptive": "PerTensorCompression RoleAdaptiveCompression SizeAdaptiveCompression",
    "dht": "CompositeValidator DHT DHTRecord RSASignatureValidator RecordValidatorBase SchemaValidator",
    "dht.crypto": "RSASignatureValidator",
    "dht.validation": "CompositeValidator DHTRecord RecordValidatorBase",
    "optim": "GradScaler GradientAverager GradientAveragerFactory Optimizer PowerSGDGradientAverager ProgressTracker "
    "TrainingAverager TrainingStateAverager",
    "optim.optimizer": "Optimizer logger",
    "optim.grad_averager": "GradientAverager GradientAveragerFactory",
    "optim.grad_scaler": "GradScaler",
    "optim.power_sgd_averager": "PowerSGDGradientAverager",
    "optim.progress_tracker": "GlobalTrainingProgress LocalTrainingProgress ProgressTracker",
    "optim.state_averager": "LRSchedulerBase OptimizerFactory ParamGroups Parameters SchedulerFactory TorchOptimizer "
    "TrainingStateAverager",
    "optim.training_averager": "TrainingAverager",
    "p2p": "PeerID",
    "utils.crypto": "RSAPrivateKey RSAPublicKey",
    "utils.logging": "get_logger use_hivemind_log_handler",
    "utils.networking": "log_visible_maddrs",
    "utils.performance_ema": "PerformanceEMA",
    "utils.serializer": "MSGPackSerializer SerializerBase",
    "utils.timed_storage": "DHTExpiration ValueWithExpiration get_dht_time",
}
"""By module below hivemind: what programs import from there."""
AVERAGER = (
    "averaged_tensors dht start prefix target_group_size min_group_size initial_group_bits min_matchmaking_time "
    "request_timeout averaging_alpha part_size_bytes allreduce_timeout next_chunk_timeout sender_timeout "
    "reducer_timeout compression state_compression tensor_infos bandwidth min_vector_size auxiliary "
    "allow_state_sharing declare_state_period client_mode daemon shutdown_timeout"
)
ARGUMENTS = {
    hivemind.DHT: "initial_peers start p2p daemon num_workers record_validators shutdown_timeout await_ready",
    hivemind.Optimizer: "dht run_id target_batch_size batch_size_per_step optimizer params scheduler matchmaking_time "
    "averaging_timeout allreduce_timeout next_chunk_timeout load_state_timeout reuse_grad_buffers offload_optimizer "
    "delay_optimizer_step delay_grad_averaging delay_state_averaging average_state_every use_local_updates client_mode "
    "auxiliary grad_compression grad_averager_factory state_averaging_compression load_state_compression "
    "average_opt_statistics extra_tensors averager_opts tracker_opts performance_ema_alpha shutdown_timeout verbose",
    hivemind.DecentralizedAverager: AVERAGER,
    hivemind.GradientAverager: "parameters dht prefix reuse_grad_buffers accumulate_grads_on client_mode warn "
    "averaged_grads",
    hivemind.TrainingAverager: "opt average_parameters average_gradients average_opt_statistics extra_tensors "
    "parameter_names initialize_optimizer",
    hivemind.TrainingStateAverager: "dht optimizer params scheduler initialize_optimizer offload_optimizer "
    "custom_gradients reuse_tensors delta_rule_averaging performance_ema_alpha sync_epoch_when_averaging "
    "parameter_names average_opt_statistics extra_tensors status_loglevel",
    hivemind.ProgressTracker: "dht prefix target_batch_size client_mode min_refresh_period max_refresh_period "
    "default_refresh_period expected_drift_peers expected_drift_rate performance_ema_alpha metadata_expiration "
    "status_loglevel private_key daemon start",
    hivemind.DecentralizedAverager.step: "gather scheduled_time weight timeout allow_retries require_trigger wait",
    hivemind.Optimizer.step: "closure batch_size grad_scaler",
    hivemind.DHT.get: "key latest return_future",
    hivemind.DHT.store: "key value expiration_time subkey return_future",
}


@pytest.mark.parametrize("module", FROM_HIVEMIND)
def test_what_programs_import_of_hivemind_is_there(module: str) -> None:
    found = importlib.import_module(f"dlc.compat.hivemind.{module}".rstrip("."))
    assert not [name for name in FROM_HIVEMIND[module].split() if not hasattr(found, name)]


@pytest.mark.parametrize("called", ARGUMENTS, ids=lambda called: called.__qualname__)
def test_every_argument_of_hivemind_is_taken(called: Any) -> None:
    assert not set(ARGUMENTS[called].split()) - inspect.signature(called).parameters.keys()


def test_install_puts_every_module_in_place_and_refuses_to_replace_another_one() -> None:
    done = subprocess.run([sys.executable, "-c", INSTALLED], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "hivemind.moe.Server" in first and "imported already" in second


def test_the_command_takes_the_options_of_hivemind_dht() -> None:
    options = ["--no_relay", "--use_auto_relay", "--refresh_period", "30", "--use_ipfs"]
    line = [sys.executable, "-m", "dlc.compat.hivemind", *options]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 2 and "does not offer use_ipfs: give the address of a peer" in done.stderr


def test_the_command_is_an_address_to_join_by_until_ctrl_c() -> None:
    line = [sys.executable, "-m", "dlc.compat.hivemind", "--host_maddrs", "/ip4/127.0.0.1/tcp/0"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=ROOT) as command:
        try:
            assert command.stdout is not None
            told = command.stdout.readline()
            assert told.startswith("others join with initial_peers /ip4/127.0.0.1/tcp/"), told
            with hivemind.DHT(told.split()[4:], start=True, startup_timeout=WAIT_S) as dht:
                wait_until(lambda: len(dht.swarm.present()) == 2, WAIT_S, "both know that the other is here")
            command.send_signal(signal.SIGINT)
            assert command.wait(WAIT_S) == 0
        finally:
            command.kill()


def test_with_the_log_the_command_is_an_address_by_which_workers_of_opendiloco_begin_a_run() -> None:
    """And one without a vote: who trains alone need not wait for it."""
    line = [sys.executable, "-m", "dlc.compat.hivemind", "--log", "--host_maddrs", "/ip4/127.0.0.1/tcp/0"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as command:
        try:
            assert command.stdout is not None and command.stderr is not None
            told = command.stderr.readline()
            address = told.partition("whoever joins by ")[2].partition(" ")[0]
            net = torch.nn.Linear(2, 1)
            with opendiloco.DHT([address], start=True, startup_timeout=WAIT_S) as worker:
                optimizer = opendiloco.DiLoCoOptimizer(
                    dht=worker, run_id="r", batch_size=1, num_inner_steps=1, params=net.parameters(),
                    inner_optimizer=partial(torch.optim.SGD, lr=0.1), outer_optimizer=partial(torch.optim.SGD, lr=1.0),
                )  # fmt: skip
                net(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                assert optimizer.local_epoch == 1 and optimizer.tracker.global_progress.num_peers == 1
                assert command.stdout.readline().startswith(f"others join with initial_peers {maddr(address)}")
            command.send_signal(signal.SIGINT)
            assert command.wait(WAIT_S) == 0
        finally:
            command.kill()


def maddr(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"/ip4/{host}/tcp/{port}"


@pytest.mark.parametrize("join", [opendiloco.DHT, partial(hivemind.DHT, log=True)])
def test_who_needs_rounds_does_not_wait_for_a_seat_where_there_are_none(join: Any) -> None:
    """Workers of OpenDiLoCo given the address of a `hivemind-dht` waited for ever, and were not told why."""
    with hivemind.DHT(start=True) as bootstrap, pytest.raises(UsageError, match="--log.*log=True"):
        join(bootstrap.get_visible_maddrs(), start=True, startup_timeout=WAIT_S)


def test_lines_of_a_verbose_optimizer_are_written_where_the_handler_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Hivemind's examples do it, before anything else."""
    root, text = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(hivemind.utils.logging._handler, "stream", text)
    level = root.level
    try:
        for where, written in (("in_root_logger", True), ("nowhere", False), ("in_hivemind", True), ("nowhere", False)):
            hivemind.use_hivemind_log_handler(where)
            hivemind.get_logger("dlc.compat.hivemind.optim.optimizer").info("epoch %d begins", 7)
            assert text.getvalue().count("[INFO] epoch 7 begins") == written
            text.seek(0), text.truncate()
    finally:
        root.setLevel(level)
        logging.getLogger("dlc").setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("dht.node", "a part of Hivemind's own network"),
        ("proto", "a part of Hivemind's own network"),
        ("averaging.matchmaking", "a part of Hivemind's own network"),
        ("moe.expert_uid", "mixture-of-experts"),
    ],
)
def test_a_module_that_is_not_there_says_why(module: str, why: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"no module hivemind\.{module}: .*{why}") as caught:
        importlib.import_module(f"dlc.compat.hivemind.{module}")
    assert isinstance(caught.value, hivemind.NotOffered)
    if "hivemind" not in sys.modules:
        with pytest.raises(ModuleNotFoundError, match="No module named 'hivemind'"):
            importlib.import_module(f"hivemind.{module}")
    dlc.compat.install()
    try:
        with pytest.raises(hivemind.NotOffered, match=rf"no module hivemind\.{module}: .*{why}"):
            importlib.import_module(f"hivemind.{module}")
    finally:
        dlc.compat.uninstall()


def test_what_hivemind_has_not_either_is_not_found_and_a_version_is_told() -> None:
    def installed() -> str | None:
        try:
            return importlib.metadata.version("hivemind")
        except importlib.metadata.PackageNotFoundError:
            return None

    before = installed()
    dlc.compat.install()
    try:
        assert importlib.util.find_spec("hivemind") is not None
        assert importlib.util.find_spec("hivemind.optim") is not None
        for absent in ("hivemind.no_such_module", "hivemind.optim.collaborative", "dlc.compat.hivemind.nothing"):
            assert importlib.util.find_spec(absent) is None
        with pytest.raises(ModuleNotFoundError, match=r"No module named 'hivemind\.no_such_module'"):
            importlib.import_module("hivemind.no_such_module")
        with pytest.raises(hivemind.NotOffered, match=r"no module hivemind\.proto"):
            importlib.util.find_spec("hivemind.proto")
        assert installed() == (before or hivemind.__version__) and hivemind.__version__.startswith("1.1.")
    finally:
        dlc.compat.uninstall()
    assert installed() == before


def test_programs_that_do_without_a_name_find_an_import_error() -> None:
    with pytest.raises(ImportError, match="own network"):
        from dlc.compat.hivemind import P2P  # noqa: F401


@pytest.mark.parametrize("name", ["Server", "RemoteExpert", "RemoteMixtureOfExperts", "ModuleBackend"])
def test_experts_are_refused_by_name(name: str) -> None:
    with pytest.raises(hivemind.NotOffered, match=name):
        getattr(hivemind, name)
    with pytest.raises(hivemind.NotOffered, match=name):
        getattr(hivemind.moe, name)
    with pytest.raises(AttributeError):
        hivemind.no_such_name  # noqa: B018
    below = "client" if name.startswith("Remote") else "server"
    with pytest.raises(hivemind.NotOffered, match=rf"hivemind\.moe\.{below}\.{name}"):
        getattr(importlib.import_module(f"dlc.compat.hivemind.moe.{below}"), name)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (hivemind, "MPFuture"),
        (hivemind, "P2P"),
        (hivemind, "serialize_torch_tensor"),
        (hivemind.compression, "deserialize_torch_tensor"),
        (hivemind.utils, "MPFuture"),
        (hivemind.utils, "TensorDescriptor"),
        (hivemind.dht, "DHTNode"),
        (hivemind.p2p, "P2P"),
    ],
)
def test_what_is_inside_hivemind_is_refused_by_name(module: Any, name: str) -> None:
    with pytest.raises(hivemind.NotOffered, match=f"hivemind.*{name}: it is a part of Hivemind's own network"):
        getattr(module, name)
    assert hivemind.utils.MSGPackSerializer is MSGPackSerializer


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("/ip4/1.2.3.4/tcp/4600/p2p/Qm12", "1.2.3.4:4600"),
        ("/ip4/1.2.3.4/tcp/4600", "1.2.3.4:4600"),
        ("/ip6/::1/tcp/4600", "[::1]:4600"),
        ("/dns4/host.example/tcp/80", "host.example:80"),
        ("host.example:80", "host.example:80"),
    ],
)
def test_addresses_are_multiaddresses_or_host_and_port(text: str, address: str) -> None:
    assert parse_multiaddr(text) == address
    assert Multiaddr.of(address).address == address


@pytest.mark.parametrize("text", ["/ip4/1.2.3.4/udp/4600/quic", "/tcp/4600", "/ip4/1.2.3.4", "/ip4/1.2.3.4/tcp", "x"])
def test_other_addresses_are_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_multiaddr(text)


def test_quic_addresses_beside_tcp_are_left_out() -> None:
    assert tcp_of(["/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic"]) == ["0.0.0.0:0"]


QUIC, UDP = "/ip4/10.0.0.1/udp/4600/quic-v1/p2p/Qm12", "/ip4/10.0.0.1/udp/4600"


@pytest.mark.parametrize("dht", [hivemind.DHT, OpenDiLoCoDHT])
@pytest.mark.parametrize("listed", [[QUIC], [QUIC, UDP], ["/ip4/10.0.0.1/tcp/4600/ws", "/p2p/Qm12/p2p-circuit"]])
def test_initial_peers_of_which_none_is_tcp_are_refused_and_no_swarm_is_begun(dht: Any, listed: list[str]) -> None:
    for start in (False, True):
        with pytest.raises(ValueError, match="dlc speaks TCP: give HOST:PORT") as refused:
            dht(listed, start=start)
        assert isinstance(refused.value, UsageError) and all(text in str(refused.value) for text in listed)


@pytest.mark.parametrize("dht", [hivemind.DHT, OpenDiLoCoDHT])
def test_probes_of_links_can_be_left_out(dht: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[bool] = []

    def join(peers: list[str], *, probe_links: bool, **of_peer: Any) -> None:
        joined.append(probe_links)
        raise JoinError("enough")

    monkeypatch.setattr(Peer, "join", join)
    for options in ({}, {"probe_links": False}):
        with pytest.raises(JoinError, match="enough"):
            dht(start=True, **options)
    assert joined == [True, False]


@pytest.mark.parametrize("dht", [hivemind.DHT, OpenDiLoCoDHT])
def test_of_the_addresses_of_a_host_the_first_of_tcp_counts(dht: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it stands, as in Hivemind, whose programs list QUIC beside it."""
    joined: list[tuple[str, str | None]] = []

    def join(peers: list[str], *, listen: str, advertise: str | None, **of_peer: Any) -> None:
        joined.append((listen, advertise))
        raise JoinError("enough")

    monkeypatch.setattr(Peer, "join", join)
    hosts = ["/ip4/127.0.0.1/udp/0/quic", "/ip4/127.0.0.1/tcp/4600", "/ip4/127.0.0.1/tcp/4700"]
    with pytest.raises(JoinError, match="enough"):
        dht(start=True, host_maddrs=hosts, announce_maddrs=[QUIC, "/ip4/10.0.0.1/tcp/80"])
    assert joined == [("127.0.0.1:4600", "10.0.0.1:80")]
    for name in ("host_maddrs", "announce_maddrs"):
        with pytest.raises(UsageError, match=f"{name} has no TCP address"):
            dht(start=True, **{name: [QUIC]})
        with pytest.raises(TypeError, match=f"{name} is a list of addresses"):
            dht(start=True, **{name: "/ip4/10.0.0.1/tcp/80"})


@pytest.mark.parametrize("dht", [hivemind.DHT, OpenDiLoCoDHT])
def test_addresses_of_a_generator_are_not_used_up(dht: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at their types was all that they were good for: a swarm of its own was begun, unsaid."""
    joined: list[list[str]] = []

    def join(peers: list[str], **of_peer: Any) -> None:
        joined.append(peers)
        raise JoinError("enough")

    monkeypatch.setattr(Peer, "join", join)
    with pytest.raises(JoinError, match="enough"):
        dht(map(str, [Multiaddr.of("10.0.0.1:4600")]), start=True)
    assert joined == [["10.0.0.1:4600"]]


def test_multiaddresses_may_be_objects_of_a_library() -> None:
    class Other:
        def __str__(self) -> str:
            return "/ip4/10.0.0.1/tcp/4600/p2p/Qm12"

    dht = hivemind.DHT([Other()], start=False, host_maddrs=[Other()], announce_maddrs=[Other()])  # type: ignore[list-item]
    assert dht._contacts == ["10.0.0.1:4600"]
    for wrong in ("/ip4/10.0.0.1/tcp/4600", [4600], [None]):
        with pytest.raises(TypeError, match="list of addresses"):
            hivemind.DHT(wrong, start=False)  # type: ignore[arg-type]


def test_of_mixed_initial_peers_those_that_are_no_tcp_are_logged_as_ignored(caplog: pytest.LogCaptureFixture) -> None:
    assert initial_of([QUIC, "/ip4/10.0.0.1/tcp/4600/p2p/Qm12", UDP]) == ["10.0.0.1:4600"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "ignored" in line and QUIC in line and UDP in line and "/tcp/" not in line
    caplog.clear()
    assert initial_of([]) == [] and initial_of(["10.0.0.1:4600"]) == ["10.0.0.1:4600"] and not caplog.records


def test_peer_ids_are_strings_with_the_methods_of_hivemind() -> None:
    peer = PeerID("abc")
    assert peer == "abc" and peer.to_bytes() == b"abc" and PeerID(b"abc") == peer and peer.to_base58() == "abc"


def test_every_compression_is_a_codec_and_the_adaptive_ones_choose() -> None:
    big, small = (CompressionInfo.from_tensor(torch.zeros(n), key=n, role=TensorRole.GRADIENT) for n in (1000, 10))
    for kind, codec in (
        (hivemind.NoCompression, "fp32"),
        (hivemind.Float16Compression, "fp16"),
        (hivemind.ScaledFloat16Compression, "bf16"),
        (hivemind.Uniform8BitQuantization, "int8"),
        (hivemind.Quantile8BitQuantization, "int8"),
        (hivemind.BlockwiseQuantization, "int8"),
    ):
        assert kind().codec_for(big) == codec
    half = hivemind.Float16Compression()
    assert half.estimate_compression_ratio(big) == 2002 / 4000
    by_size = hivemind.SizeAdaptiveCompression(
        threshold=100, less=half, greater_equal=hivemind.Uniform8BitQuantization()
    )
    assert (by_size.codec_for(small), by_size.codec_for(big)) == ("fp16", "int8")
    by_role = hivemind.RoleAdaptiveCompression(gradient=by_size)
    assert by_role.codec_for(big) == "int8"
    assert by_role.codec_for(CompressionInfo.from_tensor(torch.zeros(1000))) == "fp32"
    assert hivemind.PerTensorCompression({1000: half}).codec_for(big) == "fp16"

    class Own(hivemind.CompressionBase):
        pass

    with pytest.raises(hivemind.NotOffered, match="Own"):
        Own().codec_for(big)


def test_compressions_that_are_none_are_refused_when_they_are_chosen_from() -> None:
    half, info = hivemind.Float16Compression(), CompressionInfo.from_tensor(torch.zeros(2), key="weight")
    for make in (
        lambda: hivemind.SizeAdaptiveCompression(threshold=2, less=hivemind.NoCompression, greater_equal=half),
        lambda: hivemind.RoleAdaptiveCompression(gradient="fp16"),
        lambda: hivemind.PerTensorCompression([half, None]),
    ):
        with pytest.raises(UsageError, match="give an object of hivemind.compression"):
            make()
    for given in ([half], {0: half}):
        with pytest.raises(UsageError, match="no compression of the tensor 'weight'"):
            hivemind.PerTensorCompression(given).codec_for(info)


def test_small_values_keep_their_types_and_strange_ones_are_refused() -> None:
    value = {"a": (1, 2.5), b"b": [None, True, {3}], 7: "x", "peer": PeerID("abc"), "o": OrderedDict(k=1)}
    value[frozenset((1, 2))] = {("x", frozenset()): 2**64 - 1}
    again = MSGPackSerializer.loads(MSGPackSerializer.dumps(value))
    assert again == value and type(again["a"]) is tuple and type(again["peer"]) is str
    with pytest.raises(UsageError, match="Path"):
        MSGPackSerializer.dumps({"p": Path("x")})
    with pytest.raises(UsageError, match="a whole number is from"):
        MSGPackSerializer.dumps([2**64])
    with pytest.raises(ValueError, match="msgpack"):
        MSGPackSerializer.loads(b"\xc1")


@pytest.mark.parametrize("made", [tuple, frozenset])
def test_values_within_values_do_not_end_the_process_that_reads_them(made: Any) -> None:
    """Some hundreds, in as many bytes, took its C stack."""
    deep: Any = made()
    for _ in range(DEPTH_MAX - 1):
        deep = made((deep,))
    assert MSGPackSerializer.loads(MSGPackSerializer.dumps(deep)) == deep
    raw = MSGPackSerializer.dumps(made())
    with pytest.raises(UsageError, match=f"more than {DEPTH_MAX} tuples or sets"):
        MSGPackSerializer.dumps(made((deep,)))
    for _ in range(2000):
        raw = msgpack.packb(msgpack.ExtType(1, b"\x91" + raw))
    with pytest.raises(ValueError, match="no msgpack of ours"):
        MSGPackSerializer.loads(raw)


def test_performance_is_an_average_that_is_right_from_the_first_measurement_on() -> None:
    ema = hivemind.PerformanceEMA(alpha=0.1)
    assert ema.samples_per_second < 1e-9
    assert ema.update(10, interval=2.0) == pytest.approx(5.0)
    for _ in range(200):
        ema.update(30, interval=1.0)
    assert ema.samples_per_second == pytest.approx(30.0)
    with ema.pause(), pytest.raises(ValueError, match="interval"):
        ema.update(1)
