"""Arrows point down: which module may use what, as a table, checked on the syntax trees of all sources.

A *use* is a dotted name: an imported module ("dlc.comm.driver"), a name imported from one ("dlc.comm.driver.Driver"),
or an attribute reached through an import ("os.environ"). Imports inside functions and under TYPE_CHECKING count too.
Patterns are of `fnmatch` (a star also crosses slashes) on paths below the root, so a rule holds for files yet to come.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FACES = ("dlc.cli", "dlc.demo", "dlc.bench", "dlc.monitor", "dlc.compat", "dlc.integrations", "dlc.sim")
PURE = ("wire", "ids", "messages", "measures", "catalogue", "entries", "ledger", "codecs", "grid", "reducer", "choose")
PURE += ("framing", "straggler", "codecbase", "castcodecs", "blockcodecs", "sparsecodec", "partition", "rates", "spans")
PURE += ("meshmessages", "spanstate", "servermessages", "claims", "probemessages", "window", "vectors")
PURE += ("strides", "turns", "dropped")
"""Parts of comm/ that are values and functions: no state machine, no input or output."""
LEAVES = ("errors", "options", "runspec", "strategyspec", "pacespec", "report")
"""Modules that everybody may import, and that import only each other."""


@dataclass(frozen=True)
class Rule:
    why: str
    where: tuple[str, ...]
    forbids: tuple[str, ...]
    exempt: tuple[str, ...] = ()
    """Files to which the rule does not apply."""
    allows: tuple[str, ...] = ()
    """Uses below a forbidden name that are fine."""


RULES = (
    Rule(
        why="comm/ stands below the trainer and every face",
        where=("src/dlc/comm/*",),
        forbids=("dlc.train", "dlc.peer", *FACES),
    ),
    Rule(
        why="the façade stands below the trainer and every face",
        where=("src/dlc/peer.py", "src/dlc/peer/*"),
        forbids=("dlc.train", *FACES),
    ),
    Rule(
        why="train/ stands below the faces",
        where=("src/dlc/train/*",),
        forbids=FACES,
    ),
    Rule(
        why="only the transport, its links, its door and its authentication know zmq",
        where=("src/dlc/*",),
        forbids=("zmq",),
        exempt=tuple(f"src/dlc/comm/{name}.py" for name in ("transport", "links", "door", "security")),
    ),
    Rule(
        why="only the driver knows threads (and the resolver, whose look-ups block)",
        where=("src/dlc/comm/*",),
        forbids=("threading", "asyncio", "concurrent"),
        exempt=("src/dlc/comm/driver.py", "src/dlc/comm/addresses.py"),
    ),
    Rule(
        why="only the driver reads the clock (the transport is given one); time and randomness are arguments",
        where=("src/dlc/comm/*",),
        forbids=("dlc.comm.clock", "time", "datetime", "random", "torch.rand", "torch.randn"),
        exempt=("src/dlc/comm/driver.py", "src/dlc/comm/clock.py", "src/dlc/comm/transport.py"),
        allows=("random.Random",),
    ),
    Rule(
        why="only the command line reads the environment",
        where=("src/dlc/*",),
        forbids=("os.environ", "os.environb", "os.getenv", "os.putenv"),
        exempt=("src/dlc/cli.py", "src/dlc/cli/*"),
    ),
    Rule(
        why="no pickle, neither in files nor on the wire: reading it runs code",
        where=("src/*", "benchmarks/*", "tests/*"),
        forbids=("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "torch.load", "torch.save"),
    ),
    Rule(
        why="the machines of `dlc bench` are given the time, and know neither sockets nor threads",
        where=tuple(f"src/dlc/bench/{name}.py" for name in ("limits", "flow", "transfer", "host", "schedule")),
        forbids=("time", "threading", "random", "socket", "dlc.comm.transport", "dlc.comm.driver", "dlc.comm.clock"),
    ),
    Rule(
        why="pure parts use only each other",
        where=tuple(f"src/dlc/comm/{name}.py" for name in PURE),
        forbids=("dlc",),
        allows=("dlc.errors", *(f"dlc.comm.{name}" for name in PURE)),
    ),
    Rule(
        why="what everybody imports must not import anybody",
        where=tuple(f"src/dlc/{name}.py" for name in LEAVES),
        forbids=("dlc", "torch", "transformers", "datasets"),
        allows=("dlc.comm.timeouts", *(f"dlc.{name}" for name in LEAVES)),
    ),
)


def sources() -> list[str]:
    return sorted(
        path.relative_to(ROOT).as_posix()
        for top in ("src", "benchmarks", "tests")
        for path in (ROOT / top).rglob("*.py")
    )


def violations(path: str, text: str) -> list[str]:
    rules = [
        rule
        for rule in RULES
        if any(fnmatch(path, pattern) for pattern in rule.where)
        and not any(fnmatch(path, pattern) for pattern in rule.exempt)
    ]
    return [
        f"{path}:{line} uses {use}: {rule.why}" for line, use in uses(path, text) for rule in rules if breaks(rule, use)
    ]


def breaks(rule: Rule, use: str) -> bool:
    if any(below(use, allowed) or below(allowed, use) for allowed in rule.allows):
        return False  # also the bare import of what contains an allowed name; its attributes are uses of their own
    return any(below(use, forbidden) for forbidden in rule.forbids)


def below(name: str, top: str) -> bool:
    return name == top or name.startswith(top + ".")


def uses(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Every (line, dotted name) that the source uses."""
    tree = ast.parse(text, path)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        for line, local, target, use in imported(path, node):
            aliases[local] = target
            yield line, use
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (chain := dotted(node)):
            head, _, rest = chain.partition(".")
            if head in aliases:
                yield node.lineno, f"{aliases[head]}.{rest}"


