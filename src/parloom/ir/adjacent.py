"""Parameters that lie one after the other in one memory, as merged products read them.

An operator that reads several tensors as one (`OpDef.joins`) copies them, unless they are
parameters that the runtime can lay so: of one dtype, trained alike and stored alike, each read as
it lies. Optimizers, clipping and checkpoints see each parameter by itself, as a view of the memory
of all.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from parloom.ir.graph import Call, FlatNode, Graph, Input, Node, iter_refs
from parloom.ir.layout import Layout
from parloom.ir.ops import op_of
from parloom.ir.pcg import PCG, Compute, PCall, PParameter

Groups = tuple[tuple[str, ...], ...]
Place = tuple[str, str]  # the prefix of a call, and the key of an operator in it


def operands_at(node: Node, position: int) -> range:
    """The operands that argument `position` names."""
    if position >= len(node.args):
        return range(0)
    first, count = (
        sum(1 for _ in iter_refs(args))
        for args in (node.args[:position], node.args[position : position + 1])
    )
    return range(first, first + count)


def joined_parameters(
    flat: FlatNode, entries: Mapping[str, Input]
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The arguments of an operator that it may read as one where they lie: different parameters of
    one dtype among the `entries` of the graph, by name.
    """
    for position in op_of(flat.node).joins:
        names = tuple(flat.operands[i] for i in operands_at(flat.node, position))
        found = [e for n in {*names} if (e := entries.get(n)) and e.kind == "parameter"]
        dtypes = {entry.value.spec.dtype for entry in found}
        if len(names) == len(found) > 1 and len(dtypes) == 1:
            yield position, names


@dataclass(frozen=True, slots=True)
class Adjacent:
    """`groups` of parameters (the user's names) that lie one after the other, and the arguments of
    operators that are such groups.
    """

    groups: Groups = ()
    arguments: Mapping[Place, tuple[int, ...]] = field(default_factory=dict)

    def of(self, prefix: str, node: Node) -> tuple[int, ...]:
        """The arguments of an operator in a call."""
        return self.arguments.get((prefix, node.key), ())


def adjacent_parameters(
    graph: Graph,
    parameters: Mapping[str, PParameter],
    read: Callable[[FlatNode, int], Layout | None],
) -> Adjacent:
    """The parameters of `graph` that lie one after the other, where operands are `read` in these
    layouts. Each is in one group: that of the first operator that reads it so.
    """
    alone, entries = _of_one_call(graph), {name: p.input for name, p in parameters.items()}
    groups, arguments = dict[str, tuple[str, ...]](), dict[Place, tuple[int, ...]]()
    for flat in graph.flat():
        for position, names in joined_parameters(flat, entries):
            members = [parameters[name] for name in names]
            places = zip(members, operands_at(flat.node, position), strict=True)
            lie_so = all(member.layout == read(flat, i) for member, i in places)
            # What is stored in chunks is gathered for a call, or for main.
            units = {bool(p.decision.weight.axes) and p.input.value.name in alone for p in members}
            known = {groups.get(name, names) for name in names}
            if lie_so and len(_kinds(members)) == len(units) == 1 and known == {names}:
                groups.update(dict.fromkeys(names, names))
                place = flat.prefix, flat.node.key
                arguments[place] = (*arguments.get(place, ()), position)
    targets = {name: parameters[name].input.target for name in groups}
    found = dict.fromkeys(tuple(targets[name] for name in group) for group in groups.values())
    return Adjacent(tuple(found), arguments)


def _of_one_call(graph: Graph) -> frozenset[str]:
    """The parameters that one call of a block reads, and nothing else."""
    readers: dict[str, list[bool]] = {}
    for item in graph.main.body:
        read = item.args if isinstance(item, Call) else item.refs
        for name in {*read}:
            readers.setdefault(name, []).append(isinstance(item, Call))
    ends = {name for _, name in (*graph.outputs, *graph.updates)}
    return frozenset(n for n, calls in readers.items() if calls == [True] and n not in ends)


def side_by_side(members: Sequence[PParameter], groups: Groups) -> tuple[PParameter, ...]:
    """`members` in their order, but that those of a group follow its first one."""
    own = {member.input.target: member for member in members}
    group_of = {name: group for group in groups for name in group}
    ordered = dict.fromkeys(n for name in own for n in group_of.get(name, (name,)))
    return tuple(own[name] for name in ordered)


def adjacent_problems(pcg: PCG) -> Iterator[str]:
    """What is wrong with the groups of a lowered program, and with who reads them."""
    own = {parameter.input.target: parameter for parameter in pcg.parameters}
    listed = [name for group in pcg.adjacent for name in group]
    for name in dict.fromkeys(listed):
        if name not in own:
            yield f"{name} is no parameter"
            return
        if listed.count(name) > 1:
            yield f"{name} lies in several memories"
    for group in pcg.adjacent:
        if len(_kinds([own[name] for name in group])) > 1:
            yield f"{', '.join(group)} lie in one memory and differ in dtype, training or storage"
    for group in dict.fromkeys(_read_as_one(pcg)):
        if group not in pcg.adjacent:
            yield f"{', '.join(group)} are read as one and lie in several memories"


def _read_as_one(pcg: PCG) -> Iterator[tuple[str, ...]]:
    """The parameters that operators read as one, by the user's names."""
    targets = {p.input.value.name: p.input.target for p in pcg.parameters}
    calls = [item for item in pcg.main.body if isinstance(item, PCall)]
    bodies = [(pcg.main, targets)]
    for call in calls:
        function = pcg.by_name[call.function]
        pairs = zip(function.inputs, call.args, strict=True)
        bodies.append((function, {f.name: targets.get(a.name, a.name) for f, a in pairs}))
    for function, names in bodies:
        for item in (i for i in function.body if isinstance(i, Compute)):
            for position in item.adjacent:
                read = (item.operands[i].name for i in operands_at(item.node, position))
                yield tuple(names.get(name, name) for name in read)


def _kinds(members: Iterable[PParameter]) -> set[object]:
    """Parameters of one memory are of one of these."""
    return {
        (p.input.value.spec.dtype, p.input.trainable, p.decision.weight.axes,
         p.decision.weight.memory, p.decision.weight_sent) for p in members
    }  # fmt: skip
