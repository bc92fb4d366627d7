"""What the runtime does beside the passes, as instructions.

Weights stored in chunks are gathered for the unit at hand, with the next one under way
(`runtime.units`); gradients in chunks are reduced in every microbatch, at most two reductions at a
time (`runtime.chunked`), or in the last one; others in buckets as they become ready
(`runtime.leaves`). Activations
that leave for the host do so while the next block runs, and come back a block ahead.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

from parloom.cost.parameters import Parameters, Transfer
from parloom.cost.tasks import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    OF_WEIGHTS,
    Links,
    Listing,
    key_of,
    picoseconds,
)
from parloom.cost.works import Called
from parloom.ir.step_program import EACH_STEP

ROOT = ""


class Pool:
    """`runtime.chunks.Pool`: flat buffers by size, which stay for the next use.

    Unless they are `kept`: then they come from the allocator and go back to it.
    """

    def __init__(self, kept: bool = True) -> None:
        self.kept = kept
        self._out: Counter[tuple[int, str]] = Counter()
        self._most: dict[tuple[int, str], int] = {}

    def take(self, num_bytes: int, dtype: str, out: Listing) -> None:
        """A buffer is in use."""
        if not self.kept:
            if num_bytes:
                out.run("buffer", "memory", before=((COMMUNICATION, num_bytes),))
            return
        key = num_bytes, dtype
        self._out[key] += 1
        self._most[key] = max(self._most.get(key, 0), self._out[key])

    def give(self, num_bytes: int, dtype: str, out: Listing) -> None:
        """A buffer may be used again."""
        if not self.kept:
            if num_bytes:
                out.run("buffer", "memory", after=((COMMUNICATION, -num_bytes),))
            return
        self._out[num_bytes, dtype] -= 1

    @property
    def held_bytes(self) -> int:
        """All buffers, from the first step on."""
        return sum(size * count for (size, _), count in self._most.items())


ALLOCATOR = Pool(kept=False)
"""Of buffers that do not stay."""


class Gathered:
    """Which units are gathered or under way; writes what has to happen into a listing.

    Memory of units with `lasting` (frozen) weights does not return to the pool.
    """

    def __init__(
        self, gathers: Iterable[Transfer], links: Links, pool: Pool, lasting: Container[str] = ()
    ) -> None:
        self.links, self.pool, self._lasting = links, pool, lasting
        self.units: dict[str, list[Transfer]] = {}
        for gather in gathers:
            self.units.setdefault(gather.unit or ROOT, []).append(gather)
        self._order = list(self.units)
        self._launched: set[str] = set()
        self._whole: set[str] = set()
        self._stays = False
        self._current: str | None = None
        self._backward = False

    def turn(self, backward: bool) -> None:
        """A pass begins."""
        self._backward, self._current = backward, None
        if not backward:
            self._stays = False

    def root(self, out: Listing) -> None:
        """Main reads a weight of its own: it stays whole for the pass and its backward pass."""
        if ROOT in self.units and not self._stays:
            self.gather(ROOT, out)
            self._stays = True

    def gather(self, unit: str, out: Listing) -> None:
        """A unit is needed now; the next one sets out, too."""
        if unit not in self.units:
            return
        self._launch(unit, out)
        if unit != self._current:
            self._current = unit
            next_ = self._order.index(unit) + (-1 if self._backward else 1)
            if 0 <= next_ < len(self._order):
                self._launch(self._order[next_], out)
        self._arrive(unit, out)

    def close(self, unit: str, out: Listing) -> None:
        """A call is over; the backward pass begins with the last unit."""
        if unit in self.units and not self._backward and unit != self._order[-1]:
            self.drop(unit, out)

    def drop(self, unit: str, out: Listing) -> None:
        """Give back a unit's memory."""
        if unit in self._launched:
            self._arrive(unit, out)
            gathers = self.units[unit]
            if self._lasts(unit):
                size = sum(gather.num_bytes for gather in gathers)
                out.run("drop weights", "memory", after=((COMMUNICATION, -size),))
            else:
                for gather in gathers:
                    self.pool.give(gather.num_bytes, gather.dtype, out)
            self._launched.discard(unit)
            self._whole.discard(unit)

    def drop_all(self, out: Listing) -> None:
        """The backward pass is over."""
        for unit in self._order:
            self.drop(unit, out)

    def _launch(self, unit: str, out: Listing) -> None:
        if unit in self._launched:
            return
        self._launched.add(unit)
        for gather in self.units[unit]:
            (exchange,) = gather.exchanges
            launch = self.links.exchange(_key(gather), exchange, OF_WEIGHTS)
            self.pool.take(gather.staging_bytes, gather.dtype, out)
            encode(gather, out)
            out.launch(launch, gather.name, before=((COMMUNICATION, gather.scratch_bytes),))

    def _arrive(self, unit: str, out: Listing) -> None:
        """Wait, and unpack into memory of its own."""
        if unit in self._whole:
            return
        self._whole.add(unit)
        for gather in self.units[unit]:
            if self._lasts(unit):
                fresh = gather.num_bytes
            else:
                fresh = 0
                self.pool.take(gather.num_bytes, gather.dtype, out)
            self.pool.give(gather.staging_bytes, gather.dtype, out)
            # The back end is through before the weights are unpacked.
            after = ((COMMUNICATION, -gather.scratch_bytes), (COMMUNICATION, fresh))
            out.run(gather.name, "wait", waits=(_key(gather),), after=after)
            decode(gather, out)

    def _lasts(self, unit: str) -> bool:
        return any(n in self._lasting for gather in self.units[unit] for n in gather.parameters)


