"""Programs of tokens: each pass is given those that the one before it chose by its logits."""

from collections.abc import Sequence

from parloom.ir.graph import CACHE, Graph
from parloom.ir.stages import operands

TOKENS, GENERATED, LOGITS = "input_ids", "generated", "logits"


def feeds_itself(graph: Graph) -> bool:
    """Whether a program is of the tokens after the first one, which passes choose for the next."""
    return _feed_themselves((graph,))


def feedback(stages: Sequence[Graph]) -> tuple[tuple[int, int], ...]:
    """The stage that chooses tokens with each one that reads them in the next pass; none of a
    program that is given all it reads.
    """
    if not _feed_themselves(stages):
        return ()
    sources = (i for i, graph in enumerate(stages) if LOGITS in dict(graph.outputs))
    return tuple(
        (source, target)
        for source in sources
        for target, graph in enumerate(stages)
        if TOKENS in _read(graph)
    )


def _feed_themselves(stages: Sequence[Graph]) -> bool:
    """Whether stages with caches read how many tokens there are; a model that makes one pass may
    have an input of that name.
    """
    names = {entry.target for graph in stages for entry in graph.of_kind("batch")}
    return GENERATED in names and any(graph.of_kind(CACHE) for graph in stages)


def _read(graph: Graph) -> set[str]:
    """The inputs of the batch that a program reads."""
    names = {name for item in graph.main.body for name in operands(item)}
    return {entry.target for entry in graph.of_kind("batch") if entry.value.name in names}
