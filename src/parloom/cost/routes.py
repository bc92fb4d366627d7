"""What an operator itself sends over the axes that it routes: rows to experts, and blocks of keys
and values that go around a ring.
"""

from dataclasses import replace
from typing import Protocol

from parloom.cost.kernels import Kernels
from parloom.cost.works import Exchange, Work
from parloom.ir.mesh import Cluster, Mesh
from parloom.ir.ops.rule import RING
from parloom.ir.pcg import Compute, PValue

# Numbers of rows, their places, and rows: what is sent one after the other where rows are routed.
LED_ROUNDS = 3


class Prices(Protocol):
    """What a `Walker` knows of a mesh and its links."""

    mesh: Mesh
    cluster: Cluster
    kernels: Kernels

    def local_bytes(self, value: PValue) -> int:
        """Bytes of one rank's shard of a value."""

    def exchange(self, kind: str, axes: tuple[str, ...], moved: float) -> Exchange:
        """One collective over the joint group of `axes`."""


def sending(walker: Prices, item: Compute, work: Work, *, backward: bool) -> Work:
    """`work` with what the operator itself sends over the axes that it routes, if any."""
    axes = item.rule.routed(dict(item.assignment), walker.mesh)
    if not axes:
        return work
    if any(kind == RING for _, kind in item.rule.kinds):
        return _ring(walker, item, work, axes, backward=backward)
    return _routing(walker, item, work, axes, backward=backward)


def _ring(
    walker: Prices, item: Compute, work: Work, axes: tuple[str, ...], *, backward: bool
) -> Work:
    """`work` with blocks of keys and values that go around beside it.

    Each of p ranks has one at a time and computes a p-th part of the work with it, while the
    next one comes (Liu et al., 2023, section 3) and slows its kernels; in the backward pass the
    gradients of a block follow it, and go home in a last step that hides behind nothing.
    """
    ranks = walker.mesh.size(axes)
    block = sum(walker.local_bytes(v) for v in item.operands[1:3])
    shift = walker.exchange("shift", axes, block)
    beside, after = (2, 1) if backward else (1, 0)
    hidden = min(beside * shift.seconds, work.compute_s / ranks)
    slowed_s = shift.slows * (ranks - 1) * hidden
    exposed = beside * shift.seconds - hidden
    seconds = (ranks - 1) * exposed + after * shift.seconds
    count = beside * (ranks - 1) + after
    traffic = tuple((level, count * size, count * n) for level, size, n in shift.traffic)
    waits = (ranks - 1) * min(exposed, beside * shift.latency_s) + after * shift.latency_s
    return replace(
        work,
        compute_s=work.compute_s + slowed_s,
        exchange=replace(shift, traffic=traffic, seconds=seconds, latency_s=waits),
        staging=work.staging + 2 * beside * block,
    )


def _routing(
    walker: Prices, item: Compute, work: Work, axes: tuple[str, ...], *, backward: bool
) -> Work:
    """`work` with what it takes to send rows over `axes`.

    All ranks are taken to have equally many rows. They are copied by receiver, and again as
    they are sorted. Where their places are sent, too, these and numbers of rows go first.
    """
    rule = item.rule
    made = [v for v, dims in zip(item.results, rule.results, strict=True) if rule.travel(dims)]
    read = [v for v, dims in zip(item.operands, rule.operands, strict=True) if rule.travel(dims)]
    rows = sum(walker.local_bytes(v) for v in made or read if v.spec.is_float)
    places = sum(walker.local_bytes(v) for v in made if not v.spec.is_float and not backward)
    exchange = walker.exchange("all_to_all", axes, rows + places)
    if places:
        latency_s = LED_ROUNDS * exchange.latency_s
        seconds = exchange.seconds - exchange.latency_s + latency_s
        exchange = replace(exchange, seconds=seconds, latency_s=latency_s)
    return replace(
        work,
        compute_s=work.compute_s + walker.kernels.stream_s(2 * rows, 2),
        exchange=exchange,
        staging=work.staging + 2 * rows,
    )
