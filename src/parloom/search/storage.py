"""What storing a weight costs, for every ZeRO level over every set of axes that replicate it.

Collectives on weights travel together: what is gathered for a block call in one message, gradients
of whole weights in buckets. So a weight pays its share of a message, whose size follows if all that
may travel with it is split and stored as it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, product
from math import ceil, prod

import numpy as np
from numpy.typing import NDArray

from parloom.cost.quantized import Quantized
from parloom.cost.tasks import LONGEST_S, Links, picoseconds
from parloom.cost.walk import Walker
from parloom.cost.works import Exchange
from parloom.ir.graph import DTYPE_BYTES, TensorSpec
from parloom.ir.layout import Layout, local_shape
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions, Optimizer, ParameterDecision, Storage
from parloom.ir.step_program import bucket_bytes
from parloom.quantization import INT8, REAL, in_blocks
from parloom.search.choices import subsets
from parloom.search.pinned import allows_stored
from parloom.search.pins import Pin
from parloom.search.prices import busy_ps
from parloom.search.program import Axes, Program, Weight

# Parts of a weight's price, in ps a step (of a microbatch: GATHERED, AGAIN, CHUNKED, ALONE) and
# bytes: gathering it in the forward and in the backward pass, reducing its gradient in every
# microbatch or once; what hides behind nothing (all that main's own weights send when they are
# stored in chunks: they are gathered before the first operator and reduced after the last); what
# follows (update, gathering what was updated); bytes that are there all along (buffers that what
# moves goes through stay, too), gradients that one microbatch leaves to the next, whole gradients
# of main's gathered weights, which leave together, and what is there during the update; and what
# bounds a step: the update, and how long links are busy at least (`prices`). No count of bytes is
# more than the simulator's.
(
    GATHERED, AGAIN, CHUNKED, REDUCED, ALONE, AFTER,
    STORED, COLLECTED, MOVING, UPDATING, UPDATED, NEAR, FAR,
) = range(13)  # fmt: skip
WEIGHT_PARTS = 13
MEASURES = slice(UPDATED, FAR + 1)
# Sizes of messages among which the one is looked for that keeps links busy least, for a byte.
SIZES = tuple(1 << power for power in range(10, 34))
# Buffers of the size of a call's weights: gathered for this call and the next, and on the way to
# it; of its gradients: those of two calls on their way (`cost.transfers`).
WEIGHTS_AT_ONCE, GRADIENTS_AT_ONCE = 3, 2
# Bytes of elements of which messages are quantized, where only how many there are is counted.
WIDTH = DTYPE_BYTES["float32"]
WeightPrice = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Level:
    """Axes over which weight, gradient and optimizer state are in chunks of dim `dim`, each with
    those of the one before first, and in which data types weight and gradient travel that are not
    their own.
    """

    weight: Axes = ()
    gradient: Axes = ()
    optimizer: Axes = ()
    dim: int = 0
    weight_sent: str = field(default="", kw_only=True)
    gradient_sent: str = field(default="", kw_only=True)

    @property
    def axes(self) -> Axes:
        """All axes of any of them."""
        return self.optimizer

    @property
    def sends(self) -> bool:
        """Whether something of it travels in another data type than its own."""
        return bool(self.weight_sent or self.gradient_sent)

    @property
    def says(self) -> bool:
        """Whether a plan says it: it has chunks, or sends something as what it is not."""
        return bool(self.optimizer) or self.sends

    @property
    def zero(self) -> int | None:
        """The ZeRO level; None where they are in chunks over different axes."""
        stored = [axes for axes in (self.weight, self.gradient, self.optimizer) if axes]
        return len(stored) if len(set(stored)) < 2 else None

    def decision(self, name: str) -> ParameterDecision:
        """As a plan says it."""
        stored = (self.weight, self.gradient, self.optimizer)
        storages = (Storage(a, self.dim) if a else Storage() for a in stored)
        return ParameterDecision(
            name, *storages, weight_sent=self.weight_sent, gradient_sent=self.gradient_sent
        )


def level_of(decision: ParameterDecision) -> Level:
    """The level of a decision as `Level.decision` makes them."""
    state = decision.optimizer
    return Level(
        decision.weight.axes,
        decision.gradient.axes,
        state.axes,
        state.dim,
        weight_sent=decision.weight_sent,
        gradient_sent=decision.gradient_sent,
    )


@dataclass(frozen=True, slots=True)
class StoredWeight:
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


def chunked_dim(layout: Layout, shape: tuple[int, ...], axes: Axes, mesh: Mesh) -> int:
    """The dim of which chunks over `axes` waste least; of equals the first, whose chunks are
    contiguous.
    """
    own, count = local_shape(layout, shape, mesh), mesh.size(axes)
    return min(range(len(own)), key=lambda d: ceil(own[d] / count) / max(own[d], 1))


def nested(axes: Axes) -> Iterator[tuple[Axes, Axes, Axes]]:
    """Axes of weight, gradient and state, which has all: of fewer the last ones, those of the
    fastest links. The axes of each begin with those of the one before.
    """
    count = len(axes)
    for gradient in range(count, -1, -1):
        for weight in range(count, gradient - 1, -1):
            first, second = axes[weight:], axes[gradient:weight]
            yield first, (*first, *second), (*first, *second, *axes[:gradient])


def stored_of(program: Program, weight: Weight, layout: Layout, reduce: Axes) -> StoredWeight:
    """`weight` of `program` at home in `layout`, its gradient partial over `reduce`."""
    return StoredWeight(
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


class Messages:
    """What messages of weights cost on one mesh; without `latency`, those of block calls that
    gather and scatter pay for their bytes alone, and `of_call` says what each costs beside them.
    """

    def __init__(self, walker: Walker, latency: bool) -> None:
        self.walker, self.mesh, self.latency = walker, walker.mesh, latency
        self.rates: dict[tuple[str, Axes, int, int], float] = {}
        self.links = Links(walker.cluster)
        self.busy: dict[tuple[str, Axes, int], NDArray[np.float64]] = {}
        self.quantized = Quantized(walker.exchange, walker.kernels, self.mesh)

    def exchange(self, kind: str, axes: Axes, size: int, width: int) -> Exchange:
        """A collective on `size` bytes, or where a `width` is given on so many of elements that
        wide which it sends quantized, the work of that included.
        """
        if not width:
            return self.walker.exchange(kind, axes, size)
        sent = kind, axes, in_blocks(max(1, size // width)), width
        found, coding = self.quantized.exchange(*sent), self.quantized.coding(*sent)
        work_s = coding.encode_s + coding.decode_s
        return replace(found, seconds=found.seconds + work_s, latency_s=found.latency_s + work_s)

    def least_ps(self, axes: Axes) -> int:
        """What a collective over `axes` takes at least."""
        return picoseconds(self.walker.exchange("all_gather", axes, 1).seconds)

    def of_call(self, level: Level, units: int, reduces: bool) -> WeightPrice:
        """What the messages of one block call cost beside their bytes, whose weights are stored at
        `level`: gathered twice, and if it `reduces`, gradients scattered.
        """
        found = np.zeros(WEIGHT_PARTS, dtype=np.int64)
        width = WIDTH if level.weight_sent else 0
        gathered = picoseconds(self.exchange("all_gather", level.weight, 1, width).seconds)
        found[AGAIN] = gathered
        found[ALONE] = gathered // units
        found[GATHERED] = gathered - found[ALONE]
        width = WIDTH if level.gradient_sent else 0
        scattered = (CHUNKED, level.gradient), (REDUCED, level.optimizer[len(level.gradient) :])
        for part, axes in scattered if reduces else ():
            if axes:
                sent = picoseconds(self.exchange("reduce_scatter", axes, 1, width).seconds)
                found[AFTER] += sent // units
                found[part] = sent - sent // units
        return found

    def share(
        self,
        found: WeightPrice,
        weight: StoredWeight,
        kind: str,
        axes: Axes,
        num_bytes: int,
        unit: int = 0,
        width: int = 0,
    ) -> int:
        """Picoseconds of a weight's share of a message: of the `unit` elements that travel with it,
        or where that is 0, of a bucket; `width` as in `exchange`. Adds to `found` how long links
        are busy.
        """
        if self.mesh.size(axes) < 2:
            return 0
        if not num_bytes:  # a weight of fewer elements than ranks waits, too, if it travels alone
            alone = not (unit or weight.trained_elements) and weight.spec.num_elements
            return picoseconds(self.walker.exchange(kind, axes, 0).seconds) if alone else 0
        if weight.reached:
            found[[NEAR, FAR]] += (self._busy(kind, axes, width) * num_bytes).astype(np.int64)
        message = _together(weight, num_bytes, unit or weight.trained_elements)
        if not unit:
            message = min(message, max(num_bytes, bucket_bytes(message)))
        key = kind, axes, message, width
        if key not in self.rates:
            seconds = self.exchange(kind, axes, message, width).seconds
            if unit and not self.latency and kind != "all_reduce":
                seconds -= self.exchange(kind, axes, 1, width).seconds
            self.rates[key] = max(0.0, seconds) / message
        return picoseconds(self.rates[key] * num_bytes)

    def _busy(self, kind: str, axes: Axes, width: int) -> NDArray[np.float64]:
        """Picoseconds that links are busy for a byte, at least."""
        if (kind, axes, width) not in self.busy:
            exchanges = {size: self.exchange(kind, axes, size, width) for size in SIZES}
            # Over a slow link, the largest messages would take longer than can be counted.
            known = [s for s, e in exchanges.items() if e.seconds <= LONGEST_S] or SIZES[:1]
            rates = [np.array(busy_ps(exchanges[s], self.links)) / s for s in known]
            self.busy[kind, axes, width] = np.min(rates, axis=0)
        return self.busy[kind, axes, width]


class StoragePrices:
    """Prices of storage on one mesh under one policy of dtypes and one optimizer.

    Without `latency`, weights of a block call pay for their bytes alone (see `Messages`). Where it
    `quantizes`, weights and gradients may travel in int8, each for itself.
    """

    def __init__(
        self,
        walker: Walker,
        decisions: Decisions,
        optimizer: Optimizer,
        *,
        latency: bool = True,
        quantizes: bool = False,
    ) -> None:
        self.walker, self.mesh = walker, walker.mesh
        self.decisions, self.optimizer, self.quantizes = decisions, optimizer, quantizes
        self.messages = Messages(walker, latency)
        # Adam's denominators of all weights at once (`cost.parameters`).
        fused = walker.kernels.software.fused_optimizer or walker.cluster.backend == "gloo"
        self.denominators = optimizer.num_states > 1 and not fused
        self.known: dict[StoredWeight, tuple[tuple[Level, ...], WeightPrice]] = {}

    def options(self, weight: StoredWeight) -> tuple[tuple[Level, ...], WeightPrice]:
        """All levels that may be and their prices: [level, part]."""
        if weight not in self.known:
            levels = tuple(
                level
                for level in self._levels(weight)
                if allows_stored(weight.pins, weight.layout, level.decision(""), self.mesh)
            )
            prices = np.array([self.price(weight, level) for level in levels], dtype=np.int64)
            prices = prices.reshape(-1, WEIGHT_PARTS)
            # Of those over different axes, or quantized, what no other undercuts in every part.
            plain = np.array([level.zero is not None and not level.sends for level in levels], bool)
            kept = plain | ~_dominated(prices)
            levels = tuple(level for level, some in zip(levels, kept, strict=True) if some)
            self.known[weight] = levels, prices[kept]
        return self.known[weight]

    def _levels(self, weight: StoredWeight) -> Iterator[Level]:
        for axes in ((), *filter(None, subsets(self.free(weight)))):
            dim = self.dim(weight, axes) if axes else 0
            for stored in nested(axes) if weight.trainable else [(axes, axes, axes)]:
                yield (level := Level(*stored, dim))
                if self.quantizes:
                    yield from _in_int8(weight, level, self.mesh)

    def free(self, weight: StoredWeight) -> Axes:
        """The axes of devices that replicate a weight."""
        axes = self.mesh.axes if weight.spec.shape else ()
        own = weight.layout.axes
        return tuple(a.name for a in axes if a.name not in own and a.size > 1 and not a.steps)

    def dim(self, weight: StoredWeight, axes: Axes) -> int:
        """See `chunked_dim`."""
        return chunked_dim(weight.layout, weight.spec.shape, axes, self.mesh)

    def price(self, weight: StoredWeight, level: Level) -> WeightPrice:
        """One level."""
        found = np.zeros(WEIGHT_PARTS, dtype=np.int64)
        shape = local_shape(weight.layout, weight.spec.shape, self.mesh)
        whole, finest = prod(shape), self.mesh.size(level.optimizer)
        rows = shape[level.dim] if shape else 1
        # Elements of a finest chunk, of which the larger ones are made.
        least = whole // max(rows, 1) * ceil(rows / finest)
        kept, summed, owned = (
            least * (finest // self.mesh.size(axes)) if axes else whole
            for axes in (level.weight, level.gradient, level.optimizer)
        )
        width = DTYPE_BYTES[weight.spec.dtype]
        master = DTYPE_BYTES[self.decisions.master_dtype or weight.spec.dtype]
        gradient = DTYPE_BYTES[self.decisions.reduce_dtype or weight.spec.dtype]
        if level.weight:
            unit = weight.unit_elements
            sent = whole * width, unit, width if level.weight_sent else 0
            gathered = self.messages.share(found, weight, "all_gather", level.weight, *sent)
            found[[GATHERED, AGAIN] if weight.block else ALONE] = gathered
            found[STORED] += _pooled(weight, level, whole * width, whole * gradient)
            if weight.block:
                # What the first call needs arrives while nothing is computed.
                found[ALONE] = gathered // weight.units
                found[GATHERED] -= found[ALONE]
        found[STORED] += kept * width
        if not weight.trainable:
            return found
        self._collect(found, weight, level, whole * gradient, (summed * gradient, owned * gradient))
        self._reduce(found, weight, level, whole * gradient)
        found[UPDATED] = picoseconds(
            self.walker.kernels.update_s(owned * master, self.optimizer.num_states)
            - self.walker.kernels.software.launch_s
        )
        found[AFTER] += found[UPDATED]
        apart = level.optimizer[len(level.weight) :]
        if apart:
            found[AFTER] += self.messages.share(found, weight, "all_gather", apart, kept * width)
            found[STORED] += kept * width  # they leave all at once
        # What is updated lies in the memory of the weight, if it has the same dtype.
        found[STORED] += owned * master * (self.optimizer.num_states + (master != width))
        # Denominators go before chunks are gathered.
        found[UPDATING] += owned * (master if self.denominators else width if apart else 0)
        return found

    def _collect(
        self,
        found: WeightPrice,
        weight: StoredWeight,
        level: Level,
        whole: int,
        parts: tuple[int, int],
    ) -> None:
        """Bytes of a gradient: `whole`, or `parts` as it is stored and as it is updated."""
        whole_sums = not level.optimizer and self.mesh.size(weight.reduce) > 1
        if whole_sums or not weight.reached:
            found[STORED] += parts[0]
            return
        # The first backward pass makes it.
        found[COLLECTED], found[UPDATING] = parts
        if level.weight and not weight.block:
            found[MOVING] = whole

    def _reduce(self, found: WeightPrice, weight: StoredWeight, level: Level, size: int) -> None:
        """Reducing the gradient as `ir.step_program` says: in every microbatch to how it is stored,
        once a step to how its optimizer state is stored.
        """
        unit = weight.unit_elements if level.weight else 0
        # What is reduced last arrives when nothing is computed any more.
        late = weight.units if unit else int(weight.last)  # one of so many; none
        state = size // self.mesh.size(level.optimizer)
        each, once, rest = _path(weight, level, self.mesh)
        dtype = self.decisions.reduce_dtype or weight.spec.dtype
        width = DTYPE_BYTES[dtype] if level.gradient_sent else 0
        # Gradients of whole weights are scattered as they arrive, those of gathered ones later.
        early = CHUNKED if weight.block or not level.weight else ALONE
        for part, kind, axes, left in (
            (early, "reduce_scatter", each, size // self.mesh.size(level.gradient)),
            (REDUCED, "reduce_scatter", once, state),
            (REDUCED, "all_reduce", rest, state),
        ):
            if kind == "reduce_scatter":
                left *= self.mesh.size(axes)
            sent = self.messages.share(found, weight, kind, axes, left, unit, width)
            if part == ALONE:
                found[ALONE] += sent
                continue
            exposed = sent // late if late else 0
            found[part] += sent - exposed
            found[AFTER] += exposed


def _path(weight: StoredWeight, level: Level, mesh: Mesh) -> tuple[Axes, Axes, Axes]:
    """The axes over which a gradient is reduced: in every microbatch, and twice once a step."""
    partial = tuple(a for a in mesh.names if a in weight.reduce)
    each = tuple(a for a in level.gradient if a in partial)
    once = tuple(a for a in level.optimizer[len(level.gradient) :] if a in partial)
    return each, once, tuple(a for a in partial if a not in level.optimizer)


def _in_int8(weight: StoredWeight, level: Level, mesh: Mesh) -> Iterator[Level]:
    """The same with the weight, its gradient, or both in int8 on their way, where that may be."""
    if weight.spec.dtype in REAL:
        weights = ("", INT8) if level.weight else ("",)
        once = sum(mesh.size(axes) > 1 for axes in _path(weight, level, mesh)) == 1
        gradients = ("", INT8) if weight.trainable and once else ("",)
        for weight_sent, gradient_sent in islice(product(weights, gradients), 1, None):
            yield replace(level, weight_sent=weight_sent, gradient_sent=gradient_sent)


def _pooled(weight: StoredWeight, level: Level, size: int, gradient: int) -> int:
    """Bytes of the buffers that a gathered weight of so many bytes goes through, and its
    gradient; those of block calls serve all calls.
    """
    if not weight.reached:  # who reads it may not run
        return 0
    if not weight.block:  # of all weights at once; whole frozen ones lie elsewhere
        return 2 * size if weight.trainable else size
    wholes = min(WEIGHTS_AT_ONCE, weight.units + 1)
    if not weight.trainable:
        return (wholes - 1) * size // weight.units
    leaving = 0
    if set(level.gradient) & set(weight.reduce):
        # Those of equal size are free again where few calls follow.
        leaving = weight.units + 1 - wholes if gradient == size else weight.units
    return (wholes * size + min(GRADIENTS_AT_ONCE, leaving) * gradient) // weight.units


def _dominated(prices: WeightPrice) -> NDArray[np.bool_]:
    """Which rows have no part below that of some other row; of equal ones all but the first."""
    no_more = (prices[:, None] >= prices[None]).all(-1)
    earlier = np.tri(len(prices), k=-1, dtype=bool)
    beaten = no_more & (~no_more.T | earlier)
    found: NDArray[np.bool_] = np.logical_or.reduce(beaten, axis=1)
    return found


def _together(weight: StoredWeight, num_bytes: int, elements: int) -> int:
    """Bytes of `elements` of which `weight` has as many of its own as are `num_bytes` here."""
    own = max(weight.spec.num_elements, 1)
    return num_bytes * max(elements, own) // own
