"""A plan without one of its rewrites: what that rewrite saves.

What it replaced is back, split as what made the value is, and then each operator in the way that is
the best with everything else as the plan has it, one after the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from parloom.cost.walk import Walker
from parloom.errors import LayoutError, NotYetError
from parloom.ir.factors import Factored
from parloom.ir.graph import Graph, Node
from parloom.ir.lower import lower
from parloom.ir.ops import Rule
from parloom.ir.pcg import PCG
from parloom.ir.plan import ActivationDecision, Decisions, NodeDecision
from parloom.rewrite.forms import Form, Forms, Place
from parloom.rewrite.rewrites import before_takes, takes_of
from parloom.rewrite.take import Take
from parloom.search.restated import restated
from parloom.search.runner_up import Fits, Play, operator_ways


@dataclass(frozen=True, slots=True)
class Undone:
    """A plan of one stage without one rewrite; the operators that it has in the place of those of
    the rewrite.
    """

    pcg: PCG
    before: tuple[Node, ...]
    after: tuple[Node, ...]


class Undoing:
    """Undoes rewrites of a plan, whose decisions are of `graph`."""

    def __init__(self, graph: Graph, decisions: Decisions, walker: Walker) -> None:
        self.decisions, self.walker = decisions, walker
        self.takes = takes_of(decisions.rewrites)
        self._forms = Forms(before_takes(graph, decisions.rewrites), self.takes)
        self._whole = self._forms.of(self.takes)

    def without(self, index: int, fits: Fits, play: Play) -> Undone:
        """The plan without the rewrite of that number."""
        kept = [take for take in self.takes if take != self.takes[index]]
        form = self._forms.of(kept)
        there, every = set(self._whole.places.values()), set(form.places.values())
        pcg = self._begun(form, every - there, self.takes[index])
        left = every - there
        for flat in form.graph.flat():
            place = form.places[flat.function, flat.node.key]
            if place in left:
                left.discard(place)
                pcg = self._best(form.factored, pcg, flat.key, fits, play)
        before, after = _nodes(form, every - there), _nodes(self._whole, there - every)
        return Undone(pcg, tuple(before), tuple(after))

    def _begun(self, form: Form, new: set[Place], undone: Take) -> PCG:
        """The plan of a form, whose new operators are split as what a rewrite made is, or over none
        where that cannot be.
        """
        top = self._forms.place_of(undone.function, undone.top)
        try:
            return lower(form.graph, self._decisions(form, new, top), factored=form.factored)
        except (LayoutError, NotYetError):
            return lower(form.graph, self._decisions(form, new), factored=form.factored)

    def _decisions(self, form: Form, new: set[Place], like: Place | None = None) -> Decisions:
        """The decisions of a form, in which operators that the plan has not are split over none, or
        as far as their results are as that of an operator `like` them, as it is.
        """
        known = {
            (self._whole.places[flat.function, flat.node.key], flat.prefix): found
            for flat in self._whole.graph.flat()
            if (found := self.decisions.node(flat.key)) is not None
        }
        nodes = []
        for flat in form.graph.flat():
            place = form.places[flat.function, flat.node.key]
            own = like if like is not None and place in new else place
            found = known.get((own, flat.prefix))
            if found is not None:
                given, rule = self._whole.rules[own], form.rules[place]
                if own != place:
                    given, rule = _of_result(given), _of_result(rule)
                    if len(given.results[0]) != len(rule.results[0]):
                        continue
                factors = restated(found.factors, given, rule, self.decisions.mesh)
                nodes.append(NodeDecision(flat.key, factors))
        return replace(
            self.decisions,
            nodes=tuple(nodes),
            activations=tuple(self._activations(form, new)),
            rewrites=form.rewrites,
        )

    def _activations(self, form: Form, new: set[Place]) -> Iterator[ActivationDecision]:
        """What is made again: of operators that are gone, those that are back are."""
        functions = {flat.prefix: flat.function for flat in form.graph.flat()}
        keys = {place: key for (_, key), place in form.places.items()}
        for found in self.decisions.activations:
            function = functions[found.prefix]
            lists = []
            for names in (found.values, found.moves):
                places = [self._whole.places.get((function, name)) for name in names]
                own = {
                    keys.get(place, "") if place else name
                    for place, name in zip(places, names, strict=True)
                }
                if "" in own:
                    own |= {keys[place] for place in new if place[0] == function}
                lists.append(tuple(own - {""}))
            yield replace(found, values=lists[0], moves=lists[1])

    def _best(self, factored: Factored, pcg: PCG, key: str, fits: Fits, play: Play) -> PCG:
        """The plan with the best way of one operator."""
        flat = next(flat for flat in factored.graph.flat() if flat.key == key)
        now = play(pcg, pcg.decisions)
        ways = operator_ways(factored, pcg, self.walker, flat, fits, play)
        best = ways.fitting or next(iter(ways.best), None)
        if best is None or (fits(now) and now.step_ps <= best.timeline.step_ps):
            return pcg
        return best.pcg


def _of_result(rule: Rule) -> Rule:
    """What a rule says of the first result."""
    return replace(rule, operands=(), results=rule.results[:1])


def _nodes(form: Form, places: set[Place]) -> Iterator[Node]:
    """The operators of a form at these places, in order."""
    for own in (*form.graph.functions, form.graph.main):
        for item in own.body:
            if isinstance(item, Node) and form.places[own.name, item.key] in places:
                yield item
