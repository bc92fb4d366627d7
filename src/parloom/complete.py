"""What a plan says beside what a search found: what it assumes, and its evaluation program."""

from dataclasses import replace

from parloom.cost.units import format_bytes
from parloom.errors import ParloomError, one_line
from parloom.execute.machine import Machine
from parloom.execute.program import NO_EVALUATION, evaluation_program, lowered
from parloom.ir.expected import Status
from parloom.ir.graph import Graph
from parloom.ir.ops import op_of
from parloom.ir.plan import Decisions, Plan
from parloom.ir.regular_parts import memory_of, regular_parts
from parloom.report.words import checkpoint_words, rate_words, routing_words


def assumed(
    machine: Machine, decisions: Decisions, graph: Graph, limit_bytes: int
) -> tuple[str, ...]:
    """What predictions of a plan take for granted, in words."""
    cluster = machine.cluster
    # Processes share cores: those of the devices that a plan uses, and of all in other plans.
    used = machine.used_by(decisions).loaded.assumptions
    assumptions = list(dict.fromkeys((*used, *machine.loaded.assumptions)))
    types = dict.fromkeys(part.cluster.device for part in regular_parts(cluster))
    assumptions += (line for device in types for line in rate_words(graph, device))
    assumptions += routing_words(graph)
    there = memory_of(cluster)
    if limit_bytes > there and not cluster.parts:
        line = f"plans may use {format_bytes(limit_bytes)} per device (--memory), more than the"
        assumptions.append(f"{line} {format_bytes(there)} of {cluster.device.name}")
    return tuple(assumptions)


def with_evaluation(plan: Plan, graph: Graph) -> Plan:
    """`plan`, without an evaluation program that cannot be run, or that Ctrl-C left unchecked; says
    what is whole.
    """
    try:
        training = lowered(plan, graph)
        try:
            evaluation_program(plan, training)
        except ParloomError as error:  # an operator of evaluation alone: no reason not to train
            plan = _without_evaluation(plan, one_line(error))
    except KeyboardInterrupt:  # the search is over, and may have taken hours
        plan = _without_evaluation(plan, "interrupted before it was checked")
        plan = replace(plan, status=Status.INTERRUPTED)
    plan = replace(plan, assumptions=(*plan.assumptions, *checkpoint_words(graph)))
    reasons = {n.op: op_of(n).why_whole for _, n in graph.unfolded() if n.refs}
    whole = "; ".join(f"{op}: {why}" for op, why in sorted(reasons.items()) if why)
    if whole and plan.decisions.num_ranks > 1:
        line = f"operators that every rank computes as a whole: {whole}"
        plan = replace(plan, assumptions=(*plan.assumptions, line))
    return plan


def _without_evaluation(plan: Plan, why: str) -> Plan:
    return replace(plan, evaluation_graph="", notes=(*plan.notes, f"{NO_EVALUATION}: {why}"))
