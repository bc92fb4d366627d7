"""Forms of a model that one CPU device runs: as predicted, and as measured.

    PYTHONPATH=. python benchmarks/measured_forms.py [--models bert,..] [--modes training,forward]
        [--kinds eager,compiled] [--rounds 21] [--small] [--json FILE [--resume]] [--table]

Of each model (`measured_forms_models.py`): the original program, the forms that `auto`, `taso` and
`tensat` choose, and one with all products of one operand merged, chosen or not. They are chosen
with costs of this machine: its rates are measured before, and all operators of what is chosen; then
methods choose again. A mode is training (forward, backward, SGD), or the forward pass in evaluation
mode, planned as a program of its own. A kind is eager, or under `torch.compile`: block functions by
the runtime's option, and what stands between them as well, since some models have no blocks.

All forms of a model are in one process with one thread. They take turns, in random order, and the
original is there twice: what the second differs by is noise. Seconds, also those of operators, are
those in which the process has a core, since the machine is shared; the file has those of the clock,
too. A ratio is the median over rounds of the ratios to the original's step of that round, with its
95 % interval. Losses of the first steps are compared before, in double precision to 1e-9; exit code
1 where one differs. `--table` prints the tables of a file.
"""

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from algebra_plans import source_revision
from common import median_and_interval, report
from measured_forms_models import SUBJECTS
from measured_forms_plans import METHODS, Costs, Form, Forms, ProcessorClock, alone
from measured_forms_tables import tables
from torch.optim import SGD

from parloom.capture import capture, parameters_of
from parloom.execute.clock import LEAST_S
from parloom.execute.program import compile_pcg
from parloom.ir.graph import without_gradients
from parloom.ir.pcg import PCG
from parloom.rewrite.rewrites import derived
from parloom.runtime import CompiledBlocks, Context, Program, SingleComm, Trainer

Row = dict[str, Any]
Step = Callable[[], float]
Times = tuple[float, float]  # by the clock, and of the processor
TRAINING, FORWARD = "training", "forward"
EAGER, COMPILED = "eager", "compiled"
TWICE = "original, again"
RATE = 1e-3
# Steps that are compared, and by how much losses may differ, as a share: in double precision, and
# of the first step in single precision, whose rounding grows in networks with batch norm.
COMPARED, EXACT, CLOSE = 2, 1e-9, 1e-4


class WrongError(Exception):
    """Forms of a model have different losses."""


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


class Subject:
    """A model, its batch, and how a form of it becomes a step."""

    def __init__(self, name: str, mode: str, *, small: bool, double: bool = False) -> None:
        torch.manual_seed(0)
        self.model, batch = SUBJECTS[name].built(small=small)
        if double:
            self.model.double()
            batch = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
        self.batch, self.mode = batch, mode
        self.graph = self.trained = capture(self.model, self.batch)
        if mode == FORWARD:
            self.graph = without_gradients(capture(self.model, self.batch, training=False))

    def step(self, pcg: PCG, kind: str) -> Step:
        """One step of a form: its loss."""
        program, blocks = compile_pcg(pcg, "form").program, None
        if kind == COMPILED:
            program = replace(program, forward=torch.compile(program.forward))
            blocks = CompiledBlocks()
        if self.mode == TRAINING:
            trainer = self._trainer(program, None, blocks)

            def train() -> float:
                return trainer.step(self.batch).loss.item()

            return train
        # Evaluation has the weights of a program that trains, which lie as this form reads them; of
        # these none is trained.
        trained = compile_pcg(alone(self.trained), "trained").program
        joined = {name for group in program.adjacent for name in group}
        specs = (
            replace(s, trainable=s.trainable and s.name not in joined) for s in trained.parameters
        )
        laid = replace(trained, adjacent=program.adjacent, parameters=tuple(specs))
        judge = self._trainer(laid, program, blocks)

        def forward() -> float:
            return judge.evaluate(self.batch).loss.item()

        return forward

    def _trainer(
        self, program: Program, evaluation: Program | None, blocks: CompiledBlocks | None
    ) -> Trainer:
        return Trainer(
            program, parameters_of(self.model, self.trained),
            optimizer=lambda named: SGD(named, lr=RATE), comm=SingleComm(program.mesh),
            evaluation=evaluation, blocks=blocks,
        )  # fmt: skip


def examine(name: str, mode: str, args: argparse.Namespace) -> list[Row]:
    """The rows of a model's forms in a mode."""
    before = os.getloadavg()[0]
    subject = Subject(name, mode, small=args.small)
    clock = ProcessorClock(torch.device("cpu"), args.window)
    say(f"{name}, {mode}: measuring operators")
    forms = Forms(subject.graph, Costs(clock), say).found(args.methods.split(","))
    labels = {", ".join(name for name, _ in form.methods): form for form in forms}
    prove(Subject(name, mode, small=args.small, double=True), labels)
    rows: list[Row] = [
        {"model": name, "mode": mode, "form": label, "small": args.small,
         "revision": source_revision(), "rules": form.rules, "rewrites": form.rewrites,
         "cpu_s": dict(form.methods), "predicted_s": form.predicted_s, "source": form.source}
        for label, form in zip(labels, forms, strict=True)
    ]  # fmt: skip
    rows.append(rows[0] | {"form": TWICE, "cpu_s": {}})
    labels[TWICE] = labels[rows[0]["form"]]
    for kind in args.kinds.split(","):
        steps = {label: subject.step(form.pcg, kind) for label, form in labels.items()}
        apart = torch.compiler.disable(Context.call)  # type: ignore[no-untyped-call]
        with patch.object(Context, "call", apart):
            compare(steps, CLOSE)
            found = measured(steps, args.rounds)
        for row in rows:
            row[kind] = found[row["form"]]
            say(f"{name}, {mode}, {kind}, {row['form']}: {row[kind]['ratio'][0]:.3f}")
        del steps
        gc.collect()
    for row in rows:
        row["load"] = before, os.getloadavg()[0]
    return rows


