"""Several clusters, and parts of each, planned alike: what is cheap and fast enough to buy."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from parloom.cost.clusters import resolve_cluster, short_name
from parloom.cost.money import check_priced, parse_prices, usd_per_step, work_of
from parloom.cost.utilization import utilization
from parloom.errors import InfeasibleError, InputError, LayoutError, StoppedError, one_line
from parloom.ir.expected import Objective, Status
from parloom.ir.mesh import Cluster, HourlyPrice, part_of, part_sizes
from parloom.ir.plan import Plan
from parloom.ir.regular_parts import regular_parts, used_devices
from parloom.report.fronts import Front, FrontRow, Priced, best_words
from parloom.search.request import ScoredPlan
from parloom.searching import Captured, Found, find

Say = Callable[[str], None]
Asked = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of clusters: `every` part of each, or the best plan on each; `objective` says
    what is the best, of runs of `in_run` tokens that take at most `limit_days`.
    """

    clusters: tuple[str, ...]
    objective: Objective
    every: bool
    in_run: float | None = None
    limit_days: float | None = None

    def check(self, price: str | None) -> None:
        """Raise `InputError` before a model is captured, where an answer would lack something."""
        if self.limit_days is not None and self.in_run is None:
            raise InputError("--days is for a run: say how long it is, as --tokens 300B")
        prices = parse_prices(price)
        clusters = [resolve_cluster(spec, prices).cluster for spec in self.clusters]
        prices.check(clusters)
        if self.every or self.objective is Objective.COST:
            check_priced(clusters, "to say what is cheap")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row with what it was found among."""

    row: FrontRow
    found: Found | None = None
    scored: ScoredPlan | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The front, and the plan that was asked for."""

    front: Front
    plan: Plan


def front(captured: Captured, question: Question, progress: Say, asked: Asked) -> Answer:
    """Plan on all clusters; Ctrl-C keeps what is done. `asked` are other arguments of `find`.

    Raises `InfeasibleError` where there is no plan, or none that takes few enough days.
    """
    work = work_of(captured.graph, captured.microbatches, question.in_run)
    entries, interrupted, bounds = _Planned(captured, question, progress, asked).run()
    planned = [entry for entry in entries if entry.row.plan is not None]
    if not planned and interrupted:
        raise StoppedError
    if not planned:
        reasons = dict.fromkeys(f"{e.row.cluster}: {e.row.reason}" for e in entries)
        raise InfeasibleError("no cluster has a plan:\n" + "\n".join(reasons))

    def value(entry: _Entry) -> tuple[float, float]:
        own = entry.row.plan
        assert own is not None, "entries with a plan"
        usd = inf if own.usd_per_step is None else own.usd_per_step
        by = {Objective.TIME: own.step_s, Objective.COST: usd, Objective.MEMORY: own.peak_bytes}
        return by[question.objective], own.step_s

    limit = inf if question.limit_days is None else question.limit_days
    in_time = [e for e in planned if e.row.plan and (work.days(e.row.plan.step_s) or 0) <= limit]
    best = min(in_time, key=value, default=None)
    shown = Front(
        captured.source.spec,
        question.objective,
        work,
        tuple(entry.row for entry in entries),
        prices_of(entry.found for entry in planned if entry.found),
        None if best is None else best.row,
        question.limit_days,
        min(bounds) if bounds and all(bounds) else None,
        interrupted,
    )
    if best is None or best.found is None or best.scored is None:
        raise TooSlowError(shown)
    return Answer(shown, best.found.choosing(best.scored).plan())


class TooSlowError(InfeasibleError):
    """No plan takes few enough days."""

    def __init__(self, shown: Front) -> None:
        super().__init__(best_words(shown))
        self.front = shown


