"""Mutated files and random command lines: every one ends with an exit code of the contract.

    python benchmarks/fuzz.py --kind all --count 2000 --seed 0 [--json FILE] [--resume] [--jobs 2]
    python benchmarks/fuzz.py --kind plan --seed 0 --only 17

Each case is run in a process of its own, forked from one that has imported everything, in a folder
of its own, within 6 GiB. After 60 s it gets a Ctrl-C, and has to end with 130 after it told of a
plan that its search has found; anything else is a hang. It fails where the exit code is none of the
contract's (1 is none), a signal or the time ended it, stderr has a traceback, a warning of Python,
a control character, or no message, or where exit 2 does not name the file. `--only` runs one case
again and prints what it says; its files stay. Results are written as they come; with `--resume`,
cases that the file has of the same seed are not run again. Exit code 1 where a case fails.
"""

import argparse
import gc
import json
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import report

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from fuzz_base import FAMILIES, main_base
from fuzz_cases import KINDS, Case, case

from parloom import cli

LIMIT_S = 60.0
FOUND = "best so far"  # what a search says once it has a plan
STOP_S = 10.0  # to end after Ctrl-C
LIMIT_BYTES = 6 << 30
CODES = frozenset((0, 2, 3, 4, 5, 6, 7, 8))
BATCH = 50  # cases between two looks at the file of results
NOISE = re.compile(r"Traceback|internal error|\w+Warning\b|\bFATAL|terminate called")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]")
Row = dict[str, Any]


@dataclass
class Running:
    """A case and its process."""

    case: Case
    folder: Path
    pid: int
    started: float
    stopped: bool = False
    expired: bool = False


def main() -> int:
    """Run the cases; 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("all", *KINDS), default="all")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--only", type=int, help="run this case alone and print what it says")
    given = parser.parse_args()
    base = main_base()
    warm()
    if given.only is not None:
        return again(case(given.kind, given.seed, given.only, base), base)
    rows = past(given.json, given.seed) if given.resume else {}
    for kind in KINDS if given.kind == "all" else (given.kind,):
        row = rows.setdefault(
            kind, {"kind": kind, "seed": given.seed, "count": 0, "exits": {}, "failures": []}
        )
        while row["count"] < given.count:
            end = min(given.count, row["count"] + BATCH)
            cases = (case(kind, given.seed, i, base) for i in range(row["count"], end))
            add(row, list(outcomes(cases, base, given.jobs)), end)
            report("fuzz", list(rows.values()), given.json)
        show(row)
    shutil.rmtree(base.parent)
    return int(any(row["failures"] for row in rows.values()))


def warm() -> None:
    """Import what the commands import, so that no case has to."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from parloom import api, explain  # noqa: F401
    from parloom.report import clusters, terminal, timeline  # noqa: F401

    for family, (architecture, _) in FAMILIES.items():
        AutoConfig.for_model(family)
        __import__("transformers").__dict__.get(architecture)
    assert AutoModelForCausalLM is not None
    gc.collect()
    gc.freeze()  # collections in the children would copy every page


def past(path: str | None, seed: int) -> dict[str, Row]:
    """The rows of a file by kind."""
    if path is None or not Path(path).exists():
        return {}
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    return {row["kind"]: row for row in document["rows"] if row["seed"] == seed}


def add(row: Row, results: list[Row], end: int) -> None:
    """Count some results."""
    exits: Counter[str] = Counter(row["exits"])
    for result in results:
        exits.update(str(code) for code in result["exits"])
        if result["why"]:
            row["failures"].append(result)
            print(f"{row['kind']} {result['index']}: {result['why']}: {result['said'][-200:]!r}")
    row["exits"] = dict(sorted(exits.items()))
    row["count"] = end
    row["failures"].sort(key=lambda failure: failure["index"])


def show(row: Row) -> None:
    codes = ", ".join(f"{number} x {code}" for code, number in row["exits"].items())
    print(f"{row['kind']}: {row['count']} cases, {len(row['failures'])} fail; exit codes: {codes}")


