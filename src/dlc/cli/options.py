"""The options of every command, with help and examples. Nothing heavy is imported here: `dlc --help` is instant."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from dlc import __version__
from dlc.comm.keytext import HIDDEN, is_key, without_keys
from dlc.comm.roles import ROLES, TRAINER
from dlc.train.shelf import expanded

LEVELS = ("debug", "info", "warning", "error")
PROFILE_STEPS = 5
SECONDS_MAX = 1e9
"""Thirty years."""

JOIN_EXAMPLES = """\
examples:
  dlc join                                         found the embedded run on this machine; prints what others type
  dlc key > run.key                                a run key, to be copied to every host of a run
  dlc join --key-file run.key --config RUN.toml    found a run of your own that other hosts can join
  dlc join --key-file run.key --peers 192.0.2.7:4600
  dlc join --print-config > RUN.toml               every option of a run, with its meaning
  torchrun --nproc-per-node 8 -m dlc join ...      the GPUs of this host together are one peer

Ctrl-C leaves the run and saves a checkpoint; the same command goes on from it. A second Ctrl-C stops at once.
Environment: DLC_HOME (state of all peers, default ~/.local/state/dlc), DLC_KEY_FILE (default of --key-file).
Exit codes: 0 the run ended, or left and saved; 2 usage; 3 could not join; 4 the run failed in the middle (what was
counted is saved), or its end could not be saved; 130 stopped at once.
"""
KEY_EXAMPLES = """\
example:
  dlc key > run.key && chmod 600 run.key    then copy it to every host of the run
"""
STATUS_EXAMPLES = """\
examples:
  dlc status --peers 127.0.0.1:4600
  dlc status --peers 192.0.2.7:4600 --key-file run.key --json
"""
EXPORT_EXAMPLES = """\
examples:
  dlc export ~/.local/state/dlc/dlc/peer-0 --out model    the newest checkpoint of a peer, also while it trains
  dlc export t-00000042.safetensors --out model

Then: AutoModelForCausalLM.from_pretrained("model"). The tokenizer is there too, unless the run was trained on bytes.
"""
EVAL_EXAMPLES = """\
examples:
  dlc eval ~/.local/state/dlc/dlc/peer-0           on what its run holds out for validation
  dlc eval model --source book.txt                 a folder of `dlc export`, on all of a text
  dlc eval model --source datasets:wikitext --subset wikitext-103-raw-v1 --split test --json
"""
BENCH_EXAMPLES = """\
examples, each tool has --help of its own:
  dlc bench serve --listen 0.0.0.0:4700 --key-file run.key            on one host,
  dlc bench link --to 192.0.2.7:4700 --key-file run.key               on another
  dlc bench matrix --peers A:4700,B:4700,C:4700 --key-file run.key    every direction between hosts that serve
  dlc bench allreduce --local 4
  dlc bench codec
"""
DEMO_EXAMPLES = """\
example:
  dlc demo --n-peers 4 --rounds 16
