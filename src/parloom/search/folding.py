"""The program of a graph: its operators folded by block kind, flows counted, weights gathered."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

from parloom.ir.adjacent import joined_parameters
from parloom.ir.factors import Factored
from parloom.ir.graph import Call, FlatNode, Graph
from parloom.ir.ops import op_of
from parloom.ir.ops.shape import EITHER
from parloom.ir.samples import SAMPLED
from parloom.ir.step_program import bucket_bytes
from parloom.rewrite.forms import Forms
from parloom.search.pinned import NONE, Pinned
from parloom.search.program import (
    WIDTH,
    Block,
    CallKey,
    Flags,
    Flow,
    Operator,
    Program,
    Reader,
    Weight,
)


def last_reduced(graph: Graph) -> frozenset[str]:
    """The weights whose gradients arrive last: the first that is read, and those after it that fit
    half a bucket with it (a last bucket is half full as a rule).
    """
    trained = {e.value.name: e.value.spec for e in graph.of_kind("parameter") if e.trainable}
    total = sum(spec.num_elements for spec in trained.values())
    room, found = bucket_bytes(total * WIDTH) / WIDTH / 2, set[str]()
    for flat in graph.flat():
        for name in flat.operands:
            if name in trained and name not in found:
                room -= trained[name].num_elements
                if found and room < 0:
                    return frozenset(found)
                found.add(name)
    return frozenset(found)


def reached(graph: Graph) -> frozenset[str]:
    """The values of which there are gradients if they flow: those that the loss, or what leaves a
    stage, depends on.
    """
    ends = (*graph.leaving, *((graph.loss,) if graph.loss is not None else ()))
    found = {graph.flat_ids[name] for name in ends}
    for flat in reversed(tuple(graph.flat())):
        op = op_of(flat.node)
        results = (n for i, n in enumerate(flat.results) if i not in op.detached)
        if op.differentiable and found.intersection(results):
            found.update(flat.operands)
    return frozenset(found)


def program_of(
    graph: Graph,
    factored: Factored,
    pinned: Pinned = NONE,
    *,
    apart: bool = False,
    forms: Forms | None = None,
) -> Program:
    """Fold the unfolded program of `graph`, which may be that of all `forms`, into counted
    operators, flows and weights.

    With `apart`, every call of an operator is one of its own.
    """
    return _Folding(factored, pinned, apart, forms).run()


class _Folding:
    """One walk over the unfolded program."""

    def __init__(
        self, factored: Factored, pinned: Pinned, apart: bool, forms: Forms | None
    ) -> None:
        self.graph = graph = factored.graph
        self.factored, self.pinned, self.apart, self.forms = factored, pinned, apart, forms
        self.inputs = {entry.value.name: entry for entry in graph.inputs}
        self.index: dict[str, int] = {}
        self.made: dict[str, tuple[int, int]] = {}
        self.maker: dict[str, CallKey] = {}
        self.specs = {entry.value.name: entry.value.spec for entry in graph.inputs}
        # What another stage made is an entry of the batch that may want a gradient.
        self.flowing = {e.value.name for e in graph.inputs if e.trainable}
        self.fixed = {e.value.name for e in graph.inputs if e.kind not in SAMPLED}
        self.derived = {e.value.name for e in graph.of_kind("parameter")}
        self.first: dict[str, Reader] = {}
        self.readers: dict[str, set[tuple[str, str, int]]] = {}
        self.templates: list[FlatNode] = []

    def run(self) -> Program:
        templates = self.templates
        counts: list[dict[Flags, int]] = []
        reads: dict[tuple[CallKey, str], list[Reader]] = {}
        runs: dict[CallKey, list[tuple[int, Flags]]] = {}
        kinds: dict[tuple[str, str], int] = {}
        for flat in self.graph.flat():
            key = flat.prefix if self.apart else flat.function, flat.node.key
            flags = tuple(name in self.flowing for name in flat.operands)
            self._define(flat, flags)
            for position, name in enumerate(flat.operands):
                self.readers.setdefault(name, set()).add((*key, position))
            at = self.index[flat.key] = kinds.setdefault(key, len(templates))
            if at == len(templates):
                templates.append(flat)
                counts.append({})
            counts[at][flags] = counts[at].get(flags, 0) + 1
            self.made |= {name: (at, position) for position, name in enumerate(flat.results)}
            call = flat.function, flat.prefix
            self.maker |= dict.fromkeys(flat.results, call)
            runs.setdefault(call, []).append((at, flags))
            for position, name in enumerate(flat.operands):
                reader = Reader(at, position)
                self.first.setdefault(name, reader)
                reads.setdefault((call, name), []).append(reader)
        weights, units = _weights_of(
            self.graph, self.pinned, reads, partial(are_apart, templates, self.forms)
        )
        shared = {t: i for i, own in enumerate(weights) if own.is_shared for t in own.targets}
        operators = tuple(
            self._operator(flat, found) for flat, found in zip(templates, counts, strict=True)
        )
        flows, by_call = self._flows(reads, shared)
        blocks = tuple(_blocks_of(self.graph, runs, by_call))
        return Program(
            self.graph,
            self.factored,
            operators,
            flows,
            weights,
            blocks,
            self.index,
            self.pinned,
            units,
            self.forms,
        )

    def _define(self, flat: FlatNode, flags: Flags) -> None:
        op = op_of(flat.node)
        differentiable = op.differentiable and any(flags)
        if self.fixed.issuperset(flat.operands):
            self.fixed.update(flat.results)
            if differentiable and self.derived.intersection(flat.operands):
                self.derived.update(flat.results)
        for position, (name, value) in enumerate(zip(flat.results, flat.node.results, strict=True)):
            self.specs[name] = value.spec
            if differentiable and value.spec.is_float and position not in op.detached:
                self.flowing.add(name)

    def _operator(self, flat: FlatNode, counts: dict[Flags, int]) -> Operator:
        flowing = [name for name in flat.operands if name in self.flowing]
        derived = bool(flowing) and self.derived.issuperset(flat.results)
        several = {
            name
            for name in self.derived.intersection(flowing)
            if name not in self.inputs or has_others(flat, self.readers[name], self.forms)
        }
        return Operator(
            flat.function,
            flat.node,
            self.factored.rule(flat.function, flat.node),
            tuple(self.specs[name] for name in flat.operands),
            tuple(sorted(counts.items())),
            derived,
            bool(flowing) and not derived and several.issuperset(flowing),
            bool(self.forms and (flat.function, flat.node.key) in self.forms.optional),
            tuple(position for position, _ in joined_parameters(flat, self.inputs)),
        )

    def _flows(
        self, reads: dict[tuple[CallKey, str], list[Reader]], shared: Mapping[str, int]
    ) -> tuple[tuple[Flow, ...], dict[CallKey, list[int]]]:
        """All flows, and those of each call."""
        ids, top = self.graph.flat_ids, (self.graph.main.name, "")
        ends = dict.fromkeys(ids[name] for _, name in self.graph.buffer_updates)
        for name in ends:
            reads.setdefault((top, name), [])
        found, by_call = dict[Flow, int](), dict[CallKey, list[int]]()
        counts: list[int] = []
        for (call, name), readers in reads.items():
            flow = self._flow(name, tuple(dict.fromkeys(readers)), shared)
            if flow is None:
                continue
            whole, crosses = call == top and name in ends, self.maker.get(name, call) != call
            index = found.setdefault(replace(flow, whole=whole, crosses=crosses), len(found))
            if index == len(counts):
                counts.append(0)
            counts[index] += 1
            by_call.setdefault(call, []).append(index)
        flows = (replace(flow, count=count) for flow, count in zip(found, counts, strict=True))
        return tuple(flows), by_call

    def _as_made(self, name: str, readers: Sequence[Reader]) -> tuple[Reader, ...]:
        """The readers that a batch tensor comes for, where an operator stands for it."""
        maker = self.templates[self.made[name][0]].node
        if self.forms is None or maker.op != EITHER or len(maker.refs) > 1:
            return ()
        flats = ((reader, self.templates[reader.operator]) for reader in readers)
        return tuple(r for r, f in flats if (f.function, f.node.key) in self.forms.first)

    def _flow(
        self, name: str, readers: tuple[Reader, ...], shared: Mapping[str, int]
    ) -> Flow | None:
        """How `readers` get a value; None where there is nothing to choose."""
        spec, flows = self.specs[name], name in self.flowing
        if not spec.shape:
            return None
        if name in self.made:
            as_made = self._as_made(name, readers)
            return Flow(spec, flows, readers, 1, *self.made[name], as_made=as_made)
        entry = self.inputs[name]
        if entry.kind == "parameter":
            weight = shared.get(entry.target)
            return None if weight is None else Flow(spec, flows, readers, 1, weight=weight)
        like = self.first.get(name) if entry.kind in SAMPLED else None
        return Flow(spec, flows, readers, 1, like=like)


def has_others(
    flat: FlatNode, readers: Collection[tuple[str, str, int]], forms: Forms | None
) -> bool:
    """Whether a value has other `readers` that may be there together with this one."""
    if forms is None:
        return len(readers) > 1
    own = flat.function, flat.node.key
    places = [(function, key) for function, key, _ in readers]
    others = (other for other in places if other != own)
    return places.count(own) > 1 or any(forms.meet(own, other) for other in others)


def are_apart(
    templates: Sequence[FlatNode], forms: Forms | None, readers: Sequence[Reader]
) -> bool:
    """Whether a weight has several readers, of which one is there in every form."""
    if forms is None or len(readers) < 2:
        return False
    flats = [templates[reader.operator] for reader in readers]
    places = [(flat.function, flat.node.key) for flat in flats]
    return not any(forms.meet(*pair) for pair in combinations(places, 2)) and (
        forms.one_is_there(places)
    )


def _weights_of(
    graph: Graph,
    pinned: Pinned,
    reads: Mapping[tuple[CallKey, str], Sequence[Reader]],
    are_apart: Callable[[Sequence[Reader]], bool],
) -> tuple[tuple[Weight, ...], int]:
    """All weights, equal ones together, and how many block calls read weights of their own."""
    found: dict[Weight, list[str]] = {}
    places: dict[str, list[CallKey]] = {}
    readers: dict[str, list[Reader]] = {}
    for (call, name), some in reads.items():
        places.setdefault(name, []).append(call)
        readers.setdefault(name, []).extend(some)
    entries = graph.of_kind("parameter")
    unit: dict[str, CallKey | None] = {}
    elements: Counter[CallKey | None] = Counter()
    for entry in entries:
        name, where = entry.value.name, places.get(entry.value.name, [])
        block = len(where) == 1 and where[0][0] != graph.main.name
        unit[name] = where[0] if block else None
        elements[unit[name]] += entry.value.spec.num_elements
    last, trained = last_reduced(graph), reached(graph)
    for entry in entries:
        name = entry.value.name
        alike = Weight(
            entry.value.spec,
            entry.trainable,
            tuple(dict.fromkeys(readers.get(name, ()))),
            targets=(),
            block=unit[name] is not None,
            unit_elements=elements[unit[name]],
            last=name in last,
            pins=pinned.parameters.get(entry.target, ()),
            reached=name in trained,
            apart=are_apart(tuple(dict.fromkeys(readers.get(name, ())))),
        )
        found.setdefault(alike, []).append(entry.target)
    weights = (replace(weight, targets=tuple(targets)) for weight, targets in found.items())
    return tuple(weights), max(1, len(elements) - (None in elements))


def _blocks_of(
    graph: Graph, runs: dict[CallKey, list[tuple[int, Flags]]], flows: dict[CallKey, list[int]]
) -> Iterable[Block]:
    """The calls of main whose blocks call no others, those that cost the same together."""
    callers = {f.name for f in graph.functions if any(isinstance(i, Call) for i in f.body)}
    alike: dict[Block, list[str]] = {}
    for item in graph.main.body:
        if isinstance(item, Call) and item.function not in callers:
            call = item.function, item.prefix
            block = Block(item.function, (), tuple(flows.get(call, ())), tuple(runs.get(call, ())))
            alike.setdefault(block, []).append(item.prefix)
    return (replace(block, prefixes=tuple(found)) for block, found in alike.items())
