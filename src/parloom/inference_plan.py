"""From the programs of a model for inference to the plan that serves them best."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parloom import arguments
from parloom.choose import why_unbound
from parloom.complete import assumed
from parloom.cost.clusters import resolve_cluster
from parloom.cost.units import bytes_up, format_bytes, format_seconds
from parloom.errors import (
    BudgetError,
    InfeasibleError,
    InputError,
    LayoutError,
    StoppedError,
    one_line,
)
from parloom.execute.inference import lowered_programs
from parloom.execute.machine import Machine, machine_for
from parloom.inference import Captured
from parloom.ir.expected import (
    OF_INFERENCE,
    Aim,
    Alternative,
    Constraint,
    Objective,
    Prediction,
    Status,
)
from parloom.ir.factors import factorize
from parloom.ir.lower_stages import lower_stages
from parloom.ir.plan import DEVICES, MEMORY, NO_OPTIMIZER, Inference, Plan
from parloom.ir.regular_parts import memory_of
from parloom.ir.text import print_graph
from parloom.objectives import proposed
from parloom.report.words import INTERRUPTED
from parloom.rewrite.rewrites import rewritten
from parloom.search.answers import Pair, pairs
from parloom.search.pinned import NONE, resolve
from parloom.search.pins import parse_pin
from parloom.search.request import Request, ScoredPlan, Wanted

Say = Callable[[str], None]
REASONS = 3  # why there is no plan, in one message


@dataclass(frozen=True, slots=True)
class _Answer:
    """A candidate: programs, what they serve, and a batch of answers of them as the objective
    counts it.
    """

    pair: Pair
    inference: Inference
    counted: Prediction

    @property
    def name(self) -> str:
        return self.pair.found.name

    @property
    def rank(self) -> tuple[float, int, str]:
        """The best is the least."""
        return self.counted.step_s, self.counted.peak_bytes, self.name


def find(  # noqa: PLR0913 - one argument per flag of the command
    captured: Captured,
    *,
    cluster: str,
    objective: str = Objective.LATENCY,
    method: str = "auto",
    memory: int | str | None = None,
    devices: int | None = None,
    calibration: str | Path | None = None,
    pin: Sequence[str] = (),
    forbid: Sequence[str] = (),
    budget: int | None = None,
    progress: Say,
) -> Plan:
    """The plan whose answers take the least time on a cluster, or are the most in a second.

    Raises `InfeasibleError` where weights, caches and what passes need fit on no device.
    """
    check_objective(objective)
    aim, whole = Objective(objective), machine_for(cluster, calibration)
    machine = whole if devices is None else whole.part(devices)
    limit = arguments.memory_bytes(memory) or memory_of(machine.cluster)
    _check_caches(captured, machine, limit)
    pins = (*map(parse_pin, pin), *(parse_pin(text, forbidden=True) for text in forbid))
    throughput = aim is Objective.THROUGHPUT
    decode = Request(
        captured.graph,
        machine,
        NO_OPTIMIZER,
        limit,
        None if throughput else 1,
        captured.seed,
        budget,
        resolve(pins, captured.graph, factorize(captured.graph)),
        method=method,
        all_devices=devices is not None,
        passes_follow=throughput and captured.prefill is None and captured.steps == 1,
    )
    search = _Search(captured, aim, progress)
    found = search.answers(decode)
    best = found.best(decode)
    size = f"{memory}B" if isinstance(memory, int) else memory
    asked = _asked(decode, whole if devices else None, size)
    constraints, stopped = search.constraints(best, asked, found.status)
    plan = search.plan(best, found, decode, resolve_cluster(cluster).spec)
    known = assumed(machine, plan.decisions, captured.graph, limit)
    if found.status is Status.INTERRUPTED:
        stopped = (f"{best.name}: {INTERRUPTED}",)
    plan = replace(
        plan,
        assumptions=(*known, *captured.assumptions),
        notes=(*stopped, *plan.notes, *captured.notes),
        status=Status.INTERRUPTED if stopped else found.status,
        constraints=constraints,
    )
    lowered_programs(plan)  # whoever reads the plan will
    return plan


def check_objective(objective: str) -> None:
    """Raise `InputError` for an objective that plans for inference have not."""
    if objective not in OF_INFERENCE:
        listed = " or ".join(OF_INFERENCE)
        raise InputError(f"objective: {objective} is of training; --inference has {listed}")


def _asked(decode: Request, whole: Machine | None, memory: str | None) -> dict[str, Request]:
    """The question without each thing that was asked for, by the flag that did; `whole` are all
    devices where so many of them were asked for.
    """
    pins, there = decode.pinned.pins, memory_of(decode.cluster)
    found = {
        pin.text: replace(decode, pinned=decode.pinned.only([p for p in pins if p is not pin]))
        for pin in pins
    }
    if memory and decode.limit_bytes < there:
        found[f"{MEMORY}{memory}"] = replace(decode, limit_bytes=there)
    if whole is not None:
        text = f"{DEVICES}{decode.cluster.num_devices}"
        found[text] = replace(decode, machine=whole, all_devices=False)
    return found


@dataclass(frozen=True, slots=True)
class _Answers:
    """All candidates, the least that a batch of answers takes where it was proved, how the search
    ended, and why some plans are none.
    """

    answers: tuple[_Answer, ...]
    bound_s: float | None
    status: Status
    notes: tuple[str, ...]

    def best(self, request: Request) -> _Answer:
        """The best of those that fit; raises `InfeasibleError` where none does."""
        fitting = [answer for answer in self.answers if request.fits(answer.counted)]
        if not fitting:
            raise _shortage(self.answers, request.limit_bytes, self.notes)
        return min(fitting, key=lambda answer: answer.rank)


@dataclass(frozen=True, slots=True)
class _Search:
    """Looks for plans of a model's programs under an objective."""

    captured: Captured
    aim: Objective
    say: Say

    def answers(self, decode: Request) -> _Answers:
        """The candidates of a question."""
        found = proposed(decode, self.say)
        if self.captured.prefill is None:
            steps = self.captured.steps
            bound = None if found.bound_s is None else steps * found.bound_s
            alone = tuple(self._alone(plan, decode) for plan in found.found)
            return _Answers(alone, bound, found.status, found.refused)
        prefill = replace(decode, graph=self.captured.prefill, pinned=NONE)
        other, status = None, found.status
        made: list[_Answer] = []
        refused = list(found.refused)
        try:
            if not decode.pinned.pins and status is not Status.INTERRUPTED:
                self.say("looking for layouts of prompts")
                other = proposed(prefill, self.say)
                refused += (f"prompts: {why}" for why in other.refused)
                status = other.status if status is Status.COMPLETE else status
        except (KeyboardInterrupt, StoppedError):
            status = Status.INTERRUPTED
        try:
            for pair in pairs(found.found, other.found if other else (), decode, prefill):
                if isinstance(pair, str):
                    refused.append(pair)
                    continue
                made.append(self._of_both(pair))
                self.say(f"{pair.found.name}: {format_seconds(made[-1].counted.step_s)} an answer")
        except KeyboardInterrupt:
            if not made:
                raise
            status = Status.INTERRUPTED
        bound = None
        if found.bound_s is not None and other and other.bound_s is not None:
            bound = other.bound_s + (self.captured.new_tokens - 1) * found.bound_s
        return _Answers(tuple(made), bound, status, tuple(dict.fromkeys(refused)))

    def constraints(
        self, best: _Answer, asked: Mapping[str, Request], status: Status
    ) -> tuple[tuple[Constraint, ...], tuple[str, ...]]:
        """What is asked for with the best answer without it; after Ctrl-C without, which is told
        where it came meanwhile.
        """
        found: list[Constraint] = []
        stopped = status is Status.INTERRUPTED
        told: tuple[str, ...] = ()
        for text, other in asked.items():
            price = Constraint(text)
            if not stopped:
                try:
                    price = self._price(text, best, other)
                except (KeyboardInterrupt, StoppedError):
                    stopped, told = True, (f"what {text} costs is left out: {INTERRUPTED}",)
            found.append(price)
        return tuple(found), told

    def _price(self, text: str, best: _Answer, other: Request) -> Constraint:
        """The best answer to a question that leaves out what `text` asks for."""
        self.say(f"looking for what {text} costs")
        try:
            there = self.answers(replace(other, wanted=Wanted.PLAN))
            free = there.best(other)
        except (BudgetError, InfeasibleError):
            free = best
        except (InputError, LayoutError) as error:
            self.say(f"without {text}: {one_line(error)}")
            return Constraint(text)
        else:
            if there.status is Status.INTERRUPTED:
                raise StoppedError
        free = min(best, free, key=lambda answer: answer.rank)
        return Constraint(text, free.counted.step_s, free.counted.peak_bytes)

    def _alone(self, plan: ScoredPlan, request: Request) -> _Answer:
        """A plan of the only program; in several stages with the time from batch to batch."""
        decisions, found, period_s = plan.decisions, plan.prediction, None
        if len(decisions.stages) > 1 and self.captured.steps == 1:
            made = lower_stages(rewritten(request.graph, decisions.rewrites), decisions)
            predict = request.machine.predict_stages
            period_s = predict(made, decisions, NO_OPTIMIZER, repeated=True).step_s
            found = predict(made, decisions, NO_OPTIMIZER)
        own = replace(plan, prediction=found)
        inference = Inference(
            steps=self.captured.steps, weights=self.captured.weights, period_s=period_s
        )
        return self._answer(Pair(own, decisions, found, 0), inference)

    def _of_both(self, pair: Pair) -> _Answer:
        """A plan of both programs, but for the text of the prompts'."""
        inference = Inference(
            self.captured.new_tokens,
            prefill_nodes=pair.prefill.nodes,
            prefill=pair.expected,
            cache_bytes=pair.cache_bytes,
            weights=self.captured.weights,
        )
        return self._answer(pair, inference)

    def _answer(self, pair: Pair, inference: Inference) -> _Answer:
        return _Answer(pair, inference, inference.counted(pair.found.prediction, self.aim))

    def plan(self, best: _Answer, found: _Answers, request: Request, spec: str) -> Plan:
        """The plan of the best candidate, with its bound and what was refused."""
        captured, pair = self.captured, best.pair
        bound, notes = found.bound_s, found.notes
        cluster = request.cluster
        why = why_unbound(pair.found.decisions, cluster) or why_unbound(pair.prefill, cluster)
        if bound and why:
            bound, notes = None, (f"{best.name}: {why}", *notes)
        each = 1
        if self.aim is Objective.THROUGHPUT:
            each = captured.samples * max(1, captured.new_tokens)
        value = best.counted.step_s
        prompts = print_graph(captured.prefill) if captured.prefill else ""
        return Plan(
            captured.source,
            spec,
            captured.fingerprint,
            NO_OPTIMIZER,
            pair.found.method,
            pair.found.decisions,
            print_graph(captured.graph),
            prediction=pair.found.prediction,
            alternatives=tuple(
                Alternative(a.name, a.counted.step_s, a.counted.peak_bytes, request.fits(a.counted))
                for a in found.answers
            ),
            seed=captured.seed,
            settings=captured.settings,
            ranges=captured.ranges,
            inference=replace(best.inference, prefill_graph=prompts),
            aim=Aim(self.aim, value / each, bound / each if bound and bound <= value else None),
            notes=notes,
        )


