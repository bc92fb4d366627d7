"""On the cluster in a box: parloom's plans against their counterparts in torch.

`data_parallel` against DistributedDataParallel, `fsdp` against FSDP2 (fully_shard), `megatron`
against DTensor tensor parallel: same model, weights, batch and optimizer, on 4 hosts of 0.25 core.
Each launch runs every pair, both sides in turns, the beginner alternating between launches. A row
is the median over launches of the ratio of median step times, with its interval. The losses after
the steps must agree: that is the check that both sides train the same model.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import median_and_interval, report, verdict

from parloom import api
from parloom.comparators.baselines import METHODS
from parloom.cost.clusters import load_cluster
from parloom.ir.text import parse_graph

LIMIT = 1.05
CLUSTER = "4x1xcpu"
HERE = Path(__file__).resolve().parent
OTHERS = {"data_parallel": "DDP", "fsdp": "FSDP2", "megatron": "DTensor"}
LEAST_QUOTA_US = (
    1000  # of the kernel (sched-bwc): with less, hosts would be faster than they should
)
LOSS_TOLERANCE = 1e-4  # float32, sums in other orders


def make_plans(folder: Path, pairs: list[tuple[str, str]]) -> None:
    """Write the plan of every pair: of each method, the one with the highest degree."""
    for name in sorted({name for name, _ in pairs}):
        spec = f"{HERE / 'cluster_models.py'}:{name}"
        base = api.plan(spec, cluster=CLUSTER, optimizer="sgd", method="data_parallel")
        graph = parse_graph(base.graph)
        for method in sorted({method for other, method in pairs if other == name}):
            decisions = list(METHODS[method](graph, load_cluster(CLUSTER), 1, 0))[-1]
            plan = replace(
                base, method=method, decisions=decisions, prediction=None, alternatives=()
            )
            api.save(plan, folder / name / method)


class Bed:
    """A bed of the tool `testbed.py` with some of a core and 3 GB a host, torn down on exit; the
    last host has half of both where it is `slow`. With `uplink`, the first half of the hosts are in
    one rack, the others in another one, and uplinks of that rate join them. Hosts save up what they
    do not compute for so many `burst` periods of their quota, and go faster afterwards; in shorter
    periods they are nearer to devices that are as slow all the time.
    """

    def __init__(
        self,
        tool: Path,
        name: str,
        rate: str,
        hosts: int = 4,
        *,
        slow: bool = False,
        uplink: str = "",
        cores: float = 0.25,
        burst: float = 1.0,
        period_us: int = 10_000,
    ) -> None:
        self._tool = [sys.executable, str(tool / "testbed.py" if tool.is_dir() else tool)]
        self._name = name
        if cores / (1 + slow) * period_us < LEAST_QUOTA_US:
            raise SystemExit(f"{cores:g} cores in periods of {period_us} us: make periods longer")
        self._shape = ["--rate", rate, "--burst", str(burst), "--period-us", str(period_us)]
        devices = [{"cpu": cores, "mem": "3g"} for _ in range(hosts)]
        if slow:
            devices[-1] = {"cpu": cores / 2, "mem": "1500m"}
        described: list[dict[str, Any]] = [{"devices": [device]} for device in devices]
        racks: dict[str, str] = {}
        if uplink:
            racks = {"a": uplink, "b": uplink}
            for index, host in enumerate(described):
                host["rack"] = "ab"[2 * index // hosts]
        self._hosts = json.dumps({"hosts": described, "uplinks": racks})

    def __enter__(self) -> "Bed":
        self._call("up", "--hosts-spec", self._hosts, *self._shape)
        return self

    def __exit__(self, *_: object) -> None:
        self._call("down")

    def run(self, *command: str) -> str:
        """Run `command` on every device; what they printed."""
        return self._call("run", "--timeout", "1500", "--", *command)

    def _call(self, verb: str, *arguments: str) -> str:
        command = [*self._tool, verb, "--name", self._name, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{verb} failed ({done.returncode}):\n{done.stderr[-4000:]}")
        return done.stdout


def launch(bed: Bed, plans: Path, args: argparse.Namespace, index: int) -> list[dict[str, Any]]:
    rows = [f"{m}:{p},{OTHERS[p]}" for m, p in (pair.split(":") for pair in args.pairs.split(","))]
    found = [_pair(row) for row in train(bed, plans, rows, args.steps, index % 2)]
    ratios = [statistics.median(r["parloom_s"]) / statistics.median(r["torch_s"]) for r in found]
    print(f"launch {index}: {' '.join(f'{r:.3f}' for r in ratios)}", file=sys.stderr, flush=True)
    return found


def train(bed: Bed, plans: Path, rows: list[str], steps: int, first: int) -> list[dict[str, Any]]:
    """Run `cluster_rank.py` on every device; what its rank 0 says of each row."""
    printed = bed.run(
        sys.executable, str(HERE / "cluster_rank.py"), "--plans", str(plans),
        "--steps", str(steps), "--first", str(first), "--rows", *rows,
    )  # fmt: skip
    return [json.loads(line[7:]) for line in printed.splitlines() if line.startswith("RESULT ")]


def _pair(row: dict[str, Any]) -> dict[str, Any]:
    """A row of two sides: the plan's first."""
    if row["errors"]:
        raise SystemExit(f"{row['model']}: {row['errors']}")
    (method,) = set(row["seconds"]) & set(OTHERS)
    sides = method, OTHERS[method]
    return {
        "model": row["model"],
        "method": method,
        "other": OTHERS[method],
        **dict(zip(("parloom_s", "torch_s"), (row["seconds"][s] for s in sides), strict=True)),
        "losses": [row["losses"][side] for side in sides],
    }


