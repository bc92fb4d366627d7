"""Collectives of tensor parallelism that go on beside products, in software that cuts them up."""

from dataclasses import replace

from parloom.cost.kernels import LINEAR
from parloom.cost.liveness import Lives
from parloom.cost.works import Exchange, Work
from parloom.ir.pcg import Compute, Movement

# Of a collective that is cut up and runs beside the product that it feeds or follows, a quarter is
# exposed: the first or the last of four parts (Megatron-Bridge, docs/performance-guide.md). What is
# hidden slows the product as any collective does.
HIDDEN_SHARE = 0.75


def hidden(exchange: Exchange, beside_s: float, share: float = 1.0) -> tuple[float, Exchange]:
    """How much longer kernels of `beside_s` take with a `share` of a collective beside them, and
    what is left of it.
    """
    hidden_s = min(share * (exchange.seconds - exchange.latency_s), beside_s)
    return exchange.slows * hidden_s, replace(exchange, seconds=exchange.seconds - hidden_s)


def hide_moves(lives: Lives) -> None:
    """Hide collectives behind the products that they feed, or that they follow."""
    makers: dict[str, int] = {}
    readers: dict[str, int] = {}
    for index, item in enumerate(lives.items):
        if isinstance(item, Compute) and item.node.op in LINEAR:
            makers[lives.of(item.results[0])] = index
            readers.setdefault(lives.of(item.operands[0]), index)
    for index, item in enumerate(lives.items):
        if not isinstance(item, Movement):
            continue
        beside = readers.get(lives.of(item.result), makers.get(lives.of(item.operand)))
        if beside is None:
            continue
        for works in (lives.forward, lives.backward):
            move, product = works[index], works[beside]
            if not (isinstance(move, Work) and isinstance(product, Work) and move.exchange):
                continue
            if move.exchange.kind in ("all_gather", "reduce_scatter"):
                one_s = product.compute_s - product.weights_s
                longer_s, left = hidden(move.exchange, one_s, HIDDEN_SHARE)
                works[index] = replace(move, exchange=left)
                works[beside] = replace(product, compute_s=product.compute_s + longer_s)
