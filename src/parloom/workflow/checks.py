"""What any file of a workflow has to hold, whatever its format, told with line and column."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from parloom.cost.strict_yaml import Section
from parloom.errors import nearest
from parloom.workflow.model import Edge, Operator, Source, Worker, Workflow


def known(section: Section, key: str, what: str, names: Sequence[str]) -> str:
    """The name at `key`, which is one of `names`."""
    name = section.text(key)
    if name not in names:
        hint = nearest(name, names)
        raise section.error(section.get(key), f"{key}: unknown {what} {name!r}{hint}")
    return name


def source_names(section: Section, operators: tuple[Operator, ...]) -> tuple[str, ...]:
    """The names of sources; no operator has one of them."""
    names = section.named()
    for name in names:
        if any(operator.name == name for operator in operators):
            raise section.error(section.key(name), f"{name!r} is an operator, too; name one anew")
    return names


def latencies_of(
    section: Section, workers: tuple[Worker, ...], parse: Callable[[str], float]
) -> dict[str, float]:
    """Seconds by worker."""
    names = [worker.name for worker in workers]
    found = {}
    for name in section.named():
        if name not in names:
            raise section.error(section.key(name), f"unknown worker {name!r}{nearest(name, names)}")
        found[name] = section.parse(name, parse)
    return found


def edge_of(
    section: Section,
    key: str,
    sources: tuple[Source, ...],
    operators: tuple[Operator, ...],
    parse: Callable[[str], float],
    ratio: float = 1.0,
) -> Edge:
    """Messages from `from` to `to`, whose sizes are at `key`: one, or by the producer's variant."""
    by_name = {operator.name: operator for operator in operators}
    producer = known(section, "from", "source or operator", [*(s.name for s in sources), *by_name])
    consumer = known(section, "to", "operator", list(by_name))
    if not section.is_mapping(key):
        return Edge(producer, consumer, {"": section.parse(key, parse)}, ratio)
    sizes = section.section(key)
    if producer not in by_name:
        raise section.error(sizes.node, f"{key}: {producer!r} is a source and has no variants")
    variants = tuple(variant.name for variant in by_name[producer].variants)
    sizes.check(variants)
    return Edge(producer, consumer, {name: sizes.parse(name, parse) for name in variants}, ratio)


def check_graph(
    root: Section,
    key: str,
    sources: tuple[Source, ...],
    operators: tuple[Operator, ...],
    edges: tuple[Edge, ...],
) -> None:
    """Raise `InputError` unless the edges, listed at `key`, lead from sources to results."""
    sections = root.sections(key)
    pairs: set[tuple[str, str]] = set()
    for section, edge in zip(sections, edges, strict=True):
        pair = edge.producer, edge.consumer
        if pair in pairs:
            message = f"messages from {pair[0]!r} to {pair[1]!r} are given twice"
            raise section.error(section.node, message)
        pairs.add(pair)
    drawn = Workflow("", (), sources, operators, edges, (), {})
    if ring := drawn.cycle():
        last = next(
            section
            for section, edge in reversed(list(zip(sections, edges, strict=True)))
            if (edge.producer, edge.consumer) in pairwise(ring)
        )
        raise last.error(last.node, f"a cycle: {' -> '.join(ring)}; messages only go forward")
    for operator in operators:
        if not drawn.inputs(operator.name):
            own = root.section("operators") if root.has("operators") else root
            message = f"operator {operator.name!r} gets no messages; list them under {key!r}"
            raise own.error(own.key(operator.name), message)
    read = {edge.producer for edge in edges}
    for source in sources:
        if source.name not in read:
            own = root.section("sources")
            raise own.error(own.key(source.name), f"nothing reads the source {source.name!r}")


def check_workers(
    root: Section,
    tiers: tuple[str, ...],
    workers: tuple[Worker, ...],
    operators: tuple[Operator, ...],
) -> None:
    """Raise `InputError` for a tier without workers."""
    for position, tier in enumerate(tiers):
        if not any(worker.tier == position for worker in workers):
            node = root.get("tiers") if root.has("tiers") else root.get("workers")
            raise root.error(node, f"tier {tier!r} has no worker; give it one or leave it out")
