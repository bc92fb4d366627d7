"""Random modules under four plans each, against eager training in float64.

    PYTHONPATH=. python benchmarks/random_modules.py [--count 500] [--seed 0] [--json FILE]
        [--resume] [--jobs 1] [--only CLASS] [--inject FAULT] [--keep DIR]

Each module (`module_source.py`) is trained for three steps by plain PyTorch in a process of its
own. Then it is captured, planned for four devices under `data_parallel`, `fsdp` and two random
plans, and trained by each plan. Losses, gradients of the first step, weights and buffers must be
equal to 1e-9, or parloom must refuse the module with its path and a reason; anything else is
silent, and exit code 1. A module that draws is compared by `verify`, with equal draws on both
sides. Each plan also steps on every rank's own samples, as does one whose inputs have their samples
over different axes, and refuses a module with one thing changed and a file that calls another
operator (`module_checks.py`). `--inject` undoes one check (`--inject list` names them) and expects
to find that: exit code 1 where it does not.
"""

import argparse
import multiprocessing
import pickle
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from common import report, reported
from module_checks import another_model, crossed, finite, hostile_file, own_samples
from module_faults import FAULTS
from module_source import Source, source
from torch import Tensor

from parloom import api
from parloom import runtime as rt
from parloom.capture import load_model, mode, named_tensors, select_loss
from parloom.errors import CaptureError, InputError, ParloomError
from parloom.execute.eager_compare import tolerance_of
from parloom.execute.program import training_program
from parloom.execute.verify import (
    Trace,
    assemble,
    compare,
    gradients_of,
    pieces_of,
    verify,
)
from parloom.ir.plan import Plan

Row = dict[str, Any]
PLANS = (("data_parallel", 0), ("fsdp", 0), ("random", 0), ("random", 1))
CLUSTER = "4xcpu"
STEPS = 3
LEARNING_RATE = 0.05
TIMEOUT_S = 120.0
SHIFTS = (0, 1, 3)  # samples in another order in every step
EQUAL, REFUSED, SILENT, FAILED = "equal", "refused", "SILENT", "FAILED"


def batches(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """A batch for each step."""
    return [{n: t.roll(shift, 0) for n, t in batch.items()} for shift in SHIFTS]


def eager(spec: str) -> Trace:
    """Three steps of plain PyTorch."""
    loaded = load_model(spec)
    model = loaded.model
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, gradients = [], dict[str, Tensor]()
    with mode(model, True):
        for step, batch in enumerate(batches(loaded.batch)):
            output = model(**batch)
            flat = list(named_tensors(output))
            loss = select_loss(output, flat, batch, loaded.loss, required=True)
            assert loss is not None
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if step == 0:
                found = ((n, p.grad) for n, p in model.named_parameters())
                gradients = {n: g.clone() for n, g in found if g is not None}
            optimizer.step()
            losses.append(loss.detach())
    state = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    return Trace(tuple(losses), gradients, state)


def parallel(plan: Plan, spec: str) -> Trace:
    """The same steps of the plan's program, on threads of this process."""
    loaded = load_model(spec)
    program = training_program(plan).only.program
    tensors = dict((*loaded.model.named_parameters(), *loaded.model.named_buffers()))

    def rank(comm: rt.Comm) -> Any:
        trainer = rt.Trainer(
            program,
            tensors,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=LEARNING_RATE),
            comm=comm,
        )
        losses, gradients = [], {}
        for step, batch in enumerate(batches(loaded.batch)):
            losses.append(trainer.step(batch).loss)
            if step == 0:
                gradients = pieces_of(gradients_of(trainer))
        shards = (s for s in trainer.shards() if not s.name.startswith("optimizer/"))
        return losses, gradients, pieces_of(shards)

    return assemble(rt.run_threads(program.mesh, rank))


def judge(spec: str, made: Source, expected: Trace | str, row: Row, folder: Path) -> None:
    """Capture the module, and train it under each plan."""
    try:
        captured = api.capture(spec)
    except (CaptureError, InputError) as error:
        row |= {"outcome": REFUSED, "detail": str(error)}
        return
    if isinstance(expected, str):
        row |= {"outcome": SILENT, "detail": f"eager training fails: {expected}"}
        return
    _, tolerance = tolerance_of(captured.graph)
    worst = 0.0
    for method, seed in PLANS:
        name = f"{method} {seed}"
        plan = api.search(replace(captured, seed=seed), cluster=CLUSTER, method=method)
        if made.draws:
            loaded = load_model(spec)
            tensors = dict((*loaded.model.named_parameters(), *loaded.model.named_buffers()))
            found = verify(plan, tensors, loaded.batch)
        else:
            ranks = plan.decisions.mesh.num_ranks
            found = compare(expected, parallel(plan, spec), ranks, tolerance)
        worst = max(worst, found.worst_error)
        wrong = [] if found.passed else [str(found.first_difference)]
        if made.draws and not wrong:
            wrong.append(finite(list(parallel(plan, spec).losses)))
        elif not wrong:
            plans = filter(None, (plan, crossed(plan)))
            wrong += [own_samples(each, spec, tolerance) for each in plans]
        if method == "fsdp":
            wrong += [another_model(plan, made, folder, row["seed"]),
                      hostile_file(plan, row["seed"])]  # fmt: skip
        if any(wrong):
            row |= {"outcome": SILENT, "detail": f"{name}: {'; '.join(filter(None, wrong))}"}
            return
    row |= {"outcome": EQUAL, "worst": worst}
    said = [line for line in captured.notes if "not compared" in line]
    if said:
        row["note"] = said[0]


