"""The scoreboard: published runs, predicted by the same lowering, prices and simulator as any plan.

    python benchmarks/fidelity.py [--runs FILE] [--json FILE] [--only SOURCE] [--gated] [--quick]
                                  [--jobs N]

Every row with `plan_complete` = 1 is built by hand (`comparators.handmade`) on a graph captured at
its shapes, and simulated; what cannot be built counts against coverage, with its reason. Where a
row does not say what is recomputed or which ZeRO it is, the first of its framework's default and
what takes less memory that fits the device is predicted; rows list what was `assumed`. Errors are
|log(predicted / measured)|, bias the median of the log with its sign, rank correlation the mean of
Spearman's over groups of one model, device, device count, sequence and global batch with at least
five different plans (equal plans that were measured several times count once, by their median).
Gated rows are those that state their plan in full on a framework that builds on PyTorch.

The fitted constants of devices are those of the device table. To see what they are worth on rows
they never saw, they are fitted again with each source left out (`fit`), from how every prediction
moves with every constant; `--quick` leaves that out.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from csv import DictReader
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from fit import SHARED, Sample, held_out
from memory_terms import UNIT_BYTES, quantity_of
from published import Run, gated, runs_of_row
from published_models import Row, Shape, Unpredictable

from parloom.comparators.handmade import Program, communicators, program
from parloom.cost.devices import table
from parloom.cost.footprint import Footprint, footprint
from parloom.cost.software import GENERATIONS
from parloom.cost.timeline import Timeline
from parloom.errors import ParloomError
from parloom.ir.graph import Graph
from parloom.ir.mesh import Cluster, Device

RUNS = Path(__file__).parents[2] / "shared" / "validation" / "published_runs.csv"
MIN_GROUP = 5
GROUP = ("model", "gpu_type", "num_gpus", "seq_len", "global_batch")
PLAN = (
    "tp", "pp", "vpp", "dp", "cp", "ep", "sequence_parallel", "zero_or_fsdp", "micro_batch",
    "activation_checkpointing", "precision", "framework", "other_plan",
    "layers", "hidden", "heads", "interconnect_inter",
)  # fmt: skip
MODEL = ("family", "hidden", "heads", "seq_len", "ffn_hidden", "precision")
# What a constant is moved by to see how predictions follow.
STEP = 0.05
ROUNDS = 2  # of a pipeline, to see that
QUANTITIES = {
    "allocated": "peak_bytes", "reserved": "reserved_bytes", "device": "device_bytes",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Predicted:
    """A row, and its prediction or the reason for none.

    `slopes` are d log(prediction) / d log(constant), in the order of `fit.SHARED`.
    """

    id: str
    source_key: str
    gated: bool
    target_s: float
    group: tuple[str, ...]
    plan: tuple[str, ...]
    device: str
    predicted_s: float | None = None
    reason: str = ""
    peak_bytes: int = 0
    memory_bytes: float | None = None
    reserved_bytes: int = 0
    device_bytes: int = 0
    capacity_bytes: int = 0
    quantity: str = ""
    band: float = 0.0
    slopes: tuple[float, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def memory_error(self) -> float | None:
        """log(predicted / stated) of the quantity that is stated; None where none is."""
        predicted = getattr(self, QUANTITIES[self.quantity]) if self.quantity else 0
        return math.log(predicted / self.memory_bytes) if predicted and self.memory_bytes else None

    @property
    def over(self) -> bool:
        """Whether it would not fit the device that it ran on: some assumption is refuted."""
        return self.device_bytes > self.capacity_bytes

    @property
    def error(self) -> float:
        """log(predicted / measured)."""
        assert self.predicted_s is not None
        return math.log(self.predicted_s / self.target_s)


@dataclass(frozen=True, slots=True)
class Score:
    """How well rows are predicted."""

    rows: int
    predicted: int
    coverage: float
    median_abs_log_error: float | None
    p90_abs_log_error: float | None
    bias: float | None
    rank_correlation: float | None
    groups: int
    median_abs_memory_error: float | None
    memory_bias: float | None
    memory_rows: int
    over: int


def predict(row: Row, slopes: bool, known: list[tuple[Shape, Graph]]) -> Predicted:
    """Simulate one row."""
    memory = positive(row["mem_gb_per_gpu"])
    found = Predicted(
        row["id"], row["source_key"], gated(row), positive(row["target_seconds_per_iter"]) or 0.0,
        tuple(row[name] for name in GROUP), tuple(row[name] for name in PLAN),
        row["gpu_key"] or row["gpu_type"],
        memory_bytes=memory * UNIT_BYTES if memory else None,
        quantity=quantity_of(row),
    )  # fmt: skip
    try:
        return _simulated(found, row, slopes, known)
    except (Unpredictable, ParloomError) as why:
        return replace(found, reason=str(why))
    except Exception as why:  # no row may take the others with it; its type says that it is a bug
        known.clear()
        first = next(iter(str(why).splitlines()), "")
        return replace(found, reason=f"{type(why).__name__}: {first}")


def positive(text: str) -> float | None:
    """A number above 0; None for anything else."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def _simulated(
    found: Predicted, row: Row, slopes: bool, known: list[tuple[Shape, Graph]]
) -> Predicted:
    run, built = _first_that_fits(row, known)
    timeline = _play(built, run, run.cluster)
    moved = []
    if slopes:
        base = _play(built, run, run.cluster, rounds=ROUNDS).period_s
        for constant in SHARED:
            cluster = moved_constant(run.cluster, constant, 1 + STEP)
            other = _play(built, run, cluster, rounds=ROUNDS).period_s
            moved.append(math.log(other / base) / math.log(1 + STEP))
    held = _footprint(timeline, run)
    return replace(
        found,
        predicted_s=timeline.period_s,
        peak_bytes=held.allocated_bytes,
        reserved_bytes=held.reserved_bytes,
        device_bytes=held.device_bytes,
        capacity_bytes=held.capacity_bytes,
        band=run.unknown(held.device_bytes / held.capacity_bytes).error,
        slopes=tuple(moved),
        device=run.cluster.device.name,
        assumed=run.assumed,
    )


