"""FlexFlow (Jia, Zaharia, Aiken; SysML 2019): Markov chain Monte Carlo over the SOAP space.

An operator is split along dims of its output, samples, attributes and parameters alike, each
operator as it likes and over any of the links (section 4). A proposal takes one operator at random
and gives it a random split; it is accepted with probability min(1, exp(beta (cost - proposed)))
(section 6, Metropolis and Hastings). Chains start from data parallelism, from an expert's plan and
from a random one, and end where their budget is spent or half of it has brought nothing better;
chains over placements follow (`placements.py`).
Costs are our estimate, updated as in delta simulation (section 5), with FlexFlow's penalty on
memory. `docs/explanation/comparators.md` says what differs here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import Random

from parloom.comparators.call_costs import Assignment, CallCosts
from parloom.comparators.chains import chain
from parloom.comparators.delta import Change, Delta
from parloom.comparators.placements import placed
from parloom.comparators.plans import asked_program, joined, samples_of
from parloom.cost.walk import Walker
from parloom.ir.mesh import Mesh, MeshAxis
from parloom.ir.plan import Decisions, one_stage
from parloom.search.program import Axes, Operator, Program
from parloom.search.request import Request, Say

# Proposals, where the user says nothing, by the square of the number of prime axes: they take about
# the CPU time of `auto` (the more axes, the more prices are asked for the first time), which looks
# at more meshes the more axes there are, and at one where there is one.
PROPOSALS, OF_ONE_AXIS = 540_000, 27_000
# What a byte above the limit costs: a millisecond for a megabyte (`simulator.cc`).
PENALTY_PS = 1e9 / 1e6
# Of the proposals of a chain over splits, those of one over placements are a part.
PLACED = 10
# Products that are split over their output features in the expert's plan (Krizhevsky, 2014).
DENSE = ("linear", "addmm", "mm")


def flexflow(request: Request, base: Decisions, say: Say) -> Iterator[Decisions]:
    """The best plan of every chain, and data parallelism, from which the first one starts.

    Raises `InputError` where samples do not divide into as many microbatches as `base` has.
    """
    primes = reversed(request.cluster.prime_axes())
    mesh = Mesh(tuple(MeshAxis(f"a{i}", (prime,)) for i, prime in enumerate(primes)))
    program = asked_program(request, base, apart=True)
    walker = Walker({}, mesh, request.cluster, request.machine.kernels)
    costs = CallCosts(program, walker, base, request.optimizer)
    delta = Delta(costs, base.num_microbatches)
    search = Search(delta, request.limit_bytes, Random(request.seed))
    samples = data_parallel(program, mesh)
    starts = {"data parallel": samples, "expert": expert(program, mesh, samples)}
    starts["random"] = tuple(search.draw(index) for index in range(len(samples)))
    usual = PROPOSALS // len(mesh.axes) ** 2 if len(mesh.axes) > 1 else OF_ONE_AXIS
    proposals = request.budget or usual
    budget = max(1, proposals // len(starts))
    known = {samples}
    yield joined(replace(base, stages=one_stage(mesh), nodes=delta.nodes(samples)))
    for name, start in starts.items():
        cost, assignments = search.chain(start, budget)
        say(f"flexflow: from {name}: estimated {cost / 1e12:.4g} s")
        if assignments not in known:
            known.add(assignments)
            yield joined(replace(base, stages=one_stage(mesh), nodes=delta.nodes(assignments)))
    yield from placed(request, base, PENALTY_PS, max(1, budget // PLACED), say)


def output_factors(operator: Operator, mesh: Mesh) -> tuple[str, ...]:
    """The factors of the dims of its output that some axis divides.

    An operator without output dims (a loss) is split along those of its first operand; one of
    weights alone is not split.
    """
    rule = operator.rule
    tensors = [*rule.results, *rule.operands[:1]]
    dims = next((dims for dims in tensors if any(dims)), ())
    return tuple(
        factor
        for dim in (() if operator.derived else dims)
        for factor in dim
        if factor in rule.shardable and any(rule.size(factor) % a.size == 0 for a in mesh.axes)
    )


class Search:
    """Chains over the plans of one mesh."""

    def __init__(self, delta: Delta, limit_bytes: int, rng: Random) -> None:
        self.delta, self.limit_bytes, self.rng = delta, limit_bytes, rng
        self.mesh = delta.costs.mesh
        operators = delta.program.operators
        self.factors = tuple(output_factors(operator, self.mesh) for operator in operators)
        self.free = [i for i, factors in enumerate(self.factors) if factors]

    def draw(self, index: int) -> Assignment:
        """Any split of an operator, all alike: each axis on a factor of its output, or on none;
        what is left of the devices computes the same.
        """
        rule = self.delta.program.operators[index].rule
        while True:
            found: dict[str, Axes] = {}
            for axis in self.mesh.names:
                factor = self.rng.choice((None, *self.factors[index]))
                if factor is not None:
                    found[factor] = (*found.get(factor, ()), axis)
            if all(rule.size(f) % self.mesh.size(axes) == 0 for f, axes in found.items()):
                return tuple(sorted(found.items()))

    def cost(self, change: Change | None = None) -> float:
        """The estimate, with a penalty for what is above the memory limit."""
        sums = self.delta.sums(change)
        return sums.step_ps + PENALTY_PS * max(0.0, sums.held_bytes - self.limit_bytes)

    def propose(self) -> tuple[float, Callable[[], None]] | None:
        """One operator's split drawn anew."""
        index = self.rng.choice(self.free)
        change = self.delta.change(index, self.draw(index))
        return None if change is None else (self.cost(change), partial(self.go_back, change))

    def state(self) -> Change:
        return self.delta.state()

    def go_back(self, state: Change) -> None:
        self.delta.accept(state)

    def chain(
        self, start: Sequence[Assignment], budget: int
    ) -> tuple[float, tuple[Assignment, ...]]:
        """The best cost and plan that a chain of `budget` proposals meets."""
        self._begin(start)
        best, _ = chain(self, budget if self.free else 0, self.rng)
        return best, self.delta.assignments()

    def _begin(self, start: Sequence[Assignment]) -> None:
        """A whole plan, or as much of it as is legal, operator by operator."""
        if self.delta.start(start):
            return
        self.delta.start([()] * len(start))
        for index, assignment in enumerate(start):
            change = self.delta.change(index, assignment)
            if change is not None:
                self.delta.accept(change)


def data_parallel(program: Program, mesh: Mesh) -> tuple[Assignment, ...]:
    """Samples over all devices, or over as many as they divide by."""
    samples = samples_of(program)
    size = min((program.operators[i].rule.size(f) for i, f in samples.items()), default=1)
    axes: Axes = ()
    for axis in mesh.axes:
        if size % (mesh.size(axes) * axis.size) == 0:
            axes = (*axes, axis.name)
    found: list[Assignment] = [()] * len(program.operators)
    for index, factor in samples.items() if axes else ():
        found[index] = ((factor, axes),)
    return tuple(found)


def expert(program: Program, mesh: Mesh, samples: Sequence[Assignment]) -> tuple[Assignment, ...]:
    """Dense layers over their output features, all else over samples: what experts do to
    convolutional networks (Krizhevsky, 2014).
    """
    found = list(samples)
    for index, operator in enumerate(program.operators):
        features = operator.rule.results[0][-1:] if operator.node.op in DENSE else ()
        for factor in [f for dim in features for f in dim][:1]:
            if operator.rule.size(factor) % mesh.num_ranks == 0:
                found[index] = ((factor, mesh.names),)
    return tuple(found)
