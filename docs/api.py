"""docs/api.md: every public name with its docstring, read from the sources by griffe. `make api` runs this module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import griffe

SOURCES = Path(__file__).resolve().parent.parent / "src"
HEAD = """\
# API reference

<!-- Written by `make api` from the docstrings in src/dlc: change them there. -->

How the parts go together is in [library.md](library.md). The options of a run are in [run-toml.md](run-toml.md).
"""
CHAPTERS = {
    "A member of a swarm": ["dlc.peer.Peer", "dlc.watching.MemberChange", "dlc.survey.Member", "dlc.survey.status"],
    "Training": ["dlc.train.diloco.DiLoCo", "dlc.runspec.OuterSpec", "dlc.runspec.RunSpec", "dlc.handles.Resume"],
    "What a round tells": ["dlc.report.RoundReport", "dlc.report.Share", "dlc.report.Missing"],
    "Groups, without the log": ["dlc.mesh.Group", "dlc.mesh.GroupCall", "dlc.report.GroupReport", "dlc.report.Absent"],
    "A parameter server": [
        "dlc.server.ParameterServer",
        "dlc.server.ServerClient",
        "dlc.server.ServerReport",
        "dlc.strategyspec.ServerSpec",
    ],
    "Neighbours and grids, without the log": [
        "dlc.gossip.Gossip",
        "dlc.report.GossipReport",
        "dlc.moshpit.Moshpit",
        "dlc.report.MoshpitReport",
    ],
    "Handles": ["dlc.handles.Reduction", "dlc.handles.Pending", "dlc.handles.Position", "dlc.handles.Checkpoint"],
    "In other libraries": [
        "dlc.integrations.transformers.DiLoCoCallback",
        "dlc.integrations.transformers.saved_state",
        "dlc.integrations.lightning.DLCStrategy",
        "dlc.integrations.lightning.saved_state",
        "dlc.compat.opendiloco.dht.DHT",
        "dlc.compat.opendiloco.optimizer.DiLoCoOptimizer",
        "dlc.compat.opendiloco.strategy.AllReduceStrategy",
        "dlc.compat.opendiloco.grad_averager.DiLoCoGradAverager",
    ],
    "In place of Hivemind": [
        "dlc.compat.install",
        "dlc.compat.uninstall",
        "dlc.compat.hivemind.dht.DHT",
        "dlc.compat.hivemind.dht.set_run_key",
        "dlc.compat.hivemind.averaging.averager.DecentralizedAverager",
        "dlc.compat.hivemind.averaging.control.StepControl",
        "dlc.compat.hivemind.optim.optimizer.Optimizer",
        "dlc.compat.hivemind.optim.grad_averager.GradientAverager",
        "dlc.compat.hivemind.optim.training_averager.TrainingAverager",
        "dlc.compat.hivemind.utils.logging.use_hivemind_log_handler",
        "dlc.compat.hivemind.refused.NotOffered",
    ],
    "Errors": ["dlc.errors"],
}
"""Names of classes, functions and modules; a module stands for its docstring and all that it defines. What `dlc`
exports and is not named here comes under `MORE`."""
MORE = "More"
WIDTH = 100
"""Of a signature; longer ones have a line per parameter."""


def reference() -> str:
    """The whole page."""
    package = griffe.load("dlc", search_paths=[SOURCES], submodules=True)
    parts = [HEAD]
    named = {name.rpartition(".")[2] for names in CHAPTERS.values() for name in names}
    more = [package[name].target_path for name in exports_of(package) if name not in named and name in package.members]
    for chapter, names in (CHAPTERS | ({MORE: more} if more else {})).items():
        parts.append(f"## {chapter}\n")
        for name in names:
            parts.extend(described(package[name.removeprefix("dlc.")], name))
    return "\n".join(parts).rstrip("\n") + "\n"


def exports_of(package: griffe.Object) -> list[str]:
    """Names in its `__all__`, without those of the language."""
    return [name for name in map(str, package.exports or ()) if not name.startswith("_")]


def described(found: griffe.Object, name: str) -> Iterator[str]:
    """The section of one name."""
    if isinstance(found, griffe.Module):
        yield text_of(found)
        for member in found.members.values():
            if isinstance(member, griffe.Class) and member.docstring:
                yield f"- `{member.name}`: {' '.join(member.docstring.value.split())}"
        yield ""
        return
    home, _, last = name.rpartition(".")
    if last in exports_of(found.package):
        home = "dlc"
    elif home.startswith("dlc.compat."):  # a part of the package by which it is imported
        home = home.rpartition(".")[0]
    yield f"### {home}.{last}\n"
    if isinstance(found, griffe.Function):
        yield signature(found, found.name)
        yield text_of(found)
        return
    assert isinstance(found, griffe.Class)
    init = found.all_members.get("__init__")
    if isinstance(init, griffe.Function) and found.name != "Peer":  # which is made by `join`
        yield signature(init, found.name)
    yield text_of(found, init)
    yield from members(found)


def members(found: griffe.Class) -> Iterator[str]:
    """Attributes and properties first, as a list; then methods, those of the bases in dlc included."""
    every = {**found.members, **{n: m for n, m in found.all_members.items() if n not in found.members}}
    public = [m for m in every.values() if not m.name.startswith("_")]
    plain = [m for m in public if m.is_attribute and m.docstring]
    for member in plain:
        kind = f": {member.annotation}" if member.annotation is not None else ""
        yield f"- `{member.name}{kind}`: {' '.join(member.docstring.value.split())}"  # type: ignore[union-attr]
    yield ""
    for member in public:
        if isinstance(member.final_target if member.is_alias else member, griffe.Function) and member.docstring:
            yield f"#### {found.name}.{member.name}\n"
            yield signature(member, member.name)
            yield text_of(member)


def signature(found: griffe.Function | griffe.Alias, name: str) -> str:
    """`name(parameters) -> result` as a block of code, without `self`."""
    given = [p for p in found.parameters if p.name not in ("self", "cls")]
    words, star = list[str](), False
    for p in given:
        if p.kind is griffe.ParameterKind.keyword_only and not star:
            words.append("*")
            star = True
        stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(p.kind, "")
        star = star or stars == "*"
        kind = f": {p.annotation}" if p.annotation is not None else ""
        default = "" if p.default is None or stars else f" = {p.default}" if kind else f"={p.default}"
        words.append(f"{stars}{p.name}{kind}{default}")
    end = f" -> {found.returns}" if found.returns is not None and name == found.name else ""
    line = f"{name}({', '.join(words)}){end}"
    if len(line) > WIDTH:
        line = "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){end}"])
    return f"```python\n{line}\n```\n"


def text_of(found: griffe.Object | griffe.Alias, parameters_of: griffe.Object | None = None) -> str:
    """The docstring; a line that begins with the name of a parameter and a colon becomes an entry of a list."""
    source = parameters_of if isinstance(parameters_of, griffe.Function) else found
    known = {p.name for p in getattr(source, "parameters", ())}
    lines, in_list = list[str](), False
    for line in (found.docstring.value if found.docstring else "").splitlines():
        entry = re.match(r"([\w, `]+):\s+(.*)", line)
        if entry and known.issuperset(name.strip(" `") for name in entry[1].split(",")):
            lines += [] if in_list else [""]
            line, in_list = f"- `{entry[1].replace('`', '')}`: {entry[2]}", True
        elif in_list and line.strip():
            line = f"  {line.strip()}"
        in_list = in_list and bool(line.strip())
        lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


if __name__ == "__main__":
    print(reference(), end="")
