"""How good the plans of every method are, and how long the search takes.

    python benchmarks/search_quality.py [--cases gpt,dlrm] [--clusters 8x8xH100] [--json FILE]
        [--comparators alpa,tofu]

For each model of `cases.yaml` (those of `scale` where they are asked for by name) on each cluster:
simulated step time and peak memory of the best plan of each rule of thumb, of each comparator
(`docs/comparators.md`) and of the search alone (`auto` without the rules of thumb beside it), the
CPU seconds of each search (capture excluded; rules of thumb within that of `auto`), `gap` and
`solver_gap`. Exit code 1 where the search proposes something slower than another method that fits,
or where a method fails.
"""

import argparse
import json
import multiprocessing
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from common import report

from parloom import api
from parloom.errors import InfeasibleError
from parloom.ir.plan import Alternative, Plan

CASES = Path(__file__).resolve().parent / "cases.yaml"
METHODS = ("data_parallel", "fsdp", "megatron", "auto")
COMPARATORS = ("random", "alpa", "flexflow", "tofu")
# Steps whose times differ by less are equally fast.
TIE = 1e-9
Row = dict[str, Any]


def main() -> int:
    """Print the table; 1 where another method beats the search."""
    document = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(document["cases"]))
    parser.add_argument("--clusters", default=",".join(document["clusters"]))
    parser.add_argument("--comparators", default=",".join(COMPARATORS), help="none: empty")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    rows: list[Row] = []
    every = document["cases"] | document["scale"]
    compared = tuple(name for name in options.comparators.split(",") if name)
    titles = ("model", "cluster", *METHODS, *compared, "gap", "solver_gap", "search")
    print(f"| {' | '.join(titles)} |")
    print("|---" * len(titles) + "|", flush=True)
    for name in options.cases.split(","):
        case = dict(every[name])
        clusters = case.pop("clusters", options.clusters.split(","))
        for row in _apart(name, case, clusters, compared):
            print(_line(row, compared), flush=True)
            rows.append(row)
    report("search_quality", rows, options.json)
    lost = [row for row in rows if row.get("lost")]
    print(f"\n{len(rows)} cases; another method is faster in {len(lost)}")
    failed = [row for row in rows if "error" in row or row["errors"]]
    return 1 if lost or failed else 0


def _apart(name: str, case: Row, clusters: list[str], compared: tuple[str, ...]) -> list[Row]:
    """The rows of a case, made in a process of its own."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_send, args=(theirs, name, case, clusters, compared)
    )
    process.start()
    theirs.close()
    rows = []
    try:
        while True:
            rows.append(ours.recv())
    except EOFError:
        process.join()
    return rows


def _send(
    pipe: Connection, name: str, case: Row, clusters: list[str], compared: tuple[str, ...]
) -> None:
    try:
        captured = _captured(**case)
    except Exception as error:
        pipe.send({"model": name, "cluster": "", "error": _said(error)})
        return
    for cluster in clusters:
        path = str(CASES.parent / cluster) if cluster.endswith(".yaml") else cluster
        pipe.send({"model": name, "cluster": cluster} | _row(captured, path, compared))


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
    steps: dict[str, float | None] = {}
    peaks: dict[str, int | None] = {}
    seconds: dict[str, float] = {}
    errors: dict[str, str] = {}
    proved: Row = {"bound_s": None, "gap": None, "solver_gap": None}
    for method in ("auto", *compared):
        start = time.process_time()
        plan = _plan(captured, cluster, method, errors)
        seconds[method] = time.process_time() - start
        for name in METHODS if method == "auto" else (method,):
            found = _best(plan.alternatives, name) if plan else None
            steps[name] = found.step_s if found else None
            peaks[name] = found.peak_bytes if found else None
        if plan and method == "auto":
            proved = {"bound_s": plan.bound_s, "gap": plan.gap, "solver_gap": plan.solver_gap}
    others = [s for method, s in steps.items() if s is not None and method != "auto"]
    mine = steps["auto"]
    lost = bool(others) and (mine is None or mine > min(others) * (1 + TIE))
    found_s = {"step_s": steps, "peak_bytes": peaks, "cpu_s": seconds, "errors": errors}
    return found_s | proved | {"lost": lost, "search_s": seconds["auto"]}


def _plan(captured: api.Captured, cluster: str, method: str, errors: dict[str, str]) -> Plan | None:
    """A method's plan; None where none fits, or where it fails, which is put into `errors`."""
    try:
        return api.search(captured, cluster=cluster, method=method)
    except InfeasibleError:
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
        cells += [f"failed: {row['error']}"] + [""] * (len(METHODS) + len(compared) + 2)
        return f"| {' | '.join(cells)} |"
    for method in (*METHODS, *compared):
        step_s, failed = row["step_s"][method], row["errors"].get(method)
        fits = "does not fit" if step_s is None else f"{step_s * 1e3:.4g} ms"
        cells.append(f"failed: {failed}" if failed else fits)
        if method in compared:
            cells[-1] += f" ({row['cpu_s'][method]:.1f} s)"
    cells += ["" if row[k] is None else f"{row[k]:.1%}" for k in ("gap", "solver_gap")]
    cells.append(f"{row['search_s']:.1f} s" + (" (lost)" if row["lost"] else ""))
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
