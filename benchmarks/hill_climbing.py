"""Whether random changes of the plan that `auto` answers make it faster, on the simulator.

    python benchmarks/hill_climbing.py [--seed 0] [--mutations 250] [--random-plans 50]
        [--models mlp_unify,gpt] [--clusters 8x8xH100] [--limits 1,0.6] [--shard 1/4]
        [--graphs FOLDER] [--json FILE] [--resume]

A question is a case of `cases.yaml` on a cluster, with all of a device's memory (limit 1) or with a
share of the peak of the plan for that. The plan that the search answers is changed by the moves of
`parloom.search.climb`, with other draws, as often as is asked, and also where a graph is too large
for these in a search; a change that fits and is not slower is kept, and the next starts from it.
Random plans (`random_plans.py`), which share nothing with the search, are simulated beside. A row
has the best that was found, the changes that led to it, and whether a step was below `bound_s`.
Rows are written as they come; with `--resume`, those that the file has of the same revision and the
same flags are not made again; `--shard I/N` makes every N-th model on a cluster; `--graphs` keeps
captured programs as text.

Exit code 1 where a plan is more than 0.5 % faster than the answer, or below the bound.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from operator import ne
from random import Random

from common import report, reported, revision
from questions import Answer, Row, all_cases, answer, graph_of, request_of, sharded
from random_plans import RandomPlans

from parloom.errors import LayoutError, VerifyError
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions
from parloom.ir.verify import verify_decisions, verify_pcg
from parloom.rewrite.rewrites import rewritten
from parloom.search.climb import Climb, Draft
from parloom.search.contexts import SimulatedPlan
from parloom.search.folding import program_of
from parloom.search.request import Request, base_of
from parloom.search.work import Work

MODELS = ("mlp_unify", "dlrm", "gpt", "candle_uno", "llama")
CLUSTERS = ("1x8xV100-16GB", "2x4xRTX4090-25gbit.yaml", "4x8xA100-80GB", "8x8xH100")
# By so much a plan may be faster than the answer.
ALLOWED = 0.005
# Changes that make a plan faster by less are not listed.
LISTED = 0.0005
# Bounds are sums of floating-point numbers.
ROUNDING = 1e-9
ASKED = ("model", "cluster", "limit", "seed", "mutations", "random_plans")


class Judge:
    """Changes of an answer and random plans; what they were found to take."""

    def __init__(self, request: Request, start: Answer) -> None:
        self.request, self.factored = request, factorize(request.graph)
        self.best_s, self.least_s = start.step_s, inf
        self.steps: list[Row] = []
        self.simulated = 0

    def played(self, lowered: Callable[[], tuple[Decisions, PCG]]) -> SimulatedPlan | None:
        """A plan that is checked and simulated; None where it is not legal or does not fit."""
        request = self.request
        try:
            decisions, pcg = lowered()
            verify_decisions(request.graph, decisions, self.factored)
            found = request.machine.predict(verify_pcg(pcg), decisions, request.optimizer)
        except (LayoutError, VerifyError):
            return None
        self.simulated += 1
        self.least_s = min(self.least_s, found.step_s)
        return SimulatedPlan(decisions, found) if found.peak_bytes <= request.limit_bytes else None

    def climb(self, decisions: Decisions, count: int) -> None:
        """Change a plan so many times; keep what fits and is not slower."""
        start = SimulatedPlan(decisions, self.request.predict(decisions, self.factored))
        program = program_of(self.request.graph, self.factored)
        climb = Climb(self.request, program, start, Work())
        draft = climb.draft(decisions)
        for _ in range(count):
            changed = climb.changes.any(draft)
            found = self.played(partial(climb.lowered, changed)) if changed != draft else None
            if found is None or found.prediction.step_s > self.best_s:
                continue
            before, draft, step_s = draft, climb.draft(found.decisions), found.prediction.step_s
            if step_s < self.best_s * (1 - LISTED):
                by = 1 - step_s / self.best_s
                sizes = "x".join(str(axis.size) for axis in draft.mesh.axes)
                self.steps.append({"change": difference(before, draft), "by": by, "mesh": sizes})
            self.best_s = step_s

    def draw(self, count: int, rng: Random) -> float:
        """The fastest of so many random plans that fits."""
        request = self.request
        plans = RandomPlans(request.graph, request.cluster, base_of(request), rng)
        found = (self.played(plans.drawn) for _ in range(count))
        return min((plan.prediction.step_s for plan in found if plan), default=inf)


def difference(before: Draft, after: Draft) -> str:
    """What differs between two plans, in words."""
    layouts = sum(map(ne, before.layouts, after.layouts))
    words = [f"{layouts} layouts"] if layouts else []
    parts = ("stored", before.stored, after.stored), ("recomputed", before.remade, after.remade)
    for word, old, new in parts:
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        if names:
            words.append(
                f"{word} otherwise: {names[0]}{f' and {len(names) - 1} more' * bool(names[1:])}"
            )
    if before.num_microbatches != after.num_microbatches:
        words.append(f"{after.num_microbatches} microbatches")
    return "; ".join(words) or "mesh"


def row_of(request: Request, start: Answer, options: argparse.Namespace) -> Row:
    """What is found from the answer to one question."""
    begin = time.process_time()
    decisions = start.decisions
    if decisions is not None:  # changes are of the graph with the plan's blocks
        request = replace(request, graph=rewritten(request.graph, decisions.rewrites))
        decisions = replace(decisions, rewrites=())
    seed = f"{options.seed} {request.cluster.name} {request.limit_bytes} {request.graph.name}"
    rng = Random(seed)
    judge = Judge(replace(request, seed=rng.getrandbits(32)), start)
    drawn_s = judge.draw(options.random_plans, rng)
    if decisions is not None:
        judge.climb(decisions, options.mutations)
    best_s = min(drawn_s, judge.best_s)
    below = judge.least_s < start.bound_s * (1 - ROUNDING)
    return {
        "limit_bytes": request.limit_bytes,
        "auto_s": _finite(start.step_s),
        "bound_s": start.bound_s,
        "solver_gap": start.solver_gap,
        "search_s": start.cpu_s,
        "simulated": judge.simulated,
        "best_s": _finite(best_s),
        "random_s": _finite(drawn_s),
        "gain": 1 - best_s / start.step_s if start.step_s < inf else float(best_s < inf),
        "below_bound": below,
        "least_s": _finite(judge.least_s),
        "steps": judge.steps,
        "climb_s": time.process_time() - begin,
    }


def _finite(seconds: float) -> float | None:
    return seconds if seconds < inf else None


def rows_of(
    name: str, graph: Graph, cluster: str, limits: list[float], options: argparse.Namespace
) -> Iterator[Row]:
    """The rows of a case on a cluster; the free question is asked for all of them."""
    case = all_cases()[name]
    request = request_of(case, graph, cluster)
    free = answer(request)
    for share in limits:
        start = free
        if share != 1 and free.decisions is not None:
            request = replace(request, limit_bytes=int(share * free.peak_bytes))
            start = answer(request)
        asked = {"model": name, "cluster": cluster, "limit": share, "seed": options.seed}
        asked |= {"mutations": options.mutations, "random_plans": options.random_plans}
        yield asked | row_of(request, start, options)


def line(row: Row) -> str:
    """A row of the table."""
    cells = [row["model"], row["cluster"], f"{row['limit']:.0%}", _time(row["auto_s"])]
    cells += ["" if row["solver_gap"] is None else f"{row['solver_gap']:.2%}"]
    cells += [_time(row["best_s"]), f"{row['gain']:.2%}", _time(row["random_s"])]
    cells += [_time(row["bound_s"]) + (" **undercut**" if row["below_bound"] else "")]
    cells += [str(row["simulated"]), f"{row['search_s']:.1f} s", f"{row['climb_s']:.1f} s"]
    cells += ["<br>".join(f"{s['by']:.2%} {s['change']} [{s['mesh']}]" for s in row["steps"])]
    return f"| {' | '.join(cells)} |"


def _time(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds * 1e3:.5g} ms"


def failed(row: Row) -> bool:
    """Whether something was found that should not be there."""
    return bool(row["gain"] > ALLOWED or row["below_bound"])


def main() -> int:
    """Print the table; 1 where the search is beaten."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutations", type=int, default=250)
    parser.add_argument("--random-plans", type=int, default=50)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--limits", default="1,0.6", help="shares of the free plan's peak; 1: free")
    parser.add_argument("--shard", default="1/1", help="I/N: every N-th model on a cluster")
    parser.add_argument("--graphs", default=None, help="a folder for captured programs")
    parser.add_argument("--json", default=None)
    parser.add_argument("--resume", action="store_true", help="go on with the rows of --json")
    options = parser.parse_args()
    gc.disable()  # as `api.search` does
    limits = [float(share) for share in options.limits.split(",")]
    pairs = [(m, c) for m in options.models.split(",") for c in options.clusters.split(",")]
    rows = reported(options.json) if options.resume else []
    flags = {"seed": options.seed, "mutations": options.mutations}
    flags["random_plans"] = options.random_plans
    titles = ("model", "cluster", "limit", "auto", "solver_gap", "best", "gain", "best random",
              "bound", "simulated", "search", "climb", "changes")  # fmt: skip
    print(f"revision {revision() or 'unknown'}\n\n| {' | '.join(titles)} |")
    print("|---" * len(titles) + "|", flush=True)
    made: list[Row] = []
    for name, cluster in sharded(pairs, options.shard):
        asked = [flags | {"model": name, "cluster": cluster, "limit": share} for share in limits]
        known = [row for row in rows if {key: row[key] for key in ASKED} in asked]
        found: Iterator[Row] = iter(known)
        if len(known) < len(limits):
            rows = [row for row in rows if row not in known]
            found = rows_of(
                name, graph_of(all_cases()[name], options.graphs), cluster, limits, options
            )
        for row in found:
            print(line(row), flush=True)
            made.append(row)
            if row not in rows:
                rows.append(row)
                report("hill_climbing", rows, options.json)
    lost = [row for row in made if failed(row)]
    simulated = sum(row["simulated"] for row in made)
    most = max((row["gain"] for row in made), default=0.0)
    print(f"\n{len(made)} questions, {simulated} simulated; {len(lost)} beaten by more than"
          f" {ALLOWED:.1%} or below the bound; largest gain {most:.2%}")  # fmt: skip
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