@dataclass(slots=True)
class _Flight:
    """A reduction under way: what is still to be launched, and waited for after the `last` launch,
    which gives back `given` bytes; `staged` until what was packed has been scattered. `collected`:
    what was packed takes the place of gradients that were there since other microbatches.
    """

    name: str
    later: list[tuple[Transfer, int]]
    last: tuple[Transfer, int]
    given: int = 0
    staged: bool = False
    collected: bool = False


class Reduced:
    """The reductions of chunked gradients under way, oldest first.

    In the `first` backward pass of a step the chunks that arrive stay: others are added to them. At
    most two are under way that take memory of their own: those that travel where they lie, and
    those of gradients that were collected, do not wait.
    """

    def __init__(self, links: Links, pool: Pool) -> None:
        self.links, self.pool = links, pool
        self.first = False
        self.flights: list[_Flight] = []

    def launch(
        self, chain: Sequence[Transfer], freed_bytes: int, collected: bool, out: Listing
    ) -> None:
        """Gradients set out; `freed_bytes` of them were whole until now, and all of them, where
        they were `collected`, since other microbatches.
        """
        if not chain[0].staging_bytes and chain[0].exchanges:
            self.flights.append(self._in_place(chain, out))
            return
        for flight in self.flights:
            self._proceed(flight, out)
        while not collected and self._are_many(chain[0].name):
            self._land(out)
        # A collective of nothing stands for what is cut and not sent.
        steps = [(t, index) for t in chain for index in range(max(1, len(t.exchanges)))]
        flight = _Flight(chain[0].name, steps[1:], steps[0], collected=collected)
        stays = self.first or chain[0].when == EACH_STEP
        self._start(flight, chain[0], freed_bytes, stays, out)
        self.flights.append(flight)

    def _in_place(self, chain: Sequence[Transfer], out: Listing) -> _Flight:
        """Launch all collectives at once; each begins when the one before is over."""
        steps = [(t, index) for t in chain for index in range(len(t.exchanges))]
        encode(chain[0], out)
        scratch = max(transfer.scratch_bytes for transfer in chain)
        channel, taken = "", scratch
        for transfer, index in steps:
            exchange = transfer.exchanges[index]
            launch = self.links.exchange(_key(transfer, index), exchange, OF_WEIGHTS)
            channel = channel or launch.channel
            before = ((COMMUNICATION, taken),)
            out.launch(replace(launch, channel=channel), transfer.name, before)
            taken = 0
        return _Flight(chain[0].name, [], steps[-1], scratch)

    def _are_many(self, name: str) -> bool:
        own = sum(not flight.collected for flight in self.flights)
        return own > 1 or any(flight.name == name for flight in self.flights)

    def land(self, out: Listing) -> None:
        """Wait for all of them."""
        while self.flights:
            self._land(out)

    def _start(
        self, flight: _Flight, transfer: Transfer, freed_bytes: int, stays: bool, out: Listing
    ) -> None:
        """Pack what leaves and launch the first collective."""
        chunk = transfer.chunk_bytes
        pool = ALLOCATOR if flight.collected else self.pool
        pool.take(transfer.staging_bytes, transfer.dtype, out)
        flight.staged = True
        flight.given = transfer.scratch_bytes + (0 if stays else chunk)
        before = ((COMMUNICATION, flight.given), (GRADIENTS, chunk if stays else 0))
        after = ((GRADIENTS, -freed_bytes),)
        encode(transfer, out)
        if transfer.exchanges:
            first = self.links.exchange(_key(transfer), transfer.exchanges[0], OF_WEIGHTS)
            out.launch(first, transfer.name, before, after)
        else:  # whole on every rank already, which keeps its chunk
            out.run(transfer.name, "memory", before=before, after=after)
        if not any(exchange.kind == "reduce_scatter" for exchange in transfer.exchanges):
            self._unstage(flight, transfer, out)

    def _unstage(self, flight: _Flight, transfer: Transfer, out: Listing) -> None:
        if flight.staged:
            pool = ALLOCATOR if flight.collected else self.pool
            pool.give(transfer.staging_bytes, transfer.dtype, out)
            flight.staged = False

    def _proceed(self, flight: _Flight, out: Listing) -> None:
        """Launch what comes after the first collective, each when the one before is over."""
        for transfer, index in flight.later:
            before, _ = flight.last
            if transfer is before:
                out.run(transfer.name, "wait", waits=(_key(*flight.last),))
                self._unstage(flight, transfer, out)
                exchange = transfer.exchanges[index]
                launch = self.links.exchange(_key(transfer, index), exchange, OF_WEIGHTS)
                out.launch(launch, transfer.name)
            else:
                self._arrive(flight, out)
                self._start(flight, transfer, before.chunk_bytes, True, out)
            flight.last = transfer, index
        flight.later = []

    def _arrive(self, flight: _Flight, out: Listing) -> None:
        """Wait for the last collective of a transfer."""
        transfer, _ = flight.last
        self._unstage(flight, transfer, out)
        waits = (_key(*flight.last),) if transfer.exchanges else ()
        out.run(transfer.name, "wait", waits=waits, after=((COMMUNICATION, -flight.given),))
        decode(transfer, out)

    def _land(self, out: Listing) -> None:
        flight = self.flights.pop(0)
        self._proceed(flight, out)
        self._arrive(flight, out)


