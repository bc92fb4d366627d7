"""Plans of a small GPT by configurations, for tests of what is exported."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

from parloom.capture import capture
from parloom.comparators.configuration import Configuration, laid_out
from parloom.comparators.handmade import divided
from parloom.cost.clusters import resolve_cluster
from parloom.ir.graph import Call, Graph
from parloom.ir.mesh import part_of
from parloom.ir.plan import Decisions, ModelSource, Optimizer, Plan, Stage
from parloom.ir.stages import stage_items
from parloom.ir.text import print_graph
from parloom.rewrite.rewrites import rewritten
from parloom.zoo.gpt import build

BATCH, POSITIONS, BLOCKS, VOCABULARY = 16, 8, 4, 64
PLAIN = Configuration(tensor=2, data=8, microbatch=2, zero=1, master_dtype=None)


@cache
def gpt(vocab: int = VOCABULARY) -> tuple[Graph, str]:
    """The program, and its text."""
    model, batch = build(
        batch=BATCH, seq=POSITIONS, width=16, heads=4, depth=BLOCKS, vocab=vocab
    )  # fmt: skip
    graph = capture(model, batch)
    return graph, print_graph(graph)


def plan_of(decisions: Decisions, cluster: str = "2x8xH100", vocab: int = VOCABULARY) -> Plan:
    """A plan of the GPT with these decisions."""
    source = ModelSource("zoo:gpt", BATCH, POSITIONS)
    return Plan(source, cluster, "0" * 16, Optimizer(), "test", decisions, gpt(vocab)[1])


def planned(
    chosen: Configuration,
    cluster: str = "2x8xH100",
    blocks: Sequence[int] = (),
    vocab: int = VOCABULARY,
) -> Plan:
    """The plan that a configuration means; its stages have these numbers of blocks, or equal
    ones.
    """
    graph, _ = gpt(vocab)
    whole = resolve_cluster(cluster).cluster
    size = chosen.ranks // chosen.pipeline
    part = whole if size == whole.num_devices else part_of(whole, size)
    decisions = laid_out(graph, chosen, part).decisions(chosen)
    count = chosen.pipeline * chosen.interleave
    if count == 1:
        return plan_of(decisions, cluster, vocab)
    own = rewritten(graph, decisions.rewrites)
    items, mesh = stage_items(own), decisions.stages[0].mesh
    calls = {item.prefix for item in own.main.body if isinstance(item, Call)}
    begins = [index for index, item in enumerate(items) if item in calls]
    counts = blocks or divided(BLOCKS, count)
    ends = [0, *(begins[n] for n in accumulate(counts[:-1])), len(items)]
    firsts = [size * (index % chosen.pipeline) for index in range(count)]
    stages = tuple(
        Stage(items[begin:end], (range(first, first + size),), mesh)
        for first, (begin, end) in zip(firsts, pairwise(ends), strict=True)
    )
    decisions = replace(decisions, stages=stages, schedule=chosen.schedule_name)
    return plan_of(decisions, cluster, vocab)
