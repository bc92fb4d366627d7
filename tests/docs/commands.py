"""The commands on pages: run here, by the code that the `parloom` command runs."""

import io
import os
import re
import shlex
import socket
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch.distributed as dist

from parloom import api, cli
from tests.forked import forked_ranks

PROMPT, CODE = "$ ", '; echo "exit code $?"'
TIMEOUT_S = 120.0
# What differs between machines and runs: times, memory of a process, the last digits of losses and
# errors. Only of commands that train.
MEASURED = re.compile(
    r"\d[\d.]*k? (us|ms|s|samples/s|tokens/s|MiB|GiB)\b"
    r"|(?<=difference )[^,]*"
    r"|(?<=loss \d\.\d)\d*"
)
TRAINING = ("run", "verify")

Run = Callable[[list[str]], tuple[str, int]]  # what a command prints, and its exit code


def executed(block: str, run: Run) -> str:
    """A console block with the output of each command as it is now; `> FILE` shows none.

    A command that fails has its message, and must say so: `; echo "exit code $?"`.
    """
    lines: list[str] = []
    for command, printed in commands_of(block):
        shown = " ".join(line.rstrip("\\").strip() for line in command).removeprefix(PROMPT)
        words = shlex.split(shown.removesuffix(CODE))
        assert words[0] == "parloom", f"not a command of parloom: {shown}"
        hidden = ">" in words
        out, code = run(words[1 : words.index(">") if hidden else None])
        if not shown.endswith(CODE):
            assert code == 0, f"{shown}: exit code {code}: {out}"
        now = [] if hidden else [line.rstrip() for line in out.splitlines()]
        now += [f"exit code {code}"] if shown.endswith(CODE) else []
        same = words[1] in TRAINING and masked(now) == masked(printed)
        lines += [*command, *(printed if same else now)]
    return "\n".join(lines) + "\n"


def commands_of(block: str) -> list[tuple[list[str], list[str]]]:
    """The lines of each command of a block, and those that it prints."""
    found: list[tuple[list[str], list[str]]] = []
    goes_on = False
    for line in block.splitlines():
        if goes_on:
            found[-1][0].append(line)
        elif line.startswith(PROMPT):
            found.append(([line], []))
        else:
            assert found, f"a block begins with a command: {line}"
            found[-1][1].append(line)
        goes_on = (goes_on or line.startswith(PROMPT)) and line.endswith("\\")
    return found


def masked(lines: Sequence[str]) -> list[str]:
    """Lines without what is measured."""
    return [MEASURED.sub("..", line) for line in lines]


def run(arguments: list[str]) -> tuple[str, int]:
    """Run a command in this process, `parloom run` in forks of it that are its ranks."""
    if arguments[0] == "run":
        return trained(arguments)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main(arguments)
    said = err.getvalue()
    return out.getvalue() + (
        said[said.index("error: ") :] if code and "error: " in said else ""
    ), code


def trained(arguments: list[str], num_ranks: int | None = None) -> tuple[str, int]:
    """A run as another launcher starts it, on as many ranks as were planned or on `num_ranks`: what
    they print, and their largest exit code.
    """
    ranks = num_ranks or api.load(Path(arguments[1])).decisions.num_ranks
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    plan = Path(arguments[1]).resolve()

    def rank(index: int) -> int:
        os.environ |= {name: str(value) for name, value in job.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(index), "LOCAL_RANK": str(index)}
        os.environ["PARLOOM_PLAN"] = str(plan / "plan.json" if plan.is_dir() else plan)
        code = cli.main(arguments)
        if dist.is_initialized():
            dist.destroy_process_group()
        return code

    ended = forked_ranks(rank, ranks, TIMEOUT_S)
    worst = max((abs(code) if code is not None else 1 for code, _, _ in ended), default=0)
    said = "".join(err for _, _, err in ended) if worst else ""
    return "".join(out for _, out, _ in ended) + said, worst
