"""A large function as a drawing of its parts, and a drawing of each part: runs of neighbors.

A layered drawing of thousands of nodes takes a browser minutes, and shows nothing.
"""

from collections.abc import Iterator, Sequence
from math import isqrt
from typing import Any

Document = dict[str, Any]
# More nodes than a layered drawing shows.
MOST_NODES = 400


def in_parts(function: Document) -> list[Document]:
    """The function, or what is drawn for it: its parts as one graph, and then each of them."""
    nodes: list[Document] = function["nodes"]
    if len(nodes) <= MOST_NODES:
        return [function]
    runs = list(_runs([node["module"] for node in nodes]))
    names = [_name(function["name"], number, nodes, run) for number, run in enumerate(runs)]
    owner = {index: part for part, run in enumerate(runs) for index in run}
    inner: list[list[list[int]]] = [[] for _ in runs]
    outer: dict[tuple[int, int], None] = {}
    for source, target in function["edges"]:
        own, other = owner[source], owner[target]
        if own == other:
            inner[own].append([source - runs[own].start, target - runs[own].start])
        else:
            outer[own, other] = None
    whole = [_as_one(name, [nodes[i] for i in run]) for name, run in zip(names, runs, strict=True)]
    found = [function | {"nodes": whole, "edges": [list(edge) for edge in outer]}]
    for name, run, edges in zip(names, runs, inner, strict=True):
        part = {"name": name, "nodes": [nodes[i] for i in run], "edges": edges}
        found += in_parts(function | part)
    return found


def _runs(modules: Sequence[str]) -> Iterator[range]:
    """Neighbors, about as many in a run as there are runs; cut where modules have least in common,
    as far as runs stay of about one length.
    """
    count = len(modules)
    length = max(isqrt(count) + 1, -(-4 * count // (3 * MOST_NODES)))
    begin = 0
    while begin < count:
        end = count
        if count - begin > length * 5 // 4:
            ends = range(begin + length * 3 // 4, begin + length * 5 // 4 + 1)
            middle = begin + length
            end = min(
                ends, key=lambda at: (_shared(modules[at - 1], modules[at]), abs(at - middle))
            )
        yield range(begin, end)
        begin = end


def _shared(one: str, other: str) -> int:
    """How many names both paths begin with."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b or not a), len(one.split(".")))


def _name(function: str, number: int, nodes: Sequence[Document], run: range) -> str:
    return f"{function}, part {number + 1}: {_modules([nodes[i] for i in run])}"


def _modules(nodes: Sequence[Document]) -> str:
    """From the first to the last module."""
    named = [node["module"] for node in nodes if node["module"]] or [nodes[0]["key"]]
    return named[0] if named[0] == named[-1] else f"{named[0]} to {named[-1]}"


def _as_one(name: str, nodes: Sequence[Document]) -> Document:
    """The node of a part: its times and shares are those of all in it."""
    return {
        "key": name,
        "module": _modules(nodes),
        "op": f"{len(nodes)} nodes",
        "function": name,
        "source": "",
        "shape": nodes[-1]["shape"],
        "own_s": sum(node["own_s"] for node in nodes),
        "moving_s": sum(node["moving_s"] for node in nodes),
        "share": sum(node["share"] for node in nodes),
        "splits": {},
    }
