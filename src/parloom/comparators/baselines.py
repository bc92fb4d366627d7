"""Rules of thumb and random plans: what needs no solver.

A searched plan has to beat the rules, so each is written as the field does it: data parallelism on
samples, ZeRO-3 storage (Rajbhandari et al., SC'20) on top of it, and Megatron's tensor parallelism
(Shoeybi et al., 2019) on the fastest links. Where the samples of a microbatch divide over no full
mesh, positions take the rest (context parallelism) as far as these divide, and then ranks that do
the same work. `grid` says which of their points is the best.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import gcd
from operator import mul
from types import MappingProxyType
from typing import Any

from parloom.comparators.configuration import (
    Configuration,
    LaidOut,
    laid_out,
    num_positions,
    num_samples,
)
from parloom.comparators.tensor_parallel import split_heads
from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster, Mesh, MeshAxis, PrimeAxis
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions, NodeDecision, ParameterDecision, Storage, one_stage
from parloom.search.spread import Assignment

Method = Callable[[Graph, Cluster, int, int], Iterator[Decisions]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of thumb: the levels of ZeRO that it tries, of which the first stores least, whether
    it splits weights over the fastest links, and whether it cuts the model into `stages`.
    """

    zeros: tuple[int, ...]
    splits_weights: bool = False
    stages: bool = False

    def degrees(self, cluster: Cluster) -> tuple[int, ...]:
        """Over how many ranks weights may be split."""
        if not self.splits_weights or cluster.num_devices == 1:
            return (1,)
        return tuple(accumulate((prime.size for prime in cluster.prime_axes()), mul))

    def changes(self, chosen: Configuration, cluster: Cluster) -> Iterator[Mapping[str, Any]]:
        """What is tried, one after the other, of the best plan only."""
        if chosen.sequence_parallel:
            yield {"sequence_parallel": False}
        if chosen.context > 1:
            yield {"ring": True}
            yield {"striped": True}
        inner = chosen.tensor * chosen.context * chosen.copies
        shard, rest = divmod(cluster.levels[0].size, inner)
        if not rest and 1 < shard < chosen.data:
            yield {"shard": shard}
        for zero in self.zeros[1:]:
            yield {"zero": zero}


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "data_parallel": Rule((1, 0)),
        "fsdp": Rule((3, 2)),
        "megatron": Rule((3, 1, 0), splits_weights=True, stages=True),
    }
)


def layouts(
    rule: Rule, graph: Graph, cluster: Cluster, like: Configuration, factored: Factored
) -> Iterator[tuple[Configuration, LaidOut]]:
    """The layouts of a rule, one for each degree of tensor parallelism, which are else as `like`.

    Ends where a degree leaves heads whole that a smaller one splits (Megatron-LM refuses these).
    """
    samples = num_samples(graph)
    if all(entry.samples is None for entry in graph.of_kind("batch")):  # of the whole batch
        samples //= like.num_microbatches
    positions = [entry.value.spec.shape[1] for entry in graph.of_kind("batch")
                 if len(entry.value.spec.shape) > 1] if num_positions(graph) else [1]  # fmt: skip
    split = frozenset[str]()
    for tensor in rule.degrees(cluster):
        ranks = cluster.num_devices // tensor
        data = gcd(samples, ranks)
        context = gcd(ranks // data, *positions)
        chosen = replace(
            like,
            tensor=tensor,
            data=data,
            context=context,
            copies=ranks // data // context,
            microbatch=samples // data,
            sequence_parallel=like.sequence_parallel and tensor > 1 and num_positions(graph) > 0,
        )
        laid = laid_out(graph, chosen, cluster, factored)
        before, split = split, split_heads(laid.program, laid.assignments)
        if not before.issubset(split):
            return
        yield chosen, laid


def plain(
    rule: str, graph: Graph, cluster: Cluster, num_microbatches: int = 1, seed: int = 0
) -> Iterator[Decisions]:
    """A plan of each layout of a rule that recomputes nothing; `fsdp` stores all in chunks."""
    zero = 3 if rule == "fsdp" else 0
    like = Configuration(zero=zero, num_microbatches=num_microbatches, master_dtype=None)
    for chosen, laid in layouts(RULES[rule], graph, cluster, like, factorize(graph)):
        yield laid.decisions(chosen)


data_parallel, fsdp, megatron = (partial(plain, rule) for rule in RULES)


def random_plan(
    graph: Graph, factored: Factored, mesh: Mesh, seed: int, num_microbatches: int = 1
) -> Decisions:
    """A legal plan with every operator's layout drawn from all that its rule allows.

    Every axis of the mesh goes, independently per operator, to a uniformly chosen factor that it
    divides, to both of a route, or to none; storage is drawn per parameter: some axes in some
    order, of which weight and gradient take the first ones.
    """
    rng = random.Random(seed)
    nodes = tuple(random_assignment(graph, factored, mesh, rng, num_microbatches))
    plan = Decisions(one_stage(mesh), nodes, num_microbatches=num_microbatches)
    pcg = lower(graph, plan, factored=factored)
    return replace(plan, parameters=tuple(random_storage(pcg, rng)))


def random_assignment(
    graph: Graph, factored: Factored, mesh: Mesh, rng: random.Random, num_microbatches: int
) -> Iterator[NodeDecision]:
    """The drawn layouts of `random_plan`."""
    for flat in graph.flat():
        rule = factored.rule(flat.function, flat.node)
        assignment: Assignment = {}
        for axis in rng.sample(mesh.names, len(mesh.names)):
            fitting = [
                place
                for place in (*rule.places[1:], ())
                if all(
                    rule.size(f) % (num_microbatches * mesh.size((*assignment.get(f, ()), axis)))
                    == 0
                    for f in place
                )
            ]
            for factor in rng.choice(fitting):
                assignment[factor] = (*assignment.get(factor, ()), axis)
        yield NodeDecision(flat.key, tuple(assignment.items()))


def random_storage(pcg: PCG, rng: random.Random) -> Iterator[ParameterDecision]:
    """The drawn storage of `random_plan`."""
    for parameter in pcg.parameters:
        shape = parameter.input.value.spec.shape
        free = [a for a in pcg.decisions.mesh.names if a not in parameter.layout.axes]
        axes = tuple(rng.sample(free, rng.randint(0, len(free))))
        if not shape or not axes:
            continue
        dim = rng.randrange(len(shape))
        ends = sorted((*rng.choices(range(len(axes) + 1), k=2), len(axes)))
        chunks = (Storage(axes[:end], dim if end else 0) for end in ends)
        yield ParameterDecision(parameter.input.target, *chunks)


def random_plans(
    graph: Graph, cluster: Cluster, num_microbatches: int = 1, seed: int = 0
) -> Iterator[Decisions]:
    """One random legal plan on a random factorization of the cluster into at most two axes."""
    rng = random.Random(seed)
    primes = cluster.prime_axes()
    cut = rng.randrange(len(primes) + 1) if primes else 0
    parts = [p for p in (primes[cut:], primes[:cut]) if p] or [(PrimeAxis(1, 1, 0),)]
    mesh = Mesh(tuple(MeshAxis(n, tuple(reversed(p))) for n, p in zip("xy", parts, strict=False)))
    yield random_plan(graph, factorize(graph), mesh, rng.getrandbits(32), num_microbatches)


METHODS: Mapping[str, Method] = {
    "data_parallel": data_parallel,
    "fsdp": fsdp,
    "megatron": megatron,
    "random": random_plans,
}
