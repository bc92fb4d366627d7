"""Plans for inference: from a model to its programs, and from these to a plan that serves them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from parloom import arguments
from parloom.capture import fingerprint, load_abstract, load_model
from parloom.capture.ambient import Settings, settings
from parloom.capture.inference import capture_inference
from parloom.capture.load import full_name
from parloom.capture.quantized import WEIGHTS
from parloom.capture.ranges import Ranges, ranges_of
from parloom.choose import why_unbound
from parloom.complete import assumed
from parloom.cost.clusters import resolve_cluster
from parloom.cost.stages import simulate_stages
from parloom.cost.units import bytes_up, format_bytes, format_seconds
from parloom.errors import BudgetError, CaptureError, InfeasibleError, InputError, StoppedError
from parloom.execute.consistent import check_results
from parloom.execute.eager import PLAN
from parloom.execute.eager_compare import DIFFERS, EQUAL
from parloom.execute.eager_inference import compare_inference
from parloom.execute.inference import lowered_programs
from parloom.execute.machine import Machine, machine_for
from parloom.execute.tables import check_tables
from parloom.ir.factors import factorize
from parloom.ir.generation import GENERATED, TOKENS
from parloom.ir.graph import CACHE, Graph
from parloom.ir.lower_stages import lower_stages
from parloom.ir.plan import (
    DEVICES,
    DTYPES,
    MEMORY,
    NO_OPTIMIZER,
    OF_INFERENCE,
    Aim,
    Alternative,
    Constraint,
    Inference,
    ModelSource,
    Objective,
    Plan,
    Status,
)
from parloom.ir.regular_parts import memory_of
from parloom.ir.samples import num_samples
from parloom.ir.text import print_graph
from parloom.objectives import proposed
from parloom.report.words import INTERRUPTED
from parloom.rewrite.rewrites import rewritten
from parloom.search.answers import Pair, pairs
from parloom.search.pinned import NONE, resolve
from parloom.search.pins import parse_pin
from parloom.search.request import Request, ScoredPlan

Say = Callable[[str], None]
NO_TOKENS = 0  # of a model that is asked for one pass
REASONS = 3  # why there is no plan, in one message


@dataclass(frozen=True, slots=True)
class Captured:
    """The programs of a model for inference: of each token and of prompts, or of one pass."""

    source: ModelSource
    fingerprint: str
    graph: Graph
    prefill: Graph | None
    new_tokens: int
    steps: int
    weights: str | None
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]
    seed: int
    settings: Settings
    ranges: Ranges

    @property
    def samples(self) -> int:
        """Answers that are worked on at once."""
        return num_samples(factorize(self.graph))

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches, on all devices together."""
        return sum(entry.value.spec.num_bytes for entry in self.graph.of_kind(CACHE))


