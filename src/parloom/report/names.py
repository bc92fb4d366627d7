"""What a name stands for: an operator, a parameter, another tensor, or all that is below a path.

Names are those of the plan's text: an operator's key (`blocks.0.up:linear#0`), its module path
where it is the only one there, a parameter, buffer or batch tensor as the user calls it, and any
value of the program, `blocks.0/wide` or `block/wide` for one inside a block.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from parloom.cost.ledger import MAIN
from parloom.errors import InputError, nearest
from parloom.ir.graph import Call, FlatNode, Graph, Input

SHOWN = 12


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value: made by result `result` of `maker`, or an input of the program."""

    name: str
    maker: FlatNode | None = None
    result: int = 0
    input: Input | None = None


@dataclass(frozen=True, slots=True)
class Below:
    """A module path, with what is below it."""

    path: str
    operators: tuple[FlatNode, ...]
    inputs: tuple[Input, ...]


Named = FlatNode | Tensor | Below


@dataclass(frozen=True)
class Names:
    """All names of a graph."""

    graph: Graph

    def find(self, name: str) -> Named:
        """What `name` stands for; raises `InputError` with the nearest names."""
        found = self._operator(name) or self._input(name) or self._below(name) or self._value(name)
        if found is not None:
            return found
        known = dict.fromkeys([*self.operators, *self.inputs, *self.paths, *self.values])
        hint = nearest(name, known)
        if "did you mean" not in hint:  # thousands of names help nobody
            hint = f"; at the top are {', '.join([MAIN, *self._top()][:SHOWN])}"
        raise InputError(f"no operator, parameter, tensor or module {name!r} in the plan{hint}")

    def _top(self) -> Iterator[str]:
        """Block kinds, and module paths that are in no other."""
        yield from self.graph.by_name
        yield from (path for path in self.paths if "." not in path)

    @cached_property
    def operators(self) -> Mapping[str, FlatNode]:
        return {flat.key: flat for flat in self.graph.flat()}

    @cached_property
    def inputs(self) -> Mapping[str, Input]:
        """Parameters, buffers and batch tensors by all the user's names of them."""
        return {
            name: entry
            for entry in self.graph.inputs
            if entry.kind != "constant"
            for name in (entry.target, *entry.aliases)
        }

    @cached_property
    def paths(self) -> Mapping[str, None]:
        """Module paths with operators or parameters below them."""
        names = [key.partition(":")[0] for key in self.operators]
        names += [name.rpartition(".")[0] for name in self.inputs]
        return dict.fromkeys(
            ".".join(parts[:count])
            for parts in (name.split(".") for name in dict.fromkeys(names) if name)
            for count in range(1, len(parts) + 1)
        )

    @cached_property
    def values(self) -> Mapping[str, str]:
        """The id in the flat program of every value: of main by its name, of a block's call as
        `PREFIX/NAME`, and as `KIND/NAME` and NAME (where no other has it) that of the first call.
        """
        found = dict(self.graph.flat_ids)
        for kind, prefix, name, flat_id in self._inner():
            found.setdefault(f"{prefix}/{name}", flat_id)
            found.setdefault(f"{kind}/{name}", flat_id)
            found.setdefault(name, flat_id)
        return found

    def _inner(self) -> Iterator[tuple[str, str, str, str]]:
        """Values inside of block calls: kind, prefix, name, flat id."""
        ids = self.graph.flat_ids
        for item in self.graph.main.body:
            if isinstance(item, Call):
                callee = self.graph.by_name[item.function]
                for formal, argument in zip(callee.inputs, item.args, strict=True):
                    yield item.function, item.prefix, formal.name, ids[argument]
        for flat in self.graph.flat():
            if flat.prefix:
                for value, flat_id in zip(flat.node.results, flat.results, strict=True):
                    yield flat.function, flat.prefix, value.name, flat_id

    def _operator(self, name: str) -> Named | None:
        if name in self.operators:
            return self.operators[name]
        short = [flat for key, flat in self.operators.items() if key.startswith(f"{name}#")]
        if len(short) == 1:
            return short[0]
        return Below(name, tuple(short), ()) if short else None

    def _input(self, name: str) -> Named | None:
        entry = self.inputs.get(name)
        return None if entry is None else Tensor(entry.target, input=entry)

    def _below(self, name: str) -> Named | None:
        """All below a module path; a block kind is its first call, and main what is in none."""
        if name == MAIN:
            main = self.graph.main.name
            own = tuple(flat for flat in self.operators.values() if flat.function == main)
            return Below(MAIN, own, ())
        if name in self.graph.by_name and name not in self.paths:
            calls = (i for i in self.graph.main.body if isinstance(i, Call))
            name = next((call.prefix for call in calls if call.function == name), name)
        if name not in self.paths:
            return None
        starts = f"{name}.", f"{name}:"
        operators = tuple(f for key, f in self.operators.items() if key.startswith(starts))
        if len(operators) == 1:
            return operators[0]
        inputs = (entry for key, entry in self.inputs.items() if key.startswith(starts[0]))
        return Below(name, operators, tuple(dict.fromkeys(inputs)))

    def _value(self, name: str) -> Named | None:
        flat_id = self.values.get(name)
        if flat_id is None:
            return None
        for entry in self.graph.inputs:
            if entry.value.name == flat_id:
                return Tensor(entry.target, input=entry)
        for flat in self.operators.values():
            if flat_id in flat.results:
                return Tensor(name, flat, flat.results.index(flat_id))
        return None
