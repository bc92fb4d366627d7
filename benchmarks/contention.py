"""What collectives and computing take from each other on the cluster in a box.

    python benchmarks/contention.py --testbed FOLDER [--beds 4:250mbit,2:100mbit] [--json F]

Per bed, kind and size: a collective alone (back to back); the part of the shorter time that is
gained where it runs beside products that take about as long; and what a round of computing for some
milliseconds and then the collective takes beyond the computing. Times are those of the slowest
rank, each a mean over rounds between two barriers.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster_in_a_box import Bed
from cluster_rank import _slowest
from common import report

from parloom.runtime.comm import DistributedGroup

KINDS = ("all_reduce", "all_gather")
SIZES = (1 << 14, 1 << 18, 1 << 20, 1 << 22)
SEGMENTS_S = (0.004, 0.01, 0.04)
SIDE = 256  # of the products
BUDGET_S, MOST_ROUNDS, LEAST_ROUNDS = 1.0, 30, 5


def _starter(kind: str, num_bytes: int, group: DistributedGroup) -> Callable[[], Any]:
    """Starts the collective on float32 tensors of which the larger has `num_bytes`."""
    whole = torch.zeros(group.size, num_bytes // 4 // group.size)
    if kind == "all_reduce":
        return partial(group.all_reduce, whole)
    return partial(group.all_gather, whole, torch.zeros_like(whole[0]))


def _mean_s(run: Callable[[], object], rounds: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    for _ in range(rounds):
        run()
    return _slowest([(time.perf_counter() - started) / rounds])[0]


def measured(kind: str, num_bytes: int, group: DistributedGroup) -> dict[str, float]:
    """One row of the table."""
    start = _starter(kind, num_bytes, group)
    a, b, out = (torch.rand(SIDE, SIDE) for _ in range(3))

    def compute(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    def in_turns(count: int) -> None:
        compute(count)
        start().wait()

    def beside(count: int) -> None:
        work = start()
        compute(count)
        work.wait()

    start().wait()
    first_s = _mean_s(lambda: start().wait(), 2)
    rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(BUDGET_S / first_s)))
    alone_s = _mean_s(lambda: start().wait(), rounds)
    each_s = _mean_s(partial(compute, 100), 5) / 100
    as_long = max(1, round(alone_s / each_s))
    busy_s = _mean_s(partial(compute, as_long), rounds)
    gained_s = alone_s + busy_s - _mean_s(partial(beside, as_long), rounds)
    row = {"alone_s": alone_s, "gained": gained_s / min(alone_s, busy_s)}
    for segment_s in SEGMENTS_S:
        count = max(1, round(segment_s / each_s))
        together_s = _mean_s(partial(in_turns, count), rounds)
        row[f"after_{segment_s * 1e3:.0f}_ms_s"] = together_s - count * each_s
    return row


def on_rank() -> None:
    """Rank 0 prints one JSON line per row."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = tuple(range(dist.get_world_size()))
    group = DistributedGroup(dist.new_group(list(ranks)), ranks, dist.get_rank())
    for kind in KINDS:
        for num_bytes in SIZES:
            row = {"kind": kind, "num_bytes": num_bytes, **measured(kind, num_bytes, group)}
            if dist.get_rank() == 0:
                print("RESULT " + json.dumps(row), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in cluster_rank.py


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--testbed", type=Path, help="folder of testbed.py; none: be a rank")
    parser.add_argument("--beds", default="4:250mbit,2:100mbit,4:1gbit", help="hosts:rate,..")
    parser.add_argument("--name", default="contention", help="of the bed")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    if args.testbed is None:
        on_rank()
    table: list[dict[str, Any]] = []
    segments = " | ".join(f"after {s * 1e3:.0f} ms of computing" for s in SEGMENTS_S)
    print(f"| hosts | link | kind | KiB | alone | gained beside | {segments} |")
    print("|" + "---|" * (6 + len(SEGMENTS_S)))
    for bed in args.beds.split(","):
        hosts, rate = bed.split(":")
        with Bed(args.testbed, args.name, rate, int(hosts)) as running:
            printed = running.run(sys.executable, str(Path(__file__).resolve()))
        for line in printed.splitlines():
            if line.startswith("RESULT "):
                row = json.loads(line[7:])
                table.append({"hosts": int(hosts), "rate": rate, **row})
                after = " | ".join(
                    f"{row[f'after_{s * 1e3:.0f}_ms_s'] * 1e3:.1f} ms" for s in SEGMENTS_S
                )
                print(
                    f"| {hosts} | {rate} | {row['kind']} | {row['num_bytes'] >> 10} |"
                    f" {row['alone_s'] * 1e3:.1f} ms | {row['gained']:.2f} | {after} |",
                    flush=True,
                )
    report("contention", table, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
