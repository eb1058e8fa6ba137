"""One command for all: `gemsmith COMMAND [arguments]`; `gemsmith COMMAND --help` explains each.

It turns into the process that the longer form starts: `gemsmith export ...` is `python -m train.commands.export ...`,
and `gemsmith train --nproc 2 ...` is `NPROC=2 launch/torchrun.sh ...`.
"""

from __future__ import annotations

import ast
import difflib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from train.config.places import CONFIGS, PREFIX, ROOT

LAUNCHER = ROOT / "launch" / "torchrun.sh"


@dataclass(frozen=True)
class Command:
    """A module, and whether launch/torchrun.sh starts it: "never", "asked" (when `--nproc` is given) or "always"."""

    module: str
    what: str
    arguments: str
    ranks: str = "never"
    has_parser: bool = False  # whose --help lists the options

    @property
    def docstring(self) -> str:
        path = ROOT.joinpath(*self.module.removeprefix(PREFIX).split("."))
        source = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        return ast.get_docstring(ast.parse(source.read_text())) or ""


COMMANDS = {
    "train": Command("train.main", "train a model", "+experiment=NAME [key=value]", ranks="always"),
    "compare": Command(
        "train.commands.compare", "compare precisions or other changes over seeds", "+experiment=NAME [options]",
        ranks="asked", has_parser=True,
    ),
    "baseline": Command(
        "train.commands.baseline", "gradient-boosted trees on what a training reads", "data=NAME [key=value]",
        has_parser=True,
    ),
    "evaluate": Command("train.evaluate", "metrics of a trained model on a split", "run_dir=DIR", ranks="asked"),
    "export": Command("train.commands.export", "write a trained model for scoring", "run_dir=DIR"),
    "score": Command("train.commands.score", "how fast an exported model scores requests", "export=DIR"),
    "sweep": Command("launch.sweep", "a grid of runs", "+experiment=NAME --over key=a,b", has_parser=True),
    "search": Command(
        "launch.search", "random search and successive halving", "+experiment=NAME --space key=low..high",
        has_parser=True,
    ),
    "hosts": Command(
        "launch.hosts", "train on a list of hosts over ssh", "--hosts a,b --run-dir DIR +experiment=NAME",
        has_parser=True,
    ),
    "scaling": Command(
        "launch.scaling", "speed on 1, 2, 4 processes of this host", "+experiment=NAME runtime.steps=100",
        has_parser=True,
    ),
    "scaling_law": Command(
        "launch.scaling_law", "NE against operations, from sweeps over sizes", "SWEEP [SWEEP ...]", has_parser=True
    ),
    "importance": Command(
        "train.commands.importance", "what each feature is worth to a trained model", "run_dir=DIR", ranks="asked"
    ),
    "segments": Command("train.commands.segments", "metrics by country, device or other columns", "run_dir=DIR by=a,b"),
    "vectors": Command(
        "train.commands.vectors", "write vectors of items, requests and tables", "run_dir=DIR of=items,requests",
        ranks="asked",
    ),
    "bench": Command("kernels.bench", "time kernels beside other implementations", "FAMILY", has_parser=True),
    "doctor": Command("train.commands.doctor", "what fits together on this machine, and how to mend it", ""),
    "summary": Command(
        "train.commands.summary", "what each part of a model costs, and which backend serves it", "+experiment=NAME"
    ),
    "keys": Command("train.commands.keys", "what keys of the configuration mean", "[WORDS...]"),
    "speed": Command(
        "train.commands.speed", "how fast a configuration trains", "+experiment=NAME runtime.steps=100", ranks="always"
    ),
}  # fmt: skip


def overview() -> str:
    """What `gemsmith --help` prints."""
    lines = [f"  {name:<11} {command.what}" for name, command in COMMANDS.items()]
    ends = ["gemsmith COMMAND --help explains each.", f"configurations: {CONFIGS}"]
    return "\n".join(["usage: gemsmith COMMAND [arguments]", "", *lines, "", *ends])


def usage(name: str) -> str:
    """What `gemsmith NAME --help` prints: the docstring of the module and the options that its parser knows."""
    command = COMMANDS[name]
    several = "" if command.ranks == "never" else "[--nproc N] "
    text = f"usage: gemsmith {name} {several}{command.arguments}\n\n{command.docstring}\n"
    if several:
        without = "one process a GPU, or 2 where there is none" if command.ranks == "always" else "one process"
        text += (
            f"\n--nproc N starts N processes on this node through launch/torchrun.sh; without it: {without}. Further\n"
            "variables of that launcher: RUN_DIR, MAX_RESTARTS, and on several nodes NNODES, NODE_RANK, MASTER_ADDR.\n"
        )
    if command.has_parser:
        line = [sys.executable, "-m", command.module, "--help"]
        printed = subprocess.run(line, env=environment(), capture_output=True, text=True, check=True).stdout
        text += printed[printed.index("\n\n", printed.index("\n\n") + 2) + 1 :]  # behind its usage and description
    return text.replace(f"python -m {command.module}", f"gemsmith {name}")


def environment() -> dict[str, str]:
    """That of the processes that are started: this environment's programs, and in a checkout its packages."""
    programs = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    packages = [*([] if PREFIX else [str(ROOT)]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PATH": os.pathsep.join(programs), "PYTHONPATH": os.pathsep.join(packages)}


def process_of(name: str, arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command line and environment of the process that `gemsmith NAME arguments` turns into.

    ValueError for a `--nproc` that names no number of processes.
    """
    command, variables = COMMANDS[name], environment()
    if command.ranks != "never":
        processes, arguments = split_processes(arguments)
        if processes:
            variables["NPROC"] = processes
        if processes or command.ranks == "always":
            named = [text.partition("=")[2] for text in arguments if text.startswith("runtime.run_dir=")]
            variables |= {"RUN_DIR": named[-1].strip("'\"")} if named else {}  # else the logs had another folder
            return [str(LAUNCHER), *arguments], {**variables, "MODULE": command.module}
    return [sys.executable, "-m", command.module, *arguments], variables


def split_processes(arguments: list[str]) -> tuple[str, list[str]]:
    """The value of `--nproc N` or `--nproc=N`, "" without one, and the other arguments."""
    found, others, rest = "", [], iter(arguments)
    for argument in rest:
        option, equals, value = argument.partition("=")
        if option != "--nproc":
            others.append(argument)
            continue
        found = value if equals else next(rest, "")
        if not found.isdigit() or not int(found):
            raise ValueError(f"--nproc {found or 'without a number'}: a number of processes is needed, e.g. --nproc 2")
    return found, others


def main() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h", "help"):
        print(overview())
        return
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        sys.exit(f"gemsmith {name}: no such command{f'; did you mean {near[0]}?' if near else ''}\n\n{overview()}")
    if {"--help", "-h"} & {*arguments}:
        print(usage(name))
        return
    try:
        line, variables = process_of(name, arguments)
    except ValueError as error:
        sys.exit(f"gemsmith {name}: {error}")
    os.execve(line[0], line, variables)


if __name__ == "__main__":
    main()
