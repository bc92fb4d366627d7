"""Recomputation by value: which values of a block are dropped, and how they are made again.

Memory is dropped, not names: a value that lies in the memory of another one (a view) goes with it.
What the caller holds, inputs and results of the block, is never dropped. An operator that is not
listed runs once; what is made again is made of inputs and of values that are kept, for this purpose
if for no other. What autograd keeps of an operator that is no value of the block (the logarithms
of an attention's sums, the mask of a dropout) is dropped where the operator runs again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from parloom.ir.moves import ADJOINTS
from parloom.ir.ops import Site, op_of
from parloom.ir.ops.opdef import SavedTensors
from parloom.ir.pcg import (
    Compute,
    Item,
    Movement,
    PFunction,
    PValue,
    Remake,
    operands_of,
    results_of,
)

# Movements that leave the local tensor where it is, on some rank at least.
IN_PLACE = ("identity", "keep_first")


@dataclass(frozen=True, slots=True)
class Maker:
    """Where a value comes from: an operator's key or an input's name; `moved` on its way."""

    key: str
    moved: bool = False


def saved_by(item: Compute) -> SavedTensors:
    """What autograd keeps of an operator, as ("operand" | "result", index)."""
    site = Site(item.node, tuple(v.spec for v in item.operands))
    wanted = [v.differentiable for v in item.operands]
    found = []
    for what, index in op_of(item.node).saves(site):
        if what != "other":
            found.append((what, index))
        elif any((*wanted[:index], *wanted[index + 1 :])):
            found.append(("operand", index))
    return tuple(found)


def remake(
    function: PFunction, makers: Mapping[str, Maker], values: Iterable[str], moves: Iterable[str]
) -> Remake | None:
    """How `function` makes again the results of the operators `values` with their redistributions,
    and the redistributions alone of `moves`; None where that drops nothing that autograd keeps.
    """
    whole, moved = frozenset(values), frozenset((*values, *moves))
    owners = _owners(function.body)
    held = {owners.get(v.name, v.name) for v in (*function.inputs, *function.outputs)}
    listed = {
        name for name, maker in makers.items() if maker.key in (moved if maker.moved else whole)
    }
    known = {v.name: v for item in function.body for v in (*operands_of(item), *results_of(item))}
    dropped = frozenset(
        name for name in known if (owner := owners.get(name, name)) in listed and owner not in held
    )
    kept = dict.fromkeys(_saved_values(function.body))
    outputs = tuple(known[name] for name in kept if name in dropped)
    if not outputs:
        return None
    body, inputs = _making(function.body, outputs, dropped)
    made = [v for item in function.body for v in results_of(item)]
    return Remake(
        "", tuple(v for v in (*function.inputs, *made) if v.name in inputs), body, outputs, dropped
    )


def _owners(body: Iterable[Item]) -> dict[str, str]:
    """Of values that lie in the memory of another one: the value that the memory was made for."""
    owners: dict[str, str] = {}
    for item in body:
        if isinstance(item, Movement):
            shares = ADJOINTS[item.step.row].forward in IN_PLACE
        else:
            shares = isinstance(item, Compute) and op_of(item.node).view
        if shares:
            source = operands_of(item)[0].name
            owners.update((v.name, owners.get(source, source)) for v in results_of(item))
    return owners


def _saved_values(body: Iterable[Item]) -> Iterable[str]:
    """The values that autograd keeps, in the order in which it does."""
    for item in body:
        if isinstance(item, Compute) and any(v.differentiable for v in item.results):
            for what, index in saved_by(item):
                yield (item.results if what == "result" else item.operands)[index].name


def _making(
    body: tuple[Item, ...], outputs: tuple[PValue, ...], dropped: frozenset[str]
) -> tuple[tuple[Item, ...], set[str]]:
    """The items that make `outputs` again, and the names of kept values that they read."""
    wanted = {v.name for v in outputs}
    items: list[Item] = []
    read: set[str] = set()
    for item in reversed(body):
        if wanted.isdisjoint(v.name for v in results_of(item)):
            continue
        items.append(item)
        for value in operands_of(item):
            (wanted if value.name in dropped else read).add(value.name)
    made = {v.name for item in items for v in results_of(item)}
    return tuple(reversed(items)), read - made