def capture(
    model: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    new_tokens: int | None = None,
    steps: int | None = None,
    weights: str | None = None,
    seed: int = 0,
    progress: Say,
) -> Captured:
    """Build the model, capture its programs, and compare them with the module itself.

    `new_tokens` are generated after each prompt; without them the model makes one pass, or as many
    `steps` as a sampler of a diffusion model asks for. `weights` "int8" or "fp8" is how those of
    products are stored. Raises `InputError` where it keeps no caches and is asked for tokens.
    """
    arguments.check(model, {"batch": batch, "seq": seq, "dtype": dtype, "seed": seed})
    _check_answer(new_tokens, steps, weights)
    source = ModelSource(full_name(model), batch, seq, DTYPES.get(dtype, dtype) if dtype else None)
    built = {"batch": batch, "seq": seq, "dtype": source.dtype, "seed": seed}
    progress(f"building {model}")
    # Without weights where that can be: caches may be larger than this machine.
    loaded = load_abstract(model, **built, limit=0)  # type: ignore[arg-type]
    progress(f"capturing {'the programs of prompts and of tokens' if new_tokens else 'a pass'}")
    graph, prefill = capture_inference(loaded, new_tokens or 0, weights)
    for program in (graph, *([prefill] if prefill else [])):
        check_results(program)
    check_positions(graph, prefill, new_tokens or 0)
    progress("comparing with the module itself")
    eager = compare_inference(
        lambda: load_model(source.spec, **built),  # type: ignore[arg-type]
        graph,
        prefill,
        new_tokens or 0,
        PLAN,
    )
    if eager.outcome == DIFFERS:
        raise CaptureError(f"cannot capture {type(loaded.model).__name__}: {eager}")
    said = (str(eager),)
    equal, other = (said, ()) if eager.outcome == EQUAL else ((), said)
    entries = (prefill or graph).of_kind("batch")
    shapes = ", ".join(f"{e.target} {list(e.value.spec.shape)}" for e in entries)
    return Captured(
        source,
        fingerprint(loaded.model, loaded.batch),
        graph,
        prefill,
        new_tokens or NO_TOKENS,
        steps or 1,
        weights,
        (*equal, f"batch as built: {shapes}"),
        (*other, *positions_beyond(loaded.model, prefill, new_tokens or 0)),
        seed,
        settings(),
        ranges_of(loaded.batch),
    )


def check_positions(graph: Graph, prefill: Graph | None, new_tokens: int) -> None:
    """Raise `InputError` where a program reads what a table of the model does not have: of the
    program of tokens in its last pass.
    """
    if prefill is None:
        check_tables(graph, {}, "the batch is larger than the model has room for")
        return
    check_tables(prefill, {}, "prompts are longer than the model has positions; shorten them")
    if new_tokens > 1:
        few = "prompts and tokens are more than the model has positions; ask for fewer"
        check_tables(graph, {GENERATED: torch.tensor(new_tokens - 1)}, f"{few} (--new-tokens)")


def positions_beyond(
    model: torch.nn.Module, prefill: Graph | None, new_tokens: int
) -> tuple[str, ...]:
    """A note where a model computes positions, as by rotations, beyond those of its config."""
    config = getattr(model, "config", None)
    inner = getattr(config, "text_config", None) or config  # of models that read images, too
    most = getattr(inner, "max_position_embeddings", None)
    if prefill is None or not isinstance(most, int):
        return ()
    prompts = (e.value.spec.shape[-1] for e in prefill.of_kind("batch") if e.target == TOKENS)
    longest = max(prompts, default=0) + new_tokens - 1
    if longest <= most:
        return ()
    return (
        f"{longest} positions are read, and the model is made for {most} (max_position_embeddings):"
        " answers may be worse",
    )


def _check_answer(new_tokens: int | None, steps: int | None, weights: str | None) -> None:
    """Raise `InputError` for an answer that is none."""
    for flag, count in (("--new-tokens", new_tokens), ("--steps", steps)):
        if count is not None and count < 1:
            raise InputError(f"{flag}: must be a whole number from 1 on, got {count}")
    if weights is not None and weights not in WEIGHTS:
        raise InputError(f"--weights: none is {weights!r}; there are {', '.join(WEIGHTS)}")
    if new_tokens and steps:
        raise InputError("--steps are passes of a model that generates no tokens; leave one out")


