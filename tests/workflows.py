"""Workflows to plan: small, random and large; an oracle that shares no formula with the planner.

It enumerates: workers are looked at one by one, and flows go from worker to worker.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from random import Random

import pytest

from parloom.errors import InfeasibleError
from parloom.linear_program import LinearProgram
from parloom.workflow.answer import Method, plan_workflow
from parloom.workflow.model import (
    Accuracy,
    Edge,
    Link,
    Operator,
    Rule,
    Sample,
    Source,
    Variant,
    Worker,
    Workflow,
)
from parloom.workflow.read import read_workflow

HOUR_S = 3600


def drawn(seed: int, most: int = 8, *, latency: bool = False) -> Workflow:
    """A workflow of one to `most` operators, each of which few workers can run."""
    rng = Random(seed)
    num_tiers = rng.choice([1, 2, 2, 2, 3])
    size = rng.randint(1, most)
    rule = rng.choice(list(Rule))
    workers = tuple(_workers(rng, num_tiers, size, free=not latency))
    sources = tuple(
        Source(f"s{i}", rng.choice([10.0, 15.0, 20.0]), rng.randrange(num_tiers) if i else 0)
        for i in range(rng.choice([1, 1, 2]))
    )
    edges: list[Edge] = []
    shape: dict[str, list[str]] = {}
    for i in range(size):
        before = [f"o{j}" for j in range(i)]
        several = rng.sample(before, min(len(before), rng.choice([1, 1, 2])))
        if not several or rng.random() < 0.2:
            several = list(dict.fromkeys([*several[:1], rng.choice(sources).name]))
        shape[f"o{i}"] = several
    for source in sources:
        if all(source.name not in several for several in shape.values()):
            shape["o0"].append(source.name)
    operators = tuple(
        Operator(name, tuple(_variants(rng, rule, workers, [n for n in several if n[0] == "o"])))
        for name, several in shape.items()
    )
    for name, several in shape.items():
        for producer in several:
            sizes = {"": rng.choice([0.0, 1e3, 1e5, 5e5])}
            variants = next((o.variants for o in operators if o.name == producer), ())
            if variants and rng.random() < 0.4:
                sizes = {v.name: rng.choice([1e3, 1e5, 5e5]) for v in variants}
            ratios = [1.0, 1.0, 0.5, 2.0, 3.0] if len(several) > 1 else [1.0, 1.0, 1.0, 0.5, 2.0]
            edges.append(Edge(producer, name, sizes, rng.choice(ratios)))
    links = {}
    for sender, receiver in product(range(num_tiers), repeat=2):
        if rng.random() < (0.3 if sender == receiver else 0.95):
            bandwidth = rng.choice([float("inf"), float("inf"), 3e7, 1e7])
            price = rng.choice([0.0, 0.02, 0.1]) / 1e9
            links[sender, receiver] = Link(price, bandwidth, rng.choice([0.0, 0.01]))
    return Workflow(
        f"drawn {seed}",
        tuple(f"tier {i}" for i in range(num_tiers)),
        sources,
        operators,
        tuple(edges),
        workers,
        links,
        _accuracy(rng, rule, operators),
        rng.choice([0.3, 0.6, 1.5]) if latency else None,
        rng.random() < 0.5,
    )


def _workers(rng: Random, num_tiers: int, size: int, *, free: bool) -> Iterator[Worker]:
    """Types of one to three workers, in all tiers: a few more workers than operators."""
    number, left = 0, size + rng.randint(2, 3)
    while left > 0 or number < num_tiers:
        tier = number if number < num_tiers else rng.randrange(num_tiers)
        price = rng.choice([0.0 if number == 1 and free else 0.15, 0.1, 0.2, 0.3, 0.5, 0.8])
        count = min(rng.choice([1, 1, 2, 3]), max(left, 1))
        yield Worker(f"w{number}", tier, price, count)
        number, left = number + 1, left - count


def _variants(
    rng: Random, rule: Rule, workers: tuple[Worker, ...], inputs: list[str]
) -> Iterator[Variant]:
    able = rng.sample(workers, min(len(workers), rng.choice([2, 3, 4])))
    for index in range(rng.choice([1, 2, 2])):
        latencies = {w.name: rng.choice([0.02, 0.03, 0.06, 0.12, 0.18]) for w in able}
        own = rng.choice([0.7, 0.8, 0.9, 0.95])
        samples: tuple[Sample, ...] = ()
        if rule is Rule.PROFILES:
            levels = [0.5, 0.8] if inputs else [0.0]
            samples = tuple(
                Sample(dict.fromkeys(inputs, level), min(1.0, own * (1 - 0.2 * (k == 0))))
                for k, level in enumerate(levels)
            )
        yield Variant(f"v{index}", latencies, own, samples)


def _accuracy(rng: Random, rule: Rule, operators: tuple[Operator, ...]) -> Accuracy:
    if rule is Rule.NONE:
        return Accuracy()
    if rule is Rule.PRODUCT:
        return Accuracy(rule, rng.choice([0.75, 0.8, 0.85]) ** len(operators))
    if rule is Rule.PROFILES:
        return Accuracy(rule, rng.choice([0.2, 0.4, 0.5, 0.6]))
    some = rng.sample(operators, min(len(operators), 2))
    rows = product(*([v.name for v in o.variants] for o in some))
    table = {row: rng.choice([0.5, 0.6, 0.7, 0.8]) for row in rows if rng.random() < 0.9}
    return Accuracy(rule, rng.choice([0.0, 0.5, 0.6]), tuple(o.name for o in some), table)


# --- the oracle ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class One:
    """One worker."""

    kind: Worker
    number: int


def least_dollars(workflow: Workflow, *, exclusive: bool = True) -> float | None:
    """The cost of the cheapest plan, by enumeration; None where there is none."""
    best = [float("inf")]
    for chosen in product(*(o.variants for o in workflow.operators)):
        variants = {o.name: v for o, v in zip(workflow.operators, chosen, strict=True)}
        if not accurate(workflow, variants):
            continue
        every = {
            name: tuple(
                One(w, k) for w in workflow.workers if w.name in own for k in range(w.count)
            )
            for name, own in ((o, variant.latency_s) for o, variant in variants.items())
        }
        least = _traffic(workflow, variants, every)  # with all workers at all operators
        if least is None:
            continue
        for paid, given in _deployments(workflow, variants, best, exclusive, least):
            traffic = _traffic(workflow, variants, given)
            if traffic is not None:
                best[0] = min(best[0], paid + traffic)
    return None if best[0] == float("inf") else best[0]


def accurate(workflow: Workflow, variants: dict[str, Variant]) -> bool:
    """Whether each result is as accurate as asked for."""
    want = workflow.accuracy
    if want.rule is Rule.NONE:
        return True
    if want.rule is Rule.TABLE:
        row = tuple(variants[name].name for name in want.operators)
        return row in want.table and want.table[row] >= want.floor - 1e-12
    senders = {
        o.name: [e.producer for e in workflow.edges if e.consumer == o.name]
        for o in workflow.operators
    }
    names = [o.name for o in workflow.operators]
    results = [n for n in names if not any(n in several for several in senders.values())]

    def behind(name: str) -> set[str]:
        return {name}.union(*(behind(n) for n in senders[name] if n in names))

    def reached(name: str) -> float:
        found = 0.0
        for sample in variants[name].samples:
            if all(reached(n) >= level for n, level in sample.inputs.items()):
                found = max(found, sample.output)
        return found

    for name in results:
        value = reached(name)
        if want.rule is Rule.PRODUCT:
            value = 1.0
            for one in behind(name):
                value *= variants[one].accuracy
        if value < want.floor - 1e-12:
            return False
    return True


def rate(workflow: Workflow, name: str) -> float:
    for source in workflow.sources:
        if source.name == name:
            return source.rate_per_s
    return min(rate(workflow, e.producer) * e.ratio for e in workflow.edges if e.consumer == name)


Given = dict[str, tuple[One, ...]]


def _deployments(
    workflow: Workflow,
    variants: dict[str, Variant],
    best: list[float],
    exclusive: bool,
    traffic: float,
) -> Iterator[tuple[float, Given]]:
    """Sets of workers of each operator that carry its rate, and their price.

    Which of several alike an operator has does not matter: the first that are free.
    """
    options = []
    for operator in workflow.operators:
        latency, fits = variants[operator.name].latency_s, []
        able = [worker for worker in workflow.workers if worker.name in latency]
        for counts in product(*(range(worker.count + 1) for worker in able)):
            several = {w: n for w, n in zip(able, counts, strict=True) if n}
            carried = sum(n / latency[w.name] for w, n in several.items())
            if carried >= rate(workflow, operator.name) * (1 - 1e-9):
                fits.append((sum(w.usd_per_h * n for w, n in several.items()), several))
        if not fits:
            return
        options.append(sorted(fits, key=lambda fit: fit[0]))

    def deploy(
        position: int, paid: float, given: Given, used: dict[Worker, int]
    ) -> Iterator[tuple[float, Given]]:
        if paid + sum(fits[0][0] for fits in options[position:]) + traffic >= best[0] - 1e-12:
            return
        if position == len(options):
            yield paid, given
            return
        name = workflow.operators[position].name
        for price, several in options[position]:
            first = {w: used.get(w, 0) if exclusive else 0 for w in several}
            if all(first[w] + n <= w.count for w, n in several.items()):
                own = tuple(One(w, first[w] + k) for w, n in several.items() for k in range(n))
                taken = used | {w: first[w] + n for w, n in several.items()}
                yield from deploy(position + 1, paid + price, {**given, name: own}, taken)

    yield from deploy(0, 0.0, {}, {})


def _traffic(workflow: Workflow, variants: dict[str, Variant], given: Given) -> float | None:
    """The least dollars of messages between these workers; None where they cannot flow, or come
    too late.
    """
    answer = _Flows(workflow, variants, given).lp.solve()
    return None if answer is None else answer.cost


class _Flows:
    """The linear program of rates and flows between single workers."""

    def __init__(self, workflow: Workflow, variants: dict[str, Variant], given: Given) -> None:
        self.workflow, self.variants, self.given = workflow, variants, given
        self.lp = LinearProgram()
        self.loads: dict[str, dict[One, int]] = {}
        self.times: dict[str, list[int]] = {}
        self.carried: dict[tuple[int, int], dict[int, float]] = {}
        self.late = workflow.latency_s
        for name, several in given.items():
            self._load(name, several)
        self.done = {name: self.lp.column(0.0) for name in given} if self.late else {}
        for edge in workflow.edges:
            self._edge(edge)
        for pair, flows in self.carried.items():
            if pair in workflow.links and workflow.links[pair].bytes_per_s != float("inf"):
                self.lp.row(flows, high=workflow.links[pair].bytes_per_s)
        for column in self.done.values():
            self.lp.row({column: 1.0}, high=self.late or 0.0)

    def _load(self, name: str, several: tuple[One, ...]) -> None:
        whole, latency = rate(self.workflow, name), self.variants[name].latency_s
        self.loads[name], self.times[name] = {}, []
        for one in several:
            seconds = latency[one.kind.name]
            busiest = 0.999 if self.late else 1.0
            column = self.lp.column(0.0, high=busiest / seconds)
            self.loads[name][one] = column
            if self.late:
                self.times[name].append(_waiting(self.workflow, name, column, seconds, self.lp))
        self.lp.row(dict.fromkeys(self.loads[name].values(), 1.0), whole, whole)

    def _edge(self, edge: Edge) -> None:
        whole = rate(self.workflow, edge.consumer)
        size = edge.num_bytes.get("", 0.0)
        if edge.producer in self.variants and "" not in edge.num_bytes:
            size = edge.num_bytes[self.variants[edge.producer].name]
        into: dict[One, dict[int, float]] = {one: {} for one in self.given[edge.consumer]}
        late: dict[int, float] = {}
        for tier, sent, given in self._senders(edge):
            out: dict[int, float] = {}
            for one, flows in into.items():
                link = self._link(tier, one.kind.tier)
                if link is not None:
                    flow = self.lp.column(size * link.usd_per_byte * HOUR_S)
                    out[flow] = flows[flow] = 1.0
                    late[flow] = -(link.latency_s + size / link.bytes_per_s) / whole
                    self.carried.setdefault((tier, one.kind.tier), {})[flow] = size
            self.lp.row({**out, **sent}, given, given)
        for one, flows in into.items():
            self.lp.row({**flows, self.loads[edge.consumer][one]: -1.0}, 0.0, 0.0)
        if self.late:
            late |= {self.done[edge.consumer]: 1.0}
            late |= dict.fromkeys(self.times[edge.consumer], -1 / whole)
            late |= {self.done[edge.producer]: -1.0} if edge.producer in self.done else {}
            self.lp.row(late, low=0.0)

    def _senders(self, edge: Edge) -> Iterator[tuple[int, dict[int, float], float]]:
        """The tier of each sender, and its share of the messages that are taken, as terms and a
        number.
        """
        whole = rate(self.workflow, edge.consumer)
        for source in self.workflow.sources:
            if source.name == edge.producer:
                yield source.tier, {}, whole
        for one, load in self.loads.get(edge.producer, {}).items():
            yield one.kind.tier, {load: -whole / rate(self.workflow, edge.producer)}, 0.0

    def _link(self, sender: int, receiver: int) -> Link | None:
        if sender > receiver and not self.workflow.two_way:
            return None
        return self.workflow.links.get((sender, receiver), Link() if sender == receiver else None)


def listed(workflow: Workflow, kept: float, more: float) -> dict[str, list[dict[str, int]]]:
    """The messages of one request, one by one: of each, by input, which of its messages it is of.

    `kept` and `more` are its two numbers: whether it is among those that go on, and whether it has
    the whole number of messages above the mean or the one below.
    """
    fastest = max(source.rate_per_s for source in workflow.sources)
    share = {source.name: source.rate_per_s / fastest for source in workflow.sources}
    found: dict[str, list[dict[str, int]]] = {
        name: [{}] if kept < part else [] for name, part in share.items()
    }
    for operator in workflow.order:
        name = operator.name
        inputs = [edge for edge in workflow.edges if edge.consumer == name]
        mean = {
            e.producer: rate(workflow, e.producer) / fastest / share[e.producer] for e in inputs
        }
        # A request's messages are all dropped, or none of them, where fewer than one is left.
        share[name] = min(share[e.producer] * min(1.0, e.ratio * mean[e.producer]) for e in inputs)
        wanted = rate(workflow, name) / fastest / share[name]
        number = 0
        while kept < share[name] and number < max(1.0, wanted) - more:
            number += 1
        found[name] = [
            {e.producer: k * len(found[e.producer]) // number for e in inputs}
            for k in range(number)
        ]
    return found


def arriving_with(workflow: Workflow, name: str, grid: int = 64) -> float:
    """How many others a message meets that are of the same message of the scarcest input."""
    met = messages = 0
    for position in product(range(grid), repeat=2):
        kept, more = ((2 * p + 1) / (2 * grid) for p in position)
        several = listed(workflow, kept, more)
        parents = several[name]
        if parents:
            fewest = min(parents[0], key=lambda producer: len(several[producer]))
            met += sum(a[fewest] == b[fewest] for a in parents for b in parents) - len(parents)
            messages += len(parents)
    return met / messages


def _waiting(
    workflow: Workflow,
    name: str,
    load: int,
    latency: float,
    lp: LinearProgram,
) -> int:
    """A column of requests at one worker (rate x mean time), above many tangents of it."""
    whole = rate(workflow, name)
    others = arriving_with(workflow, name)

    def present(y: float) -> float:
        busy = y * latency
        wait = latency * (busy + others * y / whole) / (2 * (1 - busy))
        return y * (latency + wait)

    column = lp.column(0.0)
    grid = [1 - 0.93**k for k in range(125)]  # denser where waits are steep
    for busy in grid:
        y, step = busy / latency, 1e-6 / latency
        slope = (present(y + step) - present(max(0.0, y - step))) / (y + step - max(0.0, y - step))
        lp.row({column: 1.0, load: -slope}, low=present(y) - slope * y - 1e-9)
    return column


SMALL = """\
name: small
sources:
  frames: {rate: 40/s}
