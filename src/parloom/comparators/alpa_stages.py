"""Alpa (Zheng et al., OSDI 2022): stages by its inter-operator pass, of which each is laid out by
its intra-operator pass on every view of its devices.
"""

from collections.abc import Iterator

from parloom.comparators.alpa import NODES, on_view, views
from parloom.comparators.alpa_inter import LAYERS, Ways, pipelines
from parloom.comparators.plans import samples_of
from parloom.comparators.stage_costs import Ranges
from parloom.cost.walk import Walker
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.mesh import Cluster, part_of
from parloom.ir.plan import GLOBAL, Decisions
from parloom.search.folding import program_of
from parloom.search.microbatch import microbatch_of
from parloom.search.prices import Known
from parloom.search.request import Request, Say


def alpa(request: Request, base: Decisions, say: Say) -> Iterator[Decisions]:
    """The best pipeline of stages on 1, 2, 4, ... devices of a node, or on whole nodes.

    Raises `InputError` where samples do not divide into as many microbatches as `base` has.
    """
    sizes, ways = submeshes(request.cluster), laid_out(request)
    yield from pipelines("alpa", request, base, num_layers(request.cluster), sizes, ways, say)


def num_layers(cluster: Cluster) -> int:
    """How many layers operators are clustered into."""
    low, high = LAYERS
    return min(max(cluster.num_devices, low), high)


def submeshes(cluster: Cluster) -> tuple[int, ...]:
    """The sizes of stages: (1, 2^k) and (2^k, M) where there are so many devices, in nodes of M."""
    return (*(prime.stride for prime in cluster.prime_axes()), cluster.num_devices)


def laid_out(request: Request) -> Ways:
    """How stages are laid out: the best of every view of their devices."""
    nodes, shared = request.budget or NODES, Known()

    def ways(ranges: Ranges, graph: Graph, size: int, base: Decisions) -> Iterator[Decisions]:
        graph = ranges.as_batch(graph)
        program = program_of(graph, factorize(graph))
        samples = samples_of(program)
        if base.batch_semantics == GLOBAL:
            cut = microbatch_of(program, base.num_microbatches)
            if cut is None:
                return
            program = cut
        part = part_of(request.cluster, size)
        for mesh in views(part):
            walker = Walker({}, mesh, part, request.machine.kernels)
            found = on_view(program, samples, walker, base, request.optimizer, nodes, shared)
            if found is not None:
                yield found[0]

    return ways