class Ready:
    """Launches reductions in one backward pass as gradients become ready.

    `touched` are the names of the parameters in the order in which gradients are made for them,
    each as often as that happens; `whole` collects what is reduced once a step, with its keys.
    `last`: no microbatch comes after. Unless it `overlaps`, what is reduced once a step is left to
    `rest`.
    """

    def __init__(
        self,
        parameters: Parameters,
        buckets: Sequence[Transfer],
        touched: Iterable[str],
        reduced: Reduced,
        whole: list[tuple[str, Transfer]],
        last: bool,
        overlaps: bool,
    ) -> None:
        self._parameters, self._buckets, self._reduced = parameters, buckets, reduced
        self._whole, self._last, self._overlaps = whole, last, overlaps
        self._left = Counter(touched)
        self._bucket = {name: i for i, b in enumerate(buckets) for name in b.parameters}
        self._missing = [len(bucket.parameters) for bucket in buckets]
        self._next = 0
        self._units: dict[str, list[Transfer]] = {}
        for transfer in parameters.unit_reductions:
            self._units.setdefault(transfer.unit or ROOT, []).append(transfer)
        self._root = {name for t in self._units.get(ROOT, ()) for name in t.parameters}

    def made(self, names: Iterable[str], out: Listing) -> None:
        """A work has made gradients, or its part of them."""
        for name in names:
            self._left[name] -= 1
            if self._left[name]:
                continue
            if name in self._root:
                self._root.discard(name)
                if not self._root:
                    self.unit(ROOT, out)
            elif name in self._bucket:
                self._missing[self._bucket[name]] -= 1
                self._launch(out)

    def unit(self, unit: str, out: Listing) -> None:
        """The backward pass of a unit is over."""
        for transfer in self._units.get(unit, ()):
            self._scatter(transfer, out)

    def _launch(self, out: Listing) -> None:
        """Launch the buckets that are complete, in order."""
        while self._next < len(self._buckets) and not self._missing[self._next]:
            bucket = self._buckets[self._next]
            self._next += 1
            if self._overlaps or bucket.when != EACH_STEP:
                self._set_out(bucket, out)

    def rest(self, out: Listing) -> None:
        """Launch the buckets that wait for the end of the last backward pass."""
        for bucket in self._buckets:
            if not self._overlaps and bucket.when == EACH_STEP:
                self._set_out(bucket, out)

    def _set_out(self, bucket: Transfer, out: Listing) -> None:
        if bucket.chunked:
            self._scatter(bucket, out)
        elif self._last:
            key = whole(bucket, self._reduced.links, out, bucket.scratch_bytes)
            self._whole.append((key, bucket))

    def _scatter(self, transfer: Transfer, out: Listing) -> None:
        if not self._last and transfer.when == EACH_STEP:
            return
        first = self._parameters.by_name[transfer.parameters[0]]
        collected = self._parameters.collects_whole(first)
        if self._parameters.lies_whole(first):
            freed = 0
        elif collected:
            freed = transfer.num_bytes
        else:
            by_name = self._parameters.by_name
            freed = sum(self._parameters.home_bytes(by_name[n]) for n in transfer.parameters)
        chain = transfer.chain() if self._last else (transfer,)
        self._reduced.launch(chain, freed, collected and transfer.unit is None, out)


