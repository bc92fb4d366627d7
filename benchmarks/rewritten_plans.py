"""Random models under rewritten plans: proved, trained, saved and loaded.

    PYTHONPATH=. python benchmarks/rewritten_plans.py [--count 20] [--seed 0] [--json FILE]
        [--jobs 1] [--keep DIR] [--only auto,pinned,forced,stages]

Each model (`rewritten_source.py`) is planned for two to four devices: by `auto`; by `auto` with a
rewrite pinned that it may have; with random layouts of a graph in which some of all ways to compute
its values are taken, whether they pay or not (`forced`); and as a pipeline. Of each plan: its file
is read back, it is proved on gloo ranks in double precision to 1e-9, trains three steps as plain
PyTorch does (losses, gradients and which there are none of, weights, buffers), and its checkpoint
after two steps is, to the bit, that of a plan for one device without rewrites, optimizer included,
in both directions; exported weights load in the plain model to the bit. Exit code 1 where one
differs, or a model is refused that plain PyTorch trains.
"""

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from common import report
from random_modules import finished, start
from random_plans import RandomPlans
from rewritten_source import Made, source
from safetensors.torch import load_file
from torch import Tensor, nn

from parloom import api
from parloom import runtime as rt
from parloom.capture import load_model, mode, named_tensors, select_loss
from parloom.errors import (
    CaptureError,
    InfeasibleError,
    InputError,
    LayoutError,
    ParloomError,
    VerifyError,
)
from parloom.execute import checkpoint
from parloom.execute.eager_compare import tolerance_of
from parloom.execute.machine import machine_for
from parloom.execute.optimizers import make
from parloom.execute.program import training_program
from parloom.execute.ranks import fork_ranks
from parloom.execute.verify import (
    Trace,
    assemble,
    compare,
    gradients_of,
    pieces_of,
    verify,
)
from parloom.execute.weights import export_safetensors
from parloom.ir.graph import Graph
from parloom.ir.plan import Optimizer, Plan
from parloom.ir.plan_json import plan_from_json, plan_to_json
from parloom.ir.verify import verify_decisions
from parloom.rewrite.follows import with_few_rules
from parloom.rewrite.horizontal import fusions
from parloom.rewrite.merge import merges
from parloom.rewrite.rewrites import derived, takes_of
from parloom.rewrite.substitutions import by_rules, directions
from parloom.rewrite.take import Take, compatible
from parloom.search.request import with_dtypes

Row = dict[str, Any]
KINDS = ("auto", "pinned", "forced", "stages")
CLUSTERS = ("2xcpu", "3xcpu", "4xcpu", "2x2xcpu")
OPTIMIZERS = ("adamw", "adamw", "sgd", "rmsprop", "adagrad", "adam")
STEPS, SAVED_AFTER, RATE, EPS = 3, 2, 0.05, 1e-3
FORCED = 1  # random plans of graphs with random rewrites
LITTLE, STAGED = 0.2, 0.3  # of the models are planned for little memory, or as pipelines
Tensors = Mapping[str, Tensor]


