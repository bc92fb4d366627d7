"""A plan without one of its rewrites: what that rewrite saves.

What it replaced is back, in the stage of what took its place and split as that is, and then each
operator in the way that is the best with everything else as the plan has it, one after the other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from parloom.cost.timeline import Timeline
from parloom.cost.walk import Walker
from parloom.errors import InputError, LayoutError, NotYetError
from parloom.ir.factors import factorize
from parloom.ir.fold import outline
from parloom.ir.graph import FlatNode, Graph, Node
from parloom.ir.lower_stages import LoweredStages, lower_stages, staged
from parloom.ir.ops import Rule
from parloom.ir.pcg import PCG
from parloom.ir.plan import ActivationDecision, Decisions, NodeDecision
from parloom.ir.stages import Cut, placed
from parloom.rewrite.forms import Form, Forms, Place
from parloom.rewrite.rewrites import BLOCK, before_takes, takes_of
from parloom.rewrite.take import Take
from parloom.search.restated import restated
from parloom.search.runner_up import Fits, operator_ways

PlayStages = Callable[[LoweredStages], Timeline]
Rules = Mapping[str, Rule]


@dataclass(frozen=True, slots=True)
class Undone:
    """A plan without one rewrite; the operators that it has in the place of those of the rewrite,
    and what else of the plan could not stay as it is.
    """

    stages: LoweredStages
    decisions: Decisions
    before: tuple[Node, ...]
    after: tuple[Node, ...]
    changed: tuple[str, ...]


class Undoing:
    """Undoes rewrites of a plan, whose decisions are of `graph`; `stages` were lowered from them,
    with a walker of each.
    """

    def __init__(
        self,
        graph: Graph,
        decisions: Decisions,
        stages: LoweredStages,
        walkers: Sequence[Walker],
    ) -> None:
        self.decisions, self.walkers = decisions, walkers
        self.takes = takes_of(decisions.rewrites)
        first = before_takes(graph, decisions.rewrites)
        self._forms = Forms(first, self.takes)
        self._whole = self._forms.of(self.takes)
        self._keys = _keys(self._whole)
        self._rules = _rules(stages.cut.graphs, decisions)
        # By operator: the item of main that has it.
        self._items = {f.key: _item(f) for own in stages.cut.graphs for f in own.flat()}

    @staticmethod
    def knows(rewrites: Sequence[str]) -> bool:
        """Whether all takes of a plan are of one graph, and only blocks come after them."""
        takes = [index for index, text in enumerate(rewrites) if takes_of([text])]
        if not takes:
            return False
        last = takes[-1] + 1
        together = last - takes[0] == len(takes)
        return together and all(map(BLOCK.fullmatch, rewrites[last:]))

    def without(self, index: int, fits: Fits, play: PlayStages) -> Undone:
        """The plan without the rewrite of that number."""
        take = self.takes[index]
        form = self._forms.of([own for own in self.takes if own != take])
        there, every = set(self._whole.places.values()), set(form.places.values())
        new, gone = every - there, there - every
        found = _Begun(self, form, new, take)
        stages = found.best(found.lowered(), fits, play)
        return Undone(
            stages,
            found.decisions,
            tuple(_nodes(form, new)),
            tuple(_nodes(self._whole, gone)),
            tuple(found.changed()),
        )


class _Begun:
    """A plan without one `take`, in whose `form` operators at the places `new` are back."""

    def __init__(self, undoing: Undoing, form: Form, new: set[Place], take: Take) -> None:
        self.undoing, self.form = undoing, form
        self.blocks = [t for t in undoing.decisions.rewrites if BLOCK.fullmatch(t)]
        self.graph = self._with_blocks()
        self.places = {
            flat.key: form.places[flat.function, flat.node.key] for flat in form.graph.flat()
        }
        old = undoing._keys
        prefixes = {flat.key: flat.prefix for flat in form.graph.flat()}
        top = undoing._forms.place_of(take.function, take.top)
        self.new = {key for key, place in self.places.items() if place in new}
        # By operator: the one of the plan that it is, or that it is like.
        self.own = {
            key: own
            for key, place in self.places.items()
            if (own := old.get((place, prefixes[key]))) is not None
        }
        self.like = {
            key: old[top, prefixes[key]] for key in self.new if (top, prefixes[key]) in old
        }
        self.items = self._placed()
        self.decisions = undoing.decisions

    def _with_blocks(self) -> Graph:
        """The graph with those blocks of the plan that are blocks in it."""
        modules = [found[1] for text in self.blocks if (found := BLOCK.fullmatch(text))]
        while modules:
            try:
                return outline(self.form.graph, modules)
            except InputError:
                kept = [module for module in modules if _is_block(self.form.graph, module)]
                modules = kept if kept != modules else []
        return self.form.graph

    def _placed(self) -> list[tuple[str, ...]]:
        """The items of each stage; those that are back are where what took their place is."""
        stages = self.undoing.decisions.stages
        if len(stages) == 1:
            return [stages[0].items]
        found: list[tuple[str, ...]] = [()] * len(stages)
        for members in self.undoing.decisions.replicas:
            stage_of = {
                item: number for number, own in enumerate(members) for item in stages[own].items
            }
            known: dict[str, int] = {}
            for flat in self.graph.flat():
                old = self.own.get(flat.key, self.like.get(flat.key, ""))
                stage = stage_of.get(self.undoing._items.get(old, ""))
                if stage is not None:
                    known.setdefault(_item(flat), stage)
            lists = [[k for k, own in known.items() if own == n] for n in range(len(members))]
            for stage, keys in zip(members, placed(self.graph, {}, lists), strict=True):
                found[stage] = keys
        return found

    def changed(self) -> Iterator[str]:
        """What could not stay as the plan has it."""
        undoing = self.undoing
        there = {item.prefix for item in self.graph.flat()}
        for text in self.blocks:
            found = BLOCK.fullmatch(text)
            if found and found[1] not in there:
                yield f"{found[1]} is no block"
        for index, stage in enumerate(undoing.decisions.stages):
            now, before = set(self.items[index]), set(stage.items)
            for flat in self.graph.flat():
                old = self.own.get(flat.key)
                if old and _item(flat) in now and undoing._items.get(old, "") not in before:
                    yield f"{flat.key} is in stage {index}"

    def lowered(self) -> LoweredStages:
        """The plan, whose new operators are split as what a rewrite made is, or over none where
        that cannot be.
        """
        undoing = self.undoing
        stages = tuple(
            replace(stage, items=items)
            for stage, items in zip(undoing.decisions.stages, self.items, strict=True)
        )
        kept = set(self.form.rewrites)
        rewrites = tuple(
            text for text in undoing.decisions.rewrites if text in kept or not takes_of([text])
        )
        base = replace(undoing.decisions, stages=stages, rewrites=rewrites)
        factored = factorize(self.graph)
        cut = Cut((self.graph,), (), {}) if len(stages) == 1 else staged(factored, base)
        rules = _rules(cut.graphs, base)
        for like in (self.like, {}):
            self.decisions = replace(
                base,
                nodes=tuple(self._nodes(rules, like)),
                activations=tuple(self._activations()),
            )
            try:
                return lower_stages(self.graph, self.decisions, factored=factored)
            except (LayoutError, NotYetError):
                if not like:
                    raise
        raise AssertionError

    def _nodes(self, rules: Rules, like: Mapping[str, str]) -> Iterator[NodeDecision]:
        """What the plan has, restated; new operators are split as far as their results are as
        those of the operator that they are like.
        """
        undoing = self.undoing
        known = {node.key: node for node in undoing.decisions.nodes}
        for key, rule in rules.items():
            old = self.own.get(key, like.get(key, ""))
            found, given = known.get(old), undoing._rules.get(old)
            if found is None or given is None:
                continue
            if key not in self.own:
                given, rule = _of_result(given), _of_result(rule)
                if len(given.results[0]) != len(rule.results[0]):
                    continue
            item = undoing._items[old]
            stages = undoing.decisions.stages
            meshes = [own.mesh for own in stages if item in own.items] or [stages[0].mesh]
            mesh = max(meshes, key=lambda mesh: len(mesh.axes))
            yield NodeDecision(key, restated(found.factors, given, rule, mesh))

    def _activations(self) -> Iterator[ActivationDecision]:
        """What is made again: of operators that are gone, those that are back are."""
        now: dict[str, list[FlatNode]] = {}
        for flat in self.graph.flat():
            now.setdefault(flat.prefix, []).append(flat)
        names = {own: key for key, own in self.own.items()}
        for found in self.undoing.decisions.activations:
            if found.prefix not in now:
                continue
            inside = {flat.key: flat.node.key for flat in now[found.prefix]}
            lists = []
            for given in (found.values, found.moves):
                own: set[str] = set()
                for name in given:
                    old = _joined(found.prefix, name)
                    if old not in self.undoing._items:
                        own.add(name)
                    elif old in names:
                        own.add(inside[names[old]])
                    else:
                        own |= {name for key, name in inside.items() if key in self.new}
                lists.append(tuple(own))
            yield replace(found, values=lists[0], moves=lists[1])

    def best(self, stages: LoweredStages, fits: Fits, play: PlayStages) -> LoweredStages:
        """The plan with the best way of each new operator."""
        done: set[tuple[int, Place]] = set()
        for index, graph in enumerate(stages.cut.graphs):
            for flat in graph.flat():
                at = index, self.places[flat.key]
                if flat.key in self.new and at not in done:
                    done.add(at)
                    stages = self._best(stages, index, flat, fits, play)
        return stages

    def _best(
        self, stages: LoweredStages, index: int, flat: FlatNode, fits: Fits, play: PlayStages
    ) -> LoweredStages:
        def within(pcg: PCG) -> LoweredStages:
            pcgs = (pcg if i == index else own for i, own in enumerate(stages.pcgs))
            return replace(stages, pcgs=tuple(pcgs))

        pcg, walker = stages.pcgs[index], self.undoing.walkers[index]
        now = play(stages)
        ways = operator_ways(
            factorize(pcg.graph), pcg, walker, flat, fits, lambda other, _: play(within(other))
        )
        best = ways.fitting or next(iter(ways.best), None)
        if best is None or (fits(now) and now.step_ps <= best.timeline.step_ps):
            return stages
        return within(best.pcg)


def _keys(form: Form) -> dict[tuple[Place, str], str]:
    """The operators of a form, by where they are in the graph with all forms, and by block."""
    return {
        (form.places[flat.function, flat.node.key], flat.prefix): flat.key
        for flat in form.graph.flat()
    }


def _rules(graphs: Sequence[Graph], decisions: Decisions) -> dict[str, Rule]:
    """The rules of all operators as the stages that have them know them."""
    found: dict[str, Rule] = {}
    for graph, stage in zip(graphs, decisions.stages, strict=True):
        factored, items = factorize(graph), set(stage.items)
        for flat in graph.flat():
            if _item(flat) in items or flat.key not in found:
                found[flat.key] = factored.rule(flat.function, flat.node)
    return found


def _item(flat: FlatNode) -> str:
    """The item of main that has an operator."""
    return flat.prefix or flat.node.key


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}{'.' if prefix and not key.startswith(':') else ''}{key}"


def _is_block(graph: Graph, module: str) -> bool:
    try:
        outline(graph, [module])
    except InputError:
        return False
    return True


def _of_result(rule: Rule) -> Rule:
    """What a rule says of the first result."""
    return replace(rule, operands=(), results=rule.results[:1])


def _nodes(form: Form, places: set[Place]) -> Iterator[Node]:
    """The operators of a form at these places, in order."""
    for own in (*form.graph.functions, form.graph.main):
        for item in own.body:
            if isinstance(item, Node) and form.places[own.name, item.key] in places:
                yield item