@dataclass(frozen=True, slots=True)
class _Answer:
    """A candidate: a pair of programs, or one alone; `answer_s` is the time of an answer,
    `period_s` that from one batch to the next where these follow each other in stages.
    """

    name: str
    method: str
    pair: Pair
    alone: bool
    answer_s: float
    period_s: float | None = None

    @property
    def batch_s(self) -> float:
        """The time from one batch of answers to the next."""
        return self.answer_s if self.period_s is None else self.period_s

    @property
    def peak_bytes(self) -> int:
        """What a device holds at most in either program."""
        own = self.pair.found.prediction.peak_bytes
        return own if self.alone else max(own, self.pair.expected.peak_bytes)


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
    if objective not in OF_INFERENCE:
        listed = " or ".join(OF_INFERENCE)
        raise InputError(f"objective: {objective} is of training; --inference has {listed}")
    whole = machine_for(cluster, calibration)
    machine = whole if devices is None else whole.part(devices)
    limit = arguments.memory_bytes(memory) or memory_of(machine.cluster)
    _check_caches(captured, machine, limit)
    pins = (*map(parse_pin, pin), *(parse_pin(text, forbidden=True) for text in forbid))
    decode = Request(
        captured.graph,
        machine,
        NO_OPTIMIZER,
        limit,
        1 if objective == Objective.LATENCY else None,
        captured.seed,
        budget,
        resolve(pins, captured.graph, factorize(captured.graph)),
        method=method,
        all_devices=devices is not None,
    )
    found = _answers(captured, decode, progress)
    best, bound_s, notes = found.best(limit), found.bound_s, found.notes
    size = f"{memory}B" if isinstance(memory, int) else memory
    asked = _asked(decode, whole if devices else None, size)
    constraints, stopped = _constraints(captured, best, asked, progress)
    spec = resolve_cluster(cluster).spec
    plan = _planned(captured, best, found.answers, spec, limit)
    known = assumed(machine, plan.decisions, captured.graph, limit)
    why = why_unbound(best.pair.found.decisions) or why_unbound(best.pair.prefill)
    if bound_s and why:
        bound_s, notes = None, (f"{best.name}: {why}", *notes)
    value, bound = best.batch_s, bound_s
    if objective == Objective.THROUGHPUT:
        count = captured.samples * max(1, captured.new_tokens)
        value, bound = value / count, bound / count if bound else None
    plan = replace(
        plan,
        aim=Aim(Objective(objective), value, bound if bound and bound <= value else None),
        assumptions=(*known, *captured.assumptions),
        notes=(*stopped, *notes, *captured.notes),
        status=Status.INTERRUPTED if stopped else found.status,
        constraints=constraints,
    )
    lowered_programs(plan)  # whoever reads the plan will
    return plan


@dataclass(frozen=True, slots=True)
class _Answers:
    """All candidates, the least that an answer takes where it was proved, how the search ended, and
    why some plans are none.
    """

    answers: tuple[_Answer, ...]
    bound_s: float | None
    status: Status
    notes: tuple[str, ...]

    def best(self, limit: int) -> _Answer:
        """The best of those that fit; raises `InfeasibleError` where none does."""
        fitting = [answer for answer in self.answers if answer.peak_bytes <= limit]
        if not fitting:
            raise _shortage(self.answers, limit, self.notes)
        return min(fitting, key=_rank)


def _rank(answer: _Answer) -> tuple[float, int, str]:
    return answer.batch_s, answer.peak_bytes, answer.name