class WrongError(Exception):
    """Something is not as it should be."""


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their names."""
    return dict((*model.named_parameters(), *model.named_buffers()))


def eager(spec: str, planned: Optimizer, clip: float | None) -> Trace:
    """Three steps of plain PyTorch."""
    loaded = load_model(spec)
    model = loaded.model
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = make(planned, named, lr=RATE, eps=EPS)
    losses, gradients = [], dict[str, Tensor]()
    with mode(model, True):
        for step in range(STEPS):
            output = model(**loaded.batch)
            flat = list(named_tensors(output))
            loss = select_loss(output, flat, loaded.batch, loaded.loss, required=True)
            assert loss is not None
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if step == 0:
                found = ((n, p.grad) for n, p in model.named_parameters())
                gradients = {n: g.clone() for n, g in found if g is not None}
            optimizer.step()
            losses.append(loss.detach())
    return Trace(tuple(losses), gradients, {n: t.detach() for n, t in tensors_of(model).items()})


def rank_trains(  # noqa: PLR0917 - what a fork is given
    pipeline: rt.Pipeline, planned: Optimizer, tensors: Tensors, batch: Tensors,
    clip: float | None, steps: int, folder: Path | None, weights: Path | None,
    begin: Path | None,
) -> Any:  # fmt: skip
    """One rank: from `begin`, if it is given, so many steps; saved after two of them."""
    torch.set_num_threads(1)
    trainer = rt.Trainer(
        pipeline, tensors, optimizer=lambda named: make(planned, named, lr=RATE, eps=EPS),
        comm=rt.DistributedComm(pipeline.mesh), clip_norm=clip, exact_random=True,
    )  # fmt: skip
    if begin is not None:
        checkpoint.load(trainer, begin)
    losses, gradients, saved = [], {}, {}
    for step in range(steps):
        losses.append(trainer.step(batch).loss)
        if step == 0:
            gradients = pieces_of(gradients_of(trainer))
        if folder is not None and step + 1 == SAVED_AFTER:
            checkpoint.save(trainer, folder).wait()
            saved = pieces_of(iter(list(trainer.shards())))
            if weights is not None:
                export_safetensors(trainer, weights)
    state = pieces_of(iter(list(trainer.shards())))
    return (losses, gradients, state), (losses, {}, saved)


def ways(graph: Graph) -> list[Take]:
    """What one rule at one place makes of a graph, calls that are fused, and merges."""
    found = list(merges(graph))
    for own in (*graph.functions, graph.main):
        every = list(fusions(graph, own))
        for one in by_rules(graph, own, directions(own)):
            every += one.takes
        found += compatible(own, every)
    return found


class Subject:
    """A model with all that its plans are compared with."""

    def __init__(self, seed: int, made: Made, folder: Path) -> None:
        self.seed, self.made, self.folder = seed, made, folder
        self.rng = random.Random(f"plans {seed}")
        self.spec = f"{folder / f'model_{seed}.py'}:factory"
        self.captured = api.capture(self.spec, optimizer=self.rng.choice(OPTIMIZERS))
        self.graph = self.captured.graph
        self.clip = self.rng.choice((None, 0.05))
        self.loaded = load_model(self.spec)
        self.tensors = {n: t.detach().clone() for n, t in tensors_of(self.loaded.model).items()}
        self.alone = api.search(self.captured, cluster="1xcpu", method="data_parallel")
        found = finished(*start(eager, self.spec, self.alone.optimizer, self.clip))
        if isinstance(found, str):
            raise WrongError(f"eager training fails: {found}")
        self.expected: Trace = found
        self.cluster = self.rng.choice(CLUSTERS)

    def plans(self, kinds: Sequence[str], row: Row) -> Iterator[tuple[str, Plan]]:
        """Plans by their kinds."""
        rng, some = self.rng, ways(self.graph)
        row["ways"] = len(some)
        devices = rng.choice((None, None, machine_for(self.cluster, None).cluster.num_devices))
        asked: dict[str, Any] = {"cluster": self.cluster, "devices": devices}
        if "auto" in kinds:
            best = api.search(self.captured, **asked)
            yield "auto", best
            if rng.random() < LITTLE and best.prediction is not None:
                size = int(best.prediction.peak_bytes * rng.uniform(0.6, 1.0))
                with suppress(InfeasibleError):
                    yield "memory", api.search(self.captured, memory=size, **asked)
        single = {take.rules[0] for take in some if len(take.rules) == 1}
        names = [name for name in sorted(single) if name.startswith("merge")] or sorted(single)
        if "pinned" in kinds and names:
            pins = [f"rewrite={rng.choice(names)}"]
            try:
                yield "pinned", api.search(self.captured, pin=pins, **asked)
            except InputError as error:
                if "applies nowhere" not in str(error):
                    raise
        if "stages" in kinds and rng.random() < STAGED:
            with suppress(InfeasibleError, InputError):
                yield (
                    "stages",
                    api.search(self.captured, cluster=self.cluster, pin=["stages=2"]),
                )
        for _ in range(FORCED if "forced" in kinds else 0):
            found = self.forced(some)
            if found is not None:
                yield "forced", found

    def forced(self, everything: Sequence[Take]) -> Plan | None:
        """A random plan of the graph with some takes that may be made together."""
        some: list[Take] = []
        functions = {own.name: own for own in (*self.graph.functions, self.graph.main)}
        for take in self.rng.sample(everything, min(12, len(everything))):
            own = with_few_rules(functions[take.function], take)
            if own is None or len(some) == 4:
                continue
            try:
                derived(self.graph, [str(one) for one in (*some, own)])
            except InputError:
                continue
            some.append(own)
        if not some:
            return None
        texts = tuple(map(str, some))
        machine = machine_for(self.cluster, None)
        base = replace(with_dtypes(self.graph, self.alone.decisions), rewrites=())
        graph = derived(self.graph, texts)
        drawn = RandomPlans(graph, machine.cluster, base, self.rng)
        for _ in range(20):
            try:
                decisions, _ = drawn.drawn()
                verify_decisions(graph, decisions)
            except (LayoutError, VerifyError):
                continue
            decisions = replace(decisions, rewrites=texts)
            return replace(self.alone, cluster=self.cluster, decisions=decisions, method="random",
                           prediction=None, bound_s=None, solver_gap=None)  # fmt: skip
        return None

    def check(self, plan: Plan, number: int) -> float:
        """The largest difference of a proof; raises `WrongError`."""
        again = plan_from_json(plan_to_json(plan), "plan")
        if plan_to_json(again) != plan_to_json(plan):
            raise WrongError("the plan differs when it is read back")
        proof = verify(plan, self.tensors, self.loaded.batch)
        if not proof.passed:
            raise WrongError(f"proof: {proof.first_difference}")
        self._check_training(plan, number)
        return proof.worst_error

    def _check_training(self, plan: Plan, number: int) -> None:
        folder = self.folder / f"{self.seed}-{number}"
        one, two = folder / "rewritten", folder / "plain"
        own, saved = self.run(plan, STEPS, one, folder / "weights")
        _, tolerance = tolerance_of(self.graph)
        if not self.made.draws:
            mine = {n: t for n, t in own.state.items() if not n.startswith("optimizer/")}
            found = compare(
                self.expected, replace(own, state=mine), plan.decisions.num_ranks, tolerance
            )
            if not found.passed:
                raise WrongError(f"training: {found.first_difference}")
        model = load_model(self.spec).model
        model.load_state_dict(load_file(folder / "weights" / "model.safetensors"))
        mine = {n: t for n, t in saved.state.items() if not n.startswith("optimizer/")}
        loaded = {n: t.detach() for n, t in tensors_of(model).items() if n in mine}
        # Checkpoints have the masters of narrow weights.
        rounded = {n: t.to(loaded[n].dtype) for n, t in mine.items()}
        same(rounded, loaded, "exported weights")
        # Loaded by a plan without rewrites, and back.
        plain, _ = self.run(self.alone, 0, None, None, one)
        same(saved.state, plain.state, "loaded without rewrites")
        _, kept = self.run(self.alone, SAVED_AFTER, two, None)
        back, _ = self.run(plan, 0, None, None, two)
        same(kept.state, back.state, "loaded by the rewritten plan")

    def run(
        self, plan: Plan, steps: int, folder: Path | None, weights: Path | None,
        begin: Path | None = None,
    ) -> tuple[Trace, Trace]:  # fmt: skip
        pipeline = training_program(plan).pipeline
        parts = fork_ranks(
            pipeline.num_ranks, rank_trains, pipeline, plan.optimizer, self.tensors,
            self.loaded.batch, self.clip, steps, folder, weights, begin,
        )  # fmt: skip
        return assemble([ended for ended, _ in parts]), assemble([saved for _, saved in parts])


def same(one: Tensors, other: Tensors, what: str) -> None:
    """Equal to the bit; raises `WrongError`."""
    if one.keys() != other.keys():
        raise WrongError(f"{what}: {sorted(one.keys() ^ other.keys())[:3]}")
    for name, tensor in one.items():
        if tensor.dtype != other[name].dtype or not torch.equal(tensor, other[name]):
            raise WrongError(f"{what}: {name} differs")


def examine(seed: int, kinds: Sequence[str], folder: Path) -> Row:
    """All that is found out about one model."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    made = source(seed)
    (folder / f"model_{seed}.py").write_text(made.text, encoding="utf-8")
    row: Row = {"seed": seed, "dtype": made.dtype, "plans": [], "failures": []}
    doing = "capture"
    try:
        subject = Subject(seed, made, folder)
        doing = "planning"
        for number, (name, plan) in enumerate(subject.plans(kinds, row)):
            doing = name
            took = time.perf_counter() - started
            takes = takes_of(plan.decisions.rewrites)
            found: Row = {
                "plan": name, "ranks": plan.decisions.num_ranks,
                "stages": len(plan.decisions.stages), "takes": list(map(str, takes)),
                "rules": [rule for take in takes for rule in take.rules], "at": round(took, 1),
            }  # fmt: skip
            row["plans"].append(found)
            try:
                found["worst"] = subject.check(plan, number)
            except (WrongError, ParloomError) as error:
                found["wrong"] = f"{type(error).__name__}: {error}"
                row["failures"].append(f"{name}: {found['wrong']}")
            doing = "planning"
    except CaptureError as error:
        row["refused"] = str(error)
    except Exception as error:
        row["failures"].append(f"{doing}: {type(error).__name__}: {error}")
        row["trace"] = traceback.format_exc()[-2500:]
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row


