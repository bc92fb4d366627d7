"""Forms of a model for one CPU device, chosen with the costs of this very machine."""

import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parloom.candidates import ALGEBRA
from parloom.choose import choose
from parloom.comparators.baselines import METHODS as RULES_OF_THUMB
from parloom.cost.calibration import Calibration, calibration_to_json
from parloom.cost.clusters import load_cluster
from parloom.execute.calibrate import fingerprint
from parloom.execute.clock import Clock, Run
from parloom.execute.machine import Machine, machine_for
from parloom.execute.measure import launch_s, operators, products, split_s, streams
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.pcg import PCG
from parloom.ir.plan import Optimizer
from parloom.rewrite.merge import merges
from parloom.rewrite.rewrites import derived, takes_of
from parloom.rewrite.take import Take
from parloom.search.request import AUTO, Request, Say
from parloom.search.rewritten import made_together

CLUSTER, OPTIMIZER, LIMIT_BYTES = "1xcpu", Optimizer("sgd", 0), 64 << 30
ORIGINAL, MERGES = "original", "all merges"
METHODS = (AUTO, "taso", "tensat", MERGES)
# Forms are chosen again with what was measured of those that were chosen, so many times at most.
AGAIN = 1
Rewrites = tuple[str, ...]


class ProcessorClock(Clock):
    """Seconds in which this process has a core: other processes have them most of the time."""

    def elapsed(self, run: Run) -> float:
        begun = time.process_time()
        run()
        return time.process_time() - begun


class Costs:
    """What was measured of this machine by `clock`: rates, and operators of all programs that it
    was told.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.calibration = Calibration(
            fingerprint(),
            1,
            launch_s(clock),
            tuple(products(clock, ("float32",))),
            tuple(streams(clock)),
            split_s=split_s(clock),
        )

    def add(self, pcgs: Sequence[PCG], say: Say) -> int:
        """Measure the operators of programs that are not known; how many these are."""
        known = self.calibration.operators
        found = tuple(operators(pcgs, self._clock, say, [timed.key for timed in known]))
        self.calibration = replace(self.calibration, operators=(*known, *found))
        return len(found)

    @property
    def machine(self) -> Machine:
        """One device with these costs."""
        with tempfile.TemporaryDirectory(prefix="parloom-forms-") as folder:
            path = Path(folder) / "calibration.json"
            path.write_text(calibration_to_json(self.calibration), encoding="utf-8")
            return machine_for(CLUSTER, path)


@dataclass(frozen=True, slots=True)
class Form:
    """The program of a form on one device, and what a step of it should take; `methods` chose it,
    each in so many CPU seconds. `source` says what the prediction is made of.
    """

    rewrites: Rewrites
    methods: tuple[tuple[str, float], ...]
    pcg: PCG
    predicted_s: float
    source: str

    @property
    def rules(self) -> dict[str, int]:
        """How often each rule is applied."""
        return dict(Counter(rule for take in takes_of(self.rewrites) for rule in take.rules))


class Forms:
    """The forms of a graph, priced with what was measured."""

    def __init__(self, graph: Graph, costs: Costs, say: Say) -> None:
        self._graph, self._costs, self._say = graph, costs, say
        self._pcgs: dict[Rewrites, PCG] = {}

    def found(self, methods: Sequence[str]) -> list[Form]:
        """The original and what the methods choose, each form once. They choose again where
        operators of what was chosen had not been measured.
        """
        merged = rewrites_of(made_together(self._graph, merges(self._graph)))
        self._costs.add([self._lowered(()), self._lowered(merged)], self._say)
        chosen: dict[Rewrites, tuple[tuple[str, float], ...]] = {}
        for _ in range(1 + AGAIN):
            chosen = {(): ((ORIGINAL, 0.0),)}
            request = Request(
                self._graph, self._costs.machine, OPTIMIZER, LIMIT_BYTES, num_microbatches=1
            )
            for method in methods:
                if method == MERGES and not merged:
                    continue
                begun = time.process_time()
                rewrites = merged if method == MERGES else self._chosen(request, method)
                known = chosen.get(rewrites, ())
                chosen[rewrites] = (*known, (method, time.process_time() - begun))
            new = self._costs.add([self._lowered(rewrites) for rewrites in chosen], self._say)
            self._say(f"{new} operators of what was chosen are measured now")
            if not new:
                break
        machine = self._costs.machine
        return [self._priced(machine, *one) for one in chosen.items()]

    def _chosen(self, request: Request, method: str) -> Rewrites:
        """The rewrites of the form that a method chooses."""
        if method in ALGEBRA:
            chosen = ALGEBRA[method](request, self._say)
        else:
            best = choose(replace(request, method=method), lambda line: None).best
            self._say(f"{method}: {1e3 * best.prediction.step_s:.2f} ms")
            chosen = best.decisions.rewrites
        # Nothing else: one device has no layouts, and memory enough.
        found = rewrites_of(takes_of(chosen))
        for text in found:
            self._say(f"  {text}")
        return found

    def _lowered(self, rewrites: Rewrites) -> PCG:
        if rewrites not in self._pcgs:
            self._pcgs[rewrites] = alone(derived(self._graph, rewrites))
        return self._pcgs[rewrites]

    def _priced(
        self, machine: Machine, rewrites: Rewrites, methods: tuple[tuple[str, float], ...]
    ) -> Form:
        pcg = self._lowered(rewrites)
        found = machine.predict(pcg, pcg.decisions, OPTIMIZER)
        return Form(rewrites, methods, pcg, found.step_s, found.source)


def alone(graph: Graph) -> PCG:
    """The program of a graph on one device."""
    return lower(graph, next(RULES_OF_THUMB["data_parallel"](graph, load_cluster(CLUSTER), 1, 0)))


def rewrites_of(takes: Iterable[Take]) -> Rewrites:
    """As plans have them, in an order of their own."""
    return tuple(sorted(map(str, takes)))
