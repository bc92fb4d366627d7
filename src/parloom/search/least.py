"""The least memory: what no plan of the space goes below; and whether pins leave a plan at all."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import ceil

import numpy as np

from parloom.errors import InfeasibleError
from parloom.ir.graph import DTYPE_BYTES, Graph
from parloom.ir.plan import Decisions, Optimizer
from parloom.search.conflicts import smallest_conflict
from parloom.search.contexts import Contexts, ContextSearch
from parloom.search.pinned import Pinned, clashes
from parloom.search.pins import Pin
from parloom.search.prices import PARTS
from parloom.search.request import Request
from parloom.search.step_rows import NUM_ROWS
from parloom.search.storage import STORED, UPDATING


def least_share(graph: Graph, base: Decisions, optimizer: Optimizer, num_devices: int) -> int:
    """What no plan holds less than, searched or not: its devices hold every weight, gradient and
    optimizer state at least once.
    """
    total = 0
    for entry in graph.of_kind("parameter"):
        spec = entry.value.spec
        each = width = DTYPE_BYTES[spec.dtype]
        if entry.trainable:
            master = DTYPE_BYTES[base.master_dtype or spec.dtype]
            each += DTYPE_BYTES[base.reduce_dtype or spec.dtype]
            each += master * (optimizer.num_states + (master != width))
        total += spec.num_elements * each
    return ceil(total / num_devices)


def stored_bytes(context: ContextSearch) -> int:
    """What plans of a context hold at least during the update: weights, gradients and states, what
    the optimizer needs beside these, and the batch.
    """
    prices = np.zeros(NUM_ROWS)
    prices[[PARTS + STORED, PARTS + UPDATING]] = 1.0
    bound, _ = context.columns.minimum(prices, 0.0)
    return int(bound + batch_bytes(context.request.graph))


def batch_bytes(graph: Graph) -> int:
    """What every device holds of the batch all along."""
    return sum(entry.value.spec.num_bytes for entry in graph.of_kind("batch"))


def conflict(request: Request, base: Decisions) -> InfeasibleError:
    """The error for pins that no plan holds together: the fewest of them that none holds."""
    pinned = request.pinned

    def feasible(pins: Sequence[Pin]) -> bool:
        return possible(replace(request, pinned=pinned.only(pins)), base)

    found = smallest_conflict(pinned.pins, feasible)
    mesh = "the mesh that is asked for" if pinned.names_mesh else "a mesh of one or two axes"
    document = {"pins": [pin.text for pin in found]}
    if len(found) == 1:
        return InfeasibleError(f"{found[0].text}: no plan on {mesh} can hold this", document)
    shared = "; calls of one block kind are laid out alike" if _shares(pinned) else ""
    lines = "".join(f"\n  {pin.text}" for pin in found)
    return InfeasibleError(
        f"no plan on {mesh} holds these {len(found)} together{shared}; give up one:{lines}",
        document,
    )


def _shares(pinned: Pinned) -> bool:
    """Whether some pin names some calls of a block kind and not others."""
    return any(found.others for found in pinned.subjects)


def possible(request: Request, base: Decisions) -> bool:
    """Whether some plan on the meshes that are searched whole, or on the one that pins name, holds
    all pins, whatever memory it takes.
    """
    if clashes(request.pinned):
        return False
    return any(_possible(own, base) for _, own in request.regular())


def _possible(request: Request, base: Decisions) -> bool:
    contexts = Contexts(replace(request, budget=None), base)
    for mesh, count in product(contexts.meshes, contexts.counts):
        program = contexts.on(mesh, count)
        if program is not None:
            columns = contexts.search(program, mesh, count).columns
            if columns.minimum(np.ones(NUM_ROWS), 0.0)[1]:
                return True
    return False
