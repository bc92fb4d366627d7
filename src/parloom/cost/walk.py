"""Price of the passes of a lowered function: what one microbatch computes, sends and keeps.

Forward and backward are priced item by item: operators by the roofline over their local shards,
movements by the primitive that the adjoint table names. A block kind is priced once per variant.
What autograd keeps is what `OpDef.saved` declares; `cost.liveness` says when memory comes and goes.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod

from parloom.cost.exchanges import Exchanges
from parloom.cost.hiding import hidden, hide_moves
from parloom.cost.kernels import LINEAR, NARROW, Kernels, Scores
from parloom.cost.liveness import Lives, own_of
from parloom.cost.local_operators import kept_copies, local_operator, made_beside
from parloom.cost.merging import CROSS_ENTROPY, Part, merged
from parloom.cost.routes import sending
from parloom.cost.staging import staging_bytes
from parloom.cost.works import (
    INSIDE,
    NEW,
    Called,
    Exchange,
    Late,
    Track,
    Walked,
    Work,
    summed,
)
from parloom.ir.graph import DTYPE_BYTES
from parloom.ir.layout import local_shape
from parloom.ir.mesh import Cluster, Mesh
from parloom.ir.moves import ADJOINTS
from parloom.ir.ops import Site, op_of
from parloom.ir.ops.opdef import SavedTensors
from parloom.ir.pcg import Compute, Item, Movement, PCall, PFunction, PValue, Remake
from parloom.ir.remake import saved_by

# Primitives that leave the local tensor where it is.
FREE = ("identity",)
COLLECTIVE_PRIMITIVES = {
    "all_gather": "all_gather",
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "halo_exchange": "halo_exchange",
    "halo_add": "halo_exchange",
}
# Primitives that may need a stacked copy of the larger side.
STACKED = ("all_gather", "reduce_scatter", "all_to_all")


class Walker:
    """Prices the functions of one lowered program on one cluster."""

    def __init__(
        self,
        functions: Mapping[str, PFunction],
        mesh: Mesh,
        cluster: Cluster,
        kernels: Kernels | None = None,
    ) -> None:
        self.functions, self.mesh, self.cluster = functions, mesh, cluster
        self.kernels = (kernels or Kernels(cluster.device)).on(cluster.device)
        self._known: dict[str, Walked] = {}
        self.exchanges = Exchanges(mesh, cluster, self.kernels)

    @property
    def kernels_of_main(self) -> Kernels:
        """Recipes of 8 and 4 bits are for products of blocks: the head, and losses, have 16
        (TransformerEngine and torchtitan leave out the output layer).
        """
        narrow = self.kernels.product_dtype in NARROW
        return replace(self.kernels, product_dtype=None) if narrow else self.kernels

    def call(self, name: str, parameters: frozenset[int] = frozenset()) -> Walked:
        """The price of the function `name`, from memory where it was asked for before.

        `parameters` are the positions of inputs that are parameters, the same in every call.
        """
        if name not in self._known:
            function = self.functions[name]
            weights = frozenset(function.inputs[i].name for i in parameters)
            outside = frozenset(v.name for v in function.inputs)
            lives = Lives(outside, weights)
            self._known[name] = self.walk(
                function.inputs, function.body, lives, function.outputs, function.remake
            )
        return self._known[name]

    def walk(
        self,
        inputs: tuple[PValue, ...],
        body: tuple[Item, ...],
        lives: Lives,
        outputs: tuple[PValue, ...] = (),
        remake: Remake | None = None,
        kernels: Kernels | None = None,
    ) -> Walked:
        """The price of a body; `lives` says what of its inputs others count. `kernels` are those of
        blocks unless others are given.
        """
        # Values that are dropped are memory of their own: nothing of them stays in a kernel.
        software = self.kernels.software
        parts = (
            merged(body, outputs, software.merges, software.fuses_loss) if remake is None else {}
        )
        self._run(inputs, body, lives, parts, kernels or self.kernels)
        if remake is not None:
            lives.drop(remake, self._again(remake))
        return self._walked(inputs, lives, outputs)

    def _run(
        self,
        inputs: tuple[PValue, ...],
        body: tuple[Item, ...],
        lives: Lives,
        parts: Mapping[int, Part],
        kernels: Kernels,
    ) -> None:
        state = _Body(self, inputs, lives, kernels)
        for index, item in enumerate(body):
            lives.items.append(item)
            forward, backward = state.works(item, parts.get(index))
            lives.forward.append(forward)
            lives.backward.append(backward)
        if self.kernels.software.hides_moves:
            hide_moves(lives)

    def _again(self, remake: Remake) -> tuple[Work | Called, ...]:
        """The works that make dropped values again, in the order in which they run."""
        lives = Lives(frozenset(value.name for value in remake.inputs), frozenset())
        self._run(remake.inputs, remake.body, lives, {}, self.kernels)
        lives.keep_parts()
        works = lives.forward_works(remake.outputs)
        return tuple(replace(work, again=True) for work in works if isinstance(work, Work))

    def _walked(
        self, inputs: tuple[PValue, ...], lives: Lives, outputs: tuple[PValue, ...]
    ) -> Walked:
        position = {v.name: i for i, v in enumerate(inputs)}
        backward, moved = lives.backward_works(outputs)
        owners = [lives.of(value) for value in outputs]
        forward = self.track(lives.forward_works(outputs), backward=False)
        again = forward
        if self.kernels.software.stops_early and not lives.callees:
            again = self.track(lives.again_works(outputs), backward=False)
        return Walked(
            forward,
            self.track(backward, backward=True),
            again,
            lives.inside_sizes(),
            tuple(sorted(position[n] for n in lives.kept if n in position)),
            tuple(sorted(position[n] for n in moved if n in position)),
            tuple(
                position.get(n, INSIDE if n in lives.kept or n in lives.inside else NEW)
                for n in owners
            ),
            tuple(_late(lives, position, owners)),
        )

    def track(self, works: Iterable[Work | Called], backward: bool) -> Track:
        """Works in order, with their sum and the memory of activations."""
        listed = tuple(works)
        passes, held, peak = [], 0, 0
        for work in listed:
            held += work.takes
            if isinstance(work, Work):
                passes.append(work.total())
                peak = max(peak, held + work.staging)
            else:
                held += work.moves if backward else 0
                for inner in self.inner(work, backward):
                    passes.append(inner.total)
                    peak = max(peak, held + inner.peak_bytes)
                    held += inner.net_bytes
                    if inner is self.call(work.function).again:
                        held -= work.discards
            held -= work.gives
            peak = max(peak, held)
        return Track(listed, summed(passes), held, peak)

    def inner(self, called: Called, backward: bool) -> tuple[Track, ...]:
        """What a call runs in a pass."""
        callee = self.call(called.function)
        if not backward:
            return (callee.forward,)
        return (callee.again, callee.backward) if called.recompute else (callee.backward,)

    def arrival(self, track: Track) -> tuple[int, ...]:
        """Inputs in the order in which a backward pass has made all of their gradients."""
        last: dict[int, None] = {}
        for work in track.works:
            for index in self.parameters(work):
                last.pop(index, None)
                last[index] = None
        return tuple(last)

    def parameters(self, work: Work | Called) -> tuple[int, ...]:
        """Inputs whose gradients a work of a backward pass makes or adds to, in order."""
        if isinstance(work, Work):
            return work.parameters
        inner = self.arrival(self.call(work.function).backward)
        outer = (work.inputs[index] for index in inner)
        return tuple(index for index in outer if index is not None)

    def local_bytes(self, value: PValue) -> int:
        """Bytes of one rank's shard of a value, border rows included."""
        shape = list(local_shape(value.layout, value.spec.shape, self.mesh))
        for dim, below, above in value.halo:
            shape[dim] += below + above
        return prod(shape) * DTYPE_BYTES[value.spec.dtype]

    def primitive(
        self, name: str, axes: tuple[str, ...], before: int, after: int
    ) -> tuple[float, Exchange | None]:
        """Seconds of copying and the exchange of a primitive that makes `after` local bytes of
        `before`.
        """
        if name in FREE:
            return 0.0, None
        kind = COLLECTIVE_PRIMITIVES.get(name)
        copies = kind is None or (name in STACKED and self.kernels.software.stacks)
        seconds = self.kernels.stream_s(before + after) if copies else 0.0
        if kind is None:
            return seconds, None
        moved = abs(after - before) if kind == "halo_exchange" else max(before, after)
        return seconds, self.exchange(kind, axes, moved)

    def exchange(self, kind: str, axes: tuple[str, ...], moved: float) -> Exchange:
        """One collective over the joint group of `axes`; see `algorithms` for `moved`."""
        return self.exchanges.price(kind, axes, moved)


