"""Tensor parallelism: Megatron's column-then-row pairs (Shoeybi et al., 2019), found on the graph
rather than by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from parloom.cost.kernels import ATTENTION
from parloom.ir.layout import Layout
from parloom.ir.ops import Rule
from parloom.ir.ops.experts import NAME as EXPERTS
from parloom.search.spread import Assignment, Unfolded, followed, record

WEIGHT_OPS = frozenset({"linear", "addmm", "mm", "conv1d", "conv2d", "conv3d", EXPERTS})
LOOKUPS = frozenset({"embedding", "parloom.embedding_bag"})
TENSOR = "tensor"
# How many operators one looks ahead, and how many walks a new one is compared with.
FAR, RECENT = 200, 2


@dataclass(frozen=True, slots=True)
class Visit:
    """What a walk met at the operator `offset` after its first one: the operator's rule, its
    readers, and the layouts of operands that were not made on the way.
    """

    offset: int
    rule: Rule
    readers: tuple[int, ...]
    outside: tuple[tuple[int, Layout | None], ...]


class Megatron:
    """Chooses the weight factor that carries the tensor axis to the next product unbroken."""

    def __init__(self, program: Unfolded) -> None:
        self.program = program
        self.walks: dict[object, list[tuple[tuple[Visit, ...], bool]]] = {}

    def __call__(
        self, index: int, assignment: Assignment, layouts: Mapping[str, Layout]
    ) -> Assignment:
        flat, rule = self.program.nodes[index], self.program.rules[index]
        if any(TENSOR in axes for axes in assignment.values()):
            return assignment
        weights = [i for i, name in enumerate(flat.operands) if name in self.program.parameters]
        op = flat.node.op
        if op in LOOKUPS:
            rows = [f for f in rule.shardable if f.startswith("v")]
            return self._with(index, assignment, rows[:1]) or assignment
        if op not in WEIGHT_OPS or not weights:
            return assignment
        own = {f for i in weights for dim in rule.operands[i] for f in dim}
        shared = {
            f
            for i, dims in enumerate(rule.operands)
            if i not in weights and self.program.specs[flat.operands[i]].is_float
            for dim in dims
            for f in dim
        }
        for factor in rule.shardable:
            if factor in own - shared:
                trial = self._with(index, assignment, [factor])
                if trial and self._arrives(index, trial, layouts):
                    return trial
        return assignment

    def _with(self, index: int, assignment: Assignment, factors: list[str]) -> Assignment | None:
        rule, mesh = self.program.rules[index], self.program.mesh
        for factor in factors:
            axes = (*assignment.get(factor, ()), TENSOR)
            if rule.size(factor) % mesh.size(axes) == 0:
                return assignment | {factor: axes}
        return None

    def _arrives(self, start: int, trial: Assignment, layouts: Mapping[str, Layout]) -> bool:
        """Whether every value that carries the axis is read without a gather over it, up to where
        it is contracted (a row-parallel product, a loss over classes), or further than one looks.

        Blocks repeat: a walk that would meet what one before it met ends as that did.
        """
        key = id(self.program.rules[start]), tuple(trial.items())
        walks = self.walks.setdefault(key, [])
        for met, arrived in walks[-RECENT:]:
            if all(self._meets(start, visit, layouts) for visit in met):
                return arrived
        met, arrived = self._walk(start, trial, layouts)
        walks.append((met, arrived))
        return arrived

    def _meets(self, start: int, visit: Visit, layouts: Mapping[str, Layout]) -> bool:
        """Whether a walk from `start` would find at an operator what `visit` found there."""
        index = start + visit.offset
        if index >= len(self.program.nodes) or self.program.rules[index] is not visit.rule:
            return False
        operands = self.program.nodes[index].operands
        return self._readers(index, start) == visit.readers and all(
            layouts.get(operands[position]) == layout for position, layout in visit.outside
        )

    def _readers(self, index: int, start: int) -> tuple[int, ...]:
        """Who reads the results of an operator, counted from `start`."""
        program = self.program
        return tuple(
            reader - start
            for name in program.nodes[index].results
            for reader in program.readers.get(name, ())
        )

    def _walk(
        self, start: int, trial: Assignment, layouts: Mapping[str, Layout]
    ) -> tuple[tuple[Visit, ...], bool]:
        """What a walk from `start` meets, and whether it arrives."""
        program, known = self.program, dict[str, Layout]()
        record(program, start, trial, known)
        met = [Visit(0, program.rules[start], self._readers(start, start), ())]
        frontier = sorted({start + offset for offset in met[0].readers})  # a heap, too
        done: set[int] = set()
        reached = False
        while frontier:
            index = heappop(frontier)
            if index in done:
                continue
            if len(done) == FAR:
                return tuple(met), True
            done.add(index)
            operands = program.nodes[index].operands
            outside = tuple((p, layouts.get(n)) for p, n in enumerate(operands) if n not in known)
            met.append(
                Visit(index - start, program.rules[index], self._readers(index, start), outside)
            )
            seen = {n: known.get(n) or layouts.get(n, Layout()) for n in operands}
            assignment = followed(program, index, seen)
            for position, name in enumerate(operands):
                carried = seen[name].shard(TENSOR)
                wanted = program.operand_layout(index, position, assignment)
                # Other axes may move: context-parallel attention gathers its keys and values.
                if carried is not None and wanted.shard(TENSOR) != carried:
                    return tuple(met), False
            record(program, index, assignment, known)
            for name in program.nodes[index].results:
                if TENSOR in known[name].axes:
                    for reader in program.readers.get(name, ()):
                        heappush(frontier, reader)
                else:
                    reached = True
        return tuple(met), reached


def split_heads(program: Unfolded, assignments: Sequence[Assignment]) -> frozenset[str]:
    """The attentions that the tensor axis splits, by their keys."""
    return frozenset(
        flat.key
        for flat, assignment in zip(program.nodes, assignments, strict=True)
        if flat.node.op == ATTENTION and any(TENSOR in axes for axes in assignment.values())
    )
