"""What storing a weight costs, for every ZeRO level over every set of axes that replicate it.

Collectives on weights travel together: what is gathered for a block call in one message, gradients
of whole weights in buckets. So a weight pays its share of a message, whose size follows if all that
may travel with it is split and stored as it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod

import numpy as np
from numpy.typing import NDArray

from parloom.cost.tasks import LONGEST_S, Links, picoseconds
from parloom.cost.walk import Walker
from parloom.ir.graph import DTYPE_BYTES, TensorSpec
from parloom.ir.layout import Layout, local_shape
from parloom.ir.plan import Decisions, Optimizer, ParameterDecision, Storage
from parloom.ir.step_program import bucket_bytes
from parloom.search.choices import subsets
from parloom.search.pinned import allows_stored
from parloom.search.pins import Pin
from parloom.search.prices import busy_ps
from parloom.search.program import Axes, Program, Weight

# Parts of a weight's price, in ps a step (of a microbatch: GATHERED, AGAIN, CHUNKED, ALONE) and
# bytes: gathering it in the forward and in the backward pass, reducing its gradient in every
# microbatch or once; what hides behind nothing (all that main's own weights send when they are
# stored in chunks: they are gathered before the first operator and reduced after the last); what
# follows (update, gathering what was updated); what is stored, and what is there of it as it moves;
# and what of that bounds a step: the update, and how long links are busy at least (`prices`).
GATHERED, AGAIN, CHUNKED, REDUCED, ALONE, AFTER, STORED, MOVING, UPDATED, NEAR, FAR = range(11)
WEIGHT_PARTS = 11
MEASURES = slice(UPDATED, FAR + 1)
# Sizes of messages among which the one is looked for that keeps links busy least, for a byte.
SIZES = tuple(1 << power for power in range(10, 34))
# What is there of a call's weights at once: gathered for this call and the next, and on the way to
# it; gradients of two calls on their way (`cost.transfers`).
WEIGHTS_AT_ONCE, GRADIENTS_AT_ONCE = 3, 2
WeightPrice = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Level:
    """Which of weight, gradient and optimizer state are in chunks over `axes` of dim `dim`."""

    axes: Axes = ()
    dim: int = 0
    weight: bool = False
    gradient: bool = False
    optimizer: bool = False

    def decision(self, name: str) -> ParameterDecision:
        """As a plan says it."""
        chunks = Storage(self.axes, self.dim)
        whole = Storage()
        return ParameterDecision(
            name,
            chunks if self.weight else whole,
            chunks if self.gradient else whole,
            chunks if self.optimizer else whole,
        )


def level_of(decision: ParameterDecision) -> Level:
    """The level of a decision as `Level.decision` makes them."""
    chunks = next(
        (s for s in (decision.weight, decision.gradient, decision.optimizer) if s.axes), Storage()
    )
    return Level(
        chunks.axes, chunks.dim, bool(decision.weight.axes), bool(decision.gradient.axes),
        bool(decision.optimizer.axes),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight whose storage is priced: its home layout and the axes its gradient is partial over.

    `block`: it is gathered for one block call of `units`, in the backward pass once more.
    `unit_elements` are those of all weights that are gathered together with it, `trained_elements`
    those of all whose gradients are reduced (it is alone where these are 0). `last`: its gradient
    is among those that arrive last; `reached`: there is one.
    """

    spec: TensorSpec
    trainable: bool
    block: bool
    layout: Layout
    reduce: Axes
    unit_elements: int = 0
    trained_elements: int = 0
    units: int = 1
    last: bool = True
    pins: tuple[Pin, ...] = ()
    reached: bool = True


def stored_of(program: Program, weight: Weight, layout: Layout, reduce: Axes) -> Stored:
    """`weight` of `program` at home in `layout`, its gradient partial over `reduce`."""
    return Stored(
        weight.spec,
        weight.trainable,
        weight.block,
        layout,
        tuple(reduce) if weight.trainable else (),
        weight.unit_elements,
        program.trained_elements,
        program.units,
        weight.last,
        weight.pins,
        weight.reached,
    )


