"""Candidates for a plan: rules of thumb, what the search over layouts proposes, and what methods of
other systems do.

With the method `auto` the rules of thumb are always among the candidates, so that a searched plan
never loses to them in prediction.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType

from parloom.comparators.alpa import alpa
from parloom.comparators.baselines import RULES
from parloom.comparators.drawn import drawn
from parloom.comparators.flexflow import flexflow
from parloom.comparators.grid import MOST, Grid
from parloom.comparators.tofu import tofu
from parloom.errors import InputError, LayoutError, ParloomError, one_line
from parloom.ir.lower import lower
from parloom.ir.mesh import Mesh
from parloom.ir.plan import ActivationDecision, Decisions, Prediction, Status
from parloom.rewrite.rewrites import rewritten
from parloom.search.conflicts import broken
from parloom.search.contexts import Contexts, Judged
from parloom.search.least import conflict
from parloom.search.optimize import SAME, Searched, least_work_ps
from parloom.search.optimize import search as search_contexts
from parloom.search.question import Question, Say, base_of
from parloom.search.smallest import smallest_plan

AUTO = "auto"
RANDOM = "random"
# Plans of each rule of thumb that are simulated beside a search.
BESIDE = 8
# How many of the search's proposals stand in a plan.
PROPOSED = 4
# On one mesh there are dozens of plans that differ in a weight or two: who chooses among proposals
# wants another mesh, or a step or a peak that differ by more than these shares.
STEP_APART, PEAK_APART = 0.01, 0.05
Comparator = Callable[[Question, Decisions, Say], Iterator[Decisions]]
"""Plans for a question with the dtypes and recomputation of the decisions given."""
COMPARATORS: Mapping[str, Comparator] = MappingProxyType(
    {"alpa": alpa, "flexflow": flexflow, "tofu": tofu}
)
# What plans are called where that is not the method's name: Alpa's inter-operator part is left out.
TITLES: Mapping[str, str] = MappingProxyType({"alpa": "alpa, intra-operator part"})


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
    status: Status = Status.COMPLETE


def candidates(question: Question, method: str, say: Say) -> Candidates:
    """What `method` (a name in `RULES` or `COMPARATORS`, random, or auto) proposes.

    Raises `InputError` where it proposes nothing.
    """
    names, most = (tuple(RULES), BESIDE) if method == AUTO else ((method,), MOST)
    found, refused, stopped = _of_rules(question, names, most, say)
    lines = [f"{name}: not possible: {one_line(error)}" for name, error in refused.items()]
    if method not in (AUTO, RANDOM) and not stopped:
        found, stopped = _on_parts(question, method, found, say)
    found, against = _holding(question, found)
    lines += [f"{name}: not as asked: {reason}" for name, reason in against]
    searched: Searched | None = None
    if method == AUTO and not stopped:
        searched = search_contexts(question, base_of(question), say)
    found += _of_search(question, searched) if searched else ()
    if searched is not None and searched.left_out:
        lines.append(f"{AUTO}: {searched.left_out}")
    if searched is not None and searched.status is Status.OUT_OF_BUDGET:
        lines.append(f"{AUTO}: --budget {question.budget} is used up; the best until then")
    # Where the search finds nothing that fits, there may be a plan that does not.
    unknown = searched is not None and searched.status is Status.COMPLETE
    if not found and stopped:
        raise KeyboardInterrupt
    if not found and not unknown:
        raise _nothing(method, searched, against, refused)
    bound = searched.bound_ps / 1e12 if searched and searched.bound_ps else None
    gap = searched.solver_gap if searched else None
    status = searched.status if searched else Status.COMPLETE
    status = Status.INTERRUPTED if stopped else status
    return Candidates(tuple(found), tuple(lines), bound, gap, status)


def _of_search(question: Question, searched: Searched) -> Iterator[Candidate]:
    """What it proposes, the fastest on every part of the cluster included; where nothing fits, the
    smallest that was simulated.
    """
    proposals = distinct(searched.proposals)
    sizes = [proposal.decisions.mesh.num_ranks for proposal in proposals]
    fastest = map(sizes.index, set(sizes))
    proposals = [proposals[i] for i in sorted({*range(len(sizes))[:PROPOSED], *fastest})]
    if not proposals and searched.smallest:
        proposals = [searched.smallest]
    for proposal in proposals:
        mesh = proposal.decisions.mesh
        name = _on(question, _name(AUTO, mesh), mesh)
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
    question: Question, names: Sequence[str], most: int, say: Say
) -> tuple[list[Candidate], dict[str, ParloomError], bool]:
    """The plans of rules of thumb, of which `most` are simulated, or of a comparator; why others
    have none; whether Ctrl-C ended it, where there are some.
    """
    found: list[Candidate] = []
    refused: dict[str, ParloomError] = {}
    for name in names:
        plans: list[Candidate] = []
        try:
            plans.extend(_proposed(question, name, most, say))
        except KeyboardInterrupt:
            found += plans
            if not found:
                raise
            return found, refused, True
        except (InputError, LayoutError) as error:
            refused[name] = error
            continue
        found += plans
    return found, refused, False


def _on_parts(
    question: Question, method: str, found: list[Candidate], say: Say
) -> tuple[list[Candidate], bool]:
    """`found` on the whole cluster, and the plans of a method on its parts as long as computing
    alone takes no longer there than the fastest step that fits; whether Ctrl-C ended it.
    """
    try:
        found = [_predicted(question, candidate) for candidate in found]
        contexts = Contexts(question, base_of(question))
        for part in question.parts():
            known = [candidate.prediction for candidate in found if candidate.prediction]
            fitting = [p.step_s for p in known if p.peak_bytes <= question.limit_bytes]
            if known and not fitting:
                break  # each of fewer devices holds no less
            least_ps = least_work_ps(contexts.on_part(part)) / part.cluster.num_devices
            if least_ps / 1e12 > min(fitting, default=inf) * (1 + SAME):
                break
            for candidate in _of_rules(part, (method,), MOST, say)[0]:
                name = _on(question, candidate.name, candidate.decisions.mesh)
                found.append(_predicted(part, replace(candidate, name=name)))
    except KeyboardInterrupt:
        return found, True
    return found, False


def _predicted(question: Question, candidate: Candidate) -> Candidate:
    """A candidate with its prediction, unless it cannot be lowered."""
    if candidate.prediction is not None:
        return candidate
    graph = rewritten(question.graph, candidate.decisions.rewrites)
    try:
        pcg = lower(graph, candidate.decisions)
    except LayoutError:
        return candidate
    return replace(candidate, prediction=question.predict(pcg, candidate.decisions))


def _nothing(
    method: str,
    searched: Searched | None,
    against: Sequence[tuple[str, str]],
    refused: Mapping[str, ParloomError],
) -> BaseException:
    """Why a method proposes nothing."""
    if searched is not None and searched.status is Status.INTERRUPTED:
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


def _proposed(question: Question, name: str, most: int, say: Say) -> Iterator[Candidate]:
    """The plans of a rule of thumb, of a comparator, or random ones."""
    base = base_of(question)
    if name in RULES:
        for point in Grid(question, RULES[name], base, most).run():
            words = ", ".join((_name(name, point.decisions.mesh), *point.chosen.words))
            yield Candidate(name, words, point.decisions, point.prediction)
    elif name == RANDOM:
        for decisions, prediction in drawn(question, base):
            yield Candidate(name, _name(name, decisions.mesh), decisions, prediction)
    else:
        asked = tuple(ActivationDecision(p, "recompute") for p in question.graph.recomputed_calls)
        count = question.num_microbatches or 1
        base = replace(base, activations=asked, num_microbatches=count)
        for decisions in COMPARATORS[name](question, base, say):
            yield Candidate(name, _name(name, decisions.mesh), decisions)


def _name(method: str, mesh: Mesh) -> str:
    sizes = " x ".join(f"{axis.name}={axis.size}" for axis in mesh.axes)
    return f"{TITLES.get(method, method)} ({sizes})"


def _on(question: Question, name: str, mesh: Mesh) -> str:
    """A name that says where a plan is on a part of the cluster."""
    ranks = mesh.num_ranks
    devices = f"{ranks} devices" if ranks > 1 else "one device"
    return f"{name}, {devices}" if ranks < question.cluster.num_devices else name
