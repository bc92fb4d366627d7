"""Priced works in the order in which a pass runs them: what sums add up and the simulator plays."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from parloom.cost.price import Price, Traffic, total

Sizes = tuple[int, ...]
"""Bytes of tensors, one by one."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What many works cost together: their price, and the seconds of their collectives."""

    price: Price = field(default_factory=Price)
    comm_s: float = 0.0

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(self.price + other.price, self.comm_s + other.comm_s)

    @property
    def seconds(self) -> float:
        """Collectives on activations wait for what they move and are waited for: no overlap."""
        return self.price.compute_s + self.comm_s


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective over the joint group of `axes`.

    It takes `seconds` alone, in the first `latency_s` of which no link is busy; then levels are
    `busy` in these proportions. Meanwhile the back end takes `scratch_bytes`, and kernels `slows`
    times their time longer.
    """

    kind: str
    axes: tuple[str, ...]
    traffic: tuple[Traffic, ...]
    seconds: float
    latency_s: float
    scratch_bytes: int = 0
    slows: float = 0.0
    busy: tuple[tuple[int, float], ...] = ()

    def total(self, count: int = 1) -> Pass:
        """What it costs, `count` times over."""
        return Pass(Price(comm=self.traffic).times(count), self.seconds * count)


@dataclass(frozen=True, slots=True)
class Work:
    """An operator or a movement in one pass.

    `takes` bytes of activations when it starts and `gives` some back when it is over, by tensor in
    `taken` and `given` where that is known; `staging` bytes are its own meanwhile. `parameters` are
    the inputs of the function (by position) that it reads, or in a backward pass whose gradient it
    makes or adds to. `sources` are those of a backward pass, and others that reach it through a
    chain of operators of one operand, which run when their gradients are made: `weights_s` is the
    part of `compute_s` that goes into those gradients, and `flowing_bytes` are those of the
    gradients that an operator at the end of such chains makes them of. `again` marks a work of the
    forward pass that a backward pass runs again.
    """

    name: str
    kind: str
    compute_s: float
    exchange: Exchange | None = None
    takes: int = 0
    gives: int = 0
    staging: int = 0
    parameters: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    weights_s: float = 0.0
    flowing_bytes: int = 0
    again: bool = False
    taken: Sizes = ()
    given: Sizes = ()

    def total(self) -> Pass:
        """What it costs."""
        comm = Pass() if self.exchange is None else self.exchange.total()
        return Pass(Price(self.compute_s)) + comm


@dataclass(frozen=True, slots=True)
class Called:
    """All works of one pass of a call; with `recompute`, of the forward pass and the backward pass.

    `inputs` are the caller's positions of the callee's inputs, where they are inputs of the caller.
    Activations: `takes`, `gives`, `taken` and `given` as a work does, `discards` what goes when a
    recomputed forward pass is over; `moves` bytes leave for the host when the call is over, or have
    to be back before.
    """

    function: str
    prefix: str
    recompute: bool
    inputs: tuple[int | None, ...]
    takes: int = 0
    gives: int = 0
    discards: int = 0
    moves: int = 0
    taken: Sizes = ()
    given: Sizes = ()

    @property
    def is_apart(self) -> bool:
        """Whether what is kept for its backward pass is made or fetched again: not its results."""
        return self.recompute or self.moves > 0


@dataclass(frozen=True, slots=True)
class Track:
    """Works in order; activation memory after them, and at most, against before them."""

    works: tuple[Work | Called, ...] = ()
    total: Pass = field(default_factory=Pass)
    net_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Late:
    """Memory that operators with these `sources` keep (see `Work`): that of an `input` or of an
    `output` of the function, or neither.
    """

    sources: frozenset[int]
    size: int
    input: int | None = None
    output: int | None = None


@dataclass(frozen=True, slots=True)
class Walked:
    """A function's passes, and which memory crosses its border.

    `again` is the part of the forward pass that a call which recomputes runs in its backward pass.
    `inside` are the sizes of what is made in the forward pass and kept for the backward pass,
    results of the function that are kept included. `kept_inputs` are the positions of inputs that
    are kept; `moved_inputs` those whose gradient the backward pass makes. `outputs` says per output
    whether its memory is an input's (the position), is counted inside (INSIDE), or is new (NEW).
    `late` is what stays until gradients of weights are made.
    """

    forward: Track
    backward: Track
    again: Track
    inside: Sizes = ()
    kept_inputs: tuple[int, ...] = ()
    moved_inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    late: tuple[Late, ...] = ()

    @property
    def inside_bytes(self) -> int:
        return sum(self.inside)


INSIDE, NEW = -1, -2


def summed(passes: Iterable[Pass]) -> Pass:
    """The sum of many passes, in linear time."""
    listed = list(passes)
    return Pass(total(p.price for p in listed), sum(p.comm_s for p in listed))
