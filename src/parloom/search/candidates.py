"""Candidates for a plan: rules of thumb, what the search over layouts proposes, and what methods of
other systems do.

With the method `auto` the rules of thumb are always among the candidates, so that a searched plan
never loses to them in prediction.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from parloom.errors import InputError
from parloom.ir.graph import Graph
from parloom.ir.mesh import Mesh
from parloom.ir.plan import ActivationDecision, Decisions
from parloom.search.auto import Searched
from parloom.search.auto import search as search_layouts
from parloom.search.baselines import METHODS
from parloom.search.comparators.alpa import alpa
from parloom.search.comparators.flexflow import flexflow
from parloom.search.comparators.tofu import tofu
from parloom.search.question import Question, Say

AUTO = "auto"
# Rules of thumb that stand beside a search.
BESIDE = ("data_parallel", "fsdp", "megatron")
# How many of the search's proposals stand in a plan.
PROPOSED = 4
LOW_PRECISION = ("bfloat16", "float16")
Comparator = Callable[[Question, Decisions, Say], Iterator[Decisions]]
"""Plans for a question with the dtypes and recomputation of the decisions given."""
COMPARATORS: Mapping[str, Comparator] = MappingProxyType(
    {"alpa": alpa, "flexflow": flexflow, "tofu": tofu}
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that a method proposes, and what to call it."""

    method: str
    name: str
    decisions: Decisions


@dataclass(frozen=True, slots=True)
class Candidates:
    """All candidates of a method; why others are none; what the search proved."""

    found: tuple[Candidate, ...]
    refused: tuple[str, ...] = ()
    bound_s: float | None = None
    solver_gap: float | None = None


def candidates(question: Question, method: str, say: Say) -> Candidates:
    """What `method` (a name in `METHODS` or `COMPARATORS`, or auto) proposes.

    Raises `InputError` where it proposes nothing.
    """
    found: list[Candidate] = []
    refused: dict[str, InputError] = {}
    for name in BESIDE if method == AUTO else (method,):
        try:
            found += _proposed(question, name, say)
        except InputError as error:
            refused[name] = error
    lines = [f"{name}: not possible: {error}" for name, error in refused.items()]
    searched: Searched | None = None
    if method == AUTO and question.num_microbatches > 1:
        lines.append("auto: layouts are searched for one microbatch only; these are rules of thumb")
    elif method == AUTO and question.cluster.num_devices > 1:
        searched = _searched(question, say)
        for proposal in searched.proposals[:PROPOSED]:
            found.append(Candidate(AUTO, _name(AUTO, proposal.decisions.mesh), proposal.decisions))
        if searched.interrupted:
            lines.append("auto: interrupted; the best of what was found until then")
    if not found and not refused:
        raise InputError(f"{method} finds no plan within its budget; give it more (--budget)")
    if not found:
        raise next(iter(refused.values()))
    bound = searched.bound_ps / 1e12 if searched and searched.bound_ps else None
    gap = searched.solver_gap if searched else None
    return Candidates(tuple(found), tuple(lines), bound, gap)


def _searched(question: Question, say: Say) -> Searched:
    base = _with_dtypes(question.graph, Decisions(Mesh(())))
    return search_layouts(
        question.graph,
        question.cluster,
        base,
        question.optimizer,
        question.limit_bytes,
        say,
        question.kernels,
    )


def _proposed(question: Question, name: str, say: Say) -> list[Candidate]:
    """The plans of a rule of thumb, or of a comparator."""
    graph, cluster = question.graph, question.cluster
    asked = tuple(ActivationDecision(p, "recompute") for p in graph.recomputed_calls)
    if name in COMPARATORS:
        base = Decisions(Mesh(()), activations=asked, num_microbatches=question.num_microbatches)
        plans = COMPARATORS[name](question, _with_dtypes(graph, base), say)
    else:
        plans = METHODS[name](graph, cluster, question.num_microbatches, question.seed)
    found = []
    for decisions in plans:
        decisions = _with_dtypes(graph, replace(decisions, activations=asked))
        found.append(Candidate(name, _name(name, decisions.mesh), decisions))
    return found


def _with_dtypes(graph: Graph, decisions: Decisions) -> Decisions:
    """Weights of low precision are updated, and their gradients reduced, in float32."""
    if any(i.value.spec.dtype in LOW_PRECISION for i in graph.of_kind("parameter")):
        return replace(decisions, master_dtype="float32", reduce_dtype="float32")
    return decisions


def _name(method: str, mesh: Mesh) -> str:
    return f"{method} ({' x '.join(f'{axis.name}={axis.size}' for axis in mesh.axes)})"
