"""A plan without one of its rewrites: what that rewrite saves.

What it replaced is back, in the stage of what took its place and split as that is, and then each
operator in the way that is the best with everything else as the plan has it, one after the other
(`search.cheaper`).
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from parloom.cost.walk import Walker
from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.fold import outline
from parloom.ir.graph import FlatNode, Graph, Node
from parloom.ir.lower_stages import LoweredStages
from parloom.ir.mesh import Mesh
from parloom.ir.ops import Rule
from parloom.ir.plan import ActivationDecision, Decisions, NodeDecision
from parloom.ir.stages import placed
from parloom.ir.verify import verify_decisions
from parloom.rewrite.forms import Form, Forms, Place
from parloom.rewrite.rewrites import BLOCK, before_takes, takes_of
from parloom.search.cheaper import IMPOSSIBLE, Cheaper, Played, PlayStages
from parloom.search.restated import resembling, restated
from parloom.search.runner_up import Factors, Fits

Rules = Mapping[str, Rule]


@dataclass(frozen=True, slots=True)
class Undone:
    """A rewrite undone: the operators that are back and those that are gone, the `plan` without it,
    and what else of the plan could not stay as it is. Without it there may be no plan like it: then
    `plan` says why.
    """

    before: tuple[Node, ...]
    after: tuple[Node, ...]
    plan: Played | str
    changed: tuple[str, ...] = ()


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
        fits: Fits,
        play: PlayStages,
    ) -> None:
        self.decisions, self.walkers, self.fits, self.play = decisions, walkers, fits, play
        self.takes = takes_of(decisions.rewrites)
        first = before_takes(graph, decisions.rewrites)
        self._forms = Forms(first, self.takes)
        self._whole = self._forms.of(self.takes)
        self._keys = _keys(self._whole)
        self._rules = [_rules(graph) for graph in stages.cut.graphs]
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

    def without(self, index: int) -> Undone:
        """The plan without the rewrite of that number."""
        take = self.takes[index]
        try:
            form = self._forms.of([own for own in self.takes if own != take])
        except InputError as error:
            return Undone((), (), str(error))
        there, every = set(self._whole.places.values()), set(form.places.values())
        new, gone = _at(form, every - there), _at(self._whole, there - every)
        top = self._forms.place_of(take.function, take.top)
        before, after = tuple(new.values()), tuple(gone.values())
        try:
            found = _Begun(self, form, _likes(new, gone, top), top)
            return Undone(before, after, found.best(), tuple(found.changed()))
        except (InputError, *IMPOSSIBLE) as error:
            return Undone(before, after, str(error))

    def rule(self, key: str, index: int) -> Rule | None:
        """What is split of an operator of the plan, as its stage of that number knows it if it has
        it, else the first that does.
        """
        own = (self._rules[index], *self._rules)
        return next((rules[key] for rules in own if key in rules), None)


class _Begun:
    """A plan without one take, in whose `form` operators are back, each `like` one of the plan, of
    which the last is at `top`.
    """

    def __init__(
        self, undoing: Undoing, form: Form, like: Mapping[Place, Place], top: Place
    ) -> None:
        self.undoing, self.form = undoing, form
        self.blocks = [t for t in undoing.decisions.rewrites if BLOCK.fullmatch(t)]
        self.graph = self._with_blocks()
        old, places = undoing._keys, _keys(form)
        self.new = {key for (place, _), key in places.items() if place in like}
        # By operator: the one of the plan that it is, or that it is like.
        self.own = {key: old[at] for at, key in places.items() if at in old}
        back = [(place, prefix, key) for (place, prefix), key in places.items() if place in like]
        self.like, self.top = (
            {
                key: old[at[place], prefix]
                for place, prefix, key in back
                if (at[place], prefix) in old
            }
            for at in (like, dict.fromkeys(like, top))
        )
        self.items = self._placed()

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

    def best(self) -> Played:
        """The plan, whose new operators are split as those that they are like or as the last of
        the rewrite, whatever is better, not at all where neither can be, and then in better ways.

        Raises `InputError` and what is `IMPOSSIBLE`.
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
        base = replace(
            undoing.decisions,
            stages=stages,
            rewrites=rewrites,
            activations=tuple(self._activations()),
        )
        factored = factorize(self.graph)
        cheaper = Cheaper(factored, base, undoing.walkers, undoing.fits, undoing.play)
        rules = [
            {flat.key: own.rule(flat.function, flat.node) for flat in own.graph.flat()}
            for own in map(cheaper.factored_of, cheaper.cut.graphs)
        ]
        begun = self._begun(cheaper, base, rules)
        verify_decisions(self.graph, begun.decisions, factored)
        return cheaper.improved(begun, self.new)

    def _begun(self, cheaper: Cheaper, base: Decisions, rules: Sequence[Rules]) -> Played:
        """What the new operators begin with; raises what is `IMPOSSIBLE`."""
        starts = dict.fromkeys(tuple(self._nodes(rules, like)) for like in (self.like, self.top))
        found = [cheaper.possible(replace(base, nodes=nodes)) for nodes in starts]
        if any(found):
            return min(filter(None, found), key=cheaper.cost)
        return cheaper.played(replace(base, nodes=tuple(self._nodes(rules, {}))))

    def _nodes(self, rules: Sequence[Rules], like: Mapping[str, str]) -> Iterator[NodeDecision]:
        """What the plan has, restated; new operators are split as those that they are like, as far
        as their tensors have dims that are split. `rules` are those of the stages.
        """
        known = {node.key: node for node in self.undoing.decisions.nodes}
        for key, indices in self._deciding(rules):
            found = known.get(self.own.get(key, like.get(key, "")))
            if found is not None:
                factors = _by_all(
                    [self._stated(found, key, index, rules[index]) for index in indices]
                )
                if factors:
                    yield NodeDecision(key, factors)

    def _deciding(self, rules: Sequence[Rules]) -> Iterator[tuple[str, Sequence[int]]]:
        """Each operator with the stages that it is decided for: those that have it as an item, or
        that compute it for themselves.
        """
        items = {flat.key: _item(flat) for flat in self.graph.flat()}
        for key in dict.fromkeys(key for own in rules for key in own):
            every = [index for index, own in enumerate(rules) if key in own]
            yield key, [i for i in every if items[key] in self.items[i]] or every

    def _stated(self, found: NodeDecision, key: str, index: int, rules: Rules) -> "_Stated":
        """What a stage knows of a decision about an operator of the plan, as one about `key`."""
        mesh = self.undoing.decisions.stages[index].mesh
        given, rule = self.undoing.rule(found.key, index), rules[key]
        if given is None:
            return (), mesh
        factors = tuple((factor, _on(mesh, axes)) for factor, axes in found.factors)
        said = restated if key in self.own else resembling
        return said(factors, given, rule, mesh), mesh

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


