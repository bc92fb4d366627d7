"""How good the plans of every method are, and how long the search takes.

    python benchmarks/search_quality.py [--cases gpt,dlrm] [--clusters 8x8xH100] [--json FILE]
        [--resume] [--comparators alpa,tofu]
    python benchmarks/search_quality.py --curve [--json FILE]

For each model of `cases.yaml` (those of `scale` where they are asked for by name) on each cluster:
simulated step time of the best plan of each rule of thumb, of each comparator
(`docs/comparators.md`) and of the search alone (`auto` without the rules of thumb beside it), `gap`
and `solver_gap`, the peak memory of a device under the search's plan, and CPU seconds and memory of
the search. Capture is not in the seconds, rules of thumb are; where nothing fits, pricing what
would is not. Every row has a process of its own, forked after the capture: its peak includes
Python, torch and the captured model; in brackets, what was there before the search. Rows are
written as they come; with `--resume`, those that the file has of the same revision are not made
again. Exit code 1 where the search proposes something slower than another method that fits, or
where a method fails.

With `--curve`: CPU seconds of the search over the layers of Llama-3-8B on 8x8xH100.
"""

import argparse
import gc
import json
import math
import multiprocessing
import resource
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from common import report, reported, revision

from parloom import api
from parloom.choose import Ask, NothingFitsError, choose
from parloom.cost.units import format_bytes
from parloom.execute.machine import machine_for
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Alternative, Decisions, Plan

CASES = Path(__file__).resolve().parent / "cases.yaml"
METHODS = ("data_parallel", "fsdp", "megatron", "auto")
COMPARATORS = ("random", "alpa", "flexflow", "tofu")
# Steps whose times differ by less are equally fast.
TIE = 1e-9
# The case whose layers the curve is over, and how many there are.
CURVE, LAYERS = "llama3_8b", (8, 16, 32, 64, 128)
Row = dict[str, Any]


def main() -> int:
    """Print the table; 1 where another method beats the search."""
    document = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(document["cases"]))
    parser.add_argument("--clusters", default=",".join(document["clusters"]))
    parser.add_argument("--comparators", default=",".join(COMPARATORS), help="none: empty")
    parser.add_argument("--json", default=None)
    parser.add_argument("--resume", action="store_true", help="go on with the rows of --json")
    parser.add_argument("--curve", action="store_true", help="seconds over layers instead")
    options = parser.parse_args()
    print(f"revision {revision() or 'unknown'}\n")
    every = document["cases"] | document["scale"]
    if options.curve:
        return _curve(every[CURVE], options.json)
    rows: list[Row] = reported(options.json) if options.resume else []
    compared = tuple(name for name in options.comparators.split(",") if name)
    proved = "gap", "solver_gap", "memory", "search", "peak of the search"
    titles = ("model", "cluster", *METHODS, *compared, *proved)
    print(f"| {' | '.join(titles)} |")
    print("|---" * len(titles) + "|", flush=True)
    for name in options.cases.split(","):
        case = dict(every[name])
        clusters = case.pop("clusters", options.clusters.split(","))
        known = [row for row in rows if _is_made(row, name, clusters, compared)]
        for row in known:
            print(_line(row, compared), flush=True)
        left = [c for c in clusters if c not in {row["cluster"] for row in known}]
        for row in _of_case(name, case, left, compared) if left else ():
            print(_line(row, compared), flush=True)
            rows = [r for r in rows if (r["model"], r["cluster"]) != (name, row["cluster"])]
            rows.append(row)
            report("search_quality", rows, options.json)
    lost = [row for row in rows if row.get("lost")]
    print(f"\n{len(rows)} cases; another method is faster in {len(lost)}")
    return 1 if lost or any(map(_failed, rows)) else 0


def _curve(case: Row, path: str | None) -> int:
    """Print how the seconds of a search grow with the layers of a model."""
    (cluster,) = case.pop("clusters")
    rows: list[Row] = []
    print("| layers | search | exponent | step | memory | peak of the search |")
    print("|---" * 6 + "|", flush=True)
    for layers in LAYERS:
        config = case["config"] | {"num_hidden_layers": layers}
        for row in _of_case(CURVE, case | {"config": config}, [cluster], ()):
            if _failed(row):
                print(f"| {layers} | failed: {row.get('error') or row['errors']} |")
                return 1
            rows.append(row | {"layers": layers})
            print(f"| {' | '.join(_curve_cells(rows))} |", flush=True)
            report("search_curve", rows, path)
    counts, seconds = [row["layers"] for row in rows], [row["search_s"] for row in rows]
    print(f"\nseconds grow with layers to the power of {exponent(counts, seconds):.2f}")
    return 0


def _curve_cells(rows: list[Row]) -> Iterator[str]:
    """The last row, with the exponent from the one before it."""
    row, last = rows[-1], [[r[key] for r in rows[-2:]] for key in ("layers", "search_s")]
    yield str(row["layers"])
    yield f"{row['search_s']:.1f} s"
    yield f"{exponent(*last):.2f}" if rows[1:] else ""
    yield _time(row["step_s"]["auto"])
    yield _memory(row)
    yield _rss(row)


def exponent(counts: list[int], seconds: list[float]) -> float:
    """The power of `counts` that `seconds` follow, by least squares of logarithms."""
    slope, _ = statistics.linear_regression(
        [math.log(n) for n in counts], [math.log(s) for s in seconds]
    )
    return slope


def _is_made(row: Row, name: str, clusters: list[str], compared: tuple[str, ...]) -> bool:
    """Whether `row` is one of those asked for, with nothing missing."""
    asked = row["model"] == name and row["cluster"] in clusters
    return asked and not _failed(row) and set(compared).issubset(row["cpu_s"])


