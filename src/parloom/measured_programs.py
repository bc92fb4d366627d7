"""The programs of a model whose operators `calibrate` measures."""

from collections.abc import Iterator
from dataclasses import replace

from parloom.candidates import candidates
from parloom.cost.hardware import DataSheets
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower_stages import lower_stages
from parloom.ir.mesh import Cluster, part_of
from parloom.ir.pcg import PCG
from parloom.ir.plan import Optimizer
from parloom.ir.regular_parts import regular_parts
from parloom.rewrite.rewrites import rewritten
from parloom.search.request import Request, Say

# Of microbatches of one device, for each device of the cluster: about as many as pipelines have.
MICROBATCHES = 4


def measured_programs(graph: Graph, cluster: Cluster, say: Say) -> Iterator[PCG]:
    """Rules of thumb on all devices of each type, and one device alone with the whole batch and
    with small microbatches, as stages of pipelines have: what else plans need lies between.
    """
    parts = [part.alone for part in regular_parts(cluster)]
    for part in parts:
        for method in ("data_parallel", "megatron"):
            yield from _lowered(_asked(graph, part), method, say)
    for alone in {part.device.name: part_of(part, 1) for part in parts}.values():
        request = _asked(graph, alone)
        if len(parts) > 1 or parts[0] != alone:
            yield from _lowered(request, "data_parallel", say)
        counts = request.microbatch_counts(factorize(graph))
        wanted = MICROBATCHES * cluster.num_devices
        count = min(counts, key=lambda count: abs(count - wanted))
        yield from _lowered(replace(request, num_microbatches=count), "data_parallel", say)


def _asked(graph: Graph, cluster: Cluster) -> Request:
    return Request(graph, DataSheets(cluster), Optimizer(), cluster.device.memory_bytes)


def _lowered(request: Request, method: str, say: Say) -> Iterator[PCG]:
    for proposed in candidates(replace(request, method=method), say).found:
        decisions = proposed.decisions
        yield from lower_stages(rewritten(request.graph, decisions.rewrites), decisions).pcgs
