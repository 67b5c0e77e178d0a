import argparse
import io
import json
import logging
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from dlc import __version__
from dlc.addresses import advertised, default_listen
from dlc.cli import main
from dlc.cli.document import documented
from dlc.cli.join import join_line
from dlc.cli.options import parser
from dlc.cli.places import home
from dlc.cli.sinks import JsonLines, draws
from dlc.cli.status import member_table
from dlc.comm.keytext import HIDDEN
from dlc.comm.security import generate_run_key, load_run_key
from dlc.errors import UsageError
from dlc.monitor.show import Show
from dlc.monitor.table import Board
from dlc.options import OF_HOSTS
from dlc.peer import Peer
from dlc.runspec import DataSpec, InnerSpec, ModelSpec, RunSpec
from dlc.survey import Member
from tests.helpers import wait_until
from tests.swarm import DEADLINE_S
from tests.train.tokenizers_made import make_tokenizer


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DLC_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DLC_KEY_FILE", raising=False)


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit status and the one line on stderr."""
    try:
        code = main(list(words))
    except SystemExit as exit:  # argparse
        code = int(str(exit.code))
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    return code, said.err


@pytest.mark.parametrize("command", ["join", "key", "status", "export", "eval", "bench", "bench matrix", "demo"])
def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as exit:
        main([*command.split(), "--help"])
    assert exit.value.code == 0
    said = capsys.readouterr().out
    assert f"  dlc {command}" in said and "--log-level" in said
    assert (command != "demo") or "--n-peers" in said


def test_every_option_of_every_command_is_described() -> None:
    def described(one: argparse.ArgumentParser) -> list[str]:
        """Its name, and those of the commands below it."""
        seen = [one.prog]
        for action in one._actions:
            if isinstance(action, argparse._SubParsersAction):
                seen += [name for below in action.choices.values() for name in described(below)]
            else:
                assert action.help, f"{one.prog}: {action.option_strings}"
        return seen

    assert {"dlc join", "dlc demo", "dlc bench codec"} <= set(described(parser(demo_wanted=True)))


def test_what_a_library_logs_is_on_stderr_once() -> None:
    program = (
        "import huggingface_hub.utils.logging as hub; from dlc.cli import main; main(['key']);"
        "hub.get_logger('huggingface_hub.x').warning('no way to the hub')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stderr.count("no way to the hub") == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0 and capsys.readouterr().out == f"dlc {__version__}\n"


def test_keys_are_valid_and_differ(capsys: pytest.CaptureFixture[str]) -> None:
    keys = set()
    for _ in range(2):
        assert main(["key"]) == 0
        keys.add(load_run_key(capsys.readouterr().out))
    assert len(keys) == 2


def test_what_trains_nothing_does_without_torch(tmp_path: Path) -> None:
    """Torch takes seconds to load, on a busy host half a minute."""
    words = ["key", "join --print-config", "status --peers 127.0.0.1:1 --timeout 0.1"]
    program = (
        "import sys, json, dlc.bench.link, dlc.bench.matrix, dlc.bench.serve, dlc.bench.show\n"
        "from dlc.cli import main\n"
        f"codes = [main(words.split()) for words in {words}]\n"
        "print(json.dumps([codes, 'torch' in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=DEADLINE_S, cwd=tmp_path
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [[0, 0, 3], False], done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "COMMAND"),
        (["train"], "invalid choice: 'train'"),
        (["jion"], "did you mean join?"),
        (["bench", "lnk"], "did you mean link?"),
        (["join", "--role", "helpr"], "did you mean helper?"),
        (["join", "--peer", "127.0.0.1:1"], "unrecognized arguments: --peer 127.0.0.1:1; did you mean --peers?"),
        (["join", "--peer=127.0.0.1:1"], "did you mean --peers?"),
        (["join", "--key", "run.key"], "unrecognized arguments: --key run.key; did you mean --key-file?"),
        (["join", "--check=3"], "--check=3; did you mean --checkpoint-every?"),
        (
            ["join", "--peers", "h:1", "h:2"],
            "unrecognized arguments: h:2; addresses are given with --peers, as one word",
        ),
        (["join", "RUN.toml"], "unrecognized arguments: RUN.toml; a RUN.toml is given with --config"),
        (["eval", "x" * 5000], "cannot be read: File name too long"),
        (["bench", "mat"], "did you mean matrix?"),
        (["join", "--codec", "int8"], "--codec int8; codec is an option of RUN.toml, the file that --config names"),
        (["join", "--batch-size=4"], "; inner.batch_size is an option of RUN.toml"),
        (["bench", "codec", "--devise", "cpu"], "dlc bench codec: unrecognized arguments: --devise cpu; did you mean"),
        (["key", "run.key"], "dlc key: unrecognized arguments: run.key (`dlc key --help` tells more)\n"),
        (["join", "--rounds", "-1"], "negative"),
        (["join", "--keep", "0"], "below 1"),
        (["join", "--profile", "traces:0"], "below 1"),
        (["join", "--profile", ""], "it is empty"),
        (
            ["join", "--profile", "traces:x"],
            "'traces:x' is no DIR:STEPS; a folder with a colon in its name ends in '/'",
        ),
        (["join", "--profile", "traces:"], "'traces:' is no DIR:STEPS"),
        (["join", "--profile", "traces:-1"], "'traces:-1' is no DIR:STEPS"),
        (["join", "--profile", ":3"], "':3' is no DIR:STEPS"),
        (["join", "--wandb", ""], "it is empty"),
        (["join", "--profile", __file__], "test_cli.py is a file: name a folder"),
        (["export", "nowhere", "--out", f"{__file__}/m"], "test_cli.py (Not a directory); name another place"),
        (["demo", "--n-peers", "three"], "'three' is no whole number"),
        (["join", "--resume", "nowhere.safetensors"], "nowhere.safetensors cannot be read"),
        (["join", "--join-timeout", "0"], "above 0"),
        (["join", "--join-timeout", "soon"], "'soon' is no number"),
        (["join", "--rounds", "1.5"], "'1.5' is no whole number"),
        (["join", "--peers", ""], "it is empty"),
        (["join", "--peers", ","], "it is empty"),
        (["join", "--key-file", ""], "it is empty"),
        (["join", "--state-dir", ""], "it is empty"),
        (["status", "--peers", ""], "it is empty"),
        (["join", "--role", "helper", "--keep", "3"], "--role helper has no use for --keep: leave out"),
        (
            ["join", "--role", "helper", "--tensorboard", "t", "--resume", "never"],
            "has no use for --resume, --tensorboard",
        ),
        (["join", "--role", "observer", "--eval-every", "2"], "has no use for --eval-every"),
        (["join", "--role", "observer", "--found"], "an observer founds no run"),
        (["join", "--role", "observer", "--device", "cuda"], "has no use for --device"),
        (["join", "--device", "meta"], "'meta' cannot be used"),
        (["join", "--peers", "somewhere"], "no address"),
        (["join", "--peers", "127.0.0.1:0"], "port 0"),
        (["join", "--peers", "192.0.2.1:4600"], "--key-file"),
        (["join", "--listen", "0.0.0.0:0", "--device", "cpu"], "insecure"),
        (["join", "--device", "abacus"], "abacus"),
        (["join", "--parallel", "fsdp"], "torchrun"),
        (["join", "--advertise", "0.0.0.0:4600"], "nobody can dial 0.0.0.0"),
        (["join", "--advertise", "host:0"], "advertise host without a port"),
        (["join", "--config", "nowhere.toml"], "nowhere.toml"),
        (["join", "--key-file", "nowhere.key", "--device", "cpu"], "copy it from a host of the run"),
        (["join", "--key-file", "~nobody-of-this-name/k"], "there is no run key file ~nobody-of-this-name/k"),
        (["join", "--resume", "~nobody-of-this-name/s"], "the checkpoint ~nobody-of-this-name/s cannot be read"),
        (["export", "~nobody-of-this-name/s", "--out", "m"], "the checkpoint ~nobody-of-this-name/s cannot be read"),
        (["eval", "~nobody-of-this-name/m"], "there is no checkpoint, state directory or model folder"),
        (["status", "--peers", "x"], "no address"),
        (["status"], "--peers"),
        (["eval", "model", "--split", "test"], "--split says what is read of a --source"),
        (["eval", "model", "--text-field", "body"], "--text-field says what is read of a --source"),
        (["eval", "model", "--source", "a.txt", "--subset", "x"], "data.source is no"),
        (["eval", "model", "--source", "stdlib", "--split", "test"], "'stdlib' has none"),
        (["eval", "model", "--source", ""], "it is empty"),
    ],
)
def test_wrong_usage_is_one_clear_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    code, text = fails(capsys, *words)
    assert code == 2 and said in text and text.count("\n") == 1


def test_what_is_wrong_is_told_before_torch_is_loaded(tmp_path: Path) -> None:
    """Which takes seconds."""
    (tmp_path / "RUN.toml").write_text("rounds = 2\n")
    (tmp_path / "of-no-data.toml").write_text('[data]\nsource = "nowhere.txt"\n')
    words = [
        "join --peers somewhere",
        "join --listen somewhere",
        "join --listen 0.0.0.0:0",
        "join --advertise host:port",
        "join --key-file nowhere.key",
        "join --resume nowhere.safetensors",
        "join --parallel ddp",
        "join --profile RUN.toml",
        "join --role helper --config RUN.toml",
        "join --config nowhere.toml",
        "join --config of-no-data.toml",
        "eval . --source nowhere.txt",
        "status --peers somewhere",
        "status --peers 127.0.0.1:1 --key-file nowhere.key",
        "export nowhere --out model",
        "export . --out RUN.toml/model",
        "join --profile RUN.toml/traces",
        "eval model --blocks 0",
        "eval ./nowhere",
        "bench serve --listen 0.0.0.0:0",
        "bench link --to somewhere",
        "bench link --to 127.0.0.1:1 --streams many",
        "bench matrix --peers 127.0.0.1:1 --listen somewhere",
        "bench allreduce --peers somewhere",
        "bench allreduce --local 2 --key-file nowhere.key",
        "bench allreduce --peers a:1,b:1 --links nowhere.json",
    ]
    program = (
        "import sys, json; from dlc.cli import main\n"
        f"codes = [main(words.split()) for words in {words}]\n"
        "print(json.dumps([codes, 'torch' in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path
    )
    assert json.loads(done.stdout) == [[2] * len(words), False], done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that takes no files whatever its permissions say")
@pytest.mark.parametrize(
    "words", [["join", "--tensorboard", "/proc"], ["join", "--profile", "/proc:3"], ["export", "s", "--out", "/proc/m"]]
)
def test_a_folder_that_takes_no_files_is_told_before_any_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """To root its permissions say yes: a profile was lost, and TensorBoard's writer ended with a traceback."""
    monkeypatch.setattr("dlc.cli.trackers.demand", lambda extra, option: None)
    code, text = fails(capsys, *words)
    assert code == 2 and f"{words[-2]} /proc" in text and "cannot be written: " in text and text.count("\n") == 1


