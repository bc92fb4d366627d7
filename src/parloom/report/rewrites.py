"""The rewrites of a plan: rule, proof, where, the operators before and after, what each saves."""

from collections.abc import Iterator
from typing import Any

from parloom.cost.ledger import Ledger
from parloom.ir.text import parse_graph, print_node
from parloom.report.case import Case
from parloom.report.words import rewrite_words
from parloom.rewrite.rewrites import PROOF, takes_of
from parloom.search.runner_up import Play
from parloom.search.undone import Undoing

Document = dict[str, Any]


def rewrites_explained(case: Case, play: Play) -> Iterator[Document]:
    """Each rewrite, with the plan beside it in which this one is undone; seconds and bytes of one
    step, by which the plan has less.
    """
    graph = parse_graph(case.plan.graph)
    takes = [bool(takes_of([text])) for text in case.decisions.rewrites]
    if takes != sorted(takes):  # each is of another graph
        return
    undoing = Undoing(graph, case.decisions, case.priced.walker)
    lines = rewrite_words(graph, case.decisions)
    for index, (take, line) in enumerate(zip(undoing.takes, lines, strict=True)):
        found = undoing.without(index, case.fits, play)
        timeline = play(found.pcg, found.pcg.decisions)
        without = case.read(timeline, found.pcg)
        yield {
            "rules": list(take.rules),
            "proof": PROOF,
            "where": line,
            "before": [print_node(node) for node in found.before],
            "after": [print_node(node) for node in found.after],
            "saved_s": timeline.step_s - case.timeline.step_s,
            "saved_sent_bytes": _sent(without) - _sent(case.ledger),
            "saved_peak_bytes": timeline.peak_bytes - case.timeline.peak_bytes,
        }


def _sent(found: Ledger) -> int:
    """Bytes that a device sends in a step."""
    return sum(sent.num_bytes for sent in found.sent)