class _Planned:
    """Plans on one cluster after the other."""

    def __init__(self, captured: Captured, question: Question, say: Say, asked: Asked) -> None:
        self.captured, self.question, self.say, self.asked = captured, question, say, asked
        self.known: set[Cluster] = set()
        self.bounds: list[float] = []

    def run(self) -> tuple[list[_Entry], bool, list[float]]:
        """Rows in the order of the clusters; whether Ctrl-C ended them; bounds in dollars."""
        entries: list[_Entry] = []
        prices = parse_prices(self.asked.get("price"))
        for spec in self.question.clusters:
            cluster = resolve_cluster(spec, prices).cluster
            sizes = self._new_sizes(cluster) if self.question.every else ()
            if self.question.every and not cluster.parts and not sizes:
                continue
            try:
                found = self._find(spec, sizes)
            except (KeyboardInterrupt, StoppedError):
                return entries, True, []
            except (InfeasibleError, InputError, LayoutError) as error:
                self.bounds.append(inf if isinstance(error, InfeasibleError) else 0.0)
                words = f"{cluster.num_devices} devices"
                row = FrontRow(short_name(spec), words, cluster.num_devices, reason=one_line(error))
                entries.append(_Entry(row))
                self.say(f"{spec}: {row.reason}")
                continue
            aim = found.choice.aim
            self.bounds.append(aim.bound or 0.0 if aim and aim.objective is Objective.COST else 0.0)
            entries += self._entries(spec, found, sizes)
            if found.choice.status is Status.INTERRUPTED:
                return entries, True, []
        return entries, False, self.bounds

    def _find(self, spec: str, sizes: Sequence[int]) -> Found:
        objective = Objective.COST if self.question.every else self.question.objective
        return find(
            self.captured,
            cluster=spec,
            objective=objective,
            sizes=sizes,
            alone=False,
            progress=partial(of_cluster, self.say, spec),
            **self.asked,
        )

    def _new_sizes(self, cluster: Cluster) -> list[int]:
        """Numbers of devices of a cluster that are no part of an earlier one, too."""
        sizes = (*part_sizes(cluster), cluster.num_devices) if not cluster.parts else ()
        if self.asked.get("devices") is not None:
            sizes = tuple(size for size in sizes if size == self.asked["devices"])
        found = []
        for size in sorted(sizes):
            same = replace(part_of(cluster, size), name="", host=None)
            # Levels of one child say nothing.
            same = replace(same, levels=tuple(level for level in same.levels if level.size > 1))
            if same not in self.known:
                self.known.add(same)
                found.append(size)
        return found

    def _entries(self, spec: str, found: Found, sizes: Sequence[int]) -> Iterator[_Entry]:
        """Of every part the fastest plan; else the best one."""
        cluster, choice = found.machine.cluster, found.choice
        if not self.question.every:
            yield _Entry(self._row(spec, found, choice.best), found, choice.best)
            return
        fastest: dict[tuple[tuple[str, int], ...], ScoredPlan] = {}
        for plan in choice.scored:
            used = used_devices(cluster, plan.decisions)
            key = tuple((device.name, count) for device, count in used)
            if choice.fits(plan.prediction) and (
                key not in fastest or plan.prediction.step_s < fastest[key].prediction.step_s
            ):
                fastest[key] = plan
        rows = {p.decisions.num_ranks: p for p in fastest.values()} if not cluster.parts else {}
        for plan in sorted(fastest.values(), key=lambda p: p.decisions.num_ranks):
            yield _Entry(self._row(spec, found, plan), found, plan)
        for size in sizes:
            if size not in rows and choice.status is Status.COMPLETE:
                words = f"{size} x {cluster.device.name}"
                reason = f"no plan fits on {size} devices"
                yield _Entry(FrontRow(short_name(spec), words, size, reason=reason))

    def _row(self, spec: str, found: Found, plan: ScoredPlan) -> FrontRow:
        cluster = found.machine.cluster
        used = used_devices(cluster, plan.decisions)
        words = " + ".join(f"{count} x {device.name}" for device, count in used)
        ranks, mixed = plan.decisions.num_ranks, bool(cluster.parts)
        return FrontRow(short_name(spec), words, ranks, priced(found, plan), mixed=mixed)


def priced(found: Found, plan: ScoredPlan) -> Priced:
    """A plan with what it costs, where prices are known."""
    cluster, captured, step_s = found.machine.cluster, found.captured, plan.prediction.step_s
    used = used_devices(cluster, plan.decisions)
    return Priced(
        plan.name,
        step_s,
        plan.prediction.peak_bytes,
        utilization(captured.graph, used, step_s, captured.microbatches),
        usd_per_step(cluster, plan.decisions, step_s),
    )


def of_cluster(say: Say, spec: str, text: str) -> None:
    """Progress on one of several clusters."""
    say(f"{spec}: {text}")


def prices_of(found: Iterable[Found]) -> tuple[tuple[str, HourlyPrice], ...]:
    """The prices of all devices that there are."""
    clusters = [each.machine.cluster for each in found]
    devices = [part.cluster.device for cluster in clusters for part in regular_parts(cluster)]
    return tuple({d.name: d.price for d in devices if d.price is not None}.items())