class Offloaded:
    """Activations on their way to the host and back."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._leaving: tuple[str, int] | None = None
        self._order: list[Called] = []
        self._coming: set[str] = set()

    def leave(self, call: Called, out: Listing) -> None:
        """What a call made sets out for the host; that of the one before has to be there."""
        key = key_of("host", f"offload {call.prefix}")
        out.launch(self._links.host(key, call.moves, to_host=True), f"offload {call.prefix}")
        self.settle(out)
        self._leaving = key, call.moves

    def settle(self, out: Listing) -> None:
        """Wait for what is leaving."""
        if self._leaving is not None:
            key, size = self._leaving
            out.run("offload", "wait", waits=(key,), after=((ACTIVATIONS, -size),))
            self._leaving = None

    def expect(self, calls: list[Called]) -> None:
        """A backward pass begins, in which these calls need their activations."""
        self._order, self._coming = calls, set()

    def come(self, call: Called, out: Listing) -> None:
        """A call needs its activations; those of the next one set out, too."""
        at = next(i for i, other in enumerate(self._order) if other is call)
        for other in self._order[at : at + 2]:
            if other.prefix not in self._coming:
                self._coming.add(other.prefix)
                launch = self._links.host(_fetched(other), other.moves, to_host=False)
                out.launch(launch, f"fetch {other.prefix}", before=((ACTIVATIONS, other.moves),))
        out.run(f"fetch {call.prefix}", "wait", waits=(_fetched(call),))


def _fetched(call: Called) -> str:
    return key_of("host", f"fetch {call.prefix}")


def whole(transfer: Transfer, links: Links, out: Listing, taken_bytes: int = 0) -> str:
    """Launch a bucket of whole tensors, which takes so many bytes; its key."""
    (exchange,) = transfer.exchanges
    encode(transfer, out)
    launch = links.exchange(_key(transfer), exchange, OF_WEIGHTS)
    out.launch(launch, transfer.name, before=((COMMUNICATION, taken_bytes),))
    return launch.key


def encode(transfer: Transfer, out: Listing) -> None:
    """Quantize what sets out."""
    if transfer.coding is not None:
        _code(transfer.coding.encode_s, transfer.coding.encode_bytes, out)


def decode(transfer: Transfer, out: Listing) -> None:
    """Read what has arrived quantized."""
    if transfer.coding is not None:
        _code(transfer.coding.decode_s, transfer.coding.decode_bytes, out)


def _code(seconds: float, size: int, out: Listing) -> None:
    before, after = ((COMMUNICATION, size),), ((COMMUNICATION, -size),)
    out.run("quantized communication", "quantize", picoseconds(seconds), (), before, after)


def _key(transfer: Transfer, index: int = 0) -> str:
    """`weights all_gather|gather h.3 4`: one per collective."""
    exchange = transfer.exchanges[index]
    what = "gradients" if "reduce" in exchange.kind else "weights"
    step = f" {index + 1}" if index else ""
    return key_of(f"{what} {exchange.kind}", f"{transfer.name}{step}")
