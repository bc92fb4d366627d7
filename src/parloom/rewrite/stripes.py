"""Stripes: positions in the order in which causal attention gives equal work to all ranks.

With chunks of positions one after the other, the last of c ranks computes (2c - 1) / c times the
mean of causal attention. With every c-th position on a rank all compute the same (Brandon et al.,
2023, "Striped Attention"). An axis on the inner part of the positions' factor says that; what the
rewrite adds is the cut into these parts, as two views that cancel each other. No value changes.

As text, in a plan: `stripe input_ids 1 4` (dim 1 over 4 ranks).
"""

import re
from dataclasses import dataclass, replace

from parloom.ir.graph import Graph, Node, Ref, TensorSpec, Value, numbered, rename_node

STRIPE = re.compile(r"stripe ([^ ]+) ([0-9]{1,3}) ([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Stripe:
    """Dim `dim` of the batch tensor `name`, of which one of `ranks` has every so manyth element."""

    name: str
    dim: int
    ranks: int

    def __str__(self) -> str:
        return f"stripe {self.name} {self.dim} {self.ranks}"


def parse_stripe(text: str) -> Stripe | None:
    """The inverse of `str`; None for another rewrite."""
    found = STRIPE.fullmatch(text)
    return None if found is None else Stripe(found[1], int(found[2]), int(found[3]))


def striped(graph: Graph, stripe: Stripe) -> Graph | None:
    """`graph` with a cut in a dim of a batch tensor; None where there is no such dim or it does not
    divide.
    """
    entry = next((i for i in graph.of_kind("batch") if i.target == stripe.name), None)
    if entry is None or stripe.dim >= len(entry.value.spec.shape) or stripe.ranks < 1:
        return None
    value, shape = entry.value, entry.value.spec.shape
    if shape[stripe.dim] % stripe.ranks:
        return None
    parts = (shape[stripe.dim] // stripe.ranks, stripe.ranks)
    wide = (*shape[: stripe.dim], *parts, *shape[stripe.dim + 1 :])
    cut = Value(f"{value.name}__stripes", TensorSpec(wide, value.spec.dtype))
    joined = Value(f"{value.name}__striped", value.spec)
    views = (
        Node("view", (Ref(value.name), wide), (), (cut,), "", 0, ""),
        Node("view", (Ref(cut.name), shape), (), (joined,), "", 0, ""),
    )
    names = {value.name: joined.name}
    body = tuple(
        rename_node(item, names) if isinstance(item, Node)
        else replace(item, args=tuple(names.get(a, a) for a in item.args))
        for item in graph.main.body
    )  # fmt: skip
    main = replace(
        graph.main,
        body=numbered((*views, *body)),
        outputs=tuple(names.get(name, name) for name in graph.main.outputs),
    )
    outputs = tuple((user, names.get(name, name)) for user, name in graph.outputs)
    return replace(graph, main=main, outputs=outputs)