_Stated = tuple[Factors, Mesh]
"""How an operator is split in a stage with this mesh."""


def _on(mesh: Mesh, axes: Collection[str]) -> tuple[str, ...]:
    """Those of the axes that a mesh has."""
    return tuple(axis for axis in axes if axis in mesh.names)


def _by_all(stated: Sequence[_Stated]) -> Factors:
    """What all stages say that have an operator, each on its own mesh."""
    whole, _ = max(stated, key=lambda own: len(own[1].axes))
    return tuple(
        (factor, axes)
        for factor, axes in whole
        if all(_on(mesh, axes) == dict(own).get(factor, ()) for own, mesh in stated)
    )


def _keys(form: Form) -> dict[tuple[Place, str], str]:
    """The operators of a form, by where they are in the graph with all forms, and by block."""
    return {
        (form.places[flat.function, flat.node.key], flat.prefix): flat.key
        for flat in form.graph.flat()
    }


def _rules(graph: Graph) -> Rules:
    """The rules of the operators of a stage."""
    factored = factorize(graph)
    return {flat.key: factored.rule(flat.function, flat.node) for flat in graph.flat()}


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


def _at(form: Form, places: set[Place]) -> dict[Place, Node]:
    """The operators of a form at these places, in order."""
    return {
        place: item
        for own in (*form.graph.functions, form.graph.main)
        for item in own.body
        if isinstance(item, Node) and (place := form.places[own.name, item.key]) in places
    }


def _likes(before: dict[Place, Node], after: dict[Place, Node], top: Place) -> dict[Place, Place]:
    """The operator of a rewrite that each `before` it is like: of its kind, with as many of the
    kind behind it, or else the `top` of the rewrite.
    """
    known = {(after[at].op, count): at for at, count in reversed(_behind(after).items())}
    return {at: known.get((before[at].op, count), top) for at, count in _behind(before).items()}


def _behind(nodes: dict[Place, Node]) -> dict[Place, int]:
    """How many operators of its kind read, one after the other, what each makes."""
    longest: dict[str, Counter[str]] = {}
    found: dict[Place, int] = {}
    for place, node in reversed(nodes.items()):
        behind = Counter[str]()
        for value in node.results:
            behind |= longest.get(value.name, Counter())
        found[place] = behind[node.op]
        behind[node.op] += 1
        for name in node.refs:
            longest[name] = longest.get(name, Counter()) | behind
    return found