def test_an_unknown_option_in_the_config_is_answered_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "RUN.toml"
    config.write_text("[inner]\nbatchsize = 4\n")
    code, text = fails(capsys, "join", "--config", str(config))
    assert code == 2 and "did you mean 'inner.batch_size'" in text and str(config) in text


def test_an_option_of_the_command_in_the_config_is_answered_with_its_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    commands = next(a for a in parser(demo_wanted=False)._actions if isinstance(a, argparse._SubParsersAction)).choices
    options = {name for action in commands["join"]._actions for name in action.option_strings}
    config = tmp_path / "RUN.toml"
    for name, of_host in OF_HOSTS.items():
        config.write_text(f'[data]\n{name} = "x"\n')
        code, text = fails(capsys, "join", "--config", str(config))
        told = f"unknown option 'data.{name}': each host says it for itself, by `dlc join --{of_host}`"
        assert code == 2 and told in text and f"--{of_host}" in options


def test_a_file_that_holds_no_key_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.key"
    wrong.write_text("secret\n")
    wrong.chmod(0o600)
    code, text = fails(capsys, "join", "--key-file", str(wrong), "--device", "cpu")
    assert code == 2 and "does not hold a run key" in text and "secret" not in text and "dlc-key-1: and 43" in text


@pytest.mark.parametrize(
    "words",
    [
        ["join", "--key-file"],
        ["join", "--key"],
        ["key"],
        [],
        ["status", "--run", "x", "--peers=h:1"],
        ["join", "--peers"],
        ["join", "--listen"],
        ["join", "--config"],
        ["join", "--listen", "127.0.0.1:0", "--advertise"],
        ["status", "--timeout", "0.1", "--peers=h:1", "--run"],
        ["eval"],
        ["export", "--out", "new"],
        ["bench", "link", "--to"],
        ["bench", "codec", "--device"],
    ],
)
def test_a_run_key_is_never_shown_wherever_it_is_given(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    """Given for an address, a file or a name it was printed, and for that of a model the hub was asked for it."""
    key = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
    for given in (key, f"dlc-key-1:{key}"):
        code, text = fails(capsys, *words, given)
        assert code == 2 and key not in text and HIDDEN in text and text.count("\n") == 1
        assert "--key-file" in text


@pytest.mark.parametrize("line", ['codec = "%s"', 'run = "%s"', '"%s" = 1', '["%s"]', "rounds = [3, '%s']"])
def test_a_run_key_in_a_run_toml_is_not_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str) -> None:
    config, key = tmp_path / "RUN.toml", "dlc-key-1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
    config.write_text(line % key + "\n")
    code, text = fails(capsys, "join", "--config", str(config))
    assert code == 2 and key not in text and HIDDEN in text and str(config) in text


