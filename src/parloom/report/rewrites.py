"""The rewrites of a plan: rule, proof, where, the operators before and after, what each saves."""

from collections.abc import Iterator
from typing import Any

from parloom.cost.ledger import Ledger
from parloom.cost.tasks import COMPUTE
from parloom.cost.timeline import Timeline
from parloom.ir.lower_stages import LoweredStages
from parloom.ir.stages import Cut
from parloom.ir.text import parse_graph, print_node
from parloom.report.case import Case, PipelineCase
from parloom.report.words import process_names, rewrite_words
from parloom.rewrite.rewrites import proof_words
from parloom.search.cheaper import Played
from parloom.search.runner_up import Play
from parloom.search.undone import Undoing

Document = dict[str, Any]


def rewrites_explained(case: Case | PipelineCase, play: Play | None = None) -> Iterator[Document]:
    """Each rewrite, with the plan beside it in which this one is undone; seconds and bytes of one
    step, by which the plan has less, of a pipeline also by its groups of devices. `play` simulates
    plans of one stage.
    """
    decisions = case.decisions
    if not Undoing.knows(decisions.rewrites):
        return
    graph = parse_graph(case.plan.graph)
    if isinstance(case, PipelineCase):
        count = range(len(decisions.stages))
        stages = case.stages
        walkers = [case.stage(index).priced.walker for index in count]
    else:
        stages = LoweredStages(Cut((case.pcg.graph,), (), {}), (case.pcg,))
        walkers = [case.priced.walker]

    def played(other: LoweredStages) -> Timeline:
        if isinstance(case, PipelineCase):
            return case.play(other)
        assert play is not None
        return play(other.only, other.only.decisions)

    undoing = Undoing(graph, decisions, stages, walkers, case.fits, played)
    lines = rewrite_words(graph, decisions)
    for index, (take, line) in enumerate(zip(undoing.takes, lines, strict=True)):
        found = undoing.without(index)
        yield {
            "rules": list(take.rules),
            "proof": proof_words(take.rules),
            "where": line,
            "before": [print_node(node) for node in found.before],
            "after": [print_node(node) for node in found.after],
            **_saved(case, found.plan),
            "changed": list(found.changed),
        }


def _saved(case: Case | PipelineCase, without: Played | str) -> Document:
    """What a plan has less than the one beside it, or why there is none."""
    if isinstance(without, str):
        reason = f"cannot be undone alone: {without}"
        saved = dict.fromkeys(("saved_s", "saved_sent_bytes", "saved_peak_bytes"))
        return saved | {"stages": [], "reason": reason}
    timeline, stages = without.timeline, without.stages
    if isinstance(case, PipelineCase):
        found = case.read(timeline, stages)
    else:
        found = case.read(timeline, stages.only)
    return {
        "saved_s": timeline.step_s - case.timeline.step_s,
        "saved_sent_bytes": _sent(found) - _sent(case.ledger),
        "saved_peak_bytes": timeline.peak_bytes - case.timeline.peak_bytes,
        "stages": list(_by_process(case, timeline)),
        "reason": None,
    }


def _by_process(case: Case | PipelineCase, without: Timeline) -> Iterator[Document]:
    """What groups of devices of a pipeline compute and hold less, where that differs."""
    if isinstance(case, Case):
        return
    for index, name in enumerate(process_names(case.decisions)):
        busy = without.busy(index)[COMPUTE] - case.timeline.busy(index)[COMPUTE]
        peaks = [sum(t.processes[index].memory.at_peak) for t in (without, case.timeline)]
        if busy or peaks[0] != peaks[1]:
            yield {
                "name": name,
                "saved_computing_s": busy / 1e12,
                "saved_peak_bytes": peaks[0] - peaks[1],
            }


def _sent(found: Ledger) -> int:
    """Bytes that a device sends in a step."""
    return sum(sent.num_bytes for sent in found.sent)
