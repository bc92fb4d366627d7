"""The actions of one stage, written down from its priced works: what the generated program does.

`F` and `B` are the passes of one microbatch, `I` and `W` the two halves of a split backward pass;
the last backward pass launches what is reduced once a step. `REDUCE`, `STEP` and `GATHER` are the
step program.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from parloom.cost.halves import Flat, Halves, flat_works
from parloom.cost.parameters import Transfer
from parloom.cost.step import Priced
from parloom.cost.tasks import (
    ACTIVATIONS,
    BUFFERS,
    COMMUNICATION,
    COMPONENTS,
    GRADIENTS,
    OPTIMIZER,
    RECOMPUTATION,
    RECOMPUTED,
    RECOMPUTING,
    WEIGHTS,
    Action,
    Changes,
    Entry,
    Links,
    Listing,
    Placed,
    Segment,
    StepTasks,
    key_of,
    picoseconds,
    segment,
    with_placeholders,
)
from parloom.cost.transfers import ROOT, Gathered, Offloaded, Pool, Ready, Reduced, decode, whole
from parloom.cost.works import Called, Sizes, Track, Work
from parloom.ir.mesh import Cluster
from parloom.ir.pcg import PCG

# Collectives that gloo runs at once: its threads (torch 2.13's default). Others wait with what they
# would need.
AT_ONCE = 2
TEMPORARY, RETAINED = "temporary", "retained"
Gradient = tuple[str, int]
"""How long what autograd leaves of a gradient lives, and its bytes: RETAINED is until it sets out,
what is added to it, or to memory where it collects, is TEMPORARY."""


class StageWriter:
    """Writes the actions of one lowered program."""

    def __init__(self, pcg: PCG, cluster: Cluster, found: Priced) -> None:
        self.pcg, self.found = pcg, found
        self.links = Links(cluster)
        self.names = [value.name for value in pcg.main.inputs]
        self.pool = Pool(found.walker.kernels.software.memory.pools)
        self.ready: Ready | None = None  # of the last backward pass
        lasting = {n for n, p in found.parameters.by_name.items() if not p.input.trainable}
        self.gathered = Gathered(found.parameters.gathers, self.links, self.pool, lasting)
        self.software = found.walker.kernels.software
        # A GPU runs kernels while its processor issues others; a processor does one or the other.
        self.issues_ahead = cluster.backend == "nccl"
        self.reduced = Reduced(self.links, self.pool)
        self.unit_of = {n: g.unit or ROOT for g in found.parameters.gathers for n in g.parameters}
        self.host = Offloaded(self.links)
        self.pending: list[tuple[str, Transfer]] = []
        self.halves = Halves(found, self.names)
        # Forward passes of the next step for which updated weights are not needed yet.
        self.passes_before = 1
        # Bytes of gradients that come and go with the step: as stored, and as updated.
        self.passing_gradients = self.own_gradients = 0
        self._segments: dict[object, Segment] = {}
        self._bodies: dict[object, tuple[list[Entry], list[int]]] = {}
        self._known_makers: dict[tuple[str, bool], tuple[tuple[int, Flat], ...]] = {}

    def tasks(self) -> StepTasks:
        """The whole step of a plan of one stage."""
        steps = self.pcg.num_microbatches
        actions: list[Action] = [self.prologue()] * steps if self.pcg.hoisted else []
        forward, first = self.forward(), self.backward(last=steps == 1, first=True)
        backwards = [first]
        if steps > 1:
            # A backward pass may leave reductions to the next one, and adds to its gradients; at
            # most two are under way, so that every other one is the same.
            count = steps - 2
            between = [self.again() for _ in range(min(count, 3 + (count + 1) % 2))]
            while len(between) < count:
                between.append(between[-2])
            backwards = [first, *between, self.again(last=True)]
        for backward in backwards:
            actions += [forward, backward]
        return self.step((*actions, self.reduce(), self.update(), self.publish()))

    def again(self, last: bool = False) -> Action:
        """The backward pass of another microbatch, after its forward pass."""
        self.forward()
        return self.backward(last)

    def step(self, actions: tuple[Action, ...]) -> StepTasks:
        """Actions with the memory and the links of this stage."""
        stored = self.found.parameters.stored_bytes()
        base = [0] * len(COMPONENTS)
        base[WEIGHTS] = stored["weights"]
        base[GRADIENTS] = stored["gradients"] - self.passing_gradients
        base[OPTIMIZER] = stored["optimizer"]
        base[COMMUNICATION] = self.pool.held_bytes + self.found.parameters.bucket_bytes()
        base[BUFFERS] = self.found.parameters.held_bytes()
        return StepTasks(actions, self.links.names, self.links.capacities, tuple(base))

    def prologue(self) -> Action:
        """What is computed of one microbatch of the batch alone."""
        return Action("PROLOGUE", tuple(self._main(self.found.prologue.forward)))

    def forward(self) -> Action:
        """The forward pass of a microbatch."""
        self.gathered.turn(backward=False)
        parts: list[Placed] = []
        out = Listing()
        for work in self.found.main.forward.works:
            if self._reads_root(work):
                self.gathered.root(out)
            if isinstance(work, Work):
                self._emit(out, Flat(work, ACTIVATIONS, ()), "F", {})
                continue
            if out.entries:
                parts.append(self._place(out))
            parts.append(self._call_forward(work))
            out = Listing()
        self.host.settle(out)
        return Action("F", (*parts, self._place(out)))

    def backward(self, last: bool = False, part: str = "B", first: bool = False) -> Action:
        """The backward pass of a microbatch, or the half of it that `part` says.

        In the `first` one autograd makes the gradients that nobody reduces, in place.
        """
        self.gathered.turn(backward=True)
        works = self.found.main.backward.works
        touched = [name for work in works for name in self._touched(work)]
        self.halves.begin()
        parameters, buckets = self.found.parameters, self.found.buckets
        overlaps = self.software.overlaps
        ready = Ready(parameters, buckets, touched, self.reduced, self.pending, last, overlaps)
        if last and part != "I":
            self.ready = ready
        classes = self._classes(first)
        self.reduced.first = first
        if first:
            names = {name for name in touched if self._is_own(name) or self._in_chunks(name)}
            own = [parameters.by_name[name] for name in names]
            self.passing_gradients = sum(parameters.stored_of(p)["gradients"] for p in own)
            self.own_gradients = sum(map(parameters.updated_gradient_bytes, own))
        parts: list[Placed] = []
        issued: list[float] = []
        out = Listing()
        self.host.expect([w for w in works if isinstance(w, Called) and w.moves])
        for work in works:
            if isinstance(work, Called):
                if out.entries:
                    parts.append(self._place(out))
                parts.append(self._call_backward(work, ready, part, classes))
                out = Listing()
                continue
            flat = Flat(work, ACTIVATIONS, work.parameters)
            issued += self._emit(
                out, flat, part, classes, self.halves.early_of(range(len(self.names)))
            )
            if part != "I":
                ready.made(self._touched(work), out)
        collect = picoseconds(parameters.collect().price.compute_s)
        # The first gradients are where they collect, unless buffers of their own lie there.
        made = first and not self.software.memory.in_place
        if collect and part != "I" and not made:
            out.run("gradients", "collect", collect)
        if part == "W":
            self._wait_for_processor(out, issued)
        else:
            self.gathered.drop_all(out)
        if part != "B":
            self.halves.keep_main(out, part)
        name = {"B": "B last" if last else "B"}.get(part, part)
        return Action(name, (*parts, self._place(out)))

    def reduce(self) -> Action:
        """Wait until all gradients are whole; some software launches their reduction only now."""
        out = Listing()
        if self.ready is not None:
            self.ready.rest(out)
        for key, bucket in self.pending:
            after = ((COMMUNICATION, -bucket.scratch_bytes),)
            out.run("gradients", "wait", waits=(key,), after=after)
            decode(bucket, out)
        self.pending = []
        self.reduced.land(out)
        return Action("REDUCE", (self._place(out),))

    def update(self) -> Action:
        """The optimizer; states in host memory come and go through buffers that are not counted."""
        out, parameters = Listing(), self.found.parameters
        away = sum(parameters.state_bytes(p, "host") for p in parameters.trained)
        seconds = parameters.update().price.compute_s
        fetch, give = key_of("host", "fetch states"), key_of("host", "return states")
        if away:
            out.launch(self.links.host(fetch, away, to_host=False), "fetch states")
        norm = parameters.norm_bytes()
        if norm:
            out.run("norm", "memory", 0, (), ((OPTIMIZER, norm),), ((OPTIMIZER, -norm),))
        own = parameters.update_sizes()
        before, after = (_each(OPTIMIZER, sign * sum(own), own) for sign in (1, -1))
        waits = (fetch,) if away else ()
        out.run("optimizer", "update", picoseconds(seconds), waits, before, after)
        if away:
            out.launch(self.links.host(give, away, to_host=True), "return states")
            out.run("optimizer", "wait", waits=(give,))
        return Action("STEP", (self._place(out),))

    def publish(self) -> Action:
        """Whole weights, of which every rank updated a part."""
        out = Listing()
        transfers = self.found.parameters.publications
        keys = []
        scratch = [transfer.scratch_bytes for transfer in transfers]
        if self.software.overlaps_gathers:
            transfers = self._beside_forward(transfers, out)
        for index, transfer in enumerate(transfers):
            self.pool.take(transfer.staging_bytes, transfer.dtype, out)
            runs = scratch[index] if index < AT_ONCE else 0
            keys.append(whole(transfer, self.links, out, transfer.chunk_bytes + runs))
        for index, (transfer, key) in enumerate(zip(transfers, keys, strict=True)):
            self.pool.give(transfer.staging_bytes, transfer.dtype, out)
            next_ = sum(scratch[index + AT_ONCE : index + AT_ONCE + 1])
            after = ((COMMUNICATION, -scratch[index]), (COMMUNICATION, next_))
            out.run(transfer.name, "wait", waits=(key,), after=after)
        chunks = sum(transfer.chunk_bytes for transfer in transfers)
        out.run("drop chunks", "memory", after=((COMMUNICATION, -chunks),))
        # The next step begins with that.
        out.run("drop gradients", "memory", after=((GRADIENTS, -self.own_gradients),))
        return Action("GATHER", (self._place(out),))

    def _beside_forward(self, transfers: Sequence[Transfer], out: Listing) -> tuple[Transfer, ...]:
        """What is left of gathers of weights that go on beside a forward pass of the next step."""
        whole_s = sum(e.seconds for transfer in transfers for e in transfer.exchanges)
        forward_s = self.found.main.forward.total.price.compute_s
        hidden_s = min(whole_s, self.passes_before * forward_s)
        left = 1 - hidden_s / whole_s if whole_s else 1.0
        slowed_s = sum(e.slows * e.seconds for transfer in transfers for e in transfer.exchanges)
        out.run("updated weights", "collect", picoseconds((1 - left) * slowed_s))
        return tuple(
            replace(
                transfer,
                exchanges=tuple(
                    replace(e, seconds=e.seconds * left, latency_s=e.latency_s * left)
                    for e in transfer.exchanges
                ),
            )
            for transfer in transfers
        )

    def _main(self, track: Track) -> Iterator[Placed]:
        out = Listing()
        for work in track.works:
            assert isinstance(work, Work)
            self._emit(out, Flat(work, ACTIVATIONS, ()), "F", {})
        yield self._place(out)

    def _place(self, out: Listing) -> Placed:
        (entries,), keys = with_placeholders([out.entries])
        return Placed(segment(entries), "", keys)

    def _reads_root(self, work: Work | Called) -> bool:
        read = work.parameters if isinstance(work, Work) else work.inputs
        return any(self.unit_of.get(self.names[i]) == ROOT for i in read if i is not None)

    def _call_forward(self, call: Called) -> Placed:
        head, tail = Listing(), Listing()
        self.gathered.gather(call.prefix, head)
        head.run("enter", "memory", before=_each(ACTIVATIONS, call.takes, call.taken))
        self.gathered.close(call.prefix, tail)
        after = _each(ACTIVATIONS, -call.gives, call.given)
        tail.run("leave", "memory", after=(*after, (ACTIVATIONS, call.moves)))
        if call.moves:
            self.host.leave(call, tail)
        return self._call(call, "F", {}, head, {}, tail)

    def _touched(self, work: Work | Called) -> list[str]:
        """The parameters whose gradients a work makes or adds to, once for each time."""
        if isinstance(work, Work):
            return [self.names[index] for index in work.parameters]
        return [name for _, flat in self._makers(work) for name in self._outer(work, flat)]

    def _outer(self, call: Called, flat: Flat) -> list[str]:
        outer = (call.inputs[index] for index in flat.parameters)
        return [self.names[index] for index in outer if index is not None]

    def _call_backward(
        self, call: Called, ready: Ready, part: str, classes: dict[int, Gradient]
    ) -> Placed:
        head, tail = Listing(), Listing()
        inner: dict[int, Listing] = {}
        outer = [(i, o) for i, o in enumerate(call.inputs) if o is not None and o in classes]
        own = {i: classes[o] for i, o in outer}
        if part != "W":
            self.gathered.gather(call.prefix, head)
            if call.moves:
                self.host.come(call, head)
            head.run("enter", "memory", before=_each(ACTIVATIONS, call.takes, call.taken))
        if part != "I":
            for index, flat in self._makers(call):
                out = Listing()
                ready.made(self._outer(call, flat), out)
                if out.entries:
                    inner[index] = out
            ready.unit(call.prefix, tail)
        if part != "W":
            self.gathered.drop(call.prefix, tail)
            tail.run("leave", "memory", after=_each(ACTIVATIONS, -call.gives, call.given))
        placed = self._call(call, part, own, head, inner, tail)
        classes.update((o, (TEMPORARY, classes[o][1])) for _, o in outer)
        return placed

    def _is_own(self, name: str) -> bool:
        """Whether a gradient stays where autograd leaves it, until the next step."""
        parameter = self.found.parameters.by_name[name]
        parameters = self.found.parameters
        if parameters.lies_whole(parameter):
            return False
        return not (parameters.reduces(parameter) or self._in_chunks(name))

    def _in_chunks(self, name: str) -> bool:
        """Whether a gradient leaves in chunks, which come and go with the step."""
        parameter = self.found.parameters.by_name[name]
        whole = self.found.parameters.lies_whole(parameter)
        return bool(parameter.decision.optimizer.axes) and not whole

    def _classes(self, first: bool) -> dict[int, Gradient]:
        """Per parameter among main's inputs, what autograd leaves of its gradient."""
        found: dict[int, Gradient] = {}
        parameters = self.found.parameters
        for index, name in enumerate(self.names):
            parameter = parameters.by_name.get(name)
            if parameter is None or not parameter.input.trainable:
                continue
            collects = parameters.collects_whole(parameter)
            if parameters.lies_whole(parameter):
                found[index] = (TEMPORARY, parameters.home_bytes(parameter))
            elif first and (collects or self._is_own(name)):
                found[index] = (RETAINED, parameters.gradient_bytes(parameter))
            elif self._in_chunks(name) and not collects:
                found[index] = (RETAINED, parameters.home_bytes(parameter))
            else:
                found[index] = (TEMPORARY, parameters.home_bytes(parameter))
        return found

    def _call(
        self,
        call: Called,
        part: str,
        classes: dict[int, Gradient],
        head: Listing,
        inner: Mapping[int, Listing],
        tail: Listing,
    ) -> Placed:
        """The segment of a call; one that was made before, if it is the same."""
        between = sorted(inner)
        lists, keys = with_placeholders(
            [head.entries, *(inner[index].entries for index in between), tail.entries]
        )
        early = self.halves.early_of(call.inputs) if part != "B" else frozenset()
        about = part, call.recompute, call.discards
        same = call.function, *about, tuple(classes.items()), tuple(sorted(early))
        sign = (same, tuple(between), lists)
        if sign not in self._segments:
            if same not in self._bodies:
                self._bodies[same] = self._body(call, part, classes, early)
            body, ends = self._bodies[same]
            entries, start = list(lists[0]), 0
            for index, added in zip(between, lists[1:-1], strict=True):
                entries += [*body[start : ends[index]], *added]
                start = ends[index]
            self._segments[sign] = segment([*entries, *body[start:], *lists[-1]])
        return Placed(self._segments[sign], call.prefix, keys)

    def _body(
        self, call: Called, part: str, classes: dict[int, Gradient], early: frozenset[int]
    ) -> tuple[list[Entry], list[int]]:
        """A callee's instructions, and after how many each of its works is over."""
        out, classes = Listing(), dict(classes)
        ends: list[int] = []
        issued: list[float] = []
        discards = call.discards if call.recompute else 0
        remade = -discards
        listed = groupby(
            flat_works(self.found.walker, call, part), lambda flat: flat.component == RECOMPUTATION
        )
        for again, works in listed:
            if again and part == "W":
                ends += [len(out.entries) for _ in works]
                continue
            if again:
                out.run(RECOMPUTING, "memory")
            for flat in works:
                way = ("F", {}) if again else (part, classes)
                issued += self._emit(out, flat, *way, early)
                ends.append(len(out.entries))
                remade += flat.work.takes - flat.work.gives if again else 0
            if again:
                out.run(RECOMPUTED, "memory", after=((RECOMPUTATION, -discards),))
        if part == "W":
            self._wait_for_processor(out, issued)
        if remade and part in ("B", "I"):
            # The backward pass has given this back as activations.
            moved = ((RECOMPUTATION, -remade), (ACTIVATIONS, remade))
            out.run(RECOMPUTED, "memory", after=moved)
        if part in ("I", "W"):
            self.halves.keep(out, part, call, early)
        return out.entries, ends

    def _makers(self, call: Called) -> tuple[tuple[int, Flat], ...]:
        """The works of a call's backward pass that make gradients of weights, with their places."""
        key = call.function, call.recompute
        if key not in self._known_makers:
            works = enumerate(flat_works(self.found.walker, call, "B"))
            self._known_makers[key] = tuple((i, flat) for i, flat in works if flat.parameters)
        return self._known_makers[key]

    def _emit(
        self,
        out: Listing,
        flat: Flat,
        part: str,
        classes: dict[int, Gradient],
        early: frozenset[int] = frozenset(),
    ) -> tuple[float, ...]:
        """One work: it runs, its collective follows and is waited for. Of a pass of weights, the
        seconds of the gradients that it makes, none where it makes none. Those of `early` inputs
        are made with the others.
        """
        work = flat.work
        weights_s = 0.0 if early.issuperset(work.sources) else work.weights_s
        made = [classes[p] for p in flat.parameters if p in classes] if part != "I" else []
        if made:  # what comes later is added
            classes.update((p, (TEMPORARY, classes[p][1])) for p in flat.parameters if p in classes)
        if part == "W" and not (weights_s or made):
            return ()
        seconds = work.compute_s - (weights_s if part == "I" else 0.0)
        if part == "W":
            alone = bool(weights_s and flat.parameters)  # a chain runs with what reads it
            apart_s = self.software.split_s if alone and not self.issues_ahead else 0.0
            seconds = weights_s + apart_s
        takes: Changes = ()
        gives: Changes = ()
        if part != "W":
            takes = _each(flat.component, work.takes, work.taken)
            gives = _each(flat.component, -work.gives, work.given)
        staging = work.staging if part != "W" else 0
        beside = COMMUNICATION if work.exchange else flat.component
        before = (
            *takes,
            (beside, staging),
            *((GRADIENTS, size) for _, size in made),
        )
        after = (
            *gives,
            (beside, -staging),
            *((GRADIENTS, -size) for kind, size in made if kind == TEMPORARY),
        )
        exchange = work.exchange if part != "W" else None
        if exchange is None or not exchange.seconds:
            out.run(work.name, work.kind, picoseconds(seconds), (), before, after)
            return (weights_s,) * (part == "W" and weights_s > 0 and bool(flat.parameters))
        out.run(work.name, work.kind, picoseconds(seconds), (), before)
        key = key_of(f"activations {exchange.kind}", work.name)
        out.launch(self.links.exchange(key, exchange), work.name)
        out.run(work.name, "wait", waits=(key,), after=after)
        return ()

    def _wait_for_processor(self, out: Listing, times: Sequence[float]) -> None:
        """A GPU waits where gradients of weights made apart take its processor longer."""
        late_s = len(times) * self.software.split_s - sum(times)
        if self.issues_ahead and late_s > 0:
            out.run("processor", "issue", picoseconds(late_s))


def _each(component: int, change: int, sizes: Sizes) -> Changes:
    """A change of so many bytes, one by one for the tensors of these sizes."""
    if not sizes or sum(sizes) != abs(change):
        return ((component, change),)
    sign = 1 if change > 0 else -1
    return tuple((component, sign * size) for size in sizes)
