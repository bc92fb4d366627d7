"""How good the plans of every method are, and how long the search takes.

    python benchmarks/search_quality.py [--cases gpt,dlrm] [--clusters 8x8xH100] [--json FILE]

For each model of `cases.yaml` on each cluster: simulated step time and peak memory of the best plan
of each rule of thumb and of the search alone (`auto` without the rules of thumb beside it), the
CPU seconds of the search (capture excluded), `gap` and `solver_gap`. Exit code 1 where the search
proposes something slower than a rule of thumb that fits.
"""

import argparse
import multiprocessing
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml
from common import report

from parloom import api
from parloom.errors import InfeasibleError
from parloom.ir.plan import Alternative

CASES = Path(__file__).resolve().parent / "cases.yaml"
METHODS = ("data_parallel", "fsdp", "megatron", "auto")
# Steps whose times differ by less are equally fast.
TIE = 1e-9
Row = dict[str, Any]


def main() -> int:
    """Print the table; 1 where a rule of thumb beats the search."""
    document = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(document["cases"]))
    parser.add_argument("--clusters", default=",".join(document["clusters"]))
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    rows: list[Row] = []
    print(
        "| model | cluster | data_parallel | fsdp | megatron | auto | gap | solver_gap | search |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in options.cases.split(","):
        for row in _apart(name, document["cases"][name], options.clusters.split(",")):
            print(_line(row), flush=True)
            rows.append(row)
    report("search_quality", rows, options.json)
    lost = [row for row in rows if row.get("lost")]
    print(f"\n{len(rows)} cases; a rule of thumb is faster in {len(lost)}")
    return 1 if lost or any("error" in row for row in rows) else 0


def _apart(name: str, case: Row, clusters: list[str]) -> list[Row]:
    """The rows of a case, made in a process of its own."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_send, args=(theirs, name, case, clusters)
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


def _send(pipe: Connection, name: str, case: Row, clusters: list[str]) -> None:
    try:
        captured = api.capture(**case)
    except Exception as error:
        pipe.send({"model": name, "cluster": "", "error": _said(error)})
        return
    for cluster in clusters:
        pipe.send({"model": name, "cluster": cluster} | _row(captured, cluster))


def _row(captured: api.Captured, cluster: str) -> Row:
    start = time.process_time()
    try:
        plan = api.search(captured, cluster=cluster)
    except InfeasibleError as error:
        return {"infeasible": str(error), "search_s": time.process_time() - start}
    except Exception as error:
        traceback.print_exc()
        return {"error": _said(error)}
    best = {method: _best(plan.alternatives, method) for method in METHODS}
    steps = {method: found.step_s if found else None for method, found in best.items()}
    others = [s for method, s in steps.items() if s is not None and method != "auto"]
    mine = steps["auto"]
    assert plan.prediction is not None
    bound = plan.bound_s
    return {
        "step_s": steps,
        "peak_bytes": {m: found.peak_bytes if found else None for m, found in best.items()},
        "lost": bool(others) and (mine is None or mine > min(others) * (1 + TIE)),
        "bound_s": bound,
        "gap": None if not bound else plan.prediction.step_s / bound - 1,
        "solver_gap": plan.solver_gap,
        "search_s": time.process_time() - start,
    }


def _best(found: tuple[Alternative, ...], method: str) -> Alternative | None:
    """The fastest plan of a method that fits."""
    mine = [a for a in found if a.name.split(" ")[0] == method and a.fits]
    return min(mine, key=lambda a: a.step_s, default=None)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _line(row: Row) -> str:
    cells = [row["model"], row["cluster"]]
    if "error" in row or "infeasible" in row:
        said = f"failed: {row['error']}" if "error" in row else "nothing fits"
        cells += [said] + [""] * 6
    else:
        for method in METHODS:
            step_s = row["step_s"][method]
            cells.append("does not fit" if step_s is None else f"{step_s * 1e3:.4g} ms")
        cells += ["" if row[k] is None else f"{row[k]:.1%}" for k in ("gap", "solver_gap")]
        cells.append(f"{row['search_s']:.1f} s" + (" (lost)" if row["lost"] else ""))
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
