"""Better ways of some operators of a plan, whatever its stages, with everything else as it is.

Ways are ranked by what they cost beside their neighbors as they lie; only the cheapest of each
operator become plans that are lowered and played, and one is kept where its step is shorter. An
operator is decided in all stages that have it at once, as replicas do, and stages that are equal
are lowered, priced and played once.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from parloom.cost.timeline import Timeline
from parloom.cost.walk import Walker
from parloom.errors import LayoutError, NotYetError, VerifyError
from parloom.ir.factors import Factored
from parloom.ir.graph import FlatNode, Graph
from parloom.ir.lower import lower
from parloom.ir.lower_stages import LoweredStages, staged
from parloom.ir.plan import Decisions, NodeDecision
from parloom.ir.stages import Cut
from parloom.ir.verify import verify_pcg
from parloom.search.pipelines.alike import AlikeStages
from parloom.search.runner_up import Factors, Fits, alike, cheaper_ways, left_by

PlayStages = Callable[[LoweredStages], Timeline]
IMPOSSIBLE = (LayoutError, NotYetError, VerifyError)
"""What is raised for a plan that cannot be run."""
PLAYED = 3  # ways of an operator that are played; the cheapest alone is often not the fastest


@dataclass(frozen=True, slots=True)
class Played:
    """A plan with its programs and its step."""

    decisions: Decisions
    stages: LoweredStages
    timeline: Timeline


class Cheaper:
    """Plans of one graph that differ in ways of operators; `asked` has their stages, and `walkers`
    those of each price what its devices do.
    """

    def __init__(
        self,
        factored: Factored,
        asked: Decisions,
        walkers: Sequence[Walker],
        fits: Fits,
        play: PlayStages,
    ) -> None:
        self.factored, self.asked, self.walkers = factored, asked, walkers
        self.fits, self._play = fits, play
        self._alike = AlikeStages()

    @cached_property
    def cut(self) -> Cut:
        """The graph in the plan's stages; raises `LayoutError`."""
        if len(self.asked.stages) == 1:
            return Cut((self.factored.graph,), (), {})
        return staged(self.factored, self.asked)

    def factored_of(self, graph: Graph) -> Factored:
        """The graph of a stage with the factors of its operators."""
        return self.factored if graph is self.factored.graph else self._alike.factored(graph)

    def played(self, decisions: Decisions) -> Played:
        """A plan with storage over those axes only that layouts of weights leave.

        Raises what is `IMPOSSIBLE`.
        """
        stages = self._lowered(decisions)
        agreed = _agreed(stages, decisions)
        if agreed != decisions:
            stages = self._lowered(agreed)
        for pcg in {id(own): own for own in stages.pcgs}.values():
            verify_pcg(pcg)
        return Played(agreed, stages, self._play(stages))

    def possible(self, decisions: Decisions) -> Played | None:
        """See `played`; None where it raises."""
        try:
            return self.played(decisions)
        except IMPOSSIBLE:
            return None

    def cost(self, plan: Played) -> tuple[bool, int]:
        """What is better fits and has the shorter step."""
        return not self.fits(plan.timeline), plan.timeline.step_ps

    def improved(self, plan: Played, keys: Collection[str]) -> Played:
        """The plan with better ways of these operators, one after the other, until none is found:
        one may make that of a neighbor better.
        """
        before = None
        while plan is not before:
            before, plan = plan, self._once(plan, keys)
        return plan

    def _once(self, plan: Played, keys: Collection[str]) -> Played:
        left = set(keys)
        for index, graph in enumerate(self.cut.graphs):
            for at, flat in enumerate(graph.flat()):
                if flat.key in left:
                    pcg = plan.stages.pcgs[index]
                    # Equal stages have one program, with the names of one of them.
                    named = tuple(pcg.graph.flat())
                    same = {own.key for own in alike(pcg.graph, pcg.decisions, named[at])}
                    pairs = zip(graph.flat(), named, strict=True)
                    together = {one.key for one, other in pairs if other.key in same} & left
                    plan = self._improved(plan, index, named[at], together)
                    left -= together
        return plan

    def _lowered(self, decisions: Decisions) -> LoweredStages:
        if len(self.cut.graphs) > 1:
            return self._alike.lower(self.cut, decisions)
        pcg = lower(self.factored.graph, decisions, factored=self.factored)
        return LoweredStages(self.cut, (pcg,))

    def _improved(self, plan: Played, index: int, flat: FlatNode, keys: Collection[str]) -> Played:
        """The plan with the best of the cheapest ways that can be run of an operator of a stage,
        decided for `keys`, where its step is shorter.
        """
        pcg = plan.stages.pcgs[index]
        ways = cheaper_ways(self.factored_of(pcg.graph), pcg, self.walkers[index], flat)
        plans = (self.possible(_decided(plan.decisions, keys, way)) for way in ways)
        return min((plan, *islice(filter(None, plans), PLAYED)), key=self.cost)


def _decided(decisions: Decisions, keys: Collection[str], way: Factors) -> Decisions:
    kept = (node for node in decisions.nodes if node.key not in keys)
    return replace(decisions, nodes=(*kept, *(NodeDecision(key, way) for key in sorted(keys))))


def _agreed(stages: LoweredStages, decisions: Decisions) -> Decisions:
    """The decisions with storage over those axes only that layouts of weights leave."""
    known = {own.name: own for own in decisions.parameters}
    for graph, pcg in zip(stages.cut.graphs, stages.pcgs, strict=True):
        pairs = zip(pcg.graph.inputs, graph.inputs, strict=True)
        names = {own.target: entry.target for own, entry in pairs}
        for parameter in pcg.parameters:
            left = left_by(parameter.decision, parameter.layout.axes)
            if left != parameter.decision:
                name = names[parameter.decision.name]
                known[name] = replace(left, name=name)
    return replace(decisions, parameters=tuple(known.values()))