def imported(path: str, node: ast.AST) -> Iterator[tuple[int, str, str, str]]:
    """(line, local name, what that name stands for, what is used) per imported thing; nothing for other nodes."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            head = alias.name.partition(".")[0]
            yield node.lineno, alias.asname or head, alias.name if alias.asname else head, alias.name
    if isinstance(node, ast.ImportFrom):
        package = Path(path).with_suffix("").parts[1:]
        parents = package[: len(package) - node.level] if node.level else ()
        module = ".".join([*parents, *filter(None, [node.module])])
        for alias in node.names:
            name = f"{module}.{alias.name}"
            yield node.lineno, alias.asname or alias.name, name, name


def dotted(node: ast.expr) -> str:
    """ "a.b.c" for a chain of attributes that starts at a plain name, otherwise nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (chain := dotted(node.value)):
        return f"{chain}.{node.attr}"
    return ""


def test_every_arrow_points_down() -> None:
    found = [line for path in sources() for line in violations(path, (ROOT / path).read_text(encoding="utf-8"))]
    assert not found, "\n" + "\n".join(found)


def test_the_sources_are_found() -> None:
    assert {"src/dlc/errors.py", "src/dlc/comm/wire.py", "tests/test_imports.py"} <= set(sources())


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("src/dlc/comm/rounds.py", "from dlc.train import loop"),
        ("src/dlc/comm/rounds.py", "from dlc.train.loop import Trainer"),
        ("src/dlc/comm/rounds.py", "from dlc import train"),
        ("src/dlc/comm/rounds.py", "import dlc.train.loop"),
        ("src/dlc/comm/rounds.py", "import dlc.errors\nx = dlc.train.loop"),
        ("src/dlc/comm/rounds.py", "from ..train import loop"),
        ("src/dlc/comm/rounds.py", "def f():\n    from dlc.peer import Peer"),
        ("src/dlc/comm/new/deep.py", "import dlc.sim"),
        ("src/dlc/peer.py", "from dlc.train.diloco import DiLoCo"),
        ("src/dlc/train/loop.py", "from dlc.cli import main"),
        ("src/dlc/comm/driver.py", "import zmq.auth"),
        ("src/dlc/train/loop.py", "import zmq"),
        ("src/dlc/comm/transport.py", "import threading"),
        ("src/dlc/comm/rounds.py", "from time import monotonic"),
        ("src/dlc/comm/rounds.py", "from dlc.comm.clock import clock"),
        ("src/dlc/comm/rounds.py", "import random\nx = random.random()"),
        ("src/dlc/comm/rounds.py", "from random import choice"),
        ("src/dlc/train/loop.py", "import os\nx = os.environ['HOME']"),
        ("src/dlc/train/loop.py", "from os import getenv"),
        ("src/dlc/comm/rounds.py", "import pickle"),
        ("src/dlc/train/loop.py", "import torch\nx = torch.load('f')"),
        ("benchmarks/allreduce.py", "import torch as t\nt.load('f')"),
        ("src/dlc/comm/wire.py", "from dlc.comm.driver import Driver"),
        ("src/dlc/comm/grid.py", "from dlc.comm import rounds"),
        ("src/dlc/comm/codecs.py", "from . import transport"),
        ("src/dlc/runspec.py", "from dlc.comm import wire"),
        ("src/dlc/runspec.py", "import torch"),
    ],
)
def test_a_planted_violation_is_caught(path: str, text: str) -> None:
    assert violations(path, text)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("src/dlc/comm/driver.py", "import random, threading, time\nx = time.monotonic()\ny = random.random()"),
        ("src/dlc/comm/rounds.py", "import random\ndef f(rng: random.Random) -> float:\n    return rng.random()"),
        ("src/dlc/comm/rounds.py", "from dlc.comm.driver_notes import NOTES\nfrom dlc.training_names import X"),
        ("src/dlc/comm/transport.py", "import zmq"),
        (
            "src/dlc/comm/grid.py",
            "from dlc.comm import wire\nfrom dlc.comm.ids import Voter\nfrom dlc.errors import DlcError",
        ),
        ("src/dlc/train/loop.py", "import os, time\nfrom dlc.comm.ids import PeerId\nx = os.fsync"),
        ("src/dlc/cli.py", "import os\nx = os.environ"),
        ("src/dlc/runspec.py", "from dlc import options\nfrom dlc.errors import ConfigError"),
    ],
)
def test_what_is_allowed_passes(path: str, text: str) -> None:
    assert violations(path, text) == []
