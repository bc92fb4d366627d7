"""A workflow: operators with variants, and the workers, links and floors that they meet.

Rates are requests per second, sizes mean bytes of a message, prices dollars. Tiers are numbered
from 0, the edge; sources lie in a tier, too. All values are as a file says them, in base units.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

ROUNDING = 1e-9
"""Shares and parts below this are rounding."""
SOLVED = 1e-6
"""Share by which a plan may miss what is asked for: the solver's tolerance."""


class Rule(StrEnum):
    """How the accuracy of a workflow follows from those of its variants."""

    NONE = "none"
    PRODUCT = "product"
    PROFILES = "profiles"
    TABLE = "table"


class Traffic(StrEnum):
    """Whether messages may go back to a lower tier."""

    ONE_WAY = "one-way"
    TWO_WAY = "two-way"


@dataclass(frozen=True, slots=True)
class Source:
    """Requests that enter the workflow in one tier."""

    name: str
    rate_per_s: float
    tier: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """With at least these accuracies of its inputs (operators), a variant reaches `output`."""

    inputs: Mapping[str, float]
    output: float


@dataclass(frozen=True, slots=True)
class Variant:
    """One model that may do an operator's work: its latency by worker, and its accuracy.

    `accuracy` is its own (rule product); `samples` what it makes of its inputs (rule profiles).
    """

    name: str
    latency_s: Mapping[str, float]
    accuracy: float = 1.0
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True, slots=True)
class Operator:
    """A step of the workflow; exactly one of its variants is deployed."""

    name: str
    variants: tuple[Variant, ...]

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.variants if variant.name == name)


@dataclass(frozen=True, slots=True)
class Edge:
    """Messages from a source or an operator to an operator.

    `ratio` is how many the consumer gets for one request of the producer; sizes are by the
    producer's variant, or one for all under the name "".
    """

    producer: str
    consumer: str
    num_bytes: Mapping[str, float]
    ratio: float = 1.0

    def size(self, variant: str) -> float:
        return self.num_bytes.get(variant, self.num_bytes.get("", 0.0))

    @property
    def by_variant(self) -> bool:
        return "" not in self.num_bytes


@dataclass(frozen=True, slots=True)
class Worker:
    """Workers of one type: each runs one variant of one operator, and is paid while in use."""

    name: str
    tier: int
    usd_per_h: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class Link:
    """What carries messages from one tier to another, or within one."""

    usd_per_byte: float = 0.0
    bytes_per_s: float = float("inf")
    latency_s: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Of one message: the link's latency, and its bytes at full bandwidth."""
        return self.latency_s + num_bytes / self.bytes_per_s


INSIDE = Link()
"""Within a tier, where a file says nothing of it: free and at once."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The rule, the least accuracy of each result, and, of a table, accuracies by variants."""

    rule: Rule = Rule.NONE
    floor: float = 0.0
    operators: tuple[str, ...] = ()
    table: Mapping[tuple[str, ...], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Messages:
    """Of the requests of the fastest source: the share that has messages here, and how many each
    of those has on average.
    """

    present: float
    each: float


@dataclass(frozen=True, slots=True)
class Positions:
    """Where a file says what a plan may fail to reach, as `file:line:column`."""

    floor: str = ""
    rate: str = ""
    latency: str = ""


@dataclass(frozen=True)
class Workflow:
    """All that a plan depends on. `links` are by (tier of the sender, tier of the receiver)."""

    name: str
    tiers: tuple[str, ...]
    sources: tuple[Source, ...]
    operators: tuple[Operator, ...]
    edges: tuple[Edge, ...]
    workers: tuple[Worker, ...]
    links: Mapping[tuple[int, int], Link]
    accuracy: Accuracy = Accuracy()
    latency_s: float | None = None
    two_way: bool = False
    positions: Positions = Positions()
    assumed: tuple[str, ...] = ()

    @cached_property
    def order(self) -> tuple[Operator, ...]:
        """Operators, each after those whose messages it gets; file order where that is free."""
        by_name = {operator.name: operator for operator in self.operators}
        before: dict[str, list[str]] = {name: [] for name in by_name}
        for edge in self.edges:
            if edge.producer in by_name:
                before[edge.consumer].append(edge.producer)
        return tuple(by_name[name] for name in TopologicalSorter(before).static_order())

    def cycle(self) -> tuple[str, ...] | None:
        """Operators that wait for each other, each sending to the next, if there are any."""
        try:
            self.order  # noqa: B018 - what it raises is the answer
        except CycleError as error:
            return tuple(error.args[1])
        return None

    @cached_property
    def rates(self) -> Mapping[str, float]:
        """Requests per second of each source and operator.

        An operator joins a message of each input, so the input with the fewest sets its rate; the
        others' surplus is not sent.
        """
        found = {source.name: source.rate_per_s for source in self.sources}
        for operator in self.order:
            found[operator.name] = min(
                found[edge.producer] * edge.ratio for edge in self.inputs(operator.name)
            )
        return found

    @cached_property
    def fastest_per_s(self) -> float:
        """The rate of the fastest source."""
        return max(source.rate_per_s for source in self.sources)

    @cached_property
    def messages(self) -> Mapping[str, Messages]:
        """Of each source and operator, per request; a join has as many as its scarcest input."""
        fastest = self.fastest_per_s
        found = {s.name: Messages(s.rate_per_s / fastest, 1.0) for s in self.sources}
        for operator in self.order:
            inputs = [(found[edge.producer], edge.ratio) for edge in self.inputs(operator.name)]
            present = min(sent.present * min(1.0, ratio * sent.each) for sent, ratio in inputs)
            each = max(1.0, self.rates[operator.name] / fastest / present)
            found[operator.name] = Messages(present, each)
        return found

    def inputs(self, name: str) -> tuple[Edge, ...]:
        return self._by_consumer[name]

    @cached_property
    def _by_consumer(self) -> Mapping[str, tuple[Edge, ...]]:
        found: dict[str, list[Edge]] = {operator.name: [] for operator in self.operators}
        for edge in self.edges:
            found[edge.consumer].append(edge)
        return {name: tuple(edges) for name, edges in found.items()}

    @cached_property
    def sinks(self) -> tuple[str, ...]:
        """Operators whose results leave the workflow."""
        read = {edge.producer for edge in self.edges}
        return tuple(o.name for o in self.operators if o.name not in read)

    def ancestors(self, name: str) -> frozenset[str]:
        """The operator itself, and all operators whose messages reach it."""
        found = {name}
        for operator in reversed(self.order):
            if operator.name in found:
                found |= {edge.producer for edge in self.inputs(operator.name)}
        return frozenset(found) & {operator.name for operator in self.operators}

    @property
    def traffic(self) -> Traffic:
        return Traffic.TWO_WAY if self.two_way else Traffic.ONE_WAY

    def link(self, sender: int, receiver: int) -> Link | None:
        """What carries messages between two tiers; None where none may go."""
        if sender > receiver and not self.two_way:
            return None
        return self.links.get((sender, receiver), INSIDE if sender == receiver else None)

    @property
    def unused_links(self) -> tuple[tuple[int, int], ...]:
        """Links that a file lists and one-way traffic does not use."""
        return tuple(pair for pair in self.links if self.link(*pair) is None)

    def worker(self, name: str) -> Worker:
        return self._workers[name]

    @cached_property
    def _workers(self) -> Mapping[str, Worker]:
        return {worker.name: worker for worker in self.workers}

    def source(self, name: str) -> Source | None:
        return next((source for source in self.sources if source.name == name), None)

    def operator(self, name: str) -> Operator:
        return next(operator for operator in self.operators if operator.name == name)
