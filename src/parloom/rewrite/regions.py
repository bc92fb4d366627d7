"""Modules of main that become blocks, so that what they make can be made again.

What a block drops stays until its forward pass is over and is made again all at once, so blocks
should be small parts of a model, and of like size: the outermost modules that make no more than a
share of all activations; where their parts are no blocks, larger ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from parloom.ir.fold import Segment
from parloom.ir.graph import Call, Graph, Node
from parloom.ir.ops import op_of

# A block makes at most the one share of all activations, if its parts can be blocks, and at least
# the other: with eight equal blocks an eighth is there again at a time, while boundaries are few.
LARGEST, SMALLEST = 1 / 8, 1 / 100
# The share of a module that its parts have to make in place of it.
COVERED = 1 / 2
# Regions that make less of all activations together leave the peak where it is.
WORTH = 1 / 20


@dataclass(slots=True)
class _Module:
    """A module of main: the bytes that it makes, whether blocks are in it, its nodes with their
    positions, and its parts.
    """

    path: str
    num_bytes: int = 0
    calls: bool = False
    nodes: list[tuple[int, Node]] = field(default_factory=list)
    parts: "dict[str, _Module]" = field(default_factory=dict)

    def along(self, path: str) -> Iterator["_Module"]:
        """It and its parts down to `path`."""
        yield self
        inside = self
        for name in path.split(".") if path else ():
            below = f"{inside.path}.{name}" if inside.path else name
            inside = inside.parts.setdefault(name, _Module(below))
            yield inside

    @property
    def is_block(self) -> bool:
        """Whether `ir.fold.outline` makes a block of it."""
        if self.calls or not self.path:
            return False
        first, last = self.nodes[0][0], self.nodes[-1][0]
        nodes = tuple(node for _, node in self.nodes)
        together = last - first + 1 == len(nodes)
        return together and Segment(self.path, first, nodes).is_block


def regions(graph: Graph) -> tuple[str, ...]:
    """Paths of modules for `block MODULE`, in execution order; none where they make little."""
    top = _Module("")
    for position, item in enumerate(graph.main.body):
        path = item.path if isinstance(item, Node) else item.prefix
        for module in top.along(path):
            if isinstance(item, Node):
                module.nodes.append((position, item))
                module.num_bytes += _made_bytes(graph, item)
            else:
                module.calls = True
    total = sum(_made_bytes(graph, item) for item in graph.main.body)
    found = [m for m in _regions(top, total) if m.num_bytes >= SMALLEST * total]
    found.sort(key=lambda module: module.nodes[0][0])
    if found:
        # What the last one makes again is there beside all that the others keep, but for what is
        # made behind it.
        behind = graph.main.body[found[-1].nodes[-1][0] + 1 :]
        if sum(_made_bytes(graph, item) for item in behind) < found[-1].num_bytes:
            found.pop()
    together = sum(module.num_bytes for module in found)
    return tuple(m.path for m in found) if together >= max(1, WORTH * total) else ()


def _regions(module: _Module, total: int) -> Iterator[_Module]:
    if module.is_block and module.num_bytes <= LARGEST * total:
        yield module
        return
    found = [region for part in module.parts.values() for region in _regions(part, total)]
    covered = sum(region.num_bytes for region in found)
    if module.is_block and covered < COVERED * module.num_bytes:
        yield module
    else:
        yield from found


def _made_bytes(graph: Graph, item: Node | Call) -> int:
    if isinstance(item, Call):
        return sum(_made_bytes(graph, inner) for inner in graph.by_name[item.function].body)
    return 0 if op_of(item).view else sum(value.spec.num_bytes for value in item.results)
