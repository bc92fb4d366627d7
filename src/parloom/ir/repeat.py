"""Graphs with another number of equal blocks, and graphs cut into pipeline stages between blocks.

A model of 96 layers is captured with two, and repeated: every call of the block that is added has
parameters of its own, named as the module list would name them.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from parloom.errors import InputError
from parloom.ir.graph import Call, Function, Graph, Input, Node, Value, rename_args

ENTRY = re.compile(r"(.*?)(\d+)$")


@dataclass(frozen=True, slots=True)
class Repeated:
    """The calls of a block in a row: their positions in main, the name of their module list, and
    the first call's place in it.
    """

    function: str
    first: int
    last: int
    stem: str
    begin: int = 0


def repeated(graph: Graph, count: int) -> Graph:
    """`graph` with `count` calls in place of its run of calls of one block.

    Raises `InputError` where there is no run of at least two calls, each of which reads what the
    one before it returns.
    """
    run = run_of(graph)
    if count < 1:
        raise InputError(f"{count} blocks: at least one is needed")
    calls = [c for c in graph.main.body[run.first : run.last + 1] if isinstance(c, Call)]
    template, parameters = calls[1], {i.value.name: i for i in graph.inputs}
    mine = f"{template.prefix}."
    own = [a for a in template.args if a in parameters and parameters[a].target.startswith(mine)]
    made, inputs = list(calls[:count]), list(graph.inputs)
    taken = set(graph.main.specs())
    last = max(inputs.index(parameters[a]) for a in own) + 1 if own else len(inputs)
    for number in range(len(calls), count):
        prefix = f"{run.stem}{run.begin + number}"
        named = _Named(template.prefix, prefix, taken)
        names = {a: named(a) for a in own}
        names |= dict(zip(_results(calls[0]), _results(made[-1]), strict=True))
        added = [_renamed(parameters[a], names[a], mine, f"{prefix}.") for a in own]
        inputs[last:last] = added
        last += len(added)
        results = tuple(replace(v, name=named(v.name)) for v in template.results)
        args = tuple(names.get(a, a) for a in template.args)
        made.append(replace(template, prefix=prefix, args=args, results=results))
    gone = {a for c in calls[count:] for a in c.args if a in parameters} - {
        a for c in made for a in c.args
    }
    after = dict(zip(_results(calls[-1]), _results(made[-1]), strict=True))
    tail = tuple(_reading(item, after) for item in graph.main.body[run.last + 1 :])
    entries = tuple(i for i in inputs if i.value.name not in gone)
    main = Function(
        graph.main.name,
        tuple(i.value for i in entries),
        (*graph.main.body[: run.first], *made, *tail),
        tuple(after.get(name, name) for name in graph.main.outputs),
    )
    return replace(
        graph,
        main=main,
        inputs=entries,
        loss=after.get(graph.loss, graph.loss) if graph.loss else None,
        outputs=tuple((user, after.get(name, name)) for user, name in graph.outputs),
        updates=tuple((user, after.get(name, name)) for user, name in graph.updates),
    )


class _Named:
    """Names for one more call: as those of the template, with its place in the module list."""

    def __init__(self, old: str, new: str, taken: set[str]) -> None:
        self.old, self.new, self.taken = old.replace(".", "_"), new.replace(".", "_"), taken

    def __call__(self, name: str) -> str:
        wanted = name.replace(self.old, self.new, 1) if self.old in name else f"{name}_{self.new}"
        while wanted in self.taken:
            wanted += "_"
        self.taken.add(wanted)
        return wanted


def run_of(graph: Graph) -> Repeated:
    """The longest run of calls of one block, each fed by the one before it."""
    best: tuple[int, int] | None = None
    start = 0
    body = graph.main.body
    for index, item in enumerate(body):
        before = body[index - 1] if index else None
        follows = (
            isinstance(item, Call)
            and isinstance(before, Call)
            and item.function == before.function
            and not set(_results(before)).isdisjoint(item.args)
        )
        start = start if follows else index
        if (
            isinstance(item, Call)
            and index > start
            and (not best or index - start > best[1] - best[0])
        ):
            best = start, index
    if best is None:
        raise InputError(f"{graph.name} has no block that is called at least twice in a row")
    first = body[best[0]]
    assert isinstance(first, Call)
    entry = ENTRY.fullmatch(first.prefix)
    if entry is None:
        raise InputError(f"the blocks of {graph.name} are not numbered: {first.prefix!r}")
    return Repeated(first.function, best[0], best[1], entry[1], int(entry[2]))


def stage(graph: Graph, calls: Sequence[int], ends: tuple[bool, bool]) -> Graph:
    """The part of `graph` that a pipeline stage runs: some of the run's calls, and with `ends`
    what comes before the first and after the last one.

    What an earlier stage made arrives as an entry of the batch whose gradient is wanted; what is
    computed of no parameter and no activation (tables of positions) is computed in every stage.
    The last value that is handed on is the output `hidden`.
    """
    run, body = run_of(graph), graph.main.body
    first, last = ends
    chosen = [body[run.first + index] for index in calls]
    head = list(body[: run.first]) if first else []
    tail = list(body[run.last + 1 :]) if last else []
    items = [*head, *chosen, *tail]
    if not first:
        items = [*_independent(graph, body[: run.first], items), *items]
    made = {v.name for item in items for v in item.results}
    read = {name for item in items for name in _read(item)}
    inputs = [i for i in graph.inputs if i.value.name in read]
    specs = graph.main.specs()
    known = made | {i.value.name for i in graph.inputs}
    arriving = [
        name for name in dict.fromkeys(n for i in items for n in _read(i)) if name not in known
    ]
    inputs += [Input(Value(n, specs[n]), "batch", n, trainable=True) for n in arriving]
    prefixes = {item.prefix for item in items if isinstance(item, Call)}
    leaving = () if last else _results(chosen[-1]) if chosen else _entering(graph, head)
    return replace(
        graph,
        main=Function(
            graph.main.name, tuple(i.value for i in inputs), tuple(items),
            graph.main.outputs if last else leaving,
        ),
        inputs=tuple(inputs),
        loss=graph.loss if last else None,
        outputs=graph.outputs if last else tuple((name, name) for name in leaving),
        updates=tuple(u for u in graph.updates if u[1] in made),
        recompute=tuple(p for p in graph.recompute if p in prefixes),
    )  # fmt: skip


def shared_parameters(graph: Graph) -> frozenset[str]:
    """Parameters that may be in several stages: read by two or more of the equal blocks, what comes
    before them, and what comes after them.
    """
    run, body = run_of(graph), graph.main.body
    items = [body[: run.first], *([call] for call in body[run.first : run.last + 1])]
    readers = Counter(
        name
        for part in (*items, body[run.last + 1 :])
        for name in {n for i in part for n in _read(i)}
    )
    return frozenset(
        i.value.name for i in graph.inputs if i.kind == "parameter" and readers[i.value.name] > 1
    )


def _entering(graph: Graph, head: list[Node | Call]) -> tuple[str, ...]:
    """What the first block reads of `head`, but for what every stage computes for itself."""
    block = graph.main.body[run_of(graph).first]
    own = {v.name for item in _independent(graph, head, [block]) for v in item.results}
    made = {v.name for item in head for v in item.results} - own
    return tuple(dict.fromkeys(name for name in _read(block) if name in made))


def _independent(
    graph: Graph, before: Iterable[Node | Call], items: Iterable[Node | Call]
) -> list[Node | Call]:
    """What `items` need of `before` that depends on no parameter and on no entry of the batch."""
    moving = {i.value.name for i in graph.inputs if i.kind in ("parameter", "batch")}
    free: dict[str, Node | Call] = {}
    for item in before:
        if moving.isdisjoint(_read(item)):
            free.update((v.name, item) for v in item.results)
        else:
            moving.update(v.name for v in item.results)
    wanted = {name for item in items for name in _read(item)}
    needed: list[Node | Call] = []
    for item in reversed(list(before)):
        names = {v.name for v in item.results}
        if names & wanted and names <= free.keys():
            needed.insert(0, item)
            wanted.update(_read(item))
    return needed


def _read(item: Node | Call) -> tuple[str, ...]:
    return item.args if isinstance(item, Call) else item.refs


def _results(item: Node | Call) -> tuple[str, ...]:
    return tuple(v.name for v in item.results)


def _renamed(entry: Input, name: str, old: str, new: str) -> Input:
    target = new + entry.target.removeprefix(old)
    return replace(entry, value=Value(name, entry.value.spec), target=target, aliases=())


def _reading(item: Node | Call, names: dict[str, str]) -> Node | Call:
    if isinstance(item, Call):
        return replace(item, args=tuple(names.get(a, a) for a in item.args))
    kwargs = tuple((k, rename_args((v,), names)[0]) for k, v in item.kwargs)
    return replace(item, args=rename_args(item.args, names), kwargs=kwargs)