def test_a_file_with_the_name_of_a_key_may_be_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
    (tmp_path / name).write_text("rounds = 3\n")
    assert main(["join", "--config", name, "--print-config"]) == 0
    assert "rounds = 3\n" in capsys.readouterr().out


def test_nobody_at_the_address_is_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = fails(capsys, "join", "--peers", "127.0.0.1:1", "--join-timeout", "0.2", "--log-level", "error")
    assert code == 3 and "127.0.0.1:1" in text
    code, text = fails(capsys, "status", "--peers", "127.0.0.1:1", "--timeout", "0.2")
    assert code == 3 and "127.0.0.1:1" in text


@pytest.mark.parametrize(("role", "folder"), [("trainer", "peer-0"), ("observer", "observer-0")])
def test_the_state_lies_in_a_directory_of_its_own_by_role(tmp_path: Path, role: str, folder: str) -> None:
    assert main(["join", "--role", role, "--peers", "127.0.0.1:1", "--join-timeout", "0.1"]) == 3
    assert [path.name for path in (tmp_path / "home" / "dlc").iterdir()] == [folder]


def test_status_says_why_nobody_answers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(host: str) -> list[str]:
        """As the name server says it; one that is out of reach says nothing for longer than any of this takes."""
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("dlc.comm.addresses.look_up", unknown)

    def says(why: str, *words: str) -> None:
        """Sooner or later: a machine that does other things may not have found it out when the time is up."""

        def told() -> bool:
            code, text = fails(capsys, "status", *words)
            assert code == 3
            return why in text

        wait_until(told, what=why)

    says("cannot be looked up", "--peers", "nobody.invalid:1", "--timeout", "3")
    says("its run is 'r'", "--peers", "nobody.invalid:1", "--timeout", "0.2", "--run", "r")
    with Peer.join(key=generate_run_key()) as peer:
        at = ("--peers", peer.address, "--timeout", "2")  # which it waits for in any case
        says("wants a run key: add --key-file", *at)
        (tmp_path / "other.key").write_text(generate_run_key())
        (tmp_path / "other.key").chmod(0o600)
        says("refused our run key", *at, "--key-file", str(tmp_path / "other.key"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("given", "first"), [("default_int_handler", "dlc.ending.end_at_once"), ("SIG_IGN", "signal.SIG_IGN")]
)
def test_ctrl_c_while_the_command_is_loaded_shows_no_traceback(given: str, first: str) -> None:
    """It ends the process until there is somebody to tell; where it was ignored, as by a shell's `&`, it stays so."""
    code = f"""
import signal, sys
import dlc.ending
from dlc.__main__ import main
class Look:
    def find_spec(self, name, path, target=None):
        if name == "dlc.cli":
            seen.append(signal.getsignal(signal.SIGINT))
seen, sys.argv = [], ["dlc", "key"]
sys.meta_path.insert(0, Look())
signal.signal(signal.SIGINT, signal.{given})
assert main() == 0
assert seen == [{first}], seen
assert signal.getsignal(signal.SIGINT) is signal.{given}
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_S)


def test_ctrl_c_while_the_command_is_loaded_is_exit_code_130() -> None:
    """As later on; who starts it without a shell was told that a signal had ended it."""
    code = """
import os, signal, sys
from dlc.__main__ import main
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "dlc.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.argv = ["dlc", "key"]
sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize("words", ["key", "join --print-config"])
def test_output_that_nobody_takes(words: str) -> None:
    command = f"exec {sys.executable} -m dlc {words}"
    full = subprocess.run(["sh", "-c", f"{command} > /dev/full"], stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    assert full.returncode == 4 and full.stderr.count("\n") == 1 and "make room" in full.stderr
    closed = subprocess.run(["sh", "-c", f"{command} >&-"], stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    assert closed.returncode == 0 and closed.stderr == ""


def test_the_exit_status_tells_of_an_error_that_nobody_reads() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as nobody:
        command = [sys.executable, "-m", "dlc", "eval", "/no/such/model"]
        assert subprocess.run(command, stderr=nobody, check=False, timeout=DEADLINE_S).returncode == 2


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_printed_configuration_can_be_read_whatever_the_encoding_of_the_terminal(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, out = RunSpec(data=DataSpec(source="/Bücher/☃")), io.BytesIO()
    (tmp_path / "RUN.toml").write_text(documented(spec), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding))
    assert main(["join", "--config", str(tmp_path / "RUN.toml"), "--print-config"]) == 0
    (tmp_path / "AGAIN.toml").write_bytes(out.getvalue())
    assert RunSpec.from_toml(tmp_path / "AGAIN.toml") == spec


@pytest.mark.parametrize("words", ["bench codec --mb 1 --device cpu", "status --peers {}"])
def test_a_table_that_nobody_reads_is_no_broken_promise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out, Peer.join() as peer:
        monkeypatch.setattr(sys, "stdout", out)
        level = logging.getLogger("dlc").level
        assert main([*words.format(peer.address).split(), "--log-level", "error"]) == 4
        logging.getLogger("dlc").setLevel(level)
    assert capsys.readouterr().err == ""


def test_a_full_disk_below_stdout_ends_the_events_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(out, "write", lambda text: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        monkeypatch.setattr(sys, "stdout", out)
        lines = JsonLines()
        lines.take({"event": "phase"})
        lines.take({"event": "phase"})
    assert caplog.text.count("no more events go to stdout: No space left on device") == 1


def test_the_key_file_of_the_environment_is_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLC_KEY_FILE", "of-the-environment.key")
    code, text = fails(capsys, "join", "--device", "cpu")
    assert code == 2 and "of-the-environment.key" in text and "(DLC_KEY_FILE in the environment names it)\n" in text
    code, text = fails(capsys, "join", "--device", "cpu", "--key-file", "given.key")
    assert code == 2 and "given.key" in text and "DLC_KEY_FILE" not in text


def test_the_traceback_is_there_when_asked_for(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["join", "--config", "nowhere.toml", "--log-level", "debug"]) == 2
    assert "Traceback" in caplog.text and "nowhere.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "option"),
    [("join", "--micro-batch"), ("eval model", "--batch-size"), ("status --peers 127.0.0.1:4600", "unexpected")],
)
def test_a_device_without_room_is_no_riddle(
    words: str, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(args: argparse.Namespace) -> int:
        raise type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2 GiB.\nMore of it.")

    monkeypatch.setattr("dlc.cli._run", full)
    assert main(words.split()) == 4
    said = capsys.readouterr().err
    assert option in said and "Tried to allocate 2 GiB" in said


def test_what_is_asked_of_a_trainer_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"device": "cpu", "micro_batch": 3, "eval_every": 4, "checkpoint_every": 5, "keep": 6}
    given: dict[str, object] = {}

    def trainer(peer: Peer, folder: Path, **options: object) -> None:
        given.update(options)
        raise UsageError("nothing is trained here")

    monkeypatch.setattr("dlc.train.trainer.Trainer", trainer)
    words = [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["join", "--no-probe", "--state-dir", str(tmp_path), *words]) == 2
    assert given.items() >= asked.items()


@pytest.mark.parametrize(
    "spec",
    [
        RunSpec(),
        RunSpec(run="a.b", rounds=7, inner=InnerSpec(betas=(0.5, 0.75), lr=1e-5)),
        RunSpec(model=ModelSpec(kind="path", path='a "quoted" folder')),
        RunSpec(model=ModelSpec(config={"model_type": "gpt2", "rope": {"kinds": ["a", 1], "more": {"x y": True}}})),
        RunSpec(model=ModelSpec(config={"model_type": "gpt2", "kinds": ["[ a, ]", "a\u2028 b", " ", ", ]"], "no": []})),
    ],
)
def test_print_config_reads_back_as_the_same_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, spec: RunSpec
) -> None:
    config = tmp_path / "RUN.toml"
    config.write_text(spec.to_toml())
    invented = "gpt2" in spec.model.config.values()  # to show how any value is written
    assert main(["join", "--config", str(config), "--print-config"]) == (2 if invented else 0)
    text = capsys.readouterr().out if not invented else documented(spec)
    assert RunSpec.from_dict(tomllib.loads(text)) == spec
    assert not (tmp_path / "home").exists()


def test_print_config_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "--rounds", "9", "--print-config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "rounds = 9" in lines
    options = [i for i, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    config = next(i for i, line in enumerate(lines) if line == "[model.config]")
    data = next(i for i, line in enumerate(lines) if line == "[data]")
    unexplained = [lines[i] for i in options if not lines[i - 1].startswith("#") and not config < i < data]
    assert len(options) > 25 and not unexplained


def test_where_a_peer_listens_by_default() -> None:
    assert default_listen((), has_key=False, insecure=False) == "127.0.0.1:0"
    assert default_listen((), has_key=True, insecure=False) == "0.0.0.0:0"
    assert default_listen((), has_key=False, insecure=True) == "0.0.0.0:0"
    assert default_listen(("127.0.0.1:9", "localhost:9"), has_key=True, insecure=False) == "127.0.0.1:0"
    assert default_listen(("127.0.0.1:9", "host.example:9"), has_key=True, insecure=False) == "0.0.0.0:0"
    assert default_listen(("[2001:db8::1]:9",), has_key=True, insecure=False) == "[::]:0"
    with pytest.raises(UsageError):
        default_listen(("host.example:9",), has_key=False, insecure=False)


def test_what_others_dial_may_be_an_ipv6_address_without_a_port() -> None:
    for given in ("2001:db8::1", "[2001:db8::1]", "[2001:db8::1]:4600"):
        assert advertised(given, 4600) == ("2001:db8::1", 4600)
    assert advertised("host", 4600) == advertised("host:4600", 1) == ("host", 4600)


@pytest.mark.parametrize("given", ["0.0.0.0", "0.0.0.0:4600", "::", "[::]", "[::]:4600", "[::0]:0", "host:0"])
def test_what_nobody_can_dial_is_not_advertised(given: str) -> None:
    with pytest.raises(UsageError, match="nobody can dial"):
        advertised(given, 4600)
    with pytest.raises(UsageError, match="nobody can dial"):
        Peer.join(advertise=given)


def test_the_line_for_others() -> None:
    assert join_line("h:1", None, False) == "dlc join --peers h:1"
    assert join_line("h:1", Path("a b.key"), True) == "dlc join --peers h:1 --key-file 'a b.key'"
    assert join_line("h:1", None, True) == "dlc join --peers h:1 --insecure"


def test_importing_dlc_loads_neither_torch_nor_zmq() -> None:
    program = (
        "import sys, json, dlc, dlc.cli, dlc.cli.options\n"
        "dlc.cli.options.parser(False)\n"
        "heavy = [m for m in ('torch', 'zmq', 'transformers', 'numpy', 'rich') if m in sys.modules]\n"
        "print(json.dumps([heavy, dlc.RunSpec.__module__, 'torch' in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    assert json.loads(done.stdout) == [[], "dlc.runspec", False]


def test_the_public_names_are_what_they_say() -> None:
    import dlc

    assert (dlc.Peer.__name__, dlc.DiLoCo.__name__, dlc.RoundReport.__name__) == ("Peer", "DiLoCo", "RoundReport")
    assert set(dlc.__all__) <= set(dir(dlc))
    with pytest.raises(AttributeError, match="DiLoco"):
        dlc.DiLoco  # noqa: B018


def test_the_table_of_members_fits_a_terminal_and_shows_no_markup_of_others() -> None:
    status = {"t": 12, "inner": 3, "of": 20, "phase": "[bold]waiting", "loss": 2.5}
    members = [
        Member("a" * 32, "192.0.2.17:46000", "trainer", True, False, "ab" * 32, 1e6, 9, 1234.5, status, True),
        Member("b" * 32, "192.0.2.18:46000", "trainer", False, False, "cd" * 32, 1e6, 9, 0.0, {}, False),
    ]
    out = io.StringIO()
    Console(file=out, width=80).print(member_table(members, 80))
    one, two = (line for line in out.getvalue().splitlines() if line.strip().startswith(("aaaaaaaa", "bbbbbbbb")))
    for cell in ("aaaaaaaa*", "192.0.2.17:46000", "[bold]waiting", "12", "3/20", "1234", "2.5", "abababab"):
        assert cell in one
    assert "no answer" in two and "cdcdcdcd" in two
    for width in range(24, 80):
        out = io.StringIO()
        Console(file=out, width=width).print(member_table(members, width))
        one = next(line for line in out.getvalue().splitlines() if line.startswith("aaaaaaaa*")).split()
        whole = {"aaaaaaaa*", "[bold]waiting", "12", "3/20", "1234", "2.5", "abababab"}
        assert {cell for cell in one if not cell.startswith("192.")} <= whole  # an address goes on in the next line


def test_the_table_of_members_shows_addresses_whole_and_nothing_that_a_terminal_obeys() -> None:
    address = "[2001:db8:1234:5678:9abc:def0:1234:5678]:46000"
    status = {"phase": "\x1b]0;mine\x07\u202e\ntrained :smile:", "loss": "x" * 1000, "t": 1}
    members = [Member("a" * 32, address, "trainer", True, False, "ab" * 32, 1e6, 9, 1.0, status, False)]
    out = io.StringIO()
    Console(file=out, width=200).print(member_table(members, 200))
    _, line = out.getvalue().splitlines()
    assert f" {address} " in line and " ?]0;mine???trained :smile: " in line
    assert line.isprintable() and line.count("x") == 40


def test_a_terminal_that_draws_nothing_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert draws()
    monkeypatch.setenv("TERM", "dumb")
    assert not draws()
    assert not Show(Board(), Console(force_terminal=True), "")._live


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("500MB", 500_000_000), ("1.5 gb", 1_500_000_000), ("2Gi", 2 << 30), ("1KiB", 1024)],
)
def test_a_size_may_have_a_unit(text: str, size: int) -> None:
    assert parser(demo_wanted=False).parse_args(["join", "--history-bytes", text]).history_bytes == size


@pytest.mark.parametrize("text", ["-1", "much", "3i", "1e9", "4 Gbit", ""])
def test_what_is_no_size_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser(demo_wanted=False).parse_args(["join", f"--history-bytes={text}"])
    assert "is no size: give bytes, or one such as 500MB or 4GiB" in capsys.readouterr().err


def test_a_home_that_the_shell_left_alone_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    args = parser(demo_wanted=True).parse_args(["join", "--state-dir=~/peer", "--profile=~/traces:3"])
    assert (args.state_dir, args.profile) == (tmp_path / "peer", (tmp_path / "traces", 3))
    for folder in ("a:b/", "a:b/c"):
        assert parser(demo_wanted=True).parse_args(["join", "--profile", folder]).profile[0] == Path(folder)
    assert parser(demo_wanted=True).parse_args(["demo", "--out=~/out"]).out == tmp_path / "out"
    assert parser(demo_wanted=False).parse_args(["join", "--state-dir=~nobody-of-this-name/x"]).state_dir
    monkeypatch.setenv("DLC_HOME", "~/state")
    assert home() == tmp_path / "state"
    monkeypatch.setenv("DLC_HOME", "~nobody-of-this-name/x")
    assert home().parts[-1] == "x"
    monkeypatch.delenv("DLC_HOME")
    monkeypatch.setenv("HOME", "~")  # as where it is not set, and the user has no entry in /etc/passwd
    monkeypatch.setenv("USERPROFILE", "~")
    with pytest.raises(UsageError, match="set DLC_HOME"):
        home()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('[data]\nsource = "~nobody-of-this-name/x"', "no data source at ~nobody-of-this-name/x"),
        ('[data]\ntokenizer = "~nobody-of-this-name/x"', "no tokenizer folder ~nobody-of-this-name/x"),
        ('[model]\nkind = "path"\npath = "~nobody-of-this-name/x"', "no model folder at ~nobody-of-this-name/x"),
    ],
)
def test_a_run_of_a_folder_of_nobody_is_a_wrong_option(
    table: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "RUN.toml"
    config.write_text(table)
    code, text = fails(capsys, "join", "--config", str(config), "--state-dir", str(tmp_path / "s"), "--device", "cpu")
    assert code == 2 and said in text


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
def test_a_process_of_ours_may_open_as_many_files_as_the_system_lets_it() -> None:
    """Strangers that only connect take one each."""
    program = """
import resource
from dlc.cli.files import raise_open_files_limit
_, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
hard = 512 if allowed == resource.RLIM_INFINITY else min(allowed, 512)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
raise_open_files_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard))
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout == "True\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[model.config]\nmodel_type = "llama"\nhidden_sze = 3', "'hidden_sze' is no field of a llama model; did you"),
        ('[model.config]\nmodel_type = "t5"', "is no causal language model"),
        ('[model]\nkind = "path"\npath = "/nowhere/model"', "no model folder at /nowhere/model"),
        ('[model]\nkind = "hub"\nname = "nobody/of-this-name"', "no such model of the Hugging Face hub can be loaded"),
        ('[data]\ntokenizer = "/nowhere/tokenizer"', "there is no tokenizer folder /nowhere/tokenizer"),
        ('[data]\ntokenizer = "nobody/of-this-name"', "the tokenizer 'nobody/of-this-name' cannot be loaded"),
        ('[data]\nsource = "/nowhere/text"', "/nowhere/text"),
    ],
)
def test_what_is_wrong_with_the_parts_of_a_run_is_told_before_others_are_told_to_join(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, text: str, said: str
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "run.toml").write_text(text)
    words = ["join", "--config", str(tmp_path / "run.toml"), "--state-dir", str(tmp_path / "state"), "--device", "cpu"]
    assert main([*words, "--listen", "127.0.0.1:0"]) == 2
    assert said in "".join(capfd.readouterr()) and "others join with" not in caplog.text


@pytest.mark.parametrize(
    ("lines", "option", "said"),
    [
        ("", "", "holds no text"),
        ("\n\n", "", "holds no text"),
        ('{"body": "x"}\n', "", 'not a JSON object with a "text" field'),
        ('[{"text": "x"}]\n', "", 'not a JSON object with a "text" field'),
        ('{"text": "x"}\n', 'text_field = "body"', 'not a JSON object with a "body" field'),
        ('{"text": "x"}\n', 'split = "test"', "leave out data.split"),
    ],
)
def test_a_file_without_the_text_that_is_said_of_it_is_told_before_others_are_told_to_join(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    lines: str,
    option: str,
    said: str,
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "run.toml").write_text(f"[data]\nsource = {json.dumps(str(tmp_path / 'a.jsonl'))}\n{option}")
    words = ["join", "--config", str(tmp_path / "run.toml"), "--state-dir", str(tmp_path / "state"), "--device", "cpu"]
    assert main([*words, "--listen", "127.0.0.1:0"]) == 2
    assert said in "".join(capfd.readouterr()) and "others join with" not in caplog.text


@pytest.mark.parametrize(
    ("saved", "option", "said"),
    [
        (True, "", 'row 0: no column "text" (found: body)'),
        (True, 'split = "test"', "without a split 'test'"),
        (
            True,
            'text_field = "body"\nseq_len = 100',
            "holds 140 tokens, but training and validation need a block of 100",
        ),
        (True, "streaming = true\nshards = 1", 'shard 0: no column "text" (found: body)'),
        (
            False,
            'text_field = "body"\nseq_len = 100',
            "holds 140 tokens, but training and validation need a block of 100",
        ),
        (False, "streaming = true\nshards = 1", 'its first line is no JSON object with a string as "text"'),
        (False, 'text_field = "body"\nstreaming = true\nshards = 2', "no block of 128 tokens held out"),
        (False, 'text_field = "body"\nstreaming = true\nshards = 32', "hold no text to train on"),
        (False, "streaming = true\nshards = 99", 'its first line is no JSON object with a string as "text"'),
    ],
)
def test_a_dataset_or_a_stream_that_cannot_be_used_is_told_before_others_are_told_to_join(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    saved: bool,
    option: str,
    said: str,
) -> None:
    """So is one that is too short, as far as that shows where reading stops as soon as there is enough."""
    datasets = pytest.importorskip("datasets")
    caplog.set_level("INFO")
    source, bodies = tmp_path / ("rows" if saved else "a.jsonl"), ["ab c"] * 28
    if saved:
        datasets.Dataset.from_dict({"body": bodies}).save_to_disk(source)
    else:
        source.write_text("".join(json.dumps({"body": body}) + "\n" for body in bodies))
    (tmp_path / "run.toml").write_text(f"[data]\nsource = {json.dumps(str(source))}\n{option}")
    words = ["join", "--config", str(tmp_path / "run.toml"), "--state-dir", str(tmp_path / "state"), "--device", "cpu"]
    assert main([*words, "--listen", "127.0.0.1:0"]) == 2
    assert said in "".join(capfd.readouterr()) and "others join with" not in caplog.text


def test_parts_of_a_run_that_do_not_fit_each_other_are_told_before_others_are_told_to_join(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """As far as a config tells it, whether it stands in RUN.toml or in a folder."""
    caplog.set_level("INFO")
    from transformers import AutoConfig

    make_tokenizer(tmp_path / "tokenizer")
    AutoConfig.for_model("llama", vocab_size=256, max_position_embeddings=64).save_pretrained(tmp_path / "model")
    tokenizer, path = f'[data]\ntokenizer = "{tmp_path / "tokenizer"}"', f'kind = "path"\npath = "{tmp_path / "model"}"'
    rows = "ids, but the model's vocabulary (vocab_size) only 256"
    wrong = {
        f'{tokenizer}\n[model.config]\nmodel_type = "llama"\nvocab_size = 256': rows,
        f"{tokenizer}\nseq_len = 32\n[model]\n{path}": rows,
        f"[model]\n{path}": "data.seq_len (128) exceeds the 64 positions (max_position_embeddings) of the model",
    }
    for number, (text, said) in enumerate(wrong.items()):
        (tmp_path / "run.toml").write_text(text)
        state = tmp_path / f"state-{number}"
        words = ["join", "--config", str(tmp_path / "run.toml"), "--state-dir", str(state), "--device", "cpu"]
        assert main([*words, "--listen", "127.0.0.1:0"]) == 2
        assert said in "".join(capfd.readouterr()) and "others join with" not in caplog.text