operators:
  detect:
    variants:
      fast: {latency: {box: 20ms, gpu: 4ms}, accuracy: 80%}
      good: {latency: {box: 90ms, gpu: 9ms}, accuracy: 95%}
  report:
    variants:
      only: {latency: {box: 2ms, gpu: 1ms}}
messages:
  - {from: frames, to: detect, size: 100kB}
  - {from: detect, to: report, size: 1kB}
workers:
  box: {tier: edge, price: 0.02USD/h, count: 3}
  gpu: {tier: cloud, price: 0.5USD/h, count: 2}
links:
  - {from: edge, to: cloud, price: 0.1USD/GB}
accuracy: {rule: product, floor: 75%}
"""


def small(*changes: tuple[str, str]) -> Workflow:
    """The workflow above, with other words for some."""
    text = SMALL
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return read_workflow(text, "small.yaml")


def refusal(workflow: Workflow, method: Method = Method.EXACT) -> InfeasibleError:
    """Why the workflow has no plan; never an infinite figure."""
    with pytest.raises(InfeasibleError) as caught:
        plan_workflow(workflow, method)
    assert "inf" not in str(caught.value)
    return caught.value


def large(seed: int, size: int = 30, kinds: int = 20, count: int = 10, tiers: int = 2) -> Workflow:
    """Many operators, and `kinds` x `count` workers in two or three tiers."""
    rng = Random(seed)
    workers: list[tuple[Worker, float]] = []
    for kind in range(kinds):
        tier = kind if kind < tiers else rng.randrange(tiers)
        speed = rng.uniform(0.5, 2) * (1 + 3 * tier)
        price = round(speed * rng.uniform(0.1, 0.3), 3)
        workers.append((Worker(f"w{kind}", tier, price, count), speed))
    operators: list[Operator] = []
    edges = [Edge("s", "o0", {"": 2e5})]
    for index in range(size):
        base = rng.uniform(0.005, 0.05)
        variants = []
        for rank in range(3):
            work = base * (1 + rank * rng.uniform(0.5, 1))
            latencies = {w.name: work / s * rng.uniform(0.8, 1.25) for w, s in workers}
            variants.append(Variant(f"v{rank}", latencies, 1 - 0.03 / (1 + rank) * rng.random()))
        operators.append(Operator(f"o{index}", tuple(variants)))
        for _ in range(rng.choice([1, 1, 2]) if index else 0):
            edge = Edge(
                f"o{max(0, index - rng.randint(1, 4))}", f"o{index}", {"": rng.uniform(1e3, 1e5)}
            )
            if all((e.producer, e.consumer) != (edge.producer, edge.consumer) for e in edges):
                edges.append(edge)
    links = {
        (a, b): Link(1e-10 if a < b else 1e-9, 1e9, 0.01)
        for a, b in product(range(tiers), repeat=2)
        if a != b
    }
    return Workflow(
        f"large {seed}",
        ("edge", *("metro" for _ in range(tiers - 2)), "cloud"),
        (Source("s", 60.0),),
        tuple(operators),
        tuple(edges),
        tuple(worker for worker, _ in workers),
        links,
        Accuracy(Rule.PRODUCT, 0.8),
    )