def _first_that_fits(row: Row, known: list[tuple[Shape, Graph]]) -> tuple[Run, Program]:
    """The first of what a row may describe that fits its device; where none does, the one that
    takes least. Each is taken to need less memory than the one before it.
    """
    runs = runs_of_row(row, known)
    if len(runs) == 1:
        return runs[0], program(runs[0].graph, runs[0].chosen, runs[0].cluster)
    first = _fitting(runs[0])
    if first is not None:
        return runs[0], first
    low, high, best = 1, len(runs) - 1, None
    while low < high:
        middle = (low + high) // 2
        found = _fitting(runs[middle])
        if found is None:
            low = middle + 1
        else:
            high, best = middle, found
    run = runs[low]
    return run, best or program(run.graph, run.chosen, run.cluster)


def _fitting(run: Run) -> Program | None:
    """A run's program, if its device holds it."""
    built = program(run.graph, run.chosen, run.cluster)
    timeline = _play(built, run, run.cluster, rounds=ROUNDS)
    return built if _footprint(timeline, run).fits else None


def _footprint(timeline: Timeline, run: Run) -> Footprint:
    memory, groups = run.kernels.software.memory, communicators(run.chosen)
    return footprint(timeline, run.cluster.device, memory, groups)


def _play(built: Program, run: Run, cluster: Cluster, rounds: int | None = None) -> Timeline:
    kernels = replace(run.kernels, device=cluster.device)
    return built.play(cluster, kernels, run.optimizer, rounds=rounds)


def moved_constant(cluster: Cluster, constant: str, factor: float) -> Cluster:
    """The cluster with one of its constants `factor` times as large."""
    efficiency = cluster.device.efficiency
    value = {constant: getattr(efficiency, constant) * factor}
    device = replace(cluster.device, efficiency=replace(efficiency, **value))
    return replace(cluster, device=device)


def score(rows: Sequence[Predicted]) -> Score:
    """The score of some rows."""
    known = [row for row in rows if row.predicted_s is not None]
    errors = sorted(abs(row.error) for row in known)
    ranks = [spearman(*group) for group in groups_of(known)]
    memory = [row.memory_error for row in known if row.memory_error is not None]
    return Score(
        len(rows),
        len(known),
        len(known) / len(rows) if rows else 0.0,
        statistics.median(errors) if errors else None,
        percentile(errors, 0.9) if errors else None,
        statistics.median(row.error for row in known) if known else None,
        statistics.mean(ranks) if ranks else None,
        len(ranks),
        statistics.median(map(abs, memory)) if memory else None,
        statistics.median(memory) if memory else None,
        len(memory),
        sum(row.over for row in known),
    )


