"""From the candidates of a method to one plan: the fastest, as simulated, of those that fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parloom import arguments
from parloom.candidates import Candidate, Candidates, candidates
from parloom.cost.units import format_bytes, format_seconds
from parloom.errors import InfeasibleError, InputError, LayoutError, one_line
from parloom.execute.files import read_plan
from parloom.execute.machine import Machine
from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import check_part
from parloom.ir.microbatches import with_whole_batch
from parloom.ir.plan import MICROBATCH, Alternative, Decisions, Plan, Prediction, Status
from parloom.report.words import INTERRUPTED, idle_words, part_words, splits
from parloom.rewrite.rewrites import rewritten
from parloom.search.conflicts import broken
from parloom.search.optimize import SAME
from parloom.search.pinned import NONE, Pinned
from parloom.search.question import Question, Wanted

UNBOUND = (
    "the model is padded, which the search does not look at: what it proved is not of this plan"
)
Say = Callable[[str], None]
Build = Callable[[int | None, str | None, int | None], Graph]


class NothingFitsError(InfeasibleError):
    """No candidate for `asked`, a plan without decisions, fits; `played` are all there were."""

    def __init__(
        self, limit: int, asked: Plan, played: Sequence[tuple[Candidate, Prediction]]
    ) -> None:
        super().__init__(f"no plan fits in {format_bytes(limit)} per device")
        self.asked, self.played = asked, tuple(played)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a plan is asked for: `plan` without decisions, on `machine`, at most `limit` bytes.

    `whole` is the machine of which `machine` is the part that was asked for, all of whose devices
    are used.
    `build` captures the model again with another batch size, dtype and number of microbatches;
    batch semantics are those of `plan`; `wanted` is for questions
    that are asked beside the user's own.
    """

    plan: Plan
    graph: Graph
    machine: Machine
    limit: int
    microbatches: int | None = None
    pinned: Pinned = NONE
    budget: int | None = None
    build: Build | None = None
    wanted: Wanted = Wanted.PROOF
    whole: Machine | None = None

    def on(self, num_devices: int) -> "Ask":
        """The same of that many of the first devices, all of which are used."""
        part = self.machine.part(num_devices)
        return replace(self, machine=part, whole=self.whole or self.machine)

    @property
    def question(self) -> Question:
        """As the search is asked."""
        return Question(
            self.graph,
            self.machine.cluster,
            self.plan.optimizer,
            self.limit,
            self.microbatches,
            self.plan.seed,
            self.machine.kernels,
            self.budget,
            self.pinned,
            self.wanted,
            self.machine.predict,
            self.batch_semantics,
            None if self.whole else lambda count: self.on(count).question,
        )

    @property
    def batch_semantics(self) -> str:
        """Those that every candidate has."""
        return self.plan.decisions.batch_semantics

    @property
    def apart(self) -> int:
        """Microbatches each of which is computed by itself; 1 where there are none such."""
        return (self.microbatches or 1) if self.batch_semantics == MICROBATCH else 1


def choose(ask: Ask, say: Say) -> Plan:
    """The plan asked for with the decisions of the best candidate of its method.

    Raises `InfeasibleError` where none fits.
    """
    proposed = _candidates(ask, say)
    for line in proposed.refused:
        say(line)
    asked = replace(
        ask.plan,
        notes=(*proposed.refused, *ask.plan.notes),
        bound_s=proposed.bound_s,
        solver_gap=proposed.solver_gap,
    )
    return best_of(replace(ask, plan=asked), proposed, say)


def _candidates(ask: Ask, say: Say) -> Candidates:
    """What the method asked for proposes; it may be a plan file, whose decisions are taken."""
    method, cluster = ask.plan.method, ask.machine.cluster
    if method in arguments.METHODS:
        return candidates(ask.question, method, say)
    decisions = read_plan(Path(method)).decisions
    try:
        check_part(cluster, decisions.mesh.num_ranks)
    except InputError as error:
        raise InputError(f"{method}: {error}") from None
    if ask.batch_semantics == MICROBATCH:
        decisions = replace(decisions, num_microbatches=ask.apart, batch_semantics=MICROBATCH)
    elif decisions.accumulates:
        raise InputError(
            f"{method} computes each of {decisions.num_microbatches} microbatches by itself; add"
            f" --batch-semantics {MICROBATCH} --microbatches {decisions.num_microbatches}"
        )
    elif ask.microbatches is not None:
        decisions = replace(decisions, num_microbatches=ask.microbatches)
    reason = broken(ask.pinned, ask.graph, decisions)
    if reason is not None:
        raise InputError(f"{method} is not as asked: {reason}; --method auto searches for a plan")
    return Candidates((Candidate(method, method, decisions),))


