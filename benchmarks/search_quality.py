"""How good the plans of every method are, and how long the search takes.

    python benchmarks/search_quality.py [--cases gpt,dlrm] [--clusters 8x8xH100]
        [--samples case,1,4] [--limits 1,0.5,0.25] [--methods alpa,fsdp] [--draw SEED]
        [--shard 1/8] [--minutes 9] [--graphs FOLDER] [--json FILE] [--resume]
    python benchmarks/search_quality.py --curve [--json FILE]

A row is a model of `cases.yaml` on a cluster: with the batch of the case in the memory of a device,
or with 1 or 4 samples for each device under limits of 100 %, 50 % and 25 % of what the fastest
plan holds where memory has no limit. `auto` is the search alone, without the rules of thumb beside
it. `gap` is the distance of its simulated step to `bound_s`, `solver_gap` that of its best estimate
to the bound on estimates, `simulated` that of its simulated step to the same. Then the fastest plan
of all other methods that fits, and its step as a multiple of `auto`'s. CPU seconds and memory are
those of the search, which has a process of its own; capture is not in them.

Rows are written as they come; with `--resume`, those that the file has of the same revision are not
made again. `--shard I/N` makes every N-th row, `--minutes` begins none after so many minutes,
`--draw` makes 60 rows of all, drawn by a seed. Exit code 1 where the search proposes something
slower than another method that fits, or where a method fails.

With `--curve`: CPU seconds of the search over the layers of Llama-3-8B on 8x8xH100.
"""

import argparse
import gc
import math
import multiprocessing
import resource
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from tempfile import TemporaryDirectory
from typing import TypeVar

from common import report, reported, revision
from questions import (
    Row,
    all_cases,
    answer,
    devices_of,
    documented,
    graph_of,
    request_of,
    sharded,
)

from parloom import arguments
from parloom.candidates import candidates
from parloom.cost.units import format_bytes
from parloom.errors import InputError
from parloom.search.request import AUTO, Request

T = TypeVar("T")
METHODS = tuple(name for name in arguments.METHODS if name != AUTO)
# Steps whose times differ by less are equally fast.
TIE = 1e-9
# Memory without a limit.
UNLIMITED = 1 << 60
# Rows of `--draw`.
DRAWN = 60
# The case whose layers the curve is over, and how many there are.
CURVE, LAYERS = "llama3_8b", (8, 16, 32, 64, 128)
# Median gap by cluster and in all of the rows with the batches of the cases, and what is allowed.
GAPS = {
    "1x8xV100-16GB": 0.018, "4x8xA100-80GB": 0.159, "8x8xH100": 0.444,
    "2x4xRTX4090-25gbit.yaml": 0.872, "4xcpu": 0.023,
}  # fmt: skip
GAP, SOLVER_GAP, SIMULATED_GAP = 0.09, 0.01, 0.05
TITLES = (
    "model", "cluster", "samples", "limit", "auto", "gap", "solver_gap", "simulated", "best other",
    "ratio", "memory", "search", "peak of the search",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """A row: `samples` for each device (None: the batch of the case), and the share of memory that
    a plan may hold of the fastest plan without a limit (None: what a device has).
    """

    model: str
    cluster: str
    samples: int | None = None
    limit: float | None = None

    def row(self) -> Row:
        """As a row has it."""
        return {"model": self.model, "cluster": self.cluster, "samples": self.samples,
                "limit": self.limit}  # fmt: skip

    def is_of(self, row: Row) -> bool:
        return all(row.get(key) == value for key, value in self.row().items())


def every_row(options: argparse.Namespace) -> list[Asked]:
    """All rows that are asked for."""
    cases, found = all_cases(), []
    limits = [float(limit) for limit in options.limits.split(",")]
    for name in options.cases.split(","):
        for cluster in cases[name].get("clusters", options.clusters.split(",")):
            for samples in options.samples.split(","):
                if samples == "case":
                    found.append(Asked(name, cluster))
                else:
                    found += [Asked(name, cluster, int(samples), limit) for limit in limits]
    if options.draw is not None:
        found = Random(options.draw).sample(found, min(DRAWN, len(found)))
    return sharded(found, options.shard)


def main() -> int:
    """Print the table; 1 where another method beats the search."""
    document = documented()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(document["cases"]))
    parser.add_argument("--clusters", default=",".join(document["clusters"]))
    parser.add_argument("--samples", default="case,1,4", help="for each device; case: as it says")
    parser.add_argument("--limits", default="1,0.5,0.25", help="with samples for each device")
    parser.add_argument("--methods", default=",".join(METHODS), help="to compare; none: empty")
    parser.add_argument("--draw", type=int, help=f"make {DRAWN} rows drawn by this seed")
    parser.add_argument("--shard", default="1/1", help="I/N: every N-th row")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no row after these")
    parser.add_argument("--graphs", default=None, help="a folder for captured programs")
    parser.add_argument("--json", default=None)
    parser.add_argument("--resume", action="store_true", help="go on with the rows of --json")
    parser.add_argument("--curve", action="store_true", help="seconds over layers instead")
    options = parser.parse_args()
    print(f"revision {revision() or 'unknown'}\n", flush=True)
    gc.disable()  # as `api.search` does
    with TemporaryDirectory() as folder:
        options.graphs = options.graphs or folder
        return _curve(options) if options.curve else _table(options)


