"""Candidates for a plan: rules of thumb, what the search over layouts proposes, and what methods of
other systems do.

With the method `auto` the rules of thumb are always among the candidates, so that a searched plan
never loses to them in prediction.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from parloom.errors import InputError, one_line
from parloom.ir.graph import Graph
from parloom.ir.mesh import Mesh
from parloom.ir.plan import GLOBAL, ActivationDecision, Decisions, Prediction
from parloom.search.baselines import METHODS
from parloom.search.comparators.alpa import alpa
from parloom.search.comparators.flexflow import flexflow
from parloom.search.comparators.tofu import tofu
from parloom.search.conflicts import broken
from parloom.search.contexts import Judged
from parloom.search.least import conflict
from parloom.search.optimize import Searched
from parloom.search.optimize import search as search_contexts
from parloom.search.question import Question, Say
from parloom.search.smallest import smallest_plan

AUTO = "auto"
# Rules of thumb that stand beside a search.
BESIDE = ("data_parallel", "fsdp", "megatron")
# How many of the search's proposals stand in a plan.
PROPOSED = 4
# On one mesh there are dozens of plans that differ in a weight or two: who chooses among proposals
# wants another mesh, or a step or a peak that differ by more than these shares.
STEP_APART, PEAK_APART = 0.01, 0.05
LOW_PRECISION = ("bfloat16", "float16")
Comparator = Callable[[Question, Decisions, Say], Iterator[Decisions]]
"""Plans for a question with the dtypes and recomputation of the decisions given."""
COMPARATORS: Mapping[str, Comparator] = MappingProxyType(
    {"alpa": alpa, "flexflow": flexflow, "tofu": tofu}
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that a method proposes, what to call it, and its prediction if the method made it."""

    method: str
    name: str
    decisions: Decisions
    prediction: Prediction | None = None


@dataclass(frozen=True, slots=True)
class Candidates:
    """All candidates of a method; why others are none; what the search proved."""

    found: tuple[Candidate, ...]
    refused: tuple[str, ...] = ()
    bound_s: float | None = None
    solver_gap: float | None = None
    interrupted: bool = False
    exhausted: bool = False


def candidates(question: Question, method: str, say: Say) -> Candidates:
    """What `method` (a name in `METHODS` or `COMPARATORS`, or auto) proposes.

    Raises `InputError` where it proposes nothing.
    """
    names = BESIDE if method == AUTO else (method,)
    found, refused, stopped = _of_rules(question, names, say)
    lines = [f"{name}: not possible: {one_line(error)}" for name, error in refused.items()]
    found, against = _holding(question, found)
    lines += [f"{name}: not as asked: {reason}" for name, reason in against]
    searched: Searched | None = None
    if method == AUTO and not stopped:
        searched = search_contexts(question, base_of(question), say)
    found += _of_search(searched) if searched else ()
    if searched is not None and searched.left_out:
        lines.append(f"{AUTO}: {searched.left_out}")
    if searched is not None and searched.exhausted:
        lines.append(f"{AUTO}: --budget {question.budget} is used up; the best until then")
    # Where the search finds nothing that fits, there may be a plan that does not.
    unknown = searched is not None and not (searched.interrupted or searched.exhausted)
    if not found and stopped:
        raise KeyboardInterrupt
    if not found and not unknown:
        raise _nothing(method, searched, against, refused)
    bound = searched.bound_ps / 1e12 if searched and searched.bound_ps else None
    gap = searched.solver_gap if searched else None
    stopped = stopped or (searched is not None and searched.interrupted)
    exhausted = searched is not None and searched.exhausted
    return Candidates(tuple(found), tuple(lines), bound, gap, stopped, exhausted)


def _of_search(searched: Searched) -> Iterator[Candidate]:
    """What it proposes; where nothing fits, the smallest that was simulated."""
    proposals = distinct(searched.proposals)[:PROPOSED]
    if not proposals and searched.smallest:
        proposals = [searched.smallest]
    for proposal in proposals:
        name = _name(AUTO, proposal.decisions.mesh)
        yield Candidate(AUTO, name, proposal.decisions, proposal.prediction)


def distinct(proposals: Sequence[Judged]) -> list[Judged]:
    """Of those that are nearly alike the first, which is the fastest."""
    kept: list[Judged] = []
    for one in proposals:
        if not any(_alike(one, other) for other in kept):
            kept.append(one)
    return kept


def _alike(one: Judged, other: Judged) -> bool:
    mine, its = one.prediction, other.prediction
    step = abs(mine.step_s - its.step_s) <= STEP_APART * its.step_s
    peak = abs(mine.peak_bytes - its.peak_bytes) <= PEAK_APART * its.peak_bytes
    return one.decisions.mesh == other.decisions.mesh and step and peak


