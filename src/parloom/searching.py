"""From a captured model to what was found for it on one cluster."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parloom import arguments
from parloom.answer import answer
from parloom.capture import load_abstract
from parloom.capture.ambient import Settings
from parloom.capture.microbatch import capture_microbatch
from parloom.capture.ranges import Ranges
from parloom.changes import Origin
from parloom.choose import Choice, aim_of
from parloom.complete import assumed, with_evaluation
from parloom.cost.clusters import resolve_cluster
from parloom.cost.money import parse_prices
from parloom.execute.machine import Machine, machine_for
from parloom.execute.program import NO_EVALUATION
from parloom.ir.expected import Objective
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.microbatch_counts import legal_microbatches
from parloom.ir.plan import GLOBAL, MICROBATCH, ModelSource, Plan
from parloom.ir.plan import Optimizer as PlannedOptimizer
from parloom.ir.regular_parts import memory_of
from parloom.ir.samples import num_samples
from parloom.ir.text import parse_graph, print_graph
from parloom.quantization import QUANTIZED
from parloom.report.words import WARNING, unasked_words
from parloom.search.pins import parse_pin
from parloom.search.request import AUTO, Request, ScoredPlan

Say = Callable[[str], None]
Asked = dict[str, Any]
# Lines of a plan that are about the model, whatever the devices.
OF_THE_MODEL = ("the captured program", "batch as built", WARNING, NO_EVALUATION)


@dataclass(frozen=True, slots=True)
class Captured:
    """A model as graphs, with what a plan says of where they came from.

    Under `batch_semantics` "microbatch" `graph` is the program of one of `microbatches`.
    """

    source: ModelSource
    fingerprint: str
    optimizer: PlannedOptimizer
    graph: Graph
    evaluation_graph: str
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]
    seed: int
    settings: Settings = ()
    ranges: Ranges = ()
    microbatches: int = 1
    batch_semantics: str = GLOBAL

    @classmethod
    def of(cls, plan: Plan) -> "Captured":
        """What a plan was made of."""
        decisions = plan.decisions
        apart = decisions.batch_semantics == MICROBATCH
        return cls(
            plan.source,
            plan.fingerprint,
            plan.optimizer,
            parse_graph(plan.graph),
            plan.evaluation_graph,
            tuple(line for line in plan.assumptions if line.startswith(OF_THE_MODEL)),
            tuple(line for line in plan.notes if line.startswith(OF_THE_MODEL)),
            plan.seed,
            plan.settings,
            plan.ranges,
            decisions.num_microbatches if apart else 1,
            decisions.batch_semantics,
        )

    @property
    def samples(self) -> int:
        """The size of the batch."""
        return num_samples(factorize(self.graph)) * self.microbatches

    def otherwise(self, source: ModelSource, microbatches: int | None) -> Graph:
        """The training program of the model from another source or number of microbatches."""
        loaded = load_abstract(
            source.spec, batch=source.batch, seq=source.seq, dtype=source.dtype, seed=self.seed
        )
        apart = (microbatches or 1) if self.batch_semantics == MICROBATCH else 1
        return capture_microbatch(loaded.model, loaded.batch, apart, loss=loaded.loss)

    def planned(self, choice: Choice, cluster: str, assumptions: Sequence[str]) -> Plan:
        """The plan that was chosen for it."""
        plan = Plan(
            self.source,
            cluster,
            self.fingerprint,
            self.optimizer,
            choice.best.method,
            choice.best.decisions,
            print_graph(self.graph),
            assumptions=(*assumptions, *self.assumptions),
            seed=self.seed,
            evaluation_graph=self.evaluation_graph,
            notes=self.notes,
            settings=self.settings,
            ranges=self.ranges,
        )
        return choice.recorded(plan)


@dataclass(frozen=True, slots=True)
class Found:
    """What was found for a captured model, as it was asked for."""

    captured: Captured
    machine: Machine
    request: Request
    choice: Choice

    def plan(self) -> Plan:
        """The best of it."""
        spec, graph, choice = self.machine.loaded.spec, self.captured.graph, self.choice
        decisions, limit = choice.best.decisions, self.request.limit_bytes
        known = assumed(self.machine, decisions, graph, limit)
        return with_evaluation(self.captured.planned(choice, spec, known), graph)

    def choosing(self, other: ScoredPlan) -> "Found":
        """The same with another plan that was scored."""
        bound = self.choice.aim.bound if self.choice.aim else None
        aim = aim_of(self.request, other, bound)
        return replace(self, choice=replace(self.choice, best=other, aim=aim))


def asked_of(plan: Plan) -> Asked:
    """What the search of a plan was held to, and its method: `auto` where it has no other name."""
    flags = [c.text.partition(" ") for c in plan.constraints]
    pin, forbid, memory = (
        [asked for flag, _, asked in flags if flag == wanted]
        for wanted in ("--pin", "--forbid", "--memory")
    )
    method = plan.method if plan.method in arguments.METHODS else AUTO
    limit = memory[0] if memory else None
    allow = [QUANTIZED] if plan.decisions.sent_dtypes else []
    return {"method": method, "memory": limit, "pin": pin, "forbid": forbid, "allow": allow}


def find(  # noqa: PLR0913 - one argument per flag of the command
    captured: Captured,
    *,
    cluster: str,
    method: str = "auto",
    memory: int | str | None = None,
    devices: int | None = None,
    microbatches: int | None = None,
    calibration: str | Path | None = None,
    pin: Sequence[str] = (),
    forbid: Sequence[str] = (),
    allow: Sequence[str] = (),
    budget: int | None = None,
    objective: str = Objective.TIME,
    price: str | None = None,
    sizes: Sequence[int] = (),
    part: int | None = None,
    alone: bool = True,
    progress: Say,
) -> Found:
    """Price the candidates; the best of them. Under the objective `cost`, `sizes` are the numbers
    of devices that are looked at, by default all parts of the cluster. Plans are for `part` of the
    devices, of which they may leave some idle. Where the question is not asked `alone`, nobody
    looks for what would fit where nothing does.

    Where the program is that of one microbatch, there are as many as it was captured for.
    """
    prices = parse_prices(price)
    whole = machine_for(cluster, calibration, num_devices=part, prices=prices)
    machine = whole if devices is None else whole.part(devices)
    graph = captured.graph
    limit = arguments.memory_bytes(memory) or memory_of(machine.cluster)
    if captured.batch_semantics == MICROBATCH:
        microbatches = captured.microbatches
    elif microbatches is not None:
        legal_microbatches(factorize(graph)).check(microbatches)
    request = Request(
        graph,
        machine,
        captured.optimizer,
        limit,
        microbatches,
        captured.seed,
        budget,
        batch_semantics=captured.batch_semantics,
        method=method,
        all_devices=devices is not None,
        objective=Objective(objective),
        sizes=tuple(sizes),
        quantizes=QUANTIZED in allow,
    )
    is_spec = machine.calibration is None and part is None
    spec = resolve_cluster(cluster).spec if is_spec else ""
    part_of = None if devices is None else whole
    known = unasked_words(captured.source, graph, captured.samples)
    origin = Origin(captured.source, spec, captured.otherwise, part_of, alone, known)
    pins = (*map(parse_pin, pin), *(parse_pin(text, forbidden=True) for text in forbid))
    size = f"{memory}B" if isinstance(memory, int) else memory or ""
    return Found(captured, machine, request, answer(request, origin, pins, size, progress))