def groups_of(rows: Sequence[Predicted]) -> list[tuple[list[float], list[float]]]:
    """Predicted and measured seconds of the plans of each group that has enough of them."""
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[Predicted]]] = {}
    for row in rows:
        groups.setdefault(row.group, {}).setdefault(row.plan, []).append(row)
    return [
        (
            [statistics.median(r.predicted_s or 0.0 for r in same) for same in plans.values()],
            [statistics.median(r.target_s for r in same) for same in plans.values()],
        )
        for plans in groups.values()
        if len(plans) >= MIN_GROUP
    ]


def percentile(ordered: Sequence[float], share: float) -> float:
    """Between the values around it."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Rank correlation; equal values share the mean of their ranks."""
    a, b = ranked(one), ranked(other)
    mean = (len(a) + 1) / 2
    top = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    bottom = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return top / bottom if bottom else 0.0


def ranked(values: Sequence[float]) -> list[float]:
    """Ranks from 1 on, ties with their mean."""
    return [
        sum(v < value for v in values) + (1 + sum(v == value for v in values)) / 2
        for value in values
    ]


def printed(name: str, found: Score) -> str:
    """A line of the table."""
    return (
        f"| {name} | {found.rows} | {_percent(found.coverage)} |"
        f" {_percent(found.median_abs_log_error)} | {_percent(found.p90_abs_log_error)} |"
        f" {_percent(found.bias, '+')} |"
        f" {'' if found.rank_correlation is None else f'{found.rank_correlation:.3f}'}"
        f" ({found.groups}) | {_percent(found.median_abs_memory_error)}"
        f" {_percent(found.memory_bias, '+')} ({found.memory_rows}) | {found.over} |"
    )


def _percent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{100 * value:{sign}.1f} %"


HEAD = (
    "| rows of | rows | coverage | median error | 90th pct. | bias | rank (groups)"
    " | memory, bias (rows) | above the device |\n|---|---|---|---|---|---|---|---|---|"
)


def tell(rows: Sequence[Predicted]) -> dict[str, Score]:
    """Print the tables; the score of each source over all of its rows."""
    sources = list(dict.fromkeys(row.source_key for row in rows))
    for title, chosen in (
        ("Gated rows", [row for row in rows if row.gated]),
        ("All rows", list(rows)),
    ):
        if not chosen:
            continue
        print(f"\n{title}\n{HEAD}")
        for source in sources:
            own = [row for row in chosen if row.source_key == source]
            if own:
                print(printed(source, score(own)))
        print(printed("all", score(chosen)))
    tell_over(rows)
    reasons: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.reason:
            key = row.source_key, row.reason
            reasons[key] = reasons.get(key, 0) + 1
    if reasons:
        print("\nNot predicted\n| source | rows | reason |\n|---|---|---|")
        for (source, reason), count in reasons.items():
            print(f"| {source} | {count} | {reason} |")
    return {source: score([r for r in rows if r.source_key == source]) for source in sources}


def tell_over(rows: Iterable[Predicted]) -> None:
    """Print the rows that would not fit the device that they ran on."""
    above = [row for row in rows if row.over]
    if above:
        print("\nAbove the device's memory: some assumption is refuted")
        print("| row | source | predicted, GB | device, GB |\n|---|---|---|---|")
    for row in above:
        sizes = f"{row.device_bytes / 1e9:.1f} | {row.capacity_bytes / 1e9:.1f}"
        print(f"| {row.id} | {row.source_key} | {sizes} |")


def constants(rows: Iterable[Predicted]) -> dict[str, object]:
    """The constants that the predictions of these rows used."""
    names = {row.device for row in rows}
    devices: list[Device] = [d.device for d in table().devices if names & {d.device.name, *d.short}]
    return {
        "devices": {d.name: asdict(d.efficiency) for d in devices},
        "interconnects": {
            i.name: {"latency_s": i.latency_s, "efficiency": i.efficiency}
            for i in table().interconnects
        },
        "software": {name: asdict(s) for name, s in GENERATIONS.items()},
    }


def print_constants(found: Mapping[str, object]) -> None:
    """One line each."""
    print("\nConstants")
    for kind, values in found.items():
        assert isinstance(values, dict)
        for name, fields in values.items():
            listed = ", ".join(f"{k} {v}" for k, v in fields.items() if k != "name")
            print(f"{kind} {name}: {listed}")


