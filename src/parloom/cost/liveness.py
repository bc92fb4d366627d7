"""When activations take memory and give it back, from the order of items and what autograd keeps.

Forward: a value lives until the end of the section (module call) in which it is last read, as
generated code deletes it, or until the backward pass if autograd keeps it. Backward: items run in
reverse; the gradient of a value lives from the first that makes it to the one that made the value;
what is kept goes when the last one that needs it has run. Values that share memory count once.
What a block drops goes at the end of its forward pass, and is made again before the first item of
the backward pass that needs any of it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from parloom.cost.works import Called, Sizes, Walked, Work
from parloom.ir.pcg import (
    Compute,
    Item,
    Movement,
    PCall,
    PValue,
    Remake,
    operands_of,
    results_of,
)

Works = tuple[Work | Called, ...]
Changes = list[list[int]]
"""By item, the sizes of tensors that are taken, or given back."""


@dataclass(slots=True)
class Lives:
    """Items of a body in order with their works, and what is known of their values' memory.

    `outside` are the values whose memory others count, `parameters` those of them whose gradients
    others count; `held` are made here and live until the backward pass is over, and so does the
    memory of `crossing`: what arrived, until its gradient leaves, and what was sent. `forward` and
    `backward` have one entry per item, None where nothing runs. `owner` maps a value to the one
    whose memory it is; `kept` the owner of what autograd keeps to the first item that keeps it, and
    `kept_last` to the last one. What is `dropped`, as `kept` was, is made by the works `again` when
    the backward pass comes to the item `remade_at`. Nothing is saved at the item `saved_before` and
    after it.
    """

    outside: frozenset[str]
    parameters: frozenset[str]
    held: frozenset[str] = frozenset()
    crossing: frozenset[str] = frozenset()
    items: list[Item] = field(default_factory=list)
    forward: list[Work | Called | None] = field(default_factory=list)
    backward: list[Work | Called | None] = field(default_factory=list)
    again: Works = ()
    callees: dict[int, Walked] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    owner: dict[str, str] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    kept_last: dict[str, int] = field(default_factory=dict)
    keeps: dict[int, list[str]] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    remade_at: int = 0
    saved_before: int = 0
    inside: set[str] = field(default_factory=set)

    def of(self, value: PValue) -> str:
        """The value that owns the memory of `value`."""
        return self.owner.get(value.name, value.name)

    def share(self, operand: PValue, result: PValue) -> None:
        """`result` is the memory of `operand`."""
        self.owner[result.name] = self.of(operand)

    def keep(self, owner: str) -> None:
        """The item at hand keeps memory for its backward pass; what a callee keeps is counted."""
        index = len(self.items) - 1
        self.keeps.setdefault(index, []).append(owner)
        if owner not in self.inside:
            self.kept.setdefault(owner, index)
            self.kept_last[owner] = index

    def keep_parts(self) -> None:
        """After all items: autograd keeps no values, only what is inside of operators."""
        made = self._made().keys() | self.outside
        self.kept = {owner: i for owner, i in self.kept.items() if owner not in made}

    def drop(self, remake: Remake, again: Works) -> None:
        """After all items: what autograd keeps of what `remake` drops is made by `again`."""
        self.again = again
        inside = {own_of(results_of(item)[0]) for item in remake.body}
        dropped = remake.dropped | inside
        self.dropped = {owner: i for owner, i in self.kept.items() if owner in dropped}
        self.remade_at = max(self.kept_last[owner] for owner in self.dropped)
        self.kept = {o: i for o, i in self.kept.items() if o not in self.dropped}
        for owner in {self.of(value): None for value in remake.inputs}:
            if owner not in self.parameters:
                self.kept[owner] = min(self.kept.get(owner, self.remade_at), self.remade_at)

    def inside_sizes(self) -> Sizes:
        """Sizes of what is made here, or in calls, and kept for the backward pass."""
        own = tuple(self.sizes[owner] for owner in self.kept if owner not in self.outside)
        calls = (c.inside for i, c in self.callees.items() if self._keeps(i))
        return own + tuple(size for sizes in calls for size in sizes)

    def late(self) -> dict[str, set[int]]:
        """What items keep that run when gradients of weights are made: owners, and the weights."""
        found: dict[str, set[int]] = {}
        for index, owners in self.keeps.items():
            work = self.backward[index]
            if isinstance(work, Work) and work.sources:
                for owner in owners:
                    found.setdefault(owner, set()).update(work.sources)
        for index, callee in self.callees.items():
            call, work = self.items[index], self.backward[index]
            if not isinstance(work, Called):
                continue
            for late in callee.late:
                values = operands_of(call), results_of(call)
                if late.input is not None:
                    owner = self.of(values[0][late.input])
                elif late.output is not None and not work.is_apart:
                    owner = self.of(values[1][late.output])
                else:
                    continue
                outer = (work.inputs[position] for position in late.sources)
                found.setdefault(owner, set()).update(i for i in outer if i is not None)
        return {owner: by for owner, by in found.items() if by and owner not in self.parameters}

    def forward_works(self, outputs: Sequence[PValue]) -> Works:
        """The forward pass in order, with what every item takes and gives."""
        return _attached(self.forward, *self._forward_changes(outputs))

    def again_works(self, outputs: Sequence[PValue]) -> Works:
        """What a checkpoint that stops early runs again: up to the last item that saves anything.

        That item is left out itself where it saves operands alone, which autograd takes before it
        runs (torch.utils.checkpoint, `set_checkpoint_early_stop`). All that is not kept goes then.
        """
        takes, gives = (changes[: self.saved_before] for changes in self._forward_changes(outputs))
        if takes:
            left = Counter(size for sizes in takes for size in sizes)
            left.subtract(size for sizes in gives for size in sizes)
            left.subtract(self.inside_sizes())
            gives[-1] += left.elements()
        return _attached(self.forward[: self.saved_before], takes, gives)

    def _forward_changes(self, outputs: Sequence[PValue]) -> tuple[Changes, Changes]:
        """Sizes of what each item of the forward pass takes, and gives."""
        made, last, ends = self._made(), self._last_touched(), section_ends(self.items)
        stay = {self.of(v) for v in outputs} | self.kept.keys() | self.inside | self._held()
        takes, gives = self._none(), self._none()
        for owner, index in made.items():
            if not self._of_call(owner, index):  # a callee takes the memory of its results
                takes[index].append(self.sizes[owner])
            if owner not in stay:
                end = len(gives) - 1 if owner in self.dropped else ends[last[owner]]
                gives[end].append(self.sizes[owner])
        for owner, index in self.kept.items():
            if owner not in made and owner not in self.outside:  # a mask
                takes[index].append(self.sizes[owner])
        for owner, index in self.dropped.items():
            if owner not in made:
                takes[index].append(self.sizes[owner])
                gives[-1].append(self.sizes[owner])
        return takes, gives

    def backward_works(self, outputs: Sequence[PValue]) -> tuple[Works, frozenset[str]]:
        """The backward pass in order, and the values from outside whose gradient it makes."""
        made = self._made()
        given = {self.of(v): self.sizes[self.of(v)] for v in outputs if v.differentiable}
        gradients = dict(given)
        takes, gives = self._none(), self._none()
        for index in reversed(range(len(self.items))):
            item = self.items[index]
            if self.backward[index] is None:
                gives[index] += self._pass_on(item, gradients)
                continue
            if index in self.callees:
                # A callee gives back the gradients of its results, also of those nobody reads.
                own = {self.of(v) for v in results_of(item) if v.differentiable}
                unread = {o for o in own if made.get(o) == index} - gradients.keys()
                takes[index] += [self.sizes[owner] for owner in unread]
                gives[index] += self._added_by_call(index, gradients)
                continue
            taken, added = self._gradients(item, gradients)
            takes[index] += taken
            gives[index] += added
            own = {self.of(v) for v in results_of(item)}
            gives[index] += [gradients.get(o, 0) for o in own if made.get(o) == index]
        for owner, index in self.kept.items():
            if owner not in self.outside:
                gives[index].append(self.sizes[owner])
        for owner, index in self.dropped.items():
            gives[index].append(self.sizes[owner])
        for owner in self._held() - self.kept.keys() - self.inside:
            gives[0] += [self.sizes[owner]] if owner in made else []
        # A view of an input is no memory of its own.
        results = {v.name for item in self.items for v in results_of(item)}
        for owner in gradients.keys() & made.keys() - results:
            gives[0].append(gradients[owner])  # of an input, which is sent to where it came from
        listed = list(zip(self.backward, takes, gives, strict=True))
        listed[self.remade_at + 1 : self.remade_at + 1] = [(w, [], []) for w in self.again[::-1]]
        works = _attached(*zip(*listed[::-1], strict=True)) if listed else ()
        return works, frozenset(gradients.keys() - given.keys() - made.keys())

    def _made(self) -> dict[str, int]:
        """Memory made here, by its owner: the first item that touches it."""
        made: dict[str, int] = {}
        for index, item in enumerate(self.items):
            for value in (*operands_of(item), *results_of(item)):
                owner = self.of(value)
                if owner not in self.outside:
                    made.setdefault(owner, index)
        return made

    def _held(self) -> frozenset[str]:
        owners = frozenset(self.owner.get(name, name) for name in self.crossing)
        return self.held | (owners - self.outside)

    def _none(self) -> Changes:
        """No sizes, for every item."""
        return [[] for _ in self.items]

    def _keeps(self, index: int) -> bool:
        item = self.items[index]
        return isinstance(item, PCall) and item.policy == "keep"

    def _of_call(self, owner: str, index: int) -> bool:
        return index in self.callees and owner in {v.name for v in results_of(self.items[index])}

    def _last_touched(self) -> dict[str, int]:
        return {
            self.of(value): index
            for index, item in enumerate(self.items)
            for value in (*operands_of(item), *results_of(item))
        }

    def _pass_on(self, item: Item, gradients: dict[str, int]) -> list[int]:
        """Where nothing runs, the gradient of the result is that of the operand, or is added to it:
        the sizes that are then given back.
        """
        if not isinstance(item, Movement) or not item.operand.differentiable:
            return []
        before, after = self.of(item.operand), self.of(item.result)
        if before == after or after not in gradients:
            return []
        size = gradients.pop(after)
        if before in gradients:
            return [size]
        gradients[before] = size
        return []

    def _gradients(self, item: Item, gradients: dict[str, int]) -> tuple[list[int], list[int]]:
        """Sizes of the gradients that an item's backward makes, and of those added to others."""
        taken: list[int] = []
        added: list[int] = []
        skip = {self.of(v) for v in results_of(item)} | self.parameters
        for owner in {self.of(v): None for v in operands_of(item) if v.differentiable}:
            if owner not in skip:
                taken.append(self.sizes[owner])
                added += [self.sizes[owner]] if owner in gradients else []
                gradients.setdefault(owner, self.sizes[owner])
        return taken, added

    def _added_by_call(self, index: int, gradients: dict[str, int]) -> list[int]:
        """Sizes of the gradients that a call makes beside those that are there."""
        added: list[int] = []
        for position in self.callees[index].moved_inputs:
            value = operands_of(self.items[index])[position]
            owner, size = self.of(value), self.sizes[value.name]
            added += [size] if owner in gradients else []
            gradients.setdefault(owner, size)
        return added


