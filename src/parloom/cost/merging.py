"""Which operators of a body a fusing compiler, or a hand-fused kernel, runs as one.

Elementwise operators, and where asked reductions of rows and norms, are merged with those that
feed them, as long as nothing else has to run in between: operators are in one kernel where the same
number of other kernels come before them on the longest path. What a merged kernel hands on inside
never reaches memory, and its backward pass makes it again (TorchInductor's partitioner;
Megatron-LM's fused bias, GeLU, dropout and softmax).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from parloom.cost.software import ELEMENTWISE, ROWS
from parloom.ir.moves import ADJOINTS
from parloom.ir.ops import op_of
from parloom.ir.ops.elementwise import OPS as OPERATORS
from parloom.ir.pcg import Compute, Item, Movement, PValue, operands_of, results_of

ROWWISE = ("mean", "sum", "amax", "softmax", "log_softmax", "layer_norm", "rms_norm", "cat",
           "dropout", "native_dropout", "parloom.dropout")  # fmt: skip
MERGEABLE: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        ELEMENTWISE: frozenset(op.name for op in OPERATORS),
        ROWS: frozenset((*(op.name for op in OPERATORS), *ROWWISE)),
    }
)

CROSS_ENTROPY = "cross_entropy_loss"
LOSS = frozenset({CROSS_ENTROPY, "_to_copy"})


@dataclass(slots=True)
class Part:
    """What one operator's part of a merged kernel does not do."""

    inner_operands: frozenset[int] = frozenset()
    inner_results: frozenset[int] = frozenset()
    launches: bool = True


@dataclass(slots=True)
class _Kernel:
    items: list[int] = field(default_factory=list)
    read: set[str] = field(default_factory=set)


def merged(
    items: Sequence[Item], outputs: Sequence[PValue], merges: str, fuses_loss: bool = False
) -> dict[int, Part]:
    """Part of a merged kernel, per index of an operator that is in one with others.

    `merges` and `fuses_loss` are those of a `Software`.
    """
    mergeable = MERGEABLE.get(merges, frozenset()) | (LOSS if fuses_loss else frozenset())
    return _Merging(items, mergeable).run(outputs) if mergeable else {}


class _Merging:
    def __init__(self, items: Sequence[Item], mergeable: frozenset[str]) -> None:
        self.items, self.mergeable = items, mergeable
        self.root: dict[str, str] = {}
        self.depth: dict[str, int] = {}
        self.made: dict[str, int] = {}  # by value, the item whose kernel makes it
        self.kernel: dict[int, _Kernel] = {}

    def of(self, value: PValue) -> str:
        """The value whose memory it is."""
        return self.root.get(value.name, value.name)

    def run(self, outputs: Sequence[PValue]) -> dict[int, Part]:
        for index, item in enumerate(self.items):
            self._place(index, item)
        readers: dict[str, list[int]] = {}
        for index, item in enumerate(self.items):
            if not _free(item):
                for value in operands_of(item):
                    readers.setdefault(self.of(value), []).append(index)
        leave = {self.of(value) for value in outputs}
        return {
            index: self._part(index, kernel, readers, leave)
            for index, kernel in self.kernel.items()
            if len(kernel.items) > 1
        }

    def _place(self, index: int, item: Item) -> None:
        if _free(item):
            source = self.of(operands_of(item)[0])
            self.root.update((value.name, source) for value in results_of(item))
            return
        sources = [self.of(value) for value in operands_of(item)]
        depth = max((self.depth.get(name, 0) for name in sources), default=0)
        names = [value.name for value in results_of(item)]
        if not (isinstance(item, Compute) and item.node.op in self.mergeable):
            self.depth.update((name, depth + 1) for name in names)
            return
        own = self.kernel[index] = _Kernel([index])
        for name in sources:
            made = self.made.get(name)
            if made is not None and self.depth[name] == depth:
                own = self._join(self.kernel[made], own)
        self.depth.update((name, depth) for name in names)
        self.made.update((name, index) for name in names)

    def _join(self, one: _Kernel, other: _Kernel) -> _Kernel:
        if one is not other:
            one.items += other.items
            for index in other.items:
                self.kernel[index] = one
        return one

    def _part(
        self, index: int, kernel: _Kernel, readers: dict[str, list[int]], leave: set[str]
    ) -> Part:
        inside = set(kernel.items)
        inner = set()
        for position, value in enumerate(operands_of(self.items[index])):
            name = self.of(value)
            if self.made.get(name) in inside or name in kernel.read:
                inner.add(position)
            kernel.read.add(name)
        kept = {
            position
            for position, value in enumerate(results_of(self.items[index]))
            if value.name not in leave and inside.issuperset(readers.get(value.name, ()))
        }
        return Part(frozenset(inner), frozenset(kept), index == min(inside))


def _free(item: Item) -> bool:
    """Whether it makes no memory of its own."""
    if isinstance(item, Movement):
        return ADJOINTS[item.step.row].forward == "identity"
    return isinstance(item, Compute) and op_of(item.node).view