def _check_caches(captured: Captured, machine: Machine, limit: int) -> None:
    """Raise `InfeasibleError` where the caches alone are more than all devices hold."""
    there = limit * machine.cluster.num_devices
    if captured.cache_bytes > there:
        short = captured.cache_bytes - there
        raise InfeasibleError(
            f"the caches of {captured.samples} prompts and {captured.new_tokens} tokens after each"
            f" are {bytes_up(captured.cache_bytes)}, and all devices together have"
            f" {format_bytes(there)}, {bytes_up(short)} less; ask for fewer prompts at once"
            " (--batch), shorter ones (--seq), or fewer tokens (--new-tokens)",
            {"cache_bytes": captured.cache_bytes, "memory_bytes": there, "short_bytes": short},
        )


def _shortage(answers: Sequence[_Answer], limit: int, refused: Sequence[str]) -> InfeasibleError:
    """What the smallest candidate holds, and how much is missing; where there is none, why."""
    if not answers:
        why = "".join(f"; {reason}" for reason in refused[:REASONS])
        return InfeasibleError(f"no plan of both programs was found{why}")
    small = min(answers, key=lambda answer: answer.counted.peak_bytes)
    peak_bytes = small.counted.peak_bytes
    parts = dict(small.pair.found.prediction.memory)
    weights, cache = parts.get("weights", 0), small.pair.cache_bytes
    rest = peak_bytes - weights - cache
    short = peak_bytes - limit
    fewer = ", ".join(
        ["fewer samples at once (--batch)", *(["fewer tokens (--new-tokens)"] if cache else [])]
    )
    return InfeasibleError(
        f"no plan fits in {format_bytes(limit)} per device: the smallest, {small.name}, needs"
        f" {bytes_up(peak_bytes)}, {bytes_up(short)} more: weights {bytes_up(weights)},"
        f" caches {bytes_up(cache)}, working set {bytes_up(rest)}; ask for {fewer}, narrower"
        " weights (--dtype bf16, --weights int8), or more devices",
        {
            "memory_bytes": limit,
            "short_bytes": short,
            "weights_bytes": weights,
            "cache_bytes": cache,
            "working_set_bytes": rest,
        },
    )