def _failed(row: Row) -> bool:
    return "error" in row or bool(row["errors"])


def _of_case(name: str, case: Row, clusters: list[str], compared: tuple[str, ...]) -> Iterator[Row]:
    """The rows of a case, captured once in a process of its own."""

    def rows(send: Callable[[Row], None]) -> None:
        try:
            captured = _captured(**case)
        except Exception as error:
            send({"model": name, "cluster": "", "error": _said(error)})
            return
        for cluster in clusters:
            path = str(CASES.parent / cluster) if cluster.endswith(".yaml") else cluster
            made = list(_apart(partial(_send_row, captured, path, compared)))
            row = made[0] if made else {"error": "its process ended"}
            send({"model": name, "cluster": cluster} | row)

    yield from _apart(rows)


def _apart(make: Callable[[Callable[[Row], None]], None]) -> Iterator[Row]:
    """What `make` sends from a forked process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=make, args=(theirs.send,))
    process.start()
    theirs.close()
    try:
        while True:
            yield ours.recv()
    except EOFError:
        process.join()


def _send_row(
    captured: api.Captured, cluster: str, compared: tuple[str, ...], send: Callable[[Row], None]
) -> None:
    send(_row(captured, cluster, compared))


def _captured(model: str = "", config: Row | None = None, **flags: Any) -> api.Captured:
    """The model that a case names, or the Hugging Face model of its `config`."""
    if config is None:
        return api.capture(model, **flags)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        return api.capture(str(path), **flags)


def _row(captured: api.Captured, cluster: str, compared: tuple[str, ...]) -> Row:
    """What every method finds on a cluster; where one fails, its error is in its place."""
    gc.disable()  # as `api.search` does
    steps: dict[str, float | None] = {}
    peaks: dict[str, int | None] = {}
    seconds: dict[str, float] = {}
    errors: dict[str, str] = {}
    proved: Row = {"bound_s": None, "gap": None, "solver_gap": None}
    proved |= {"rss_bytes": None, "rss_before_bytes": _rss_bytes()}
    for method in ("auto", *compared):
        start = time.process_time()
        plan = _plan(captured, cluster, method, errors)
        seconds[method] = time.process_time() - start
        for name in METHODS if method == "auto" else (method,):
            found = _best(plan.alternatives, name) if plan else None
            steps[name] = found.step_s if found else None
            peaks[name] = found.peak_bytes if found else None
        if method == "auto":
            proved["rss_bytes"] = _rss_bytes()
        if plan and method == "auto":
            proved |= {"bound_s": plan.bound_s, "gap": plan.gap, "solver_gap": plan.solver_gap}
    others = [s for method, s in steps.items() if s is not None and method != "auto"]
    mine = steps["auto"]
    lost = bool(others) and (mine is None or mine > min(others) * (1 + TIE))
    found_s = {"step_s": steps, "peak_bytes": peaks, "cpu_s": seconds, "errors": errors}
    return found_s | proved | {"lost": lost, "search_s": seconds["auto"]}


def _rss_bytes() -> int:
    """The most memory that this process had at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _plan(captured: api.Captured, cluster: str, method: str, errors: dict[str, str]) -> Plan | None:
    """A method's plan; None where none fits, or where it fails, which is put into `errors`."""
    try:
        machine = machine_for(cluster)
        asked = Plan(
            captured.source,
            machine.loaded.spec,
            captured.fingerprint,
            captured.optimizer,
            method,
            Decisions(Mesh(())),
            graph="",
            seed=captured.seed,
        )
        limit = machine.cluster.device.memory_bytes
        return choose(Ask(asked, captured.graph, machine, limit), lambda text: None)
    except NothingFitsError:
        return None
    except Exception as error:
        traceback.print_exc()
        errors[method] = _said(error)
        return None


def _best(found: tuple[Alternative, ...], method: str) -> Alternative | None:
    """The fastest plan of a method that fits."""
    mine = [a for a in found if a.name.split(" ")[0] == method and a.fits]
    return min(mine, key=lambda a: a.step_s, default=None)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _line(row: Row, compared: tuple[str, ...]) -> str:
    cells = [row["model"], row["cluster"]]
    if "error" in row:
        cells += [f"failed: {row['error']}"] + [""] * (len(METHODS) + len(compared) + 4)
        return f"| {' | '.join(cells)} |"
    for method in (*METHODS, *compared):
        failed = row["errors"].get(method)
        cells.append(f"failed: {failed}" if failed else _time(row["step_s"][method]))
        if method in compared:
            cells[-1] += f" ({row['cpu_s'][method]:.1f} s)"
    cells += ["" if row[k] is None else f"{row[k]:.1%}" for k in ("gap", "solver_gap")]
    lost = " (lost)" if row["lost"] else ""
    cells += [_memory(row), f"{row['search_s']:.1f} s{lost}", _rss(row)]
    return f"| {' | '.join(cells)} |"


def _time(step_s: float | None) -> str:
    return "does not fit" if step_s is None else f"{step_s * 1e3:.4g} ms"


def _memory(row: Row) -> str:
    """What a device holds at most under the plan of the search."""
    found = row["peak_bytes"]["auto"]
    return "" if found is None else format_bytes(found)


def _rss(row: Row) -> str:
    """The peak of the process that searches, and what was there before it."""
    return f"{format_bytes(row['rss_bytes'])} ({format_bytes(row['rss_before_bytes'])})"


if __name__ == "__main__":
    raise SystemExit(main())
