"""Whether random changes of the plan that `auto` answers make it faster, on the simulator.

    python benchmarks/hill_climbing.py [--seed 0] [--mutations 250] [--random-plans 50]
        [--models mlp_unify,gpt] [--clusters 8x8xH100] [--limits 1,0.6] [--shard 1/4]
        [--graphs FOLDER] [--json FILE] [--resume]

A question is a case of `cases.yaml` on a cluster, with all of a device's memory (limit 1) or with a
share of the peak of the plan for that. From the plan that the search answers, random mutations
(`mutations.py`) are lowered and simulated; one that fits and is not slower is kept, and the next
starts from it. Random plans are simulated beside. A row has the best that was found, the changes
that led to it, and whether a step was below `bound_s`. Rows are written as they come; with
`--resume`, those that the file has of the same revision and the same flags are not made again;
`--shard I/N` makes every N-th model on a cluster; `--graphs` keeps captured programs as text.

Exit code 1 where a plan is more than 0.5 % faster than the answer, or below the bound.
"""

import argparse
import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from random import Random

from common import report, reported, revision
from mutations import Draft, Space, mutated, random_draft
from questions import Answer, Row, all_cases, answer, graph_of, question_of, sharded

from parloom.errors import LayoutError, VerifyError
from parloom.ir.graph import Graph
from parloom.ir.plan import Decisions, Prediction
from parloom.ir.verify import verify_decisions, verify_pcg
from parloom.rewrite.rewrites import rewritten
from parloom.search.request import Request, base_of

MODELS = ("mlp_unify", "dlrm", "gpt", "candle_uno", "llama")
CLUSTERS = ("1x8xV100-16GB", "2x4xRTX4090-25gbit.yaml", "4x8xA100-80GB", "8x8xH100")
# By so much a plan may be faster than the answer.
ALLOWED = 0.005
# Changes that make a plan faster by less are not listed.
LISTED = 0.0005
# Bounds are sums of floating-point numbers.
ROUNDING = 1e-9
ASKED = ("model", "cluster", "limit", "seed", "mutations", "random_plans")


class Climb:
    """Mutations and random plans of one question; what they were found to take."""

    def __init__(self, question: Request, start: Answer, rng: Random) -> None:
        self.request, self.rng = question, rng
        self.space = Space(question.graph, question.cluster, base_of(question))
        self.best_s, self.least_s = start.step_s, inf
        self.steps: list[Row] = []
        self.simulated = 0

    def predicted(self, draft: Draft) -> tuple[Draft, Prediction] | None:
        """A draft as it is lowered, and its step; None where it is no legal plan."""
        try:
            draft, pcg = self.space.lowered(draft)
            decisions = self.space.decisions(draft)
            verify_decisions(self.request.graph, decisions, self.space.factored)
            question = self.request
            found = question.machine.predict(verify_pcg(pcg), decisions, question.optimizer)
        except (LayoutError, VerifyError):
            return None
        self.simulated += 1
        self.least_s = min(self.least_s, found.step_s)
        return draft, found

    def climb(self, decisions: Decisions, count: int) -> None:
        """Mutate a plan so many times; keep what fits and is not slower."""
        draft, limit = self.space.draft(decisions), self.request.limit_bytes
        for _ in range(count):
            try:
                words, changed = mutated(self.space, draft, self.rng)
            except LayoutError:
                continue
            found = self.predicted(changed) if words else None
            if found is None or found[1].peak_bytes > limit or found[1].step_s > self.best_s:
                continue
            draft, step_s = found[0], found[1].step_s
            if step_s < self.best_s * (1 - LISTED):
                by = 1 - step_s / self.best_s
                sizes = "x".join(str(axis.size) for axis in draft.mesh.axes)
                self.steps.append({"change": words, "by": by, "mesh": sizes})
            self.best_s = step_s

    def draw(self, count: int) -> float:
        """The fastest of so many random plans that fits."""
        best = inf
        for _ in range(count):
            try:
                draft = random_draft(self.space, self.rng)
            except LayoutError:
                continue
            found = self.predicted(draft)
            if found is not None and found[1].peak_bytes <= self.request.limit_bytes:
                best = min(best, found[1].step_s)
        return best


def row_of(question: Request, start: Answer, options: argparse.Namespace) -> Row:
    """What is found from the answer to one question."""
    begin = time.process_time()
    decisions = start.decisions
    if decisions is not None:  # changes are of the graph with the plan's blocks
        question = replace(question, graph=rewritten(question.graph, decisions.rewrites))
        decisions = replace(decisions, rewrites=())
    seed = f"{options.seed} {question.cluster.name} {question.limit_bytes} {question.graph.name}"
    climb = Climb(question, start, Random(seed))
    drawn_s = climb.draw(options.random_plans)
    if decisions is not None:
        climb.climb(decisions, options.mutations)
    best_s = min(drawn_s, climb.best_s)
    below = climb.least_s < start.bound_s * (1 - ROUNDING)
    return {
        "limit_bytes": question.limit_bytes,
        "auto_s": _finite(start.step_s),
        "bound_s": start.bound_s,
        "solver_gap": start.solver_gap,
        "search_s": start.cpu_s,
        "simulated": climb.simulated,
        "best_s": _finite(best_s),
        "random_s": _finite(drawn_s),
        "gain": 1 - best_s / start.step_s if start.step_s < inf else float(best_s < inf),
        "below_bound": below,
        "least_s": _finite(climb.least_s),
        "steps": climb.steps,
        "climb_s": time.process_time() - begin,
    }


def _finite(seconds: float) -> float | None:
    return seconds if seconds < inf else None


def rows_of(
    name: str, graph: Graph, cluster: str, limits: list[float], options: argparse.Namespace
) -> Iterator[Row]:
    """The rows of a case on a cluster; the free question is asked for all of them."""
    case = all_cases()[name]
    question = question_of(case, graph, cluster)
    free = answer(question)
    for share in limits:
        start = free
        if share != 1 and free.decisions is not None:
            question = replace(question, limit_bytes=int(share * free.peak_bytes))
            start = answer(question)
        asked = {"model": name, "cluster": cluster, "limit": share, "seed": options.seed}
        asked |= {"mutations": options.mutations, "random_plans": options.random_plans}
        yield asked | row_of(question, start, options)


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
