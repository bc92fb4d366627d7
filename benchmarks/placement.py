"""Where a plan lies: the order of devices that a cluster has by default against ours.

Logical plans are Megatron's, of one stage, on all devices: each degree of tensor parallelism (that
splits heads), ZeRO-1, blocks recomputed, positions of norms split; each is laid where its step is
shortest. Of each: the simulated step by default (the last axes over the fastest links) and as laid,
the bytes on the busiest link of each level, the step that no placement is expected to undercut, and
CPU seconds of the search for the placement.
"""

import argparse
import time
from typing import Any

from common import report

from parloom import api
from parloom.comparators.baselines import RULES, layouts
from parloom.comparators.configuration import Configuration
from parloom.cost.ledger import ledger
from parloom.cost.links import GRID, neighbor_bytes_per_s
from parloom.execute.machine import machine_for
from parloom.ir.factors import factorize
from parloom.ir.lower import lower
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions
from parloom.ir.regular_parts import memory_of
from parloom.rewrite.rewrites import rewritten
from parloom.search.contexts import SimulatedPlan
from parloom.search.placing import on_mesh, place
from parloom.search.request import Request
from parloom.searching import Captured

CLUSTERS = ("TPU-v5e:4x4", "TPU-v5e:4x8", "rails-8x8xH100", "two-level-16x4xA100")
LLAMA = {"vocab": 32000, "width": 2048, "depth": 16, "heads": 32, "groups": 8, "inner": 8192}
# Clips of 17 frames of 240x416: latents of 5x30x52, 1,950 patches each.
VIDEO = {"frames": 5, "rows": 30, "columns": 52}
MODELS: dict[str, tuple[str, dict[str, Any], int, int | None]] = {
    "dit": ("wan_1_3b", VIDEO, 32, None),
    "llama": ("llama", LLAMA, 64, 2048),
}


def built(name: str) -> tuple[Any, dict[str, Any]]:
    """A model of the table on meta, with its batch."""
    import torch

    from parloom import zoo

    which, sizes, batch, seq = MODELS[name]
    with torch.device("meta"):
        return zoo.build(which, batch=batch, seq=seq, **sizes)


def dit() -> tuple[Any, dict[str, Any]]:
    """As `file.py:factory` builds it."""
    return built("dit")


def llama() -> tuple[Any, dict[str, Any]]:
    """The same."""
    return built("llama")


def loads(request: Request, decisions: Decisions, mesh: Mesh) -> dict[str, float]:
    """GB on the busiest link of each level in a step."""
    graph = rewritten(request.graph, decisions.rewrites)
    pcg = on_mesh(lower(graph, decisions, factored=factorize(graph)), mesh)
    cluster = request.cluster
    timeline = request.machine.simulate(pcg, pcg.decisions, request.optimizer)
    busy = ledger(timeline, pcg, cluster).busy
    found = {}
    for level in cluster.levels:
        on_grid = level.fabric in GRID
        rate = neighbor_bytes_per_s(level) if on_grid else level.link.payload_bytes_per_s
        found[level.name] = busy.get(level.name, 0) / 1e12 * rate / 1e9
    return found


def described(mesh: Mesh) -> str:
    """Axes with the strides of their prime axes, and the order of devices if there is one."""
    axes = (f"{a.name}={a.size} ({'.'.join(str(p.stride) for p in a.primes)})" for a in mesh.axes)
    order = f"; order {','.join(map(str, mesh.order))}" if mesh.order else ""
    return " ".join(axes) + order


def rows_of(captured: Captured, model: str, cluster: str) -> list[dict[str, object]]:
    """Each logical plan by default and as laid."""
    machine = machine_for(cluster, None)
    limit = memory_of(machine.cluster)
    request = Request(captured.graph, machine, captured.optimizer, limit, all_devices=True)
    like = Configuration(zero=1, recompute="full", sequence_parallel=True)
    factored = factorize(captured.graph)
    rows: list[dict[str, object]] = []
    for chosen, laid_out in layouts(
        RULES["megatron"], captured.graph, machine.cluster, like, factored
    ):
        decisions = laid_out.decisions(chosen)
        before = SimulatedPlan(decisions, request.predict(decisions))
        started = time.process_time()
        laid = place(request, before)
        spent = time.process_time() - started
        mesh = laid.plan.decisions.mesh
        sizes = " x ".join(f"{a.name}={a.size}" for a in decisions.mesh.axes)
        rows.append(
            {
                "model": model,
                "cluster": cluster,
                "plan": ", ".join((sizes, *chosen.words)),
                "fits": request.fits(before.prediction),
                "default_s": before.prediction.step_s,
                "ours_s": laid.plan.prediction.step_s,
                "least_s": laid.least_ps / 1e12,
                "default_gb": loads(request, decisions, decisions.mesh),
                "ours_gb": loads(request, decisions, mesh),
                "placements": laid.num_placements,
                "simulated": laid.num_simulated,
                "cpu_s": spent,
                "default_mesh": described(decisions.mesh),
                "mesh": described(mesh),
            }
        )
        print(printed(rows[-1]), flush=True)
    return rows


def printed(row: dict[str, Any]) -> str:
    """A row of the table."""
    default, ours = row["default_s"] * 1e3, row["ours_s"] * 1e3
    size = "" if row["fits"] else " (too large)"
    links = " ".join(
        f"{name} {gb:.1f}>{row['ours_gb'][name]:.1f}" for name, gb in row["default_gb"].items()
    )
    return (
        f"| {row['model']} | {row['cluster']} | {row['plan']}{size}"
        f" | {default:.1f} | {ours:.1f} |"
        f" {default / ours:.3f} | {row['least_s'] * 1e3:.1f} | {links} | {row['cpu_s']:.1f} |"
        f" {row['mesh']} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    print("| model | cluster | plan | default ms | ours ms | ratio | least ms | GB on the busiest"
          " link | CPU s | mesh |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    for model in arguments.models.split(","):
        captured = api.capture(f"{__file__}:{model}", dtype="bf16")
        for cluster in arguments.clusters.split(","):
            rows += rows_of(captured, model, cluster)
            report("placement", rows, arguments.json)


if __name__ == "__main__":
    main()
