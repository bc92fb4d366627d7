"""Plans for answers: a program of prompts and one of each token after them, on the same weights.

Either program is searched alone; for every plan that is found the other program is laid out as that
one is, where both have an operator (`search.evaluation`), with weights and caches where they lie.
An answer takes a pass of the one and as many of the other as there are tokens after the first, so
that the sum of both programs' bounds is one of all such pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from parloom.errors import LayoutError, VerifyError
from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import CACHE, DTYPE_BYTES, Graph
from parloom.ir.layout import local_shape
from parloom.ir.lower import lower
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions, Prediction
from parloom.rewrite.rewrites import as_stored, rewritten
from parloom.search.evaluation import evaluation_decisions
from parloom.search.request import Request, ScoredPlan


@dataclass(frozen=True, slots=True)
class Pair:
    """A plan of both programs: decisions and expected pass of the decoding one, and of prompts'."""

    found: ScoredPlan
    prefill: Decisions
    expected: Prediction
    cache_bytes: int

    def answer_s(self, new_tokens: int) -> float:
        """The time of a prompt's pass and those of the tokens after its first."""
        return self.expected.step_s + (new_tokens - 1) * self.found.prediction.step_s


def pair_of(found: ScoredPlan, decode: Request, prefill: Request) -> Pair:
    """The pair that a plan of the decoding program makes.

    Raises `LayoutError` where prompts have no program for it.
    """
    pcg, factored = _lowered(decode.graph, found.decisions)
    graph = as_stored(prefill.graph, found.decisions.rewrites)
    other = _other(graph, pcg, factored)
    return Pair(found, *_expected(prefill, graph, other, pcg), cache_bytes_of(pcg))


def pair_from_prefill(found: ScoredPlan, decode: Request, prefill: Request) -> Pair:
    """The pair that a plan of the program of prompts makes, whose rewrites it leaves out."""
    first = replace(found.decisions, rewrites=(), activations=())
    pcg, factored = _lowered(prefill.graph, first)
    own = replace(_other(decode.graph, pcg, factored), parameters=first.parameters)
    laid = lower(decode.graph, own)
    if laid.homes != pcg.homes:
        raise LayoutError("weights or caches of prompts lie where no token is decoded")
    expected = decode.placed(own)
    prediction = prefill.placed(first)
    scored = replace(found, decisions=own, prediction=expected)
    return Pair(scored, replace(first, parameters=()), prediction, cache_bytes_of(laid))


def _lowered(graph: Graph, decisions: Decisions) -> tuple[PCG, Factored]:
    if len(decisions.stages) > 1:
        raise LayoutError("answers come of one stage")
    factored = factorize(rewritten(graph, decisions.rewrites))
    return lower(factored.graph, decisions, factored=factored), factored


def _other(graph: Graph, pcg: PCG, factored: Factored) -> Decisions:
    chosen = evaluation_decisions(graph, factorize(graph), pcg, factored, 1)
    return replace(chosen, activations=(), rewrites=())


def _expected(
    request: Request, graph: Graph, decisions: Decisions, pcg: PCG
) -> tuple[Decisions, Prediction]:
    lowered = lower(graph, decisions, homes=pcg.homes)
    machine = request.machine.used_by(decisions)
    return decisions, machine.predict(lowered, decisions, request.optimizer)


def cache_bytes_of(pcg: PCG) -> int:
    """Bytes of all caches on one device."""
    inputs = zip(pcg.graph.inputs, pcg.main.inputs, strict=True)
    caches = [value for entry, value in inputs if entry.kind == CACHE]
    shapes = (local_shape(value.layout, value.spec.shape, pcg.mesh) for value in caches)
    widths = (DTYPE_BYTES[value.spec.dtype] for value in caches)
    return sum(prod(shape) * width for shape, width in zip(shapes, widths, strict=True))


def pairs(
    decoding: tuple[ScoredPlan, ...],
    prompting: tuple[ScoredPlan, ...],
    decode: Request,
    prefill: Request,
) -> Iterator[Pair | str]:
    """All pairs of plans that were found, and why others are none."""
    for plans, make in ((decoding, pair_of), (prompting, pair_from_prefill)):
        for plan in plans:
            try:
                yield make(plan, decode, prefill)
            except (LayoutError, VerifyError) as error:
                yield f"{plan.name}: {error}"