def rows_of(seeds: list[int], jobs: int, kinds: Sequence[str], folder: Path) -> Iterator[Row]:
    """Rows in the order in which they are done."""
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    left = list(reversed(seeds))
    while left or running:
        while left and len(running) < jobs:
            seed = left.pop()
            here, process = start(examine, seed, kinds, folder)
            running[here] = seed, process
        for end in wait(list(running)):
            assert isinstance(end, Connection)
            seed, process = running.pop(end)
            found = finished(end, process)
            row = {"seed": seed, "plans": [], "failures": [str(found)]}
            yield found if isinstance(found, dict) else row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first model")
    parser.add_argument("--json")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep", help="where to leave the models' sources")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of plans")
    arguments = parser.parse_args()
    rows: list[Row] = []
    seeds = list(range(arguments.seed, arguments.seed + arguments.count))
    with tempfile.TemporaryDirectory(prefix="parloom-rewritten-") as folder:
        place = Path(arguments.keep or folder)
        place.mkdir(parents=True, exist_ok=True)
        for row in rows_of(seeds, arguments.jobs, arguments.only.split(","), place):
            rows.append(row)
            rows.sort(key=lambda r: int(r["seed"]))
            report("rewritten_plans", rows, arguments.json)
            for failure in row["failures"]:
                print(f"model {row['seed']}: {failure}", flush=True)
            plans = ", ".join(f"{p['plan']}: {len(p['takes'])}" for p in row["plans"])
            print(f"model {row['seed']}: {row.get('seconds')} s, {row.get('ways')} ways; {plans}",
                  flush=True)  # fmt: skip
    return summary(rows)


def summary(rows: Sequence[Row]) -> int:
    """Print counts; the exit code."""
    plans = [plan for row in rows for plan in row["plans"]]
    rewritten = [plan for plan in plans if plan["takes"]]
    counts = Counter(rule for plan in rewritten for rule in set(plan["rules"]))
    failed = [row for row in rows if row["failures"]]
    kinds = Counter(plan["plan"].split()[0].strip(",") for plan in rewritten)
    refused = sum("refused" in row for row in rows)
    print(
        f"{len(rows)} models, {refused} of them refused; {len(plans)} plans, {len(rewritten)} of"
        f" them rewritten: {dict(kinds)}"
    )
    print(f"rules: {len(counts)}; " + ", ".join(f"{n} {c}" for n, c in counts.most_common(12)))
    worst = max((plan.get("worst", 0.0) for plan in plans), default=0.0)
    print(f"largest difference of a proof {worst:.1e}; {len(failed)} models fail")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
