"""The command `dlc`. Only here is the environment read; each command imports what it needs when it runs.

Exit codes: 0 done, 1 `dlc demo` found a promise broken, 2 usage, 3 could not join, 4 the run failed, 130 interrupted.
Errors are one line on stderr; `--log-level debug` adds the traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence

from dlc.cli.interrupt import Interrupts
from dlc.cli.options import parser
from dlc.comm.keytext import is_key, without_keys
from dlc.ending import INTERRUPTED, end_at_once
from dlc.errors import DlcError, JoinError, UsageError, first_line

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OK, USAGE, NOT_JOINED, FAILED = 0, 2, 3, 4
AT_ONCE = {"join": "--micro-batch", "eval": "--batch-size"}
"""By command: the option that says how many sequences go through a model at once."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser(demo_wanted="demo" in words[:1]).parse_args(words)
    _stand_in()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own, and all came twice
    logging.getLogger("dlc").setLevel(args.log_level.upper())
    try:
        if signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, end_at_once):
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = _run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        _complain(args.command, "interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone; Python would complain once more at exit
        _discard_stdout()
        return FAILED
    except Exception as error:
        if args.log_level == "debug":
            logging.getLogger("dlc").exception("dlc %s failed", args.command)
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            _discard_stdout()  # or Python would try once more, and complain
        text = str(error) if isinstance(error, DlcError) else _unexpected(args.command, error)
        _complain(args.command, without_keys(text, is_key))
        return USAGE if isinstance(error, UsageError) else NOT_JOINED if isinstance(error, JoinError) else FAILED


def _run(args: argparse.Namespace) -> int:
    match args.command:
        case "key":
            from dlc.comm.security import generate_run_key

            sys.stdout.write(generate_run_key())
            sys.stdout.flush()
            return OK
        case "join":
            with Interrupts() as interrupts:  # before the imports, which take seconds
                from dlc.cli.join import join

                return join(args, interrupts)
        case "status":
            with Interrupts():
                from dlc.cli.status import show_status

                return show_status(args)
        case "export":
            with Interrupts() as interrupts:
                from dlc.cli.export import export

                return export(args, interrupts)
        case "eval":
            with Interrupts() as interrupts:
                from dlc.cli.evaluate import evaluate_model

                return evaluate_model(args, interrupts)
        case "bench":
            from dlc.cli.bench import bench

            return bench(args)
        case _:
            from dlc.demo import main as demo

            return demo(args)


def _stand_in() -> None:
    """A stdout or stderr that is closed (`>&-`) is /dev/null: else a socket would get its number.

    What the terminal's encoding lacks stdout shows as stderr does: it is no reason to lose what was measured.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_WRONLY)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115  as long as we live
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # it was made for a file, and its number has become a pipe
            sys.stdout.reconfigure(errors="backslashreplace")


def _complain(command: str, text: str) -> None:
    """Where nobody reads it, the exit status still tells."""
    with contextlib.suppress(OSError):
        print(f"dlc {command}: {text}", file=sys.stderr)


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unexpected(command: str, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        where = f"{error.filename} cannot be written" if error.filename else "what there is to say cannot be written"
        return f"{where}: {error.strerror}; make room, and start it again"
    if type(error).__name__ == "OutOfMemoryError" and command in AT_ONCE:  # torch's, which may not be loaded here
        return f"{first_line(error)} Give a smaller {AT_ONCE[command]}: the outcome is the same one, with less memory"
    return f"unexpected {type(error).__name__}: {error} (--log-level debug shows where)"
