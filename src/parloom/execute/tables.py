"""Whether a program reads rows that its tables have: of places that follow from constants, as
positions do, not from a batch.

Nothing but integers is computed, so that this takes no weights and no time.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from parloom.errors import InputError
from parloom.execute.reference import input_values, run_node
from parloom.ir.graph import FlatNode, Graph, TensorSpec, Value

READ = ("embedding", "index", "index_select", "gather")  # from their first operand
MAX_ELEMENTS = 1 << 24  # of a result that is looked at


def check_tables(graph: Graph, given: Mapping[str, Tensor], advice: str) -> None:
    """Raise `InputError`, with `advice`, for a row that a table does not have; `given` are the
    inputs that are known, by the user's names.
    """
    specs = {entry.value.name: entry.value.spec for entry in graph.inputs}
    known = {e.value.name: given[e.target] for e in graph.inputs if e.target in given}
    for entry in graph.of_kind("constant"):
        known |= input_values(replace(graph, inputs=(entry,)), {})
    for flat in graph.flat():
        results = flat.node.results
        specs |= {n: v.spec for n, v in zip(flat.results, results, strict=True)}
        if any(prod(value.spec.shape) > MAX_ELEMENTS for value in results):
            continue
        there = [name in known for name in flat.operands]
        if all(there) and all(map(_counts, results)) and not flat.node.op.startswith("rand"):
            made = run_node(flat.node, flat.key, _named(flat, known), None)
            known |= zip(flat.results, made, strict=True)
        elif flat.node.op in READ and len(there) > 1 and not there[0] and all(there[1:]):
            _read(flat, specs[flat.operands[0]], known, advice)


def _counts(value: Value) -> bool:
    return "int" in value.spec.dtype or value.spec.dtype == "bool"


def _named(flat: FlatNode, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a call reads, by the names that it has there."""
    pairs = zip(flat.node.refs, flat.operands, strict=True)
    return {name: known[operand] for name, operand in pairs if operand in known}


def _read(flat: FlatNode, table: TensorSpec, known: Mapping[str, Tensor], advice: str) -> None:
    """Read from a table of zeros, which has no memory."""
    zeros = torch.zeros((), dtype=getattr(torch, table.dtype)).expand(table.shape)
    named = _named(flat, known)
    try:
        run_node(flat.node, flat.key, {**named, flat.node.refs[0]: zeros}, None)
    except (IndexError, RuntimeError):
        most = max(int(index.max()) for index in named.values())
        where = f"{flat.key} ({flat.node.source})"
        shape = list(table.shape)
        raise InputError(f"{where} reads row {most} of a table of {shape}: {advice}") from None