def isolated(send: Connection, function: Callable[..., Any], *args: Any) -> None:
    """What `function` returns or raises, from a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        result = function(*args)
    except Exception as error:
        result = f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"
    # Plain pickle: torch's own way of sending a tensor needs the sender alive.
    send.send_bytes(pickle.dumps(result))


def start(function: Callable[..., Any], *args: Any) -> tuple[Connection, BaseProcess]:
    """Run a function in a fork of this process, which has loaded no module."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=isolated, args=(there, function, *args))
    process.start()
    there.close()
    return here, process


def finished(here: Connection, process: BaseProcess) -> Any:
    """What came of it; text where nothing did."""
    try:
        result = (
            pickle.loads(here.recv_bytes())
            if here.poll(TIMEOUT_S)
            else f"no result within {TIMEOUT_S:g} s"
        )
    except EOFError:
        result = "its process died"
    process.kill()
    process.join()
    return result


def examine(seed: int, only: str, fault: str, folder: Path) -> Row:
    """All that is found out about one module."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    made = source(seed, only)
    path = folder / f"module_{seed}.py"
    path.write_text(made.text, encoding="utf-8")
    row: Row = {"seed": seed, "traps": list(made.traps), "outcome": FAILED}
    spec = f"{path}:factory"
    expected = None if made.draws else finished(*start(eager, spec))
    with ExitStack() as undone:
        if fault:
            FAULTS[fault].undo(undone)
        try:
            judge(spec, made, expected or Trace((), {}, {}), row, folder)
        except ParloomError as error:
            row |= {"outcome": REFUSED, "detail": str(error)}
        except Exception as error:
            row["detail"] = f"{type(error).__name__}: {error}"
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row


def rows_of(seeds: list[int], arguments: argparse.Namespace, folder: Path) -> Any:
    """Rows in the order in which they are done, `--jobs` at a time."""
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    left = list(reversed(seeds))
    while left or running:
        while left and len(running) < arguments.jobs:
            seed = left.pop()
            here, process = start(examine, seed, arguments.only, arguments.inject, folder)
            running[here] = seed, process
        for end in wait(list(running)):
            assert isinstance(end, Connection)
            seed, process = running.pop(end)
            found = finished(end, process)
            row = {"seed": seed, "outcome": FAILED, "detail": found}
            yield found if isinstance(found, dict) else row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first module")
    parser.add_argument("--json")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="modules with a trap of this class")
    parser.add_argument("--inject", default="", choices=["", "list", *FAULTS])
    parser.add_argument("--keep", help="where to leave the modules' sources")
    arguments = parser.parse_args()
    if arguments.inject == "list":
        print("\n".join(f"{name:24} {fault.trap:3} {fault.what}" for name, fault in FAULTS.items()))
        return 0
    if arguments.inject:
        arguments.only = arguments.only or FAULTS[arguments.inject].trap
    rows = reported(arguments.json) if arguments.resume else []
    done = {row["seed"] for row in rows}
    seeds = [s for s in range(arguments.seed, arguments.seed + arguments.count) if s not in done]
    with tempfile.TemporaryDirectory(prefix="parloom-modules-") as folder:
        place = Path(arguments.keep or folder)
        place.mkdir(parents=True, exist_ok=True)
        for row in rows_of(seeds, arguments, place):
            rows.append(row)
            rows.sort(key=lambda r: int(r["seed"]))
            report("random_modules", rows, arguments.json)
            bad = row["outcome"] in (SILENT, FAILED)
            if bad:
                print(f"module {row['seed']} {row.get('traps')}: {row['outcome']}: {row['detail']}")
            if arguments.inject and row["outcome"] == SILENT:
                print(f"{arguments.inject}: found at module {len(rows)} of at most {len(seeds)}")
                return 0
    return summary(rows, arguments.inject)


def summary(rows: list[Row], fault: str) -> int:
    """Print counts; the exit code."""
    counts = Counter(row["outcome"] for row in rows)
    total = len(rows)
    print(f"{total} modules x {len(PLANS)} plans: " + ", ".join(
        f"{counts[name]} {name} ({counts[name] / total:.1%})"
        for name in (EQUAL, REFUSED, SILENT, FAILED)
    ))  # fmt: skip
    worst = max((row["worst"] for row in rows if row["outcome"] == EQUAL), default=0.0)
    print(f"largest relative difference of those that are equal: {worst:.1e}")
    where = re.compile(r"cannot capture \w+")
    unnamed = [r["seed"] for r in rows
               if r["outcome"] == REFUSED and not where.search(r["detail"])]  # fmt: skip
    print(f"refused without a module path: {len(unnamed)} {unnamed[:5]}")
    noted = Counter(r["note"] for r in rows if r.get("note"))
    for note, count in noted.most_common():
        print(f"{count} x {note}")
    if fault:
        print(f"{fault}: not found")
        return 1
    return int(bool(counts[SILENT] or counts[FAILED]))


if __name__ == "__main__":
    sys.exit(main())