def _table(options: argparse.Namespace) -> int:
    methods = tuple(name for name in options.methods.split(",") if name)
    known: list[Row] = reported(options.json) if options.resume else []
    begun, left, rows = time.monotonic(), 0, list[Row]()
    print(f"| {' | '.join(TITLES)} |\n" + "|---" * len(TITLES) + "|", flush=True)
    for asked in every_row(options):
        row = next((r for r in known if asked.is_of(r) and is_made(r, methods)), None)
        if row is None and time.monotonic() - begun > 60 * options.minutes:
            left += 1
            continue
        if row is None:
            row = _row(asked, all_cases()[asked.model], options.graphs, methods)
            known = [*(r for r in known if not asked.is_of(r)), row]
            report("search_quality", known, options.json)
        print(line(row), flush=True)
        rows.append(row)
    print("\n" + "\n".join(summary(rows)))
    if left:
        print(f"{left} rows are left: the same command with --resume makes them")
    return 1 if any(row.get("lost") or failed(row) for row in rows) else 0


def is_made(row: Row, methods: Sequence[str]) -> bool:
    """Whether nothing is missing of a row."""
    return not failed(row) and set(methods).issubset(row["cpu_s"])


def failed(row: Row) -> bool:
    return "error" in row or bool(row["errors"])


def _row(asked: Asked, case: Row, graphs: str, methods: Sequence[str]) -> Row:
    """A row, its search in a process of its own."""
    try:
        if asked.samples is not None:
            case = case | {"batch": asked.samples * devices_of(asked.cluster)}
        _apart(partial(graph_of, case, graphs))
        request = request_of(case, graph_of(case, graphs), asked.cluster)
        if asked.limit is not None:
            free = _apart(partial(_searched, replace(request, limit_bytes=UNLIMITED)))
            request = replace(request, limit_bytes=int(asked.limit * free["peak_bytes"]))
        found = _apart(partial(_searched, request))
        return asked.row() | found | _apart(partial(_compared, request, found, methods))
    except ChildError as error:
        return asked.row() | {"error": str(error)}


class ChildError(Exception):
    """A forked process that failed."""


def _apart(make: Callable[[], T]) -> T:
    """What `make` returns in a forked process; raises `ChildError` where that fails."""

    def run() -> None:
        try:
            theirs.send((make(), ""))
        except Exception as error:
            traceback.print_exc()
            theirs.send((None, _said(error)))

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run)
    process.start()
    theirs.close()
    try:
        answered: tuple[T, str] = ours.recv()
    except EOFError:
        raise ChildError("its process ended") from None
    finally:
        process.join()
    if answered[1]:
        raise ChildError(answered[1])
    return answered[0]


def _searched(request: Request) -> Row:
    """What the search alone answers."""
    before, found = _rss_bytes(), answer(request)
    fits = found.decisions is not None
    bound, estimated = found.bound_s, found.estimate_bound_s
    return {
        "limit_bytes": request.limit_bytes,
        "auto_s": found.step_s if fits else None,
        "peak_bytes": found.peak_bytes if fits else None,
        "bound_s": bound,
        "gap": found.step_s / bound - 1 if fits and bound else None,
        "solver_gap": found.solver_gap,
        "simulated_gap": found.step_s / estimated - 1 if fits and estimated else None,
        "search_s": found.cpu_s,
        "rss_bytes": _rss_bytes(),
        "rss_before_bytes": before,
    }


def _compared(request: Request, found: Row, methods: Sequence[str]) -> Row:
    """The fastest plan of each other method that fits; what failed."""
    steps: dict[str, float | None] = {}
    seconds: dict[str, float] = {}
    errors: dict[str, str] = {}
    for method in methods:
        start = time.process_time()
        try:
            steps[method] = min(_steps(request, method), default=None)
        except InputError:  # the method has no plan for this request
            steps[method] = None
        except Exception as error:
            traceback.print_exc()
            errors[method] = _said(error)
        seconds[method] = time.process_time() - start
    best, ratio = _best(found["auto_s"], steps)
    lost = best is not None and (ratio is None or ratio < 1 - TIE)
    return {"step_s": steps, "cpu_s": seconds, "errors": errors, "best": best, "ratio": ratio,
            "lost": lost}  # fmt: skip


def _best(auto_s: float | None, steps: dict[str, float | None]) -> tuple[str | None, float | None]:
    """The fastest of other methods, and its step as a multiple of `auto_s`."""
    fitting = {name: step_s for name, step_s in steps.items() if step_s is not None}
    best = min(fitting, key=lambda name: fitting[name], default=None)
    return best, fitting[best] / auto_s if best is not None and auto_s else None


def _steps(request: Request, method: str) -> Iterator[float]:
    """Simulated steps of a method's plans that fit."""
    for candidate in candidates(replace(request, method=method), lambda text: None).found:
        prediction = candidate.prediction
        if prediction.peak_bytes <= request.limit_bytes:
            yield prediction.step_s