def prove(subject: Subject, forms: Mapping[str, Form]) -> None:
    """Take the first steps of all forms in double precision; raises `WrongError`."""
    losses: dict[str, list[float]] = {}
    for label, form in forms.items():
        step = subject.step(alone(derived(subject.graph, form.rewrites)), EAGER)
        losses[label] = [step() for _ in range(COMPARED)]
    for number in range(COMPARED):
        check({label: own[number] for label, own in losses.items()}, EXACT)


def compare(steps: Mapping[str, Step], tolerance: float) -> None:
    """Take a step of all forms, and others to warm up; raises `WrongError`."""
    check({label: step() for label, step in steps.items()}, tolerance)
    for step in (*steps.values(), *steps.values()):
        step()


def check(losses: Mapping[str, float], tolerance: float) -> None:
    """Raises `WrongError` where losses differ from the first by more than this share."""
    first = next(iter(losses.values()))
    for label, loss in losses.items():
        if not abs(loss - first) <= tolerance * abs(first):
            raise WrongError(f"the loss is {first}, that of {label} {loss}")


def measured(steps: Mapping[str, Step], rounds: int) -> dict[str, Row]:
    """Steps in turns, in another order each round: seconds and ratios to the first form's."""
    rng, times = random.Random(0), {label: list[Times]() for label in steps}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for label in rng.sample(list(steps), len(steps)):
            times[label].append(timed(steps[label]))
    gc.enable()
    first = next(iter(times.values()))
    return {label: summary(own, first) for label, own in times.items()}


def timed(step: Step) -> Times:
    """Seconds of a step."""
    begun, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - begun, time.process_time() - cpu


def summary(own: Sequence[Times], first: Sequence[Times]) -> Row:
    """Medians, quartiles, and ratios to the steps of `first` with their intervals."""
    row: Row = {"steps": len(own)}
    for unit, prefix in enumerate(("clock_", "")):
        seconds = [times[unit] for times in own]
        pairs = zip(seconds, (times[unit] for times in first), strict=True)
        row[f"{prefix}s"] = statistics.median(seconds)
        row[f"{prefix}quartiles_s"] = statistics.quantiles(seconds, n=4)[::2]
        row[f"{prefix}ratio"] = median_and_interval([one / other for one, other in pairs])
    return row


def launched(name: str, mode: str, args: argparse.Namespace) -> list[Row]:
    """The rows of a model in a mode, from a process of its own; raises `WrongError`."""
    command = [
        sys.executable, __file__, "--one", name, "--modes", mode, "--kinds", args.kinds,
        "--methods", args.methods, "--rounds", str(args.rounds), "--window", str(args.window),
        *(["--small"] if args.small else []),
    ]  # fmt: skip
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | one_thread
    )
    if done.returncode:
        raise WrongError(f"{name}, {mode}: exit code {done.returncode}")
    found: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(SUBJECTS))
    parser.add_argument("--modes", default=f"{TRAINING},{FORWARD}")
    parser.add_argument("--kinds", default=f"{EAGER},{COMPILED}")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--window", type=float, default=LEAST_S, help="seconds for each operator")
    parser.add_argument("--small", action="store_true", help="small copies of the models")
    parser.add_argument("--one", default=None, help="run this model here, print JSON")
    parser.add_argument("--json", default=None)
    parser.add_argument("--resume", action="store_true", help="keep rows of the same revision")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.one is not None:
        torch.set_num_threads(1)
        print(json.dumps(examine(args.one, args.modes, args)))
        return 0
    rows = known(args.json, every=args.table) if args.resume or args.table else []
    if args.table:
        print(tables(rows))
        return 0
    failed = 0
    for mode in args.modes.split(","):
        for name in args.models.split(","):
            if any((row["model"], row["mode"]) == (name, mode) for row in rows):
                continue
            try:
                rows += launched(name, mode, args)
            except WrongError as error:
                say(str(error))
                failed = 1
            report("measured_forms", rows, args.json)
    print(tables(rows))
    return failed


def known(path: str | None, *, every: bool) -> list[Row]:
    """The rows of a file, or those of this revision of parloom."""
    if path is None or not Path(path).exists():
        return []
    found: list[Row] = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
    return [row for row in found if every or row["revision"] == source_revision()]


if __name__ == "__main__":
    raise SystemExit(main())
