"""FlexFlow (Jia, Zaharia, Aiken; SysML 2019): Markov chain Monte Carlo over the SOAP space.

An operator is split along dims of its output, samples, attributes and parameters alike, each
operator as it likes (section 4). A proposal takes one operator at random and gives it a random
split; it is accepted with probability min(1, exp(beta (cost - proposed cost))) (section 6,
Metropolis and Hastings). Chains start from data parallelism, from an expert's plan and from a
random one, and end where their budget is spent or half of it has brought nothing better. Costs are
our estimate, updated as in delta simulation (section 5), with FlexFlow's penalty on memory.
`docs/comparators.md` says what differs here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import exp
from random import Random

from parloom.cost.walk import Walker
from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.mesh import Mesh, MeshAxis
from parloom.ir.plan import Decisions
from parloom.search.baselines import DATA, batch_seeds, mesh_of
from parloom.search.comparators.delta import Assignment, Change, Delta
from parloom.search.comparators.plans import ALONE, joined, refuse_microbatches
from parloom.search.program import Operator, Program, program_of
from parloom.search.question import Question, Say
from parloom.search.spread import spread, unfold

# Proposals, where the user says nothing.
PROPOSALS = 6000
# Of a millisecond (`search_alpha` of the released code, 0.05 in its documentation).
BETA_PER_PS = 0.05 / 1e9
# What a byte above the limit costs: a millisecond for a megabyte (`simulator.cc`).
PENALTY_PS = 1e9 / 1e6
# The released code goes back to the best plan after a hundredth of the budget, at most so often.
RESETS, RESET = 100, 1000
# Products that are split over their output features in the expert's plan (Krizhevsky, 2014).
DENSE = ("linear", "addmm", "mm")


def flexflow(question: Question, base: Decisions, say: Say) -> Iterator[Decisions]:
    """The best plan of every chain, and data parallelism, from which the first one starts.

    Raises `InputError` for more than one microbatch, which FlexFlow does not have.
    """
    refuse_microbatches(question, "flexflow")
    if question.cluster.num_devices == 1:
        yield replace(base, mesh=ALONE)
        return
    primes = reversed(question.cluster.prime_axes())
    mesh = Mesh(tuple(MeshAxis(f"a{i}", (prime,)) for i, prime in enumerate(primes)))
    program = program_of(question.graph, factorize(question.graph), apart=True)
    walker = Walker({}, mesh, question.cluster, question.kernels)
    delta = Delta(program, walker, base, question.optimizer)
    search = Search(delta, question.limit_bytes, Random(question.seed))
    samples = data_parallel(program, question, mesh)
    starts = {"data parallel": samples, "expert": expert(program, mesh, samples)}
    starts["random"] = tuple(search.rng.choice(menu) for menu in search.menus)
    budget = max(1, (question.budget or PROPOSALS) // len(starts))
    known = {samples}
    yield joined(replace(base, mesh=mesh, nodes=delta.nodes(samples)))
    for name, start in starts.items():
        cost, assignments = search.chain(start, budget)
        say(f"flexflow: from {name}: estimated {cost / 1e12:.4g} s")
        if assignments not in known:
            known.add(assignments)
            yield joined(replace(base, mesh=mesh, nodes=delta.nodes(assignments)))


def acceptance(current: float, proposed: float) -> float:
    """The probability with which a proposal is accepted (costs in ps)."""
    return exp(min(0.0, BETA_PER_PS * (current - proposed)))


def splits(operator: Operator, mesh: Mesh) -> tuple[Assignment, ...]:
    """Every way to split an operator: a degree for each dim of its output that divides, the first
    dims over the slowest links; what the degrees leave of the devices computes the same.

    An operator without output dims (a loss) is split along those of its first operand.
    """
    rule = operator.rule
    tensors = [*rule.results, *rule.operands[:1]]
    dims = next((dims for dims in tensors if any(dims)), ())
    factors = [f for dim in dims for f in dim if f in rule.shardable]
    found: list[tuple[Assignment, int]] = [((), 0)]  # what was given, and how many axes that took
    for factor in factors:
        longer = []
        for given, first in found:
            for end in range(first + 1, len(mesh.axes) + 1):
                axes = mesh.names[first:end]
                if rule.size(factor) % mesh.size(axes):
                    break
                longer.append(((*given, (factor, axes)), end))
        found += longer
    return tuple(tuple(sorted(given)) for given, _ in found)


class Search:
    """Chains over the plans of one mesh."""

    def __init__(self, delta: Delta, limit_bytes: int, rng: Random) -> None:
        self.delta, self.limit_bytes, self.rng = delta, limit_bytes, rng
        known: dict[object, tuple[Assignment, ...]] = {}
        menus = []
        for operator in delta.program.operators:
            key = operator.function, operator.node.key
            if key not in known:
                known[key] = ((),) if operator.derived else splits(operator, delta.mesh)
            menus.append(known[key])
        self.menus = tuple(menus)
        self.free = [i for i, menu in enumerate(menus) if len(menu) > 1]

    def cost(self, change: Change | None = None) -> float:
        """The estimate, with a penalty for what is above the memory limit."""
        excess = max(0, self.delta.held_bytes(change) - self.limit_bytes)
        return self.delta.step_ps(change) + PENALTY_PS * excess

    def chain(
        self, start: Sequence[Assignment], budget: int
    ) -> tuple[float, tuple[Assignment, ...]]:
        """The best cost and plan that a chain of `budget` proposals meets."""
        self._begin(start)
        current = self.cost()
        best, plan, last = current, self.delta.state(), 0
        reset = min(RESET, max(1, budget // RESETS))
        for count in range(1, budget + 1 if self.free else 1):
            if count - last > max(1, budget // 2):
                break
            if count % reset == 0 and current > best:
                self.delta.accept(plan)
                current = best
            index = self.rng.choice(self.free)
            change = self.delta.change(index, self.rng.choice(self.menus[index]))
            if change is None:
                continue
            proposed = self.cost(change)
            if self.rng.random() >= acceptance(current, proposed):
                continue
            self.delta.accept(change)
            current = proposed
            if current < best:
                best, plan, last = current, self.delta.state(), count
        self.delta.accept(plan)
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


def data_parallel(program: Program, question: Question, mesh: Mesh) -> tuple[Assignment, ...]:
    """Samples over all devices; nothing where they do not divide."""
    whole: list[Assignment] = [()] * len(program.operators)
    flat = mesh_of(question.cluster)
    try:
        seeds = batch_seeds(program.graph, flat)
    except InputError:
        return tuple(whole)
    unfolded = unfold(program.graph, program.factored, flat)
    for node, found in zip(unfolded.nodes, spread(unfolded, seeds), strict=True):
        named = ((f, mesh.names) for f, axes in sorted(found.items()) if DATA in axes)
        whole[program.index[node.key]] = tuple(named)
    return tuple(whole)


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
