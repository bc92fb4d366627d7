"""All forms of a graph at once: where a value can be computed in several ways, each is there.

An operator `parloom.either` takes one of equal values. Such a graph is searched and never runs:
`Forms.form` is the graph in which each of them takes what was chosen, with the rewrites that make
it of the graph that was asked about. What only these read, or others that may be left out, may be
left out.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import pairwise
from operator import and_, or_

from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import Call, Function, Graph, Node, Ref, Value, numbered, rename_node
from parloom.ir.ops.shape import EITHER
from parloom.rewrite.merge import Merge, nodes_of, place_of, product_of

Place = tuple[str, str]
"""A block kind and the key of an operator in it."""
Condition = tuple[Place, int]
"""An operator that takes one of several values, and the operand that it takes."""
Item = Node | Call


@dataclass(frozen=True)
class Form:
    """A graph, and the rewrites that make it; `places` says which operator of the graph with all
    forms each of its operators is.
    """

    factored: Factored
    rewrites: tuple[str, ...] = ()
    places: Mapping[Place, Place] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.factored.graph

    def key_of(self, function: str, key: str) -> str:
        """The key here of an operator in a block of the graph with all forms; other names stay."""
        return self._keys.get((function, key), key)

    @cached_property
    def _keys(self) -> Mapping[Place, str]:
        return {before: key for (_, key), before in self.places.items()}


class Forms:
    """The forms of `asked` with some of these merges. `graph` has all; operators at the places
    `optional` may be left out, those of a pair in `together` take operands in one position.

    A batch tensor comes as its first reader wants it. Where that may be left out, an operator of
    one operand stands for how it comes; one of the readers at `first` is there and takes it so.
    """

    def __init__(self, asked: Graph, found: Sequence[Merge]) -> None:
        self.asked = asked
        groups: dict[str, list[tuple[Merge, list[Node]]]] = {}
        functions = {own.name: own for own in (*asked.functions, asked.main)}
        for merge in found:
            name, keys = place_of(asked, merge)
            groups.setdefault(name, []).append((merge, nodes_of(functions[name], keys)))
        made: dict[str, Function] = {}
        # By the first result of the product.
        self.texts: dict[tuple[str, str], str] = {}
        eithers: list[tuple[str, set[str]]] = []
        for name, own in functions.items():
            some = groups.get(name, [])
            made[name], products = _superposed(own, [nodes for _, nodes in some])
            for (merge, nodes), product in zip(some, products, strict=True):
                self.texts[name, product] = str(merge)
                eithers.append((name, {node.results[0].name for node in nodes}))
        optional = self._optional(made.values())
        first: set[Place] = set()
        for entry in reversed(asked.of_kind("batch")):
            readers = list(_first_readers(made, asked.main.name, entry.value.name, optional))
            if optional.intersection(readers):
                made[asked.main.name] = _with_source(made[asked.main.name], entry.value)
                first.update(readers)
        self.graph, self.first = _with(asked, made), frozenset(first)
        self.together = tuple(
            pair
            for name, results in eithers
            for pair in pairwise((name, own.key) for own in _eithers(made[name], results))
        )
        self.optional = self._optional(made.values())
        self.conditions = {
            (own.name, key): some for own in made.values() for key, some in self._conditions(own)
        }
        self._known: dict[frozenset[tuple[Place, int]], Form] = {}

    def form(self, taken: Mapping[Place, int]) -> Form:
        """The graph in which operators at these places take the operands in these positions, as far
        as they are there.
        """
        key = frozenset(taken.items())
        if key not in self._known:
            self._known[key] = self._form(taken)
        return self._known[key]

    def _form(self, taken: Mapping[Place, int]) -> Form:
        places, made, kept = dict[Place, Place](), {}, set[tuple[str, str]]()
        for own in (*self.graph.functions, self.graph.main):
            chosen = {key: at for (name, key), at in taken.items() if name == own.name}
            optional = {key for name, key in self.optional if name == own.name}
            pairs = tuple(_taken(own, self._ends(own), chosen, optional))
            body = numbered(tuple(item for item, _ in pairs))
            made[own.name] = replace(own, body=body)
            for item, (_, before) in zip(body, pairs, strict=True):
                kept |= {(own.name, value.name) for value in before.results}
                if isinstance(item, Node) and isinstance(before, Node):
                    places[own.name, item.key] = own.name, before.key
        rewrites = tuple(text for product, text in self.texts.items() if product in kept)
        graph = _with(self.graph, made) if rewrites else self.asked
        return Form(factorize(graph), rewrites, places)

    def meet(self, one: Place, other: Place) -> bool:
        """Whether two operators may be there together."""
        mine, its = dict(self.conditions.get(one, ())), dict(self.conditions.get(other, ()))
        return all(mine[either] == its[either] for either in mine.keys() & its.keys())

    def _conditions(self, function: Function) -> Iterator[tuple[str, frozenset[Condition]]]:
        """What is taken in all forms that have an operator, of operators that may be left out."""
        # Those that take together count as one, the first.
        first = {place: place for place in self._takers(function)}
        for one, other in self.together:
            if one in first:
                first[other] = first[one]
        ends = self._ends(function)
        needs: dict[str, frozenset[Condition]] = dict.fromkeys(ends, frozenset())
        for item in reversed(function.body):
            found = [needs[v.name] for v in item.results if v.name in needs]
            own = frozenset.intersection(*found) if found else frozenset()
            place = function.name, item.key if isinstance(item, Node) else ""
            if isinstance(item, Call) or place not in self.optional:
                own = frozenset()
            elif own:
                yield place[1], own
            for at, name in enumerate(item.refs if isinstance(item, Node) else item.args):
                here = own | {(first[place], at)} if place in first else own
                needs[name] = needs[name] & here if name in needs else here

    def _takers(self, function: Function) -> list[Place]:
        return [
            (function.name, item.key)
            for item in function.body
            if isinstance(item, Node) and _takes(item) and len(item.refs) > 1
        ]

    def _optional(self, functions: Iterable[Function]) -> frozenset[Place]:
        return frozenset(
            (own.name, key) for own in functions for key in _optional(own, self._ends(own))
        )

    def _ends(self, function: Function) -> set[str]:
        """The values that are read outside of a function."""
        graph, ends = self.asked, set(function.outputs)
        if function.name == graph.main.name:
            ends |= {*graph.leaving, *(name for _, name in (*graph.outputs, *graph.updates))}
            ends |= {graph.loss} if graph.loss is not None else set()
        return ends


def _with(graph: Graph, made: Mapping[str, Function]) -> Graph:
    functions = tuple(made[own.name] for own in graph.functions)
    return replace(graph, functions=functions, main=made[graph.main.name])


def _superposed(function: Function, groups: Sequence[Sequence[Node]]) -> tuple[Function, list[str]]:
    """The function with products both apart and together, and the first result of each product of
    several.
    """
    instead: dict[str, list[Node]] = {}
    used, products = set(function.specs()), list[str]()
    for nodes in groups:
        names = [node.results[0].name for node in nodes]
        alone, merged = (
            {name: _unused(f"{name}_{how}", used) for name in names}
            for how in ("apart", "together")
        )
        product = product_of(function, nodes)
        assert product is not None, "it was looked at"
        for node, name in zip(nodes, names, strict=True):
            both = (Ref(alone[name]), Ref(merged[name]))
            either = Node(EITHER, both, (), node.results, node.path, 0, node.source)
            instead[node.key] = [rename_node(node, alone), either]
        instead[nodes[0].key].insert(1, rename_node(product, merged))
        products.append(merged[names[0]])
    body = [
        new
        for item in function.body
        for new in (instead.get(item.key, [item]) if isinstance(item, Node) else [item])
    ]
    if not instead:
        return function, products
    return replace(function, body=numbered(tuple(body))), products


def _unused(name: str, used: set[str]) -> str:
    """This name, or with underscores one that is not used yet."""
    while name in used:
        name = f"{name}_"
    used.add(name)
    return name


def _eithers(function: Function, names: Collection[str]) -> list[Node]:
    """The operators that take one of several values, of these names."""
    return [
        item
        for item in function.body
        if isinstance(item, Node) and item.op == EITHER and item.results[0].name in names
    ]


def _optional(function: Function, ends: set[str]) -> Iterator[str]:
    """The keys of operators that are read, but not needed in every form."""
    # What each value needs in every form, as bits of items.
    needs: dict[str, int] = {}
    read: set[str] = set()
    always = 0
    for index, item in enumerate(function.body):
        names = item.refs if isinstance(item, Node) else item.args
        read.update(names)
        each = [needs.get(name, 0) for name in names]
        found = reduce(and_ if _takes(item) else or_, each, each[0]) if each else 0
        found |= 1 << index
        needs |= {value.name: found for value in item.results}
    for item in function.body:
        names = tuple(value.name for value in item.results)
        if isinstance(item, Call) or read.isdisjoint(names) or not ends.isdisjoint(names):
            always |= reduce(or_, (needs[name] for name in names), 0)
    for index, item in enumerate(function.body):
        if isinstance(item, Node) and not always >> index & 1:
            yield item.key


def _takes(item: Item) -> bool:
    return isinstance(item, Node) and item.op == EITHER


def _first_readers(
    functions: Mapping[str, Function], name: str, value: str, optional: Collection[Place]
) -> Iterator[Place]:
    """The first readers of a value of a function, as many as it takes for one of them to be there
    in every form.
    """
    function, chosen = functions[name], set[str]()
    for reader in function.body:
        if isinstance(reader, Call):
            if value in reader.args:
                inner = functions[reader.function].inputs[reader.args.index(value)].name
                yield from _first_readers(functions, reader.function, inner, optional)
                return
            continue
        if value not in reader.refs:
            continue
        yield name, reader.key
        chosen.add(reader.key)
        # What is made in every form by one of those that were chosen.
        made: set[str] = set()
        for item in function.body:
            operands = item.refs if isinstance(item, Node) else item.args
            among = [operand in made for operand in operands]
            own = isinstance(item, Node) and item.key in chosen
            if own or (all(among) if _takes(item) else any(among)):
                made.update(result.name for result in item.results)
                if isinstance(item, Call) or (name, item.key) not in optional:
                    return


def _with_source(function: Function, value: Value) -> Function:
    """The function in which one operator reads an input, and all others its result."""
    used = set(function.specs())
    made = Value(_unused(f"{value.name}_given", used), value.spec)
    source = Node(EITHER, (Ref(value.name),), (), (made,))
    body = tuple(_renamed(item, {value.name: made.name}) for item in function.body)
    return replace(function, body=numbered((source, *body)))


def _renamed(item: Item, names: dict[str, str]) -> Item:
    """An item that reads other values."""
    if isinstance(item, Node):
        return rename_node(item, names)
    return replace(item, args=tuple(names.get(name, name) for name in item.args))


def _taken(
    function: Function, ends: Collection[str], taken: Mapping[str, int], optional: Collection[str]
) -> Iterator[tuple[Item, Item]]:
    """The body in which operators with these keys take the operands in these positions: each item
    with the one that it was.
    """
    needed, names = set(ends), dict[str, str]()
    given = {value.name for value in function.inputs}
    kept: list[Item] = []
    for item in reversed(function.body):
        made = [value.name for value in item.results]
        if isinstance(item, Node) and item.op == EITHER:
            if needed.intersection(made):
                operand = item.refs[taken.get(item.key, 0)]
                needed.add(operand)
                if operand in given:
                    names[made[0]] = operand
                else:
                    names[operand] = made[0]
        elif not (isinstance(item, Node) and item.key in optional) or needed.intersection(made):
            needed.update(item.refs if isinstance(item, Node) else item.args)
            kept.append(item)
    for item in reversed(kept):
        yield _renamed(item, names), item