def _asked(decode: Request, whole: Machine | None, memory: str | None) -> dict[str, Request]:
    """The question without each thing that was asked for, by the flag that did; `whole` are all
    devices where there are more than were asked for.
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


def _constraints(
    captured: Captured, best: _Answer, asked: Mapping[str, Request], say: Say
) -> tuple[tuple[Constraint, ...], tuple[str, ...]]:
    """What is asked for with the best answer without it, and what Ctrl-C left out of that."""
    found: list[Constraint] = []
    for text, other in asked.items():
        say(f"looking for what {text} costs")
        free = best
        try:
            free = min(best, _answers(captured, other, say).best(other.limit_bytes), key=_rank)
        except (KeyboardInterrupt, StoppedError):
            return tuple(found), (f"what {text} costs is left out: {INTERRUPTED}",)
        except (BudgetError, InfeasibleError):
            pass
        found.append(Constraint(text, free.batch_s, free.peak_bytes))
    return tuple(found), ()


def _answers(captured: Captured, decode: Request, say: Say) -> _Answers:
    """The candidates of a question."""
    tokens = captured.new_tokens
    found = proposed(decode, say)
    if captured.prefill is None:
        times = captured.steps
        bound = None if found.bound_s is None else times * found.bound_s
        alone = [_alone(plan, times) for plan in found.found]
        if decode.passes_follow and times == 1:
            alone = [_following(answer, decode) for answer in alone]
        return _Answers(tuple(alone), bound, found.status, found.refused)
    prefill = replace(decode, graph=captured.prefill, pinned=NONE)
    say("looking for layouts of prompts")
    other = None if decode.pinned.pins else proposed(prefill, say)
    made: list[_Answer] = []
    refused = [*found.refused, *(f"prompts: {why}" for why in (other.refused if other else ()))]
    for pair in pairs(found.found, other.found if other else (), decode, prefill):
        if isinstance(pair, str):
            refused.append(pair)
            continue
        answer = _Answer(pair.found.name, pair.found.method, pair, False, pair.answer_s(tokens))
        say(f"{answer.name}: {format_seconds(answer.answer_s)} an answer")
        made.append(answer)
    bounds = found.bound_s, other.bound_s if other else None
    bound = None if None in bounds else bounds[1] + (tokens - 1) * bounds[0]  # type: ignore[operator]
    ended = [found.status, *([other.status] if other else [])]
    status = next((s for s in ended if s is not Status.COMPLETE), Status.COMPLETE)
    return _Answers(tuple(made), bound, status, tuple(dict.fromkeys(refused)))


def _alone(plan: ScoredPlan, times: int) -> _Answer:
    pair = Pair(plan, plan.decisions, plan.prediction, 0)
    return _Answer(plan.name, plan.method, pair, True, times * plan.prediction.step_s)


def _following(answer: _Answer, request: Request) -> _Answer:
    """The same with the time from batch to batch, where several stages work on them."""
    decisions = answer.pair.found.decisions
    if len(decisions.stages) == 1:
        return answer
    made = lower_stages(rewritten(request.graph, decisions.rewrites), decisions)
    machine = request.machine.used_by(decisions)
    played = simulate_stages(
        made, machine.cluster, decisions, NO_OPTIMIZER, machine.kernels, repeated=True
    )
    return replace(answer, period_s=played.period_s)


def _planned(
    captured: Captured, best: _Answer, answers: Sequence[_Answer], spec: str, limit: int
) -> Plan:
    """The plan of the best candidate."""
    pair, tokens = best.pair, captured.new_tokens
    inference = Inference(steps=captured.steps, weights=captured.weights, period_s=best.period_s)
    if captured.prefill is not None:
        inference = Inference(
            tokens,
            print_graph(captured.prefill),
            pair.prefill.nodes,
            pair.expected,
            pair.cache_bytes,
            weights=captured.weights,
        )
    return Plan(
        captured.source,
        spec,
        captured.fingerprint,
        NO_OPTIMIZER,
        best.method,
        pair.found.decisions,
        print_graph(captured.graph),
        prediction=pair.found.prediction,
        alternatives=tuple(
            Alternative(a.name, a.batch_s, a.peak_bytes, a.peak_bytes <= limit) for a in answers
        ),
        seed=captured.seed,
        settings=captured.settings,
        ranges=captured.ranges,
        inference=inference,
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
    small = min(answers, key=lambda answer: answer.peak_bytes)
    prediction = small.pair.found.prediction
    parts = dict(prediction.memory)
    weights, cache = parts.get("weights", 0), small.pair.cache_bytes
    rest = small.peak_bytes - weights - cache
    short = small.peak_bytes - limit
    fewer = ", ".join(
        ["fewer samples at once (--batch)", *(["fewer tokens (--new-tokens)"] if cache else [])]
    )
    return InfeasibleError(
        f"no plan fits in {format_bytes(limit)} per device: the smallest, {small.name}, needs"
        f" {bytes_up(small.peak_bytes)}, {bytes_up(short)} more: weights {bytes_up(weights)},"
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
