"""From the candidates of a method to one plan: the fastest, as simulated, of those that fit."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from parloom import arguments
from parloom.cost.units import format_bytes, format_seconds
from parloom.errors import InfeasibleError, InputError, LayoutError
from parloom.execute.files import read_plan
from parloom.execute.machine import Machine
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.plan import Alternative, Plan, Prediction
from parloom.report.shortage import shortage_document, shortage_line, shortage_of
from parloom.report.words import idle_words
from parloom.rewrite.pad import rewritten
from parloom.search.candidates import Candidate, Candidates, candidates
from parloom.search.question import Question

Say = Callable[[str], None]


def choose(
    asked: Plan, graph: Graph, machine: Machine, limit: int, microbatches: int | None, say: Say
) -> Plan:
    """`asked` with the decisions of the best candidate of its method, at most `limit` bytes.

    Raises `InfeasibleError` where none fits.
    """
    proposed = _candidates(graph, machine, asked, limit, microbatches, say)
    for line in proposed.refused:
        say(line)
    asked = replace(
        asked,
        notes=(*proposed.refused, *asked.notes),
        bound_s=proposed.bound_s,
        solver_gap=proposed.solver_gap,
    )
    return _best(asked, graph, proposed.found, machine, limit, say)


def _candidates(
    graph: Graph, machine: Machine, asked: Plan, limit: int, microbatches: int | None, say: Say
) -> Candidates:
    """What the method asked for proposes; it may be a plan file, whose decisions are taken."""
    cluster = machine.cluster
    if asked.method in arguments.METHODS:
        question = Question(
            graph, cluster, asked.optimizer, limit, microbatches or 1, asked.seed, machine.kernels
        )
        return candidates(question, asked.method, say)
    decisions = read_plan(Path(asked.method)).decisions
    if decisions.mesh.num_ranks != cluster.num_devices:
        raise InputError(
            f"{asked.method} is for {decisions.mesh.num_ranks} ranks, {cluster.name} has"
            f" {cluster.num_devices} devices"
        )
    if microbatches is not None:
        decisions = replace(decisions, num_microbatches=microbatches)
    return Candidates((Candidate(asked.method, asked.method, decisions),))


def _best(
    asked: Plan,
    graph: Graph,
    proposed: Sequence[Candidate],
    machine: Machine,
    limit: int,
    progress: Say,
) -> Plan:
    """The candidate whose simulated step is the fastest of those that fit."""
    played: list[tuple[Candidate, Prediction]] = []
    factored = factorize(graph)
    refused: list[LayoutError] = []
    notes = asked.notes
    for candidate in proposed:
        try:
            rewrites = candidate.decisions.rewrites
            pcg = lower(
                rewritten(graph, rewrites),
                candidate.decisions,
                factored=None if rewrites else factored,
            )
        except LayoutError as error:  # as when microbatches do not divide over this mesh
            refused.append(error)
            notes = (f"{candidate.name}: not possible: {error}", *notes)
            progress(notes[0])
            continue
        played.append((candidate, machine.predict(pcg, candidate.decisions, asked.optimizer)))
        step_s, peak = played[-1][1].step_s, played[-1][1].peak_bytes
        progress(f"{candidate.name}: {format_seconds(step_s)}, {format_bytes(peak)}")
    if not played:
        raise refused[0]
    alternatives = tuple(
        Alternative(c.name, p.step_s, p.peak_bytes, p.peak_bytes <= limit) for c, p in played
    )
    fitting = [
        (p.step_s, p.peak_bytes, i) for i, (_, p) in enumerate(played) if p.peak_bytes <= limit
    ]
    if not fitting:
        candidate, smallest = min(played, key=lambda entry: entry[1].peak_bytes)
        shortage = shortage_of(candidate.name, smallest, limit)
        raise InfeasibleError(shortage_line(shortage), shortage_document(shortage))
    candidate, prediction = played[min(fitting)[2]]
    return replace(
        asked,
        method=candidate.method,
        decisions=candidate.decisions,
        prediction=prediction,
        alternatives=alternatives,
        notes=(*idle_words(candidate.decisions), *notes),
    )
