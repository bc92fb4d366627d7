"""A backward pass in two halves, as `runtime.split_backward` runs it: what comes with which half,
and what is kept between them.

Between the halves there is what operators with weights have kept, and the gradients that flow into
them. Gradients of weights with several readers come with the first half.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from parloom.cost.step import Priced
from parloom.cost.tasks import ACTIVATIONS, GRADIENTS, RECOMPUTATION, Listing
from parloom.cost.walk import Walker
from parloom.cost.works import Called, Track, Walked, Work


@dataclass(frozen=True, slots=True)
class Flat:
    """A work, the component of its activations, and the inputs whose gradients it makes."""

    work: Work
    component: int
    parameters: tuple[int, ...]


def flat_works(walker: Walker, call: Called, part: str) -> Iterator[Flat]:
    """All works of a call in a pass; parameters are positions of the callee's inputs."""
    callee = walker.call(call.function)
    if part == "F":
        yield from _within(callee.forward, ACTIVATIONS)
        return
    if call.recompute:
        yield from _within(callee.again, RECOMPUTATION)
    yield from _within(callee.backward, ACTIVATIONS)


def _within(track: Track, component: int) -> Iterator[Flat]:
    for work in track.works:
        assert isinstance(work, Work), "block functions do not call others"
        if work.again:
            yield Flat(work, RECOMPUTATION, ())
        else:
            yield Flat(work, component, work.parameters if component == ACTIVATIONS else ())


class Halves:
    """The halves `I` and `W` of the backward pass of one stage, whose main has inputs `names`."""

    def __init__(self, found: Priced, names: list[str]) -> None:
        self.found, self.names = found, names
        self.early: frozenset[str] = frozenset()

    def begin(self) -> None:
        """Look which weights have several readers."""
        read = Counter(name for work in self.found.main.backward.works for name in self._read(work))
        self.early = frozenset(name for name, n in read.items() if n > 1)

    def _read(self, work: Work | Called) -> Iterator[str]:
        """The weights that operators at the ends of chains read, once for each operator."""
        if isinstance(work, Work):
            yield from (self.names[i] for i in work.sources if work.flowing_bytes)
            return
        for flat in flat_works(self.found.walker, work, "B"):
            outer = (work.inputs[i] for i in flat.work.sources if flat.work.flowing_bytes)
            yield from (self.names[o] for o in outer if o is not None)

    def early_of(self, inputs: Iterable[int | None]) -> frozenset[int]:
        """The places, among inputs by their places in main, of weights with several readers."""
        names = enumerate(inputs)
        return frozenset(i for i, o in names if o is not None and self.names[o] in self.early)

    def keep(self, out: Listing, part: str, call: Called, early: frozenset[int]) -> None:
        """What a call keeps between the halves."""
        kept = _late_bytes(self.found.walker.call(call.function), early, call.is_apart)
        for flat in flat_works(self.found.walker, call, "B"):
            if flat.component != RECOMPUTATION and not early.issuperset(flat.work.sources):
                kept += flat.work.flowing_bytes
        _change(out, part, kept)

    def keep_main(self, out: Listing, part: str) -> None:
        """What everything else keeps, and the gradients that are made early."""
        main, early = self.found.main, self.early_of(range(len(self.names)))
        kept = _late_bytes(main, early, apart=True)
        for work in main.backward.works:
            if isinstance(work, Work) and not early.issuperset(work.sources):
                kept += work.flowing_bytes
        parameters = self.found.parameters
        own = (parameters.by_name[name] for name in self.early)
        _change(out, part, kept, sum(parameters.home_bytes(parameter) for parameter in own))


def _late_bytes(found: Walked, early: frozenset[int], apart: bool) -> int:
    """Bytes of its own that a function keeps; those of results, too, where they are `apart`."""
    return sum(
        late.size
        for late in found.late
        if late.input is None
        and (apart or late.output is None)
        and not early.issuperset(late.sources)
    )


def _change(out: Listing, part: str, kept: int, gradients: int = 0) -> None:
    sign = 1 if part == "I" else -1
    after = ((ACTIVATIONS, sign * kept), (GRADIENTS, sign * gradients))
    out.run("kept for W", "memory", after=after)