def _late(lives: Lives, position: Mapping[str, int], owners: Sequence[str]) -> Iterator[Late]:
    """What of a body stays until gradients of weights are made; `owners` are of its outputs."""
    late = lives.late()
    for name in lives.crossing & position.keys():
        late.setdefault(name, set()).add(position[name])  # its place in the graph holds it
    for owner, by in late.items():
        size, outside = lives.sizes[owner], owner in lives.outside
        output = owners.index(owner) if owner in owners and not outside else None
        yield Late(frozenset(by), size, position[owner] if outside else None, output)


class _Body:
    """A body that is being walked: every item's works, and what is known of its values."""

    def __init__(
        self, walker: Walker, inputs: tuple[PValue, ...], lives: Lives, kernels: Kernels
    ) -> None:
        self.walker, self.lives, self.kernels = walker, lives, kernels
        self.position = {v.name: i for i, v in enumerate(inputs)}
        # What stays inside of a merged kernel, and the operator that makes it.
        self.unwritten: dict[str, Compute] = {}
        # By a gathered value's memory, the movement that gathered it of the ranks' own parts.
        self.gathered: dict[str, Movement] = {}
        # What is made of one parameter alone, operator by operator, and where that is.
        self.chains: dict[str, tuple[int, ...]] = {}
        # What is gathered again, for the first of the products that read it.
        self.again: set[str] = set()
        lives.sizes |= {v.name: walker.local_bytes(v) for v in inputs}

    def works(
        self, item: Item, part: Part | None = None
    ) -> tuple[Work | Called | None, Work | Called | None]:
        """Forward and backward of an item; None where nothing runs."""
        if isinstance(item, Compute):
            return self.compute(item, part)
        return self.move(item) if isinstance(item, Movement) else self.call(item)

    def compute(self, item: Compute, part: Part | None) -> tuple[Work | None, Work | None]:
        """Forward and backward of an operator, or of its `part` in a merged kernel."""
        op, lives = op_of(item.node), self.lives
        site = Site(item.node, tuple(v.spec for v in item.operands))
        if part is not None:
            self.unwritten |= {item.results[i].name: item for i in part.inner_results}
        self.define(item.operands, item.results)
        if op.lies_in:
            roomy = self.share(item.operands[0], op.lies_in(site, self.fused))
            lives.sizes[item.results[0].name] = roomy
        if op.view:
            for value in item.results:
                lives.share(item.operands[0], value)
            return self.written(item, op.writes), None
        local = local_operator(item, self.walker.mesh)
        if part is not None:
            local = replace(
                local,
                inner_operands=part.inner_operands,
                inner_results=part.inner_results,
                launches=part.launches,
            )
        seconds = self.kernels.seconds(local)
        name, kind = item.node.key, item.node.op
        read = (lives.of(v) for v in item.operands)
        scores = self.kernels.score_bytes(local)
        staging = scores.forward_bytes if scores else 0
        forward = Work(
            name, kind, seconds.forward_s, staging=staging, parameters=self.weights(read)
        )
        forward = sending(self.walker, item, forward, backward=False)
        if not any(v.differentiable for v in item.results):
            return forward, None
        undo = self.kept(item, site, scores)
        wanted = {lives.of(v): None for v in item.operands if v.differentiable}
        sources = self.sources(wanted)
        chained = self.note_chain(wanted, item.results)
        all_late = all(owner in lives.parameters or owner in self.chains for owner in wanted)
        share = seconds.backward_s if all_late else seconds.weights_s
        flowing = (self.walker.local_bytes(v) for v in item.results if v.differentiable)
        undone = Work(
            name, kind, seconds.backward_s, staging=undo, parameters=self.weights(wanted),
            sources=sources, weights_s=share if sources else 0.0,
            flowing_bytes=sum(flowing) if sources and not chained else 0,
        )  # fmt: skip
        undone = sending(self.walker, item, undone, backward=True)
        return forward, self.gathering_again(item, undone)

    def written(self, item: Compute, operands: Sequence[int]) -> Work | None:
        """Copies of operands to the memory of another one, if there are any."""
        sizes = (self.walker.local_bytes(item.operands[index]) for index in operands)
        seconds = self.kernels.stream_s(2 * sum(sizes))
        return Work(item.node.key, item.node.op, seconds) if operands else None

    def kept(self, item: Compute, site: Site, scores: Scores | None) -> int:
        """Keep what the backward pass of an operator needs; the bytes of its own that it takes."""
        op, lives, result = op_of(item.node), self.lives, item.results[0]
        saved = saved_by(item)
        if item.node.op in LINEAR:
            self.keep_product(item, saved)
        else:
            self.keep(item, saved)
        own = self.share(result, op.own_bytes(site, self.fused)) if op.own_bytes else 0
        undo = self.share(result, op.undo_bytes(site, self.fused)) if op.undo_bytes else 0
        if op.joins:
            own += sum(map(self.walker.local_bytes, kept_copies(item)))
            undo += sum(map(self.walker.local_bytes, made_beside(item)))
        if scores:
            own, undo = scores.kept_bytes, scores.backward_bytes
        if item.node.op == CROSS_ENTROPY and self.kernels.software.fuses_loss:
            # Its gradient is made of the logits, and takes their place.
            own = undo = 0
            self.keep_value(item.operands[0])
        if own:
            lives.sizes[own_of(result)] = own
            lives.keep(own_of(result))
        if saved or own:
            runs = own or any(what == "result" for what, _ in saved)
            lives.saved_before = len(lives.items) - (not runs)
        return undo

    @property
    def fused(self) -> bool:
        """Whether the back end's devices have fused kernels."""
        return self.walker.cluster.backend != "gloo"

    def share(self, value: PValue, num_bytes: float) -> int:
        """One rank's part of memory that is sharded as `value` is."""
        local = prod(local_shape(value.layout, value.spec.shape, self.walker.mesh))
        return round(num_bytes * local / max(1, value.spec.num_elements))

    def keep(self, item: Compute, saved: SavedTensors) -> None:
        """What autograd keeps of an operator lives until its backward pass."""
        for what, index in saved:
            self.keep_value(item.results[index] if what == "result" else item.operands[index])

    def keep_product(self, item: Compute, saved: SavedTensors) -> None:
        """What a product keeps: 8-bit activations in place of those that it casts, which products
        that read the same share; and of gathered ones the rank's own part (Korthikanti et al.,
        2022, section 4.2.2), where the software gathers them again beside the backward pass.
        """
        kernels, rest = self.kernels, saved
        if ("operand", 0) in saved and item.operands[0].name not in self.position:
            rest = tuple(s for s in saved if s != ("operand", 0))
            value = item.operands[0]
            if kernels.software.gathers_again:
                found = self.gathered.get(self.lives.of(value))
                value = value if found is None else found.operand
            if kernels.software.fuses_casts and kernels.product_dtype in NARROW:
                owner = f"{self.lives.of(value)} narrow"
                width = DTYPE_BYTES[value.spec.dtype]
                self.lives.sizes[owner] = self.walker.local_bytes(value) // width
                self.lives.keep(owner)
            else:
                self.keep_value(value)
        self.keep(item, rest)

    def gathering_again(self, item: Compute, undone: Work) -> Work:
        """A product's backward work that gathers its operand again: beside the gradient of that
        operand, which does not need it.
        """
        owner = self.lives.of(item.operands[0])
        found = self.gathered.get(owner)
        reads = item.node.op in LINEAR and ("operand", 0) in saved_by(item)
        if not (self.kernels.software.gathers_again and reads and found) or owner in self.again:
            return undone
        self.again.add(owner)
        before, after = (self.walker.local_bytes(v) for v in (found.operand, found.result))
        copies_s, exchange = self.walker.primitive("all_gather", found.step.axes, before, after)
        if exchange is None:
            return undone
        seconds, exchange = hidden(exchange, undone.compute_s - undone.weights_s)
        return replace(undone, compute_s=undone.compute_s + copies_s + seconds, exchange=exchange)

    def keep_value(self, value: PValue) -> None:
        """Keep a value, or what it is made of again in the backward pass's kernel."""
        owner = self.lives.of(value)
        maker = self.unwritten.get(owner)
        if maker is None:
            self.lives.keep(owner)
            return
        for operand in maker.operands:
            self.keep_value(operand)

    def weights(self, owners: Iterable[str]) -> tuple[int, ...]:
        """The positions of those that are parameters."""
        return tuple(self.position[n] for n in dict.fromkeys(owners) if n in self.lives.parameters)

    def sources(self, owners: Iterable[str]) -> tuple[int, ...]:
        """The positions of parameters that are these, or that reach them through chains."""
        behind = (self.chains.get(owner, ()) for owner in owners)
        return tuple(dict.fromkeys((*self.weights(owners), *chain.from_iterable(behind))))

    def note_chain(self, owners: Collection[str], results: Sequence[PValue]) -> bool:
        """Note whether an item's only operand with a gradient is a parameter, or made of one alone,
        as its results then are.
        """
        sources = self.sources(owners) if len(owners) == 1 else ()
        for value in results if sources else ():
            if self.lives.of(value) not in self.lives.parameters:
                self.chains[self.lives.of(value)] = sources
        return bool(sources)

    def move(self, item: Movement) -> tuple[Work | None, Work | None]:
        """Forward and backward of a movement."""
        adjoint = ADJOINTS[item.step.row]
        self.define((item.operand,), (item.result,))
        if adjoint.forward in FREE:
            self.lives.share(item.operand, item.result)
        if adjoint.forward == "all_gather":
            self.gathered[item.result.name] = item
        forward = self.primitive(adjoint.forward, item, item.operand, item.result)
        if not item.operand.differentiable:
            return forward, None
        self.note_chain([self.lives.of(item.operand)], [item.result])
        return forward, self.primitive(adjoint.backward, item, item.result, item.operand)

    def primitive(self, name: str, item: Movement, source: PValue, target: PValue) -> Work | None:
        """One primitive that makes a local tensor of another."""
        if name in FREE:
            return None
        before, after = self.walker.local_bytes(source), self.walker.local_bytes(target)
        seconds, exchange = self.walker.primitive(name, item.step.axes, before, after)
        weights = self.weights([self.lives.of(item.operand)])
        staging = 0 if exchange is None else exchange.scratch_bytes
        if exchange is not None and self.kernels.software.stacks:
            mesh = self.walker.mesh
            shapes = [local_shape(v.layout, v.spec.shape, mesh) for v in (source, target)]
            staging = staging_bytes(
                name, item.step, mesh.size(item.step.axes), (shapes[0], before),
                (shapes[1], after), staging, undone=source is item.result,
            )  # fmt: skip
        return Work(item.result.name, name, seconds, exchange, staging=staging, parameters=weights)

    def call(self, item: PCall) -> tuple[Called, Called | None]:
        """Forward and backward of a call."""
        lives = self.lives
        self.define(item.args, item.results)
        weights = frozenset(i for i, v in enumerate(item.args) if v.name in lives.parameters)
        inner = self.walker.call(item.function, weights)
        lives.callees[len(lives.items) - 1] = inner
        shown = tuple(zip(item.results, inner.outputs, strict=True))
        inputs = tuple(self.position.get(v.name) for v in item.args)
        keeps, recompute = item.policy == "keep", item.policy == "recompute"
        for value, memory in shown:
            if memory >= 0:
                lives.share(item.args[memory], value)
            elif memory == INSIDE and keeps:
                lives.inside.add(value.name)
        if inner.backward.works:
            kept = range(len(item.args)) if recompute else inner.kept_inputs
            for index in kept:
                if item.args[index].name not in lives.parameters:
                    lives.keep(lives.of(item.args[index]))
        size = {memory: 0 for memory in (INSIDE, NEW)}
        left = list(inner.inside)
        for value, memory in shown:
            if memory < 0:
                size[memory] += lives.sizes[value.name]
            if memory == INSIDE:
                left.remove(lives.sizes[value.name])
        given = () if keeps else tuple(left)
        dropped = sum(given)
        moves = dropped if item.policy == "offload" else 0
        forward = Called(
            item.function, item.prefix, False, inputs, gives=dropped, moves=moves, given=given
        )
        if not inner.backward.works:
            return forward, None
        backward = Called(
            item.function, item.prefix, recompute, inputs,
            discards=0 if self.kernels.software.stops_early else size[NEW],
            moves=inner.inside_bytes if moves else 0,
        )  # fmt: skip
        return forward, backward

    def define(self, operands: tuple[PValue, ...], results: tuple[PValue, ...]) -> list[int]:
        """Local bytes of all of them; what never reaches memory has none."""
        values = (*operands, *results)
        sizes = [0 if v.name in self.unwritten else self.walker.local_bytes(v) for v in values]
        self.lives.sizes |= {v.name: s for v, s in zip(values, sizes, strict=True)}
        return sizes