def summary(rate: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table from the same pair's rows of all launches."""
    sides = {
        side: [statistics.median(row[side]) for row in rows] for side in ("parloom_s", "torch_s")
    }
    ratios = [a / b for a, b in zip(sides["parloom_s"], sides["torch_s"], strict=True)]
    ratio, low, high = median_and_interval(ratios)
    differences = [abs(a - b) / abs(b) for a, b in (row["losses"] for row in rows)]
    return {
        "rate": rate,
        **{key: rows[0][key] for key in ("model", "method", "other")},
        **{side: statistics.median(times) for side, times in sides.items()},
        "ratio": ratio,
        "low": low,
        "high": high,
        "verdict": verdict(low, high, LIMIT) if len(rows) >= 6 else "too few launches",
        "launches": len(rows),
        "loss_difference": max(differences),
        "losses_agree": max(differences) <= LOSS_TOLERANCE,
        "ratios": ratios,
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"| {row['rate']} | {row['model']} | {row['method']} | {row['parloom_s']:.3f} s |"
        f" {row['other']} {row['torch_s']:.3f} s | {row['ratio']:.3f}"
        f" ({row['low']:.3f} .. {row['high']:.3f}) | {row['verdict']} |"
        f" {row['loss_difference']:.0e}{'' if row['losses_agree'] else ' DISAGREE'} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--testbed", type=Path, required=True, help="folder of testbed.py")
    parser.add_argument("--launches", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each side per launch")
    parser.add_argument("--rates", default="100mbit,250mbit")
    parser.add_argument(
        "--pairs", default=",".join(f"{m}:{p}" for m in ("mlp", "gpt") for p in OTHERS)
    )
    parser.add_argument("--name", default="pbench", help="of the bed")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    pairs = [(m, p) for m, p in (pair.split(":") for pair in args.pairs.split(","))]
    table: list[dict[str, Any]] = []
    print("| link | model | plan | parloom | torch | ratio (95 %) | <= 1.05 | loss differs by |")
    print("|" + "---|" * 8)
    with tempfile.TemporaryDirectory(prefix="parloom-bench-") as folder:
        make_plans(Path(folder), pairs)
        for rate in args.rates.split(","):
            found: list[dict[str, Any]] = []
            for index in range(args.launches):
                with Bed(args.testbed, args.name, rate) as bed:
                    found += launch(bed, Path(folder), args, index)
            for model, method in pairs:
                rows = [r for r in found if (r["model"], r["method"]) == (model, method)]
                table.append(summary(rate, rows))
                print(_line(table[-1]), flush=True)
    report("cluster_in_a_box", table, args.json)
    return int(not all(row["losses_agree"] for row in table))


if __name__ == "__main__":
    raise SystemExit(main())