def own_of(result: PValue) -> str:
    """The name of what autograd keeps of an operator that is no value, by its first result."""
    return f"{result.name} own"


def section_ends(items: Sequence[Item]) -> list[int]:
    """Per item, the last item of its section; movements belong to the section before them."""
    ends = [len(items) - 1] * len(items)
    first, current = 0, None
    for index, item in enumerate(items):
        section = _section(item)
        if section is not None and section != current:
            ends[first:index] = [index - 1] * (index - first)
            first, current = index, section
    return ends


def _section(item: Item) -> str | None:
    if isinstance(item, Compute):
        return f"{item.node.path} {item.node.source}"
    return item.prefix if isinstance(item, PCall) else None


def _attached(
    works: Sequence[Work | Called | None], takes: Sequence[list[int]], gives: Sequence[list[int]]
) -> Works:
    """The works that there are, with what they take and give.

    Where nothing runs, what is given goes with the work before and what is taken with that after.
    """
    placed: list[tuple[Work | Called, list[int], list[int]]] = []
    taken: list[int] = []
    given: list[int] = []
    for work, take, give in zip(works, takes, gives, strict=True):
        if work is None:
            taken += take
            given += give
        else:
            if placed and given:
                placed[-1][2].extend(given)
                given = []
            placed.append((work, take + taken, give + given))
            taken, given = [], []
    if placed and given:
        placed[-1][2].extend(given)
    return tuple(_holding(*place) for place in placed)


def _holding(work: Work | Called, take: Sequence[int], give: Sequence[int]) -> Work | Called:
    """A work with what it takes and gives beside what it did."""
    taken, given = (tuple(size for size in sizes if size) for sizes in (take, give))
    return replace(
        work,
        takes=work.takes + sum(taken),
        gives=work.gives + sum(given),
        taken=work.taken + taken,
        given=work.given + given,
    )