def _of_rules(
    question: Question, names: Sequence[str], say: Say
) -> tuple[list[Candidate], dict[str, InputError], bool]:
    """The plans of rules of thumb, or of a comparator; why others have none; whether Ctrl-C ended
    it, where there are some.
    """
    found: list[Candidate] = []
    refused: dict[str, InputError] = {}
    for name in names:
        plans: list[Candidate] = []
        try:
            plans.extend(_proposed(question, name, say))
        except KeyboardInterrupt:
            found += plans
            if not found:
                raise
            return found, refused, True
        except InputError as error:
            refused[name] = error
            continue
        found += plans
    return found, refused, False


def _nothing(
    method: str,
    searched: Searched | None,
    against: Sequence[tuple[str, str]],
    refused: Mapping[str, InputError],
) -> BaseException:
    """Why a method proposes nothing."""
    if searched is not None and searched.interrupted:
        return KeyboardInterrupt()
    if against:
        what = f"{method} has no plan as asked: {against[0][1]}"
        return InputError(what if method == AUTO else f"{what}; --method auto searches for one")
    if searched is not None or not refused:
        return InputError(f"{method} finds no plan within its budget; give it more (--budget)")
    return next(iter(refused.values()))


def _holding(
    question: Question, found: list[Candidate]
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """The candidates that hold all pins, and why others do not."""
    held: list[Candidate] = []
    against: list[tuple[str, str]] = []
    for candidate in found:
        reason = broken(question.pinned, question.graph, candidate.decisions)
        if reason is None:
            held.append(candidate)
        else:
            against.append((candidate.name, reason))
    return held, against


def smallest(question: Question) -> tuple[Candidate, int]:
    """The smallest plan that is found, whatever the limit, and what no plan holds less than.

    Raises `InputError` where there is none because pins contradict each other.
    """
    base = base_of(question)
    found = smallest_plan(question, base)
    if found is None:
        raise conflict(question, base)
    plan = found.plan
    name = _name(f"{AUTO}, least memory", plan.decisions.mesh)
    return Candidate(AUTO, name, plan.decisions, plan.prediction), found.bound_bytes


def base_of(question: Question) -> Decisions:
    """What holds for all plans that are searched."""
    base = Decisions(Mesh(()), batch_semantics=question.batch_semantics)
    return _with_dtypes(question.graph, base)


def _proposed(question: Question, name: str, say: Say) -> Iterator[Candidate]:
    """The plans of a rule of thumb, or of a comparator."""
    graph, cluster = question.graph, question.cluster
    asked = tuple(ActivationDecision(p, "recompute") for p in graph.recomputed_calls)
    count, semantics = question.num_microbatches or 1, question.batch_semantics
    if name in COMPARATORS:
        base = Decisions(
            Mesh(()), activations=asked, num_microbatches=count, batch_semantics=semantics
        )
        plans = COMPARATORS[name](question, _with_dtypes(graph, base), say)
    else:
        # The program of one microbatch is divided no further.
        plans = METHODS[name](graph, cluster, count if semantics == GLOBAL else 1, question.seed)
    for decisions in plans:
        decisions = replace(
            decisions, activations=asked, num_microbatches=count, batch_semantics=semantics
        )
        decisions = _with_dtypes(graph, decisions)
        yield Candidate(name, _name(name, decisions.mesh), decisions)


def _with_dtypes(graph: Graph, decisions: Decisions) -> Decisions:
    """Weights of low precision are updated in float32, and their gradients reduced in it.

    All gradients are reduced in one dtype: float64 where weights have it. Raises `InputError` where
    others are complex.
    """
    dtypes = {i.value.spec.dtype for i in graph.of_kind("parameter")}
    if dtypes.isdisjoint(LOW_PRECISION):
        return decisions
    for entry in graph.of_kind("parameter"):
        if entry.trainable and entry.value.spec.dtype.startswith("complex"):
            raise InputError(
                f"{entry.target} is {entry.value.spec.dtype} beside weights in half precision, and"
                " all gradients are reduced in one dtype; train in float32 (--dtype fp32), or keep"
                " the weight as pairs of real numbers and use torch.view_as_complex"
            )
    reduce_dtype = "float64" if "float64" in dtypes else "float32"
    return replace(decisions, master_dtype="float32", reduce_dtype=reduce_dtype)


def _name(method: str, mesh: Mesh) -> str:
    return f"{method} ({' x '.join(f'{axis.name}={axis.size}' for axis in mesh.axes)})"