def cross_validated(rows: Sequence[Predicted]) -> dict[str, object]:
    """Errors of gated rows with constants that were fitted without their source; printed."""
    known = [row for row in rows if row.gated and row.predicted_s is not None]
    errors = held_out([Sample(r.source_key, r.error, r.slopes) for r in known])
    print("\nGated rows, each with constants fitted to the other sources")
    print("| source | rows | median error | 90th percentile |\n|---|---|---|---|")
    found: dict[str, object] = {}
    sources = dict.fromkeys(row.source_key for row in known)
    for source in (*sources, None):
        mine = sorted(
            abs(e) for e, row in zip(errors, known, strict=True) if source in (None, row.source_key)
        )
        median, high = statistics.median(mine), percentile(mine, 0.9)
        print(f"| {source or 'all'} | {len(mine)} | {_percent(median)} | {_percent(high)} |")
        found[source or "all"] = {"median_abs_log_error": median, "p90_abs_log_error": high}
    return found


def tell_bands(rows: Sequence[Predicted]) -> None:
    """How many rows lie within the band that a prediction of them prints."""
    print("\nWithin the printed band (nine in ten are wanted)")
    print("| band | rows | within |\n|---|---|---|")
    known = [row for row in rows if row.predicted_s is not None]
    for band in (*sorted({round(row.band, 3) for row in known}), None):
        own = [row for row in known if band is None or round(row.band, 3) == band]
        within = sum(abs(row.error) <= row.band for row in own) / max(1, len(own))
        print(f"| {'all' if band is None else _percent(band)} | {len(own)} | {_percent(within)} |")


def document(rows: Sequence[Predicted], sources: Mapping[str, Score]) -> dict[str, object]:
    """The JSON: the gate's figures at the top where there are gated rows, else those of all."""
    gate = [row for row in rows if row.gated] or list(rows)
    keys = ("coverage", "median_abs_log_error", "p90_abs_log_error", "rank_correlation", "bias")
    top = asdict(score(gate))
    return {
        **{key: top[key] for key in keys},
        "gated_rows": sum(row.gated for row in rows),
        "all": asdict(score(rows)),
        "sources": {name: asdict(found) for name, found in sources.items()},
        "gated_sources": {
            name: asdict(score(own))
            for name in sources
            if (own := [row for row in rows if row.gated and row.source_key == name])
        },
        "constants": constants(rows),
        "rows": [
            {
                "id": row.id,
                "source_key": row.source_key,
                "gated": row.gated,
                "target_s": row.target_s,
                "predicted_s": row.predicted_s,
                "band": row.band,
                "reason": row.reason or None,
                "predicted_peak_bytes": row.peak_bytes or None,
                "predicted_reserved_bytes": row.reserved_bytes or None,
                "predicted_device_bytes": row.device_bytes or None,
                "above_device": row.over,
                "stated_quantity": row.quantity,
                "stated_memory_bytes": row.memory_bytes,
                "assumed": list(row.assumed),
            }
            for row in rows
        ],
    }


def chosen_rows(path: Path, only: str | None, keep: Callable[[Row], bool]) -> list[Row]:
    """Rows with a plan and a target, those of one architecture after each other."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [r for r in DictReader(file) if r["plan_complete"] == "1"]
    rows = [r for r in rows if positive(r["target_seconds_per_iter"]) and keep(r)]
    return [r for r in rows if only is None or r["source_key"] == only]


def predicted(rows: Sequence[Row], slopes: bool, jobs: int) -> list[Predicted]:
    """All rows, in their order; in `jobs` processes, each of which has all rows of a model."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(tuple(row[name] for name in MODEL), []).append(index)
    work = [([rows[i] for i in group], slopes) for group in groups.values()]
    if jobs > 1:
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            done = pool.map(_predict_all, work, chunksize=1)
    else:
        done = [_predict_all(one) for one in work]
    found = dict(zip((i for group in groups.values() for i in group), chain(*done), strict=True))
    return [found[index] for index in range(len(rows))]


def _predict_all(work: tuple[Sequence[Row], bool]) -> list[Predicted]:
    rows, slopes = work
    known: list[tuple[Shape, Graph]] = []
    return [predict(row, slopes and gated(row), known) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="rows of one source")
    parser.add_argument("--gated", action="store_true", help="rows of the gate alone")
    parser.add_argument("--quick", action="store_true", help="no cross-validation")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    start = sum(os.times()[:4])  # of its processes, too
    listed = chosen_rows(asked.runs, asked.only, gated if asked.gated else lambda row: True)
    rows = predicted(listed, not asked.quick, asked.jobs)
    sources = tell(rows)
    found = document(rows, sources)
    tell_bands(rows)
    print_constants(constants(rows))
    if not asked.quick and any(row.gated for row in rows):
        found["cross_validated"] = cross_validated(rows)
    used = sum(os.times()[:4]) - start
    print(f"\n{len(rows)} rows in {used:.0f} s of CPU time")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