class StoragePrices:
    """Prices of storage on one mesh under one policy of dtypes and one optimizer.

    Without `latency`, weights of a block call pay for their bytes alone, and `messages` for what
    each message costs beside them.
    """

    def __init__(
        self, walker: Walker, decisions: Decisions, optimizer: Optimizer, *, latency: bool = True
    ) -> None:
        self.walker, self.mesh = walker, walker.mesh
        self.latency = latency
        self.decisions, self.optimizer = decisions, optimizer
        self.rates: dict[tuple[str, Axes, int], float] = {}
        self.links = Links(walker.cluster)
        self.busy: dict[tuple[str, Axes], NDArray[np.float64]] = {}
        self.known: dict[Stored, tuple[tuple[Level, ...], WeightPrice]] = {}

    def options(self, weight: Stored) -> tuple[tuple[Level, ...], WeightPrice]:
        """All levels that may be and their prices: [level, part]."""
        if weight not in self.known:
            levels = tuple(
                level
                for level in self._levels(weight)
                if allows_stored(weight.pins, weight.layout, level.decision(""), self.mesh)
            )
            prices = np.array([self.price(weight, level) for level in levels], dtype=np.int64)
            prices = prices.reshape(-1, WEIGHT_PARTS)
            self.known[weight] = levels, prices
        return self.known[weight]

    def _levels(self, weight: Stored) -> Iterator[Level]:
        yield Level()
        free = [a for a in self.mesh.names if a not in weight.layout.axes and self.mesh[a].size > 1]
        if not weight.spec.shape:
            return
        shape = local_shape(weight.layout, weight.spec.shape, self.mesh)
        for axes in subsets(free):
            if not axes:
                continue
            count = self.mesh.size(axes)
            # The dim that wastes least; of equals the first, whose chunks are contiguous.
            dim = min(range(len(shape)), key=lambda d: ceil(shape[d] / count) / max(shape[d], 1))
            if not weight.trainable:
                yield Level(axes, dim, weight=True)
                continue
            yield Level(axes, dim, optimizer=True)
            yield Level(axes, dim, gradient=True, optimizer=True)
            yield Level(axes, dim, weight=True, gradient=True, optimizer=True)

    def price(self, weight: Stored, level: Level) -> WeightPrice:
        """One level."""
        found = np.zeros(WEIGHT_PARTS, dtype=np.int64)
        shape = list(local_shape(weight.layout, weight.spec.shape, self.mesh))
        whole = prod(shape)
        if level.axes:
            shape[level.dim] = ceil(shape[level.dim] / self.mesh.size(level.axes))
        chunk = prod(shape)
        width = DTYPE_BYTES[weight.spec.dtype]
        master = DTYPE_BYTES[self.decisions.master_dtype or weight.spec.dtype]
        gradient = DTYPE_BYTES[self.decisions.reduce_dtype or weight.spec.dtype]
        if level.weight:
            unit = weight.unit_elements
            gathered = self._share(found, weight, "all_gather", level.axes, whole * width, unit)
            found[[GATHERED, AGAIN] if weight.block else ALONE] = gathered
            if weight.block:
                room = WEIGHTS_AT_ONCE * width + GRADIENTS_AT_ONCE * gradient * weight.trainable
                found[MOVING] = whole * room // weight.units
                # What the first call needs arrives while nothing is computed.
                found[ALONE] = gathered // weight.units
                found[GATHERED] -= found[ALONE]
        found[STORED] = (chunk if level.weight else whole) * width
        if level.weight and not weight.block:  # whole from the first operator to the last
            found[STORED] += whole * width + (whole * gradient if weight.trainable else 0)
        if not weight.trainable:
            return found
        self._reduce(found, weight, level, whole * gradient)
        owned = chunk if level.optimizer else whole
        found[UPDATED] = picoseconds(
            self.walker.kernels.update_s(owned * master, self.optimizer.num_states)
            - self.walker.kernels.software.launch_s
        )
        found[AFTER] += found[UPDATED]
        if level.optimizer and not level.weight:
            found[AFTER] += self._share(found, weight, "all_gather", level.axes, whole * width)
        copy = level.optimizer != level.weight or master != width
        found[STORED] += owned * master * (self.optimizer.num_states + copy)
        found[STORED] += (chunk if level.gradient else whole) * gradient
        return found

    def _reduce(self, found: WeightPrice, weight: Stored, level: Level, size: int) -> None:
        """Making the gradient whole: scattered over its chunks where it is partial over them."""
        partial = tuple(a for a in self.mesh.names if a in weight.reduce)
        part, unit = REDUCED, weight.unit_elements if level.weight else 0
        if level.gradient:
            # Gradients of whole weights are scattered as they arrive, those of gathered ones later.
            part = CHUNKED if weight.block or not level.weight else ALONE
        # What is reduced last arrives when nothing is computed any more.
        late = weight.units if unit else int(weight.last)  # one of so many; none
        sent = 0
        if level.gradient and set(level.axes) <= set(partial):
            sent += self._share(found, weight, "reduce_scatter", level.axes, size, unit)
            size //= self.mesh.size(level.axes)
            partial = tuple(a for a in partial if a not in level.axes)
        if partial:
            sent += self._share(found, weight, "all_reduce", partial, size, unit)
        if part == ALONE:
            found[ALONE] += sent
        else:
            exposed = sent // late if late else 0
            found[part] += sent - exposed
            found[AFTER] += exposed

    def message_ps(self, axes: Axes) -> int:
        """What a collective over `axes` takes at least."""
        return picoseconds(self.walker.exchange("all_gather", axes, 1).seconds)

    def messages(self, axes: Axes, units: int, reduces: bool) -> WeightPrice:
        """What the messages of one block call cost beside their bytes, whose weights are in chunks
        over `axes`: gathered twice, and if it `reduces`, gradients scattered.
        """
        found = np.zeros(WEIGHT_PARTS, dtype=np.int64)
        gathered = self.message_ps(axes)
        found[AGAIN] = gathered
        found[ALONE] = gathered // units
        found[GATHERED] = gathered - found[ALONE]
        if reduces:
            sent = picoseconds(self.walker.exchange("reduce_scatter", axes, 1).seconds)
            found[AFTER] = sent // units
            found[CHUNKED] = sent - found[AFTER]
        return found

    def _share(
        self,
        found: WeightPrice,
        weight: Stored,
        kind: str,
        axes: Axes,
        num_bytes: int,
        unit: int = 0,
    ) -> int:
        """Picoseconds of a weight's share of a message: of the `unit` elements that travel with it,
        or where that is 0, of a bucket. Adds to `found` how long links are busy.
        """
        if self.mesh.size(axes) < 2 or not num_bytes:
            return 0
        if weight.reached:
            found[[NEAR, FAR]] += (self._busy(kind, axes) * num_bytes).astype(np.int64)
        message = _together(weight, num_bytes, unit or weight.trained_elements)
        if not unit:
            message = min(message, max(num_bytes, bucket_bytes(message)))
        key = kind, axes, message
        if key not in self.rates:
            seconds = self.walker.exchange(kind, axes, message).seconds
            if unit and not self.latency:
                seconds -= self.walker.exchange(kind, axes, 1).seconds
            self.rates[key] = max(0.0, seconds) / message
        return picoseconds(self.rates[key] * num_bytes)

    def _busy(self, kind: str, axes: Axes) -> NDArray[np.float64]:
        """Picoseconds that links are busy for a byte, at least."""
        if (kind, axes) not in self.busy:
            exchanges = {size: self.walker.exchange(kind, axes, size) for size in SIZES}
            # Over a slow link, the largest messages would take longer than can be counted.
            known = [s for s, e in exchanges.items() if e.seconds <= LONGEST_S] or SIZES[:1]
            rates = [np.array(busy_ps(exchanges[s], self.links)) / s for s in known]
            self.busy[kind, axes] = np.min(rates, axis=0)
        return self.busy[kind, axes]


def _together(weight: Stored, num_bytes: int, elements: int) -> int:
    """Bytes of `elements` of which `weight` has as many of its own as are `num_bytes` here."""
    own = max(weight.spec.num_elements, 1)
    return num_bytes * max(elements, own) // own
