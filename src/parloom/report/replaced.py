"""What rewrites took the place of, by the names of the model as it was written."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from parloom.ir.graph import FlatNode, Graph
from parloom.rewrite.horizontal import is_fusion
from parloom.rewrite.merge import RULES
from parloom.rewrite.rewrites import before_takes, parse_rewrite, rewritten
from parloom.rewrite.take import Take


@dataclass(frozen=True, slots=True)
class Replaced:
    """An operator of the model that the plan's program has not: a sentence, and the operators that
    are there instead, those that make its value first.
    """

    text: str
    into: tuple[str, ...]


def replaced(graph: Graph, rewrites: Sequence[str], name: str) -> list[Replaced]:
    """Operators of `graph` that rewrites took the place of and that `name` names: by their keys, by
    their modules, values that they make, or parameters that they read.
    """
    parsed = list(map(parse_rewrite, rewrites))
    takes = {at: own for at, own in enumerate(parsed) if isinstance(own, Take)}
    if not takes:
        return []
    before = before_takes(graph, rewrites)
    after = tuple(rewritten(graph, rewrites[: max(takes) + 1]).flat())
    sources = set(map(_source, takes.values()))
    kept = {
        (own.prefix, value.name)
        for own in after
        if own.node.source not in sources
        for value in own.node.results
    }
    gone = [
        own
        for own in before.flat()
        if kept.isdisjoint((own.prefix, value.name) for value in own.node.results)
    ]
    read = {entry.value.name for entry in before.inputs if name in (entry.target, *entry.aliases)}
    found = list[Replaced]()
    for take in takes.values():
        others = [own for own in takes.values() if own is not take]
        its = [own for own in gone if not any(_is_taken(own, other) for other in others)]
        found += _replaced(take, its, after, name, read)
    return list(dict.fromkeys(found))


def _replaced(
    take: Take,
    gone: Sequence[FlatNode],
    after: Sequence[FlatNode],
    name: str,
    read: Collection[str],
) -> Iterator[Replaced]:
    """What a take is in the place of, of what is gone and is named, or reads what is named."""
    makers = {result: own for own in gone for result in own.results}
    for last in (own for own in gone if _is_taken(own, take)):
        beside = [own for own in gone if own.prefix == last.prefix and _makes(own, take)]
        into = [
            own
            for own in after
            if (own.prefix, own.node.source) == (last.prefix, _source(take))
        ]  # fmt: skip
        into.sort(key=lambda own: not _makes(own, take))
        left, seen = [last], dict[str, FlatNode]()
        while left:
            own = left.pop()
            seen[own.key] = own
            left += [makers[one] for one in own.operands if one in makers]
        for own in seen.values():
            keys = (own.key, own.key.rpartition("#")[0], own.key.partition(":")[0])
            values = (value.name for value in own.node.results)
            if name in (*keys, *values) or not set(own.operands).isdisjoint(read):
                yield _said(own, beside, take, tuple(one.key for one in into))


def _source(take: Take) -> str:
    """What the operators that a take adds have as the place that they come from."""
    return "+".join(take.rules)


def _is_taken(own: FlatNode, take: Take) -> bool:
    return own.function == take.function and _makes(own, take)


def _makes(own: FlatNode, take: Take) -> bool:
    names = {name for _, name in take.taken}
    return any(value.name in names for value in own.node.results)


def _said(own: FlatNode, beside: Sequence[FlatNode], take: Take, into: tuple[str, ...]) -> Replaced:
    others = ", ".join(one.key for one in beside if one is not own)
    rules, there = ", ".join(take.rules), f"the plan's {', '.join(into)}"
    if own not in beside:
        text = f"the model's {own.key} is computed with {others}, made of it, by {rules}: {there}"
    elif others and all(rule in RULES or is_fusion(rule) for rule in take.rules):
        text = f"the model's {own.key} is merged with {others} by {rules} into {there}"
    else:
        text = f"the model's {own.key} is computed in another way, by {rules}: {there}"
    return Replaced(text, into)
