"""The published instance of JellyBean (VLDB 2023) as numbers: a format whose units are fixed.

Rates are requests per second, `kb` KiB of a message, prices dollars per hour and, of links, per
GiB, latencies milliseconds, accuracies percent. Tier 1 is the edge, where the sources are.
"""

from collections.abc import Callable
from pathlib import Path

from parloom.cost import units
from parloom.cost.strict_yaml import Section
from parloom.errors import InputError, nearest
from parloom.workflow.checks import (
    check_graph,
    check_workers,
    edge_of,
    latencies_of,
    source_names,
)
from parloom.workflow.model import (
    Accuracy,
    Edge,
    Link,
    Operator,
    Positions,
    Rule,
    Source,
    Variant,
    Worker,
    Workflow,
)

UNITS = "$/h, $/GiB, KiB, ms, requests/s and percent, as the format of published numbers has them"


def is_published(root: Section) -> bool:
    """Whether a file has this format."""
    return root.has("latency_ms")


def read_published(root: Section) -> Workflow:
    """The workflow of a file in this format; raises `InputError` with file:line:column."""
    root.check(("sources", "edges", "workers", "links", "latency_ms", "accuracy"))
    workers, tiers = _workers(root.section("workers"))
    operators = _operators(root.section("latency_ms"), workers)
    section = root.section("sources")
    sources = []
    for name in source_names(section, operators):
        own = section.section(name)
        own.check(("rate",))
        sources.append(Source(name, own.parse("rate", _in("/s", units.parse_requests))))
    edges = tuple(_edge(s, tuple(sources), operators) for s in root.sections("edges"))
    check_graph(root, "edges", tuple(sources), operators, edges)
    check_workers(root, tiers, workers, operators)
    accuracy, floor = _accuracy(root.section("accuracy"), operators)
    positions = Positions(floor, section.at(section.key(section.names()[0])))
    links = _links(root.section("links"), len(tiers))
    name = Path(root.where).stem
    graph = tuple(sources), operators, edges, workers, links, accuracy
    return Workflow(name, tiers, *graph, positions=positions, assumed=(f"{root.where}: {UNITS}",))


def _in(unit: str, parse: Callable[[str], float]) -> Callable[[str], float]:
    """A parser of numbers that are in one unit, with the ranges that hold where it is written."""

    def parsed(text: str) -> float:
        try:
            float(text)
        except ValueError:
            raise InputError(f"expected a number (of {unit}), got {text!r}") from None
        return parse(f"{text}{unit}")

    return parsed


PERCENT = _in("%", units.parse_percent)


def _workers(section: Section) -> tuple[tuple[Worker, ...], tuple[str, ...]]:
    workers = []
    for name in section.named():
        own = section.section(name)
        own.check(("price", "tier"))
        workers.append(
            Worker(
                name,
                own.integer("tier") - 1,
                own.parse("price", _in("USD/h", units.parse_usd_per_h)),
            )
        )
    last = max(worker.tier for worker in workers)
    if last > 9:
        raise section.error(section.node, f"tier {last + 1}: at most 10 are expected")
    return tuple(workers), tuple(f"tier {number + 1}" for number in range(last + 1))


def _operators(section: Section, workers: tuple[Worker, ...]) -> tuple[Operator, ...]:
    """Keys are `operator/variant`."""
    found: dict[str, list[Variant]] = {}
    for key in section.named():
        operator, slash, variant = key.partition("/")
        if not (operator and slash and variant):
            raise section.error(section.key(key), f"expected operator/variant, got {key!r}")
        milliseconds = _in("ms", units.parse_service_s)
        latencies = latencies_of(section.section(key), workers, milliseconds)
        found.setdefault(operator, []).append(Variant(variant, latencies))
    return tuple(Operator(name, tuple(variants)) for name, variants in found.items())


def _edge(section: Section, sources: tuple[Source, ...], operators: tuple[Operator, ...]) -> Edge:
    section.check(("from", "to", "kb"))
    return edge_of(section, "kb", sources, operators, _in("KiB", units.parse_mean_bytes))


def _links(section: Section, num_tiers: int) -> dict[tuple[int, int], Link]:
    section.check(("up", "down"))
    price = _in("USD/GiB", units.parse_usd_per_byte)
    up, down = (Link(section.parse(key, price)) for key in ("up", "down"))
    tiers = range(num_tiers)
    return {(a, b): up if a < b else down for a in tiers for b in tiers if a != b}


def _accuracy(section: Section, operators: tuple[Operator, ...]) -> tuple[Accuracy, str]:
    """A table of two operators: rows are variants of the first, columns of the second.

    Which two they are follows from the variants that are named; a column may be the first word of
    a variant's name.
    """
    rows = tuple(name for name in section.named() if name != "floor")
    floor = section.parse("floor", PERCENT)
    at = section.at(section.get("floor"))
    first = _named(rows[0], operators) if rows else None
    if first is None:
        raise section.error(section.node, "accuracy: expected rows by variant of an operator")
    table: dict[tuple[str, ...], float] = {}
    second: Operator | None = None
    for row in rows:
        variants = [variant.name for variant in first.variants]
        if row not in variants:
            message = f"unknown variant {row!r} of {first.name!r}{nearest(row, variants)}"
            raise section.error(section.key(row), message)
        cells = section.section(row)
        for cell in cells.named():
            others = [second] if second else [o for o in operators if o is not first]
            pairs = [(o, v) for o in others for v in o.variants if cell in _names(v.name)]
            if len(pairs) != 1:
                raise cells.error(cells.key(cell), f"{cell!r} names no single variant")
            second = pairs[0][0]
            table[row, pairs[0][1].name] = cells.parse(cell, PERCENT)
    assert second is not None
    return Accuracy(Rule.TABLE, floor, (first.name, second.name), table), at


def _named(variant: str, operators: tuple[Operator, ...]) -> Operator | None:
    return next((o for o in operators if any(v.name == variant for v in o.variants)), None)


def _names(variant: str) -> set[str]:
    return {variant, *variant.split("-")}
