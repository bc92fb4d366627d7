"""A plan of a workflow: variants, workers with their rates, flows, and what all that comes to."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parloom.workflow.accuracy import accuracy_of
from parloom.workflow.model import Workflow
from parloom.workflow.program import HOUR_S, Place
from parloom.workflow.queueing import together, wait_s


@dataclass(frozen=True, slots=True)
class Load:
    """Workers of one type at an operator: how many, and the rate that all of them take."""

    operator: str
    variant: str
    worker: str
    count: int
    rate_per_s: float
    utilization: float
    time_s: float
    """Mean time of a request, waiting included."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Messages of an edge from tier to tier."""

    producer: str
    consumer: str
    sender: int
    receiver: int
    rate_per_s: float
    bytes_per_s: float
    usd_per_h: float
    time_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What is deployed, what it costs, and the least that anything could cost (the bound)."""

    workflow: Workflow
    method: str
    variants: Mapping[str, str]
    loads: tuple[Load, ...]
    flows: tuple[Flow, ...]
    bound_usd_per_h: float | None = None
    interrupted: bool = False

    @property
    def workers_usd_per_h(self) -> float:
        worker = self.workflow.worker
        return math.fsum(worker(load.worker).usd_per_h * load.count for load in self.loads)

    @property
    def traffic_usd_per_h(self) -> float:
        return math.fsum(flow.usd_per_h for flow in self.flows)

    @property
    def usd_per_h(self) -> float:
        return self.workers_usd_per_h + self.traffic_usd_per_h

    @property
    def gap(self) -> float | None:
        """How far the plan is above the bound, as a share of the plan."""
        if self.bound_usd_per_h is None:
            return None
        cost = self.usd_per_h
        return max(0.0, (cost - self.bound_usd_per_h) / cost) if cost else 0.0

    @property
    def accuracy(self) -> float | None:
        return accuracy_of(self.workflow, self.variants)

    def loads_of(self, operator: str) -> tuple[Load, ...]:
        return tuple(load for load in self.loads if load.operator == operator)

    def flows_of(self, producer: str, consumer: str) -> tuple[Flow, ...]:
        ends = producer, consumer
        return tuple(flow for flow in self.flows if (flow.producer, flow.consumer) == ends)

    def operator_s(self, name: str) -> float:
        """Mean time of a request at an operator, over its workers."""
        return math.fsum(_weighted(self.loads_of(name))) / self.workflow.rates[name]

    def edge_s(self, producer: str, consumer: str) -> float:
        """Mean time of a message of an edge on its way."""
        flows = self.flows_of(producer, consumer)
        return math.fsum(_weighted(flows)) / self.workflow.rates[consumer]

    @property
    def path(self) -> tuple[str, ...]:
        """The slowest path by mean times, from its source to its result."""
        return self._slowest()[1]

    @property
    def latency_s(self) -> float:
        """Of the slowest path: the means of all that is on it; infinite where a queue has none."""
        return self._slowest()[0]

    def _slowest(self) -> tuple[float, tuple[str, ...]]:
        found: dict[str, tuple[float, tuple[str, ...]]] = {
            source.name: (0.0, (source.name,)) for source in self.workflow.sources
        }
        for operator in self.workflow.order:
            own = self.operator_s(operator.name)
            arrivals = (
                (found[e.producer][0] + self.edge_s(e.producer, e.consumer), found[e.producer][1])
                for e in self.workflow.inputs(operator.name)
            )
            seconds, path = max(arrivals, key=lambda arrival: arrival[0])
            found[operator.name] = seconds + own, (*path, operator.name)
        return max((found[sink] for sink in self.workflow.sinks), key=lambda end: end[0])


def _weighted(parts: tuple[Load, ...] | tuple[Flow, ...]) -> Iterator[float]:
    return (part.time_s * part.rate_per_s for part in parts)


def load_of(workflow: Workflow, place: Place, count: int, rate_per_s: float) -> Load:
    """Workers with the utilization and the time that their rate gives them."""
    name, variant, worker = place
    latency = workflow.operator(name).variant(variant).latency_s[worker]
    each = rate_per_s / count
    waits = wait_s(latency, each, workflow.rates[name], together(workflow, name))
    return Load(name, variant, worker, count, rate_per_s, each * latency, latency + waits)


def flow_of(
    workflow: Workflow,
    producer: str,
    consumer: str,
    size: float,
    pair: tuple[int, int],
    rate: float,
) -> Flow:
    """Messages with what their link takes and costs."""
    link = workflow.link(*pair)
    assert link is not None, f"no messages go from tier {pair[0]} to tier {pair[1]}"
    usd = rate * size * link.usd_per_byte * HOUR_S
    return Flow(producer, consumer, *pair, rate, rate * size, usd, link.seconds(size))