"""


OF_TRAINERS = {
    "resume": "auto",
    "device": "auto",
    "parallel": None,
    "micro_batch": 0,
    "eval_every": 0,
    "checkpoint_every": 10,
    "keep": 2,
    "tensorboard": None,
    "wandb": None,
    "profile": None,
    "fault": None,
}
"""Options of `dlc join` that mean something to a trainer only, with their defaults."""


class Parser(argparse.ArgumentParser):
    """No abbreviations: a misspelt option must not become another one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """No key is among the words, whatever it is given for: some would be looked up, or shown."""
        words = sys.argv[1:] if args is None else args
        if any(is_key(part) and not os.path.exists(part) for word in words for part in re.split(r"[=,\s]", word)):
            self.error(
                f"a run key is among the words of this command {HIDDEN}: other users of this host can read them there; "
                "write the key to a file, with `chmod 600`, and give its path to --key-file"
            )
        return super().parse_args(args, namespace)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Nothing is left over for the parser above, which would not know what options there are."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown[0].partition('=')[0])}")
        return known, unknown

    def _hint(self, word: str) -> str:
        """What may have been meant by that option."""
        if self.prog == "dlc join" and (of_run := _of_run(word)):
            return f"; {' or '.join(of_run)} is an option of RUN.toml, the file that --config names"
        names = [name for action in self._actions for name in action.option_strings if action.help != argparse.SUPPRESS]
        if "--peers" in names and re.search(r"[^/]:\d+$", word):
            return "; addresses are given with --peers, as one word with commas between them"
        if "--config" in names and word.endswith(".toml"):
            return "; a RUN.toml is given with --config"
        return _did_you_mean(word, names)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """With a suggestion, which argparse itself makes from Python 3.14 on, if asked."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = _did_you_mean(str(value), list(map(str, action.choices or ())))
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from None

    def error(self, message: str) -> NoReturn:
        """One line, as of every error: argparse puts all options before it, a dozen lines."""
        self.exit(2, f"{self.prog}: {without_keys(message)} (`{self.prog} --help` tells more)\n")


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    """A name that the word is the beginning of; without one, that which is most like it."""
    near = [name for name in known if word and name.startswith(word)] or difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _of_run(word: str) -> list[str]:
    """Options of a RunSpec that have the name of this option of a command line."""
    from dlc.options import dotted_names
    from dlc.runspec import RunSpec

    name = word.lstrip("-").replace("-", "_")
    return [known for known in dotted_names(RunSpec) if name in (known, known.rpartition(".")[2])]


def parser(demo_wanted: bool) -> Parser:
    """The whole command line. `demo_wanted`: also the options of `dlc demo`, which come from its own module."""
    from dlc.cli.bench import add_arguments as add_bench  # it uses this module

    top = Parser(
        prog="dlc",
        description="Train one model on machines that are far apart and that come and go.",
        epilog="`dlc COMMAND --help` tells more, with examples. Start with: dlc demo",
    )
    top.add_argument("--version", action="version", version=f"dlc {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_join(_command(commands, "join", "join a run, or found one, and train", JOIN_EXAMPLES))
    _command(commands, "key", "print a fresh run key: whoever has it can join", KEY_EXAMPLES)
    _add_status(_command(commands, "status", "list the peers of a run, without joining it", STATUS_EXAMPLES))
    _add_export(
        _command(commands, "export", "write the model of a checkpoint as a transformers folder", EXPORT_EXAMPLES)
    )
    _add_eval(_command(commands, "eval", "loss, perplexity and bits per byte of a model on a text", EVAL_EXAMPLES))
    add_bench(_command(commands, "bench", "measure links, the all-reduce and codecs, before a run", BENCH_EXAMPLES))
    demo = _command(commands, "demo", "peers on this machine train a model; one is killed, one joins", DEMO_EXAMPLES)
    if demo_wanted:
        from dlc.demo import add_arguments

        add_arguments(demo)
    return top


def _command(commands: Any, name: str, what: str, examples: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=what[0].upper() + what[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--log-level", choices=LEVELS, default="info", help="what goes to stderr (default info)")
    return command


def _add_join(join: argparse.ArgumentParser) -> None:
    join.set_defaults(**OF_TRAINERS)
    swarm = join.add_argument_group("the swarm")
    swarm.add_argument(
        "--peers", type=given, metavar="HOST:PORT,...", help="any of its peers; left out: a run is founded"
    )
    swarm.add_argument("--key-file", type=given, metavar="FILE", help="the run key; needed beyond this machine")
    swarm.add_argument("--insecure", action="store_true", help="listen beyond this machine without a key")
    swarm.add_argument(
        "--listen", type=given, metavar="HOST:PORT", help="default: a free port, on all interfaces if a key is given"
    )
    swarm.add_argument(
        "--advertise",
        type=given,
        metavar="HOST[:PORT]",
        help="address that others dial; another PORT, and the one after it, lead here from outside; default: found out",
    )
    swarm.add_argument(
        "--found",
        action="store_true",
        help="found the run, or go on from a checkpoint, even if not all of --peers (or of those that were with it to "
        "the last) answer: --peers have 15 s to do so, and those of the last round a minute (timeouts.evict_s)",
    )
    swarm.add_argument("--join-timeout", type=seconds, metavar="S", help="give up after S seconds; default: never")
    run = join.add_argument_group("the run (without --config and --rounds it is the swarm's, or the embedded one)")
    run.add_argument("--config", type=path, metavar="RUN.toml", help="options of the run; see --print-config")
    run.add_argument(
        "--rounds",
        type=count,
        metavar="R",
        help="end with this many rounds; overrides --config, and the checkpoint of --resume",
    )
    run.add_argument("--print-config", action="store_true", help="print all options of the run, and exit")
    here = join.add_argument_group("this peer")
    here.add_argument(
        "--state-dir",
        type=path,
        metavar="DIR",
        help="identity, checkpoints, model; default: the first of DLC_HOME/RUN/peer-0, peer-1, ... that no process "
        "uses (RUN is dlc where --peers are given without --config; of other roles helper-0, observer-0, ...)",
    )
    here.add_argument(
        "--resume",
        type=given,
        metavar="auto|never|PATH",
        help="auto (default): go on from the newest checkpoint in the state directory that is of this run, or of one "
        "that differs in its length only (rounds, tokens, inner.total_steps, outer.total_rounds); never: set all that "
        "are there aside; PATH: go on from this checkpoint, or the newest in this folder",
    )
    here.add_argument(
        "--role",
        choices=ROLES,
        default=TRAINER,
        help="trainer (default); helper: owns a share of the parameters of a run with a parameter server; it needs "
        "no GPU and no data; observer: looks on at the run of --peers, or of whoever joins by it first, without a "
        "vote, and is an address to join by; neither takes the options of training",
    )
    here.add_argument("--device", help="auto (default), cpu, cuda, cuda:1, ...; under torchrun each takes its own")
    here.add_argument(
        "--parallel",
        choices=("ddp", "fsdp"),
        help="under torchrun: the model whole on each process (ddp, default), or in parts (fsdp)",
    )
    here.add_argument(
        "--micro-batch",
        type=_positive,
        metavar="B",
        help="sequences that go through the model at once, where inner.batch_size are too many for this device (under "
        "torchrun for each): the steps are the same ones, and take longer",
    )
    here.add_argument(
        "--no-probe",
        action="store_true",
        help="do not measure this link before the first round (a second of junk to other peers, 64 MiB at most), nor "
        "let others measure theirs with it: for links that are paid by the byte",
    )
    here.add_argument(
        "--history-bytes",
        type=size,
        metavar="SIZE",
        help="host memory for the results of the last rounds, by which peers that missed some, and newcomers, catch "
        "up; those of the newest are always kept, in fp16 2 bytes per parameter (default 1GiB)",
    )
    here.add_argument(
        "--eval-every", type=count, metavar="K", help="validate every K rounds; default: at start and end"
    )
    here.add_argument("--checkpoint-every", type=count, metavar="K", help="in rounds (default 10; 0: at the end only)")
    here.add_argument(
        "--keep",
        type=_positive,
        metavar="K",
        help="checkpoints that stay on the disk, which needs room for one more (default 2)",
    )
    follow = join.add_argument_group("following the run (metrics.jsonl in the state directory is always written)")
    follow.add_argument("--json", action="store_true", help="events as JSON lines on stdout, and no live table")
    follow.add_argument("--tensorboard", type=path, metavar="DIR", help="curves for TensorBoard; dlc[tensorboard]")
    follow.add_argument("--wandb", type=given, metavar="PROJECT", help="curves in Weights & Biases; dlc[wandb]")
    follow.add_argument(
        "--profile",
        type=_profile,
        metavar="DIR[:STEPS]",
        help=f"write a Chrome trace of a few inner steps (default {PROFILE_STEPS})",
    )
    here.add_argument("--fault", metavar="kill-in-round=T", type=_fault, help=argparse.SUPPRESS)


def _add_status(status: argparse.ArgumentParser) -> None:
    status.add_argument("--peers", type=given, metavar="HOST:PORT,...", required=True, help="any peers of the run")
    status.add_argument("--key-file", type=given, metavar="FILE", help="the run key, where the run has one")
    status.add_argument("--run", type=given, metavar="NAME", help="only peers of this run")
    status.add_argument("--timeout", type=seconds, default=5.0, metavar="S", help="to wait for answers (default 5)")
    status.add_argument("--json", action="store_true", help="a JSON list on stdout")


def _add_export(export: argparse.ArgumentParser) -> None:
    export.add_argument(
        "checkpoint", type=given, metavar="CHECKPOINT", help="a checkpoint file, or the state directory of a peer"
    )
    export.add_argument("--out", type=path, metavar="DIR", required=True, help="folder to write; must be new or empty")
    export.add_argument("--json", action="store_true", help="what was written, as JSON on stdout")


def _add_eval(evaluation: argparse.ArgumentParser) -> None:
    evaluation.add_argument(
        "model", type=given, metavar="MODEL", help="a checkpoint, state directory, model folder, or hub name"
    )
    text = evaluation.add_argument_group(
        "the text (default: what the run holds out; of a model folder, that of stdlib)"
    )
    text.add_argument("--source", type=given, metavar="S", help="as data.source in RUN.toml; all of it is used")
    text.add_argument("--subset", type=given, metavar="NAME", help="with --source: as data.subset")
    text.add_argument("--split", type=given, metavar="NAME", help="with --source: as data.split (default train)")
    text.add_argument(
        "--text-field", type=given, metavar="NAME", help="with --source: as data.text_field (default text)"
    )
    text.add_argument("--tokenizer", type=given, metavar="T", help="as data.tokenizer; default: the model's own")
    text.add_argument(
        "--seq-len",
        type=count,
        metavar="N",
        help="tokens per block; default: that of the run; without one 1024, or what the model takes if that is less",
    )
    text.add_argument("--blocks", type=count, default=256, metavar="N", help="at most so many blocks (default 256)")
    evaluation.add_argument("--batch-size", type=count, default=8, metavar="B", help="blocks at once (default 8)")
    evaluation.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, ...")
    evaluation.add_argument("--json", action="store_true", help="one JSON object on stdout")


def given(text: str) -> str:
    """What an option says. Nothing at all is mostly a shell variable that is not set, and not the default."""
    if not text.strip(", "):
        raise argparse.ArgumentTypeError("it is empty: give a value, or leave the option out")
    return text


def path(text: str) -> Path:
    """Where a shell leaves the ~ of `--option=~/folder` alone, a folder of that name would be made."""
    return expanded(given(text))


def number(text: str) -> float:
    """Any, also one that is not finite."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def seconds(text: str) -> float:
    """Above 0."""
    value = number(text)
    if not 0 < value < SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0 and below {SECONDS_MAX:g}")
    return value


def pause(text: str) -> float:
    """Seconds, or 0."""
    return 0.0 if number(text) == 0 else seconds(text)


def count(text: str) -> int:
    """0 or more."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def size(text: str) -> int:
    """Bytes: a number, with or without a unit."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?))?b?\s*", text, re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give bytes, or one such as 500MB or 4GiB")
    unit: int = (1024 if found[3] else 1000) ** " kmgt".index((found[2] or " ").lower())
    return round(float(found[1]) * unit)


def _positive(text: str) -> int:
    value = count(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _profile(text: str) -> tuple[Path, int]:
    folder, colon, steps = text.rpartition(":")
    if not colon or "/" in steps or os.sep in steps:
        return path(text), PROFILE_STEPS
    if not folder or not steps.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no DIR:STEPS; a folder with a colon in its name ends in {os.sep!r}"
        )
    return path(folder), _positive(steps)


def _fault(text: str) -> int:
    name, _, t = text.partition("=")
    if name != "kill-in-round" or not t.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no fault")
    if sys.platform == "win32":
        raise argparse.ArgumentTypeError("faults need SIGKILL")
    return int(t)