def best_of(ask: Ask, proposed: Candidates, say: Say) -> Plan:
    """The candidate whose simulated step is the fastest of those that fit."""
    asked, limit = ask.plan, ask.limit
    played: list[tuple[Candidate, Prediction]] = []
    factored = factorize(ask.graph)
    refused: list[LayoutError] = []
    notes, status = asked.notes, proposed.status
    for candidate in proposed.found:
        if status is Status.INTERRUPTED and candidate.prediction is None:
            continue
        try:
            prediction = candidate.prediction or predict(ask, candidate.decisions, factored)
        except LayoutError as error:  # as when microbatches do not divide over this mesh
            refused.append(error)
            notes = (f"{candidate.name}: not possible: {one_line(error)}", *notes)
            say(notes[0])
            continue
        except KeyboardInterrupt:
            status = Status.INTERRUPTED
            continue
        played.append((candidate, prediction))
        step, peak = format_seconds(prediction.step_s), format_bytes(prediction.peak_bytes)
        say(f"{candidate.name}: {step}, {peak}")
    fitting = [
        (p.step_s, c.decisions.mesh.num_ranks, p.peak_bytes, i)
        for i, (c, p) in enumerate(played)
        if p.peak_bytes <= limit
    ]
    if status is Status.INTERRUPTED and not fitting:
        raise KeyboardInterrupt
    if not played and refused:
        raise refused[0]
    if not fitting and status is Status.OUT_OF_BUDGET:
        found = f"no plan that was found within --budget {ask.budget}"
        raise InfeasibleError(f"{found} fits in {format_bytes(limit)} per device; give it more")
    if not fitting:
        raise NothingFitsError(limit, asked, played)
    step_s, _, _, index = min(fitting)
    candidate, prediction = played[index]
    fewest = min((n, found_s) for found_s, n, _, _ in fitting if found_s <= step_s * (1 + SAME))
    if asked.bound_s and candidate.decisions.rewrites:
        asked = replace(asked, bound_s=None, solver_gap=None)
        notes = (f"{candidate.name}: {UNBOUND}", *notes)
    stopped = status is Status.INTERRUPTED
    return replace(
        asked,
        method=candidate.method,
        decisions=candidate.decisions,
        prediction=prediction,
        status=status,
        assumptions=_assumed(ask, candidate.decisions),
        alternatives=tuple(
            Alternative(c.name, p.step_s, p.peak_bytes, p.peak_bytes <= limit) for c, p in played
        ),
        notes=(
            *([f"{candidate.method}: {INTERRUPTED}"] if stopped else []),
            *part_words(ask.machine.cluster, candidate.decisions, step_s, *fewest),
            *idle_words(candidate.decisions, _why_idle(ask, played)),
            *notes,
        ),
    )


def _assumed(ask: Ask, decisions: Decisions) -> tuple[str, ...]:
    """What is assumed of the devices that a plan uses, in place of all: processes share cores."""
    of_all = ask.machine.loaded.assumptions
    of_part = ask.machine.part(decisions.mesh.num_ranks).loaded.assumptions
    return (*of_part, *(line for line in ask.plan.assumptions if line not in of_all))


def _why_idle(ask: Ask, played: Sequence[tuple[Candidate, Prediction]]) -> str:
    """Why the best plan splits nothing: it is the best, or there is no other."""
    others = [(p.step_s, p.peak_bytes, c.name) for c, p in played if splits(c.decisions)]
    if others:
        step_s, peak, name = min(others)
        fits = "" if peak <= ask.limit else ", which does not fit"
        size = f"{format_seconds(step_s)} and {format_bytes(peak)} per device{fits}"
        return f"the fastest plan that splits something, {name}, needs {size}"
    count, ranks = samples(ask), ask.machine.cluster.num_devices
    if count % ranks == 0:
        return f"{ask.plan.method} finds nothing in this model that can be split"
    near = max(1, round(count / ranks)) * ranks
    way = f"have the factory make {near}" if ask.plan.source.is_factory else f"try --batch {near}"
    return f"{count} samples do not divide over them: {way}"


def samples(ask: Ask) -> int:
    """The size of the batch."""
    whole = with_whole_batch(ask.graph, ask.apart)
    shapes = [entry.value.spec.shape for entry in whole.of_kind("batch")]
    return max((shape[0] for shape in shapes if shape), default=1)


def predict(ask: Ask, decisions: Decisions, factored: Factored) -> Prediction:
    """The step that the simulator expects of `decisions`."""
    rewrites = decisions.rewrites
    graph = rewritten(ask.graph, rewrites)
    pcg = lower(graph, decisions, factored=None if rewrites else factored)
    machine = ask.machine.part(decisions.mesh.num_ranks)
    return machine.predict(pcg, decisions, ask.plan.optimizer)
