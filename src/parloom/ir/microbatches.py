"""Microbatches in a graph, under both batch semantics.

Global: the program is that of the whole batch, and microbatches are an axis in time. An operator
follows its operands: what is computed from a microbatch's samples is cut in time. A value that no
sample went into (positions, class tokens, masks and biases that are expanded over the batch) is
cut, too, where every reader takes one microbatch's part of it: no rank then makes it for all
samples in every microbatch.

By microbatch: the program is that of one of N microbatches, captured with its samples, whose loss
counts 1/N. So the sum over microbatches is the mean of their losses, and whatever couples samples
or counts them (batch norm, auxiliary losses, capacities, token counts) does so in a microbatch.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import isqrt

from parloom.ir.factors import Factored, follow
from parloom.ir.graph import FlatNode, Graph, Input, Node, Ref, Value
from parloom.ir.layout import Layout, Shard
from parloom.ir.mesh import Mesh, MeshAxis
from parloom.ir.ops import Rule
from parloom.ir.ops.rule import HALO, LOCAL
from parloom.ir.pcg import TIME

Place = tuple[str, str]  # prefix of the block call, key of the node
Shards = tuple[Shard | None, ...]
Divides = Callable[[FlatNode, str], bool]
"""Whether a factor of an operator divides into microbatches beside the axes that it has."""


def expanded(
    factored: Factored, inputs: Mapping[str, Shard], steps: int, divides: Divides
) -> Mapping[Place, str]:
    """The factor that is cut in time of each operator that no sample went into.

    `inputs` are the shards over time of main's inputs.
    """
    graph, mesh = factored.graph, Mesh((MeshAxis(TIME, (), steps),))

    # Operators of a block kind share their rules, so one call answers for all.
    @cache
    def followed(rule_id: int, lying: tuple[Shard | None, ...]) -> tuple[str, ...]:
        return tuple(follow(rules[rule_id], tuple(map(_layout, lying)), mesh))

    @cache
    def shards(rule_id: int, factors: tuple[str, ...]) -> tuple[Shards, Shards]:
        """Of operands, and of results."""
        rule, over = rules[rule_id], _over(factors)
        operands = (rule.operand_layout(i, over, mesh) for i in range(len(rule.operands)))
        results = (rule.result_layout(i, over, mesh) for i in range(len(rule.results)))
        return tuple(v.shard(TIME) for v in operands), tuple(v.shard(TIME) for v in results)

    rules: dict[int, Rule] = {}
    carried = dict(inputs)
    factors: dict[Place, tuple[str, ...]] = {}
    nodes = tuple(graph.flat())
    for flat in nodes:
        rule = factored.rule(flat.function, flat.node)
        rules[id(rule)] = rule
        found = followed(id(rule), tuple(carried.get(name) for name in flat.operands))
        factors[flat.prefix, flat.node.key] = found
        made = zip(flat.results, shards(id(rule), found)[1], strict=True) if found else ()
        carried.update((name, shard) for name, shard in made if shard is not None)
    ends = {name for _, name in (*graph.outputs, *graph.updates)} | {graph.loss}
    wanted: dict[str, set[Shard | None]] = {graph.flat_ids[n]: {None} for n in ends if n}
    cut: dict[Place, str] = {}
    for flat in reversed(nodes):
        rule, place = factored.rule(flat.function, flat.node), (flat.prefix, flat.node.key)
        if not carried.keys() & set(flat.operands):
            factor = _as_read(rule, flat, wanted, mesh)
            if factor is not None and divides(flat, factor):
                cut[place], factors[place] = factor, (factor,)
        for name, shard in zip(flat.operands, shards(id(rule), factors[place])[0], strict=True):
            wanted.setdefault(name, set()).add(shard)
    return cut


def of_microbatch(graph: Graph, dims: Mapping[str, int], count: int) -> Graph:
    """A program captured with one microbatch's samples, as one of `count`: its loss is its share of
    the mean. `dims` are the dims of samples by input.
    """
    inputs = tuple(
        replace(i, samples=dims.get(i.target)) if i.kind == "batch" else i for i in graph.inputs
    )
    main, loss = graph.main, graph.loss
    if loss is None:
        return replace(graph, inputs=inputs)
    specs = main.specs()
    names = (f"{loss}_share{n or ''}" for n in itertools.count())
    share = Value(next(name for name in names if name not in specs), specs[loss])
    same = [i.index for i in main.body if isinstance(i, Node) and (i.path, i.op) == ("", "div")]
    node = Node("div", (Ref(loss), count), (), (share,), index=max(same, default=-1) + 1)
    outputs = tuple(share.name if name == loss else name for name in main.outputs)
    main = replace(main, body=(*main.body, node), outputs=outputs)
    return replace(graph, inputs=inputs, main=main, loss=share.name)


def with_whole_batch(graph: Graph, count: int) -> Graph:
    """`graph` with inputs of the shapes that all `count` microbatches have together, for those who
    look at inputs alone.
    """
    return replace(graph, inputs=tuple(whole_input(entry, count) for entry in graph.inputs))


def whole_input(entry: Input, count: int) -> Input:
    """An input as all `count` microbatches have it together."""
    if entry.samples is None:
        return entry
    spec = entry.value.spec
    shape = tuple(n * count if d == entry.samples else n for d, n in enumerate(spec.shape))
    return replace(entry, value=replace(entry.value, spec=replace(spec, shape=shape)))


def _as_read(
    rule: Rule, flat: FlatNode, wanted: Mapping[str, set[Shard | None]], mesh: Mesh
) -> str | None:
    """The factor that cuts the results as all their readers want them, if there is one."""
    read = [(i, wanted[name]) for i, name in enumerate(flat.results) if name in wanted]
    if not read or any(len(shards) > 1 for _, shards in read):
        return None
    index, (shard,) = read[0][0], read[0][1]
    if shard is None:
        return None
    mirrored = Rule(rule.sizes, (rule.results[index],), (), rule.kinds)
    found = tuple(follow(mirrored, (Layout((shard,)),), mesh))
    if len(found) != 1 or rule.kind(found[0]) in (LOCAL, HALO):
        return None
    same = all({_result(rule, i, found, mesh).shard(TIME)} == shards for i, shards in read)
    return found[0] if same else None


def _layout(shard: Shard | None) -> Layout:
    return Layout() if shard is None else Layout((shard,))


def _over(factors: Iterable[str]) -> dict[str, tuple[str, ...]]:
    return {factor: (TIME,) for factor in factors}


def _result(rule: Rule, index: int, factors: tuple[str, ...], mesh: Mesh) -> Layout:
    return rule.result_layout(index, _over(factors), mesh)


def nearest_counts(asked: int, counts: Sequence[int]) -> str:
    """The counts next to `asked`, as advice."""
    near = ([c for c in counts if c < asked][-1:], [c for c in counts if c > asked][:1])
    return f"the nearest legal counts: {', '.join(str(c) for found in near for c in found)}"


def divisors(number: int) -> tuple[int, ...]:
    """The divisors of `number` >= 1, ascending."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return tuple(dict.fromkeys((*small, *(number // d for d in reversed(small)))))