def outcomes(cases: Iterator[Case], base: Path, jobs: int) -> Iterator[Row]:
    """What became of each case, `jobs` at a time."""
    running: list[Running] = []
    left = True
    while running or left:
        while left and len(running) < jobs:
            chosen = next(cases, None)
            left = chosen is not None
            if chosen is not None:
                running.append(start(chosen, base))
        time.sleep(0.002)
        for one in list(running):
            pid, status = os.waitpid(one.pid, os.WNOHANG)
            if pid:
                running.remove(one)
                end_group(one.pid)
                yield outcome(one, status)
            elif time.monotonic() - one.started > LIMIT_S and not one.stopped:
                one.stopped = True
                os.kill(one.pid, signal.SIGINT)
            elif time.monotonic() - one.started > LIMIT_S + STOP_S and not one.expired:
                one.expired = True
                end_group(one.pid)


def start(chosen: Case, base: Path) -> Running:
    """Fork a process for a case."""
    folder = base.parent / f"{chosen.kind}-{chosen.index}"
    chosen.write(base, folder)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        code = 70
        try:
            code = child(chosen, folder)
        finally:
            os._exit(code)
    return Running(chosen, folder, pid, time.monotonic())


def child(chosen: Case, folder: Path) -> int:
    """Run the commands, up to the first that fails; 0 where all of them came to an end."""
    os.setsid()
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["TMPDIR"] = str(folder)
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{name}.txt", os.O_WRONLY | os.O_CREAT, 0o600), stream)
    codes = Path("exits.txt").open("w", encoding="utf-8")  # noqa: SIM115 - closed by _exit
    for command in chosen.commands:
        code = cli.main(command)
        codes.write(f"{code}\n")
        codes.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        if code:
            break
    return 0


def end_group(pid: int) -> None:
    """End what a process has left, ranks for instance."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def outcome(one: Running, status: int) -> Row:
    """What became of a case; `why` is empty where it is as it should be."""
    said = text_of(one.folder / "stderr.txt")
    exits = [int(code) for code in text_of(one.folder / "exits.txt").split()]
    why = fault(one, status, exits, said)
    result: Row = {"index": one.case.index, "exits": exits, "why": why, "said": said[-2000:]}
    if why:
        for bug in one.folder.glob("parloom-bug-*"):
            result["bug"] = text_of(bug)[-1500:]
        result["commands"] = [shlex.join(command) for command in one.case.commands]
        script = f"python benchmarks/fuzz.py --kind {one.case.kind} --seed {one.case.seed}"
        result["again"] = f"{script} --only {one.case.index}"
    shutil.rmtree(one.folder, ignore_errors=True)
    return result


def fault(one: Running, status: int, exits: list[int], said: str) -> str:
    """Why a case fails, or nothing."""
    if one.expired:
        return f"more than {LIMIT_S:g} s, and no end after Ctrl-C"
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    if os.WEXITSTATUS(status) or not exits:
        return f"left with {os.WEXITSTATUS(status)}"
    if one.stopped and FOUND not in said:
        return f"more than {LIMIT_S:g} s, and no plan yet"
    wrong = [code for code in exits if code not in CODES and not (one.stopped and code == 130)]
    if wrong:
        return f"exit {wrong[0]}"
    verbose = any({"-v", "--verbose"}.intersection(command) for command in one.case.commands)
    if not verbose and (noise := NOISE.search(said)):
        return f"{noise.group()} on stderr"
    printed = said + text_of(one.folder / "stdout.txt")
    if found := CONTROL.search(printed):
        return f"control character {found.group()!r}"
    if exits[-1] and not said.strip():
        return "no message"
    if exits[-1] == 2 and one.case.named and not any(name in said for name in one.case.named):
        return "the message does not name the file"
    return ""


def again(chosen: Case, base: Path) -> int:
    """Run one case in sight; its files stay."""
    for command in chosen.commands:
        print("parloom", shlex.join(command))
    running = start(chosen, base)
    while not os.waitpid(running.pid, os.WNOHANG)[0]:
        time.sleep(0.01)
        if time.monotonic() - running.started > LIMIT_S:
            end_group(running.pid)
    for name in (
        "stdout.txt",
        "stderr.txt",
        "exits.txt",
        *(p.name for p in running.folder.glob("parloom-bug*")),
    ):
        print(f"--- {name}\n{text_of(running.folder / name)}")
    print(f"--- {running.folder}")
    return 0


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