def _rss_bytes() -> int:
    """The most memory that this process had at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


# What is printed


def line(row: Row) -> str:
    """A row of the table."""
    limit, samples = row["limit"], row["samples"]
    cells = [row["model"], row["cluster"], "case" if samples is None else str(samples)]
    cells += ["device" if limit is None else f"{limit:.0%}"]
    if "error" in row:
        cells += [f"failed: {row['error']}"] + [""] * (len(TITLES) - len(cells) - 1)
        return f"| {' | '.join(cells)} |"
    cells += [_time(row["auto_s"]), *(_share(row[key]) for key in ("gap", "solver_gap"))]
    cells += [_share(row["simulated_gap"])]
    failures = "; ".join(f"{name} failed: {error}" for name, error in row["errors"].items())
    best = row["best"]
    cells += [failures or ("none fits" if best is None else f"{best} {_time(row['step_s'][best])}")]
    cells += ["" if row["ratio"] is None else f"{row['ratio']:.3f}"]
    cells[-1] += " (lost)" if row["lost"] else ""
    cells += ["" if row["peak_bytes"] is None else format_bytes(row["peak_bytes"])]
    cells += [f"{row['search_s']:.1f} s", _rss(row)]
    return f"| {' | '.join(cells)} |"


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """What all rows say together, against what is allowed."""
    made = [row for row in rows if "error" not in row]
    lost, fits = [r for r in made if r["lost"]], [r for r in made if r["auto_s"] is not None]
    yield f"{len(rows)} rows, {len(rows) - len(made)} failed, another method faster in {len(lost)}"
    today = [r for r in fits if r["samples"] is None and r["gap"] is not None]
    for cluster, allowed in GAPS.items():
        gaps = [r["gap"] for r in today if r["cluster"] == cluster]
        yield from _median(f"gap, batch of the case, {cluster}", gaps, allowed)
    yield from _median("gap, batch of the case, in all", [r["gap"] for r in today], GAP)
    simulated = [r["simulated_gap"] for r in fits if r["simulated_gap"] is not None]
    yield from _median("simulated step to the bound on estimates", simulated, SIMULATED_GAP)
    wide = [r["solver_gap"] for r in fits if r["solver_gap"] is not None]
    if wide:
        above = f"above {SOLVER_GAP:.0%} in {sum(g > SOLVER_GAP for g in wide)} of {len(wide)}"
        yield f"solver_gap: at most {max(wide):.1%}, {above}"


def _median(name: str, values: Sequence[float], allowed: float) -> Iterator[str]:
    if values:
        found = statistics.median(values)
        held = "" if found <= allowed else ": **not held**"
        yield f"{name}: median {found:.1%} of {len(values)} rows, allowed {allowed:.1%}{held}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _time(step_s: float | None) -> str:
    return "does not fit" if step_s is None else f"{step_s * 1e3:.4g} ms"


def _rss(row: Row) -> str:
    """The peak of the process that searches, and what was there before it."""
    return f"{format_bytes(row['rss_bytes'])} ({format_bytes(row['rss_before_bytes'])})"


# Seconds over layers


def _curve(options: argparse.Namespace) -> int:
    """Print how the seconds of a search grow with the layers of a model."""
    case = all_cases()[CURVE]
    (cluster,) = case["clusters"]
    rows: list[Row] = []
    print("| layers | search | exponent | step | memory | peak of the search |")
    print("|---" * 6 + "|", flush=True)
    for layers in LAYERS:
        config = case["config"] | {"num_hidden_layers": layers}
        row = _row(Asked(CURVE, cluster), case | {"config": config}, options.graphs, ())
        if failed(row):
            print(f"| {layers} | failed: {row['error']} |")
            return 1
        rows.append(row | {"layers": layers})
        print(f"| {' | '.join(_curve_cells(rows))} |", flush=True)
        report("search_curve", rows, options.json)
    counts, seconds = [row["layers"] for row in rows], [row["search_s"] for row in rows]
    print(f"\nseconds grow with layers to the power of {exponent(counts, seconds):.2f}")
    return 0


def _curve_cells(rows: list[Row]) -> Iterator[str]:
    """The last row, with the exponent from the one before it."""
    row, last = rows[-1], [[r[key] for r in rows[-2:]] for key in ("layers", "search_s")]
    yield str(row["layers"])
    yield f"{row['search_s']:.1f} s"
    yield f"{exponent(*last):.2f}" if rows[1:] else ""
    yield _time(row["auto_s"])
    yield "" if row["peak_bytes"] is None else format_bytes(row["peak_bytes"])
    yield _rss(row)


def exponent(counts: list[int], seconds: list[float]) -> float:
    """The power of `counts` that `seconds` follow, by least squares of logarithms."""
    slope, _ = statistics.linear_regression(
        [math.log(n) for n in counts], [math.log(s) for s in seconds]
    )
    return slope


if __name__ == "__main__":
    raise SystemExit(main())
