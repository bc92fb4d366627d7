"""Which other ways to compute values are worth a choice: what the cheapest whole forms of a
function on one device have and it has not, products of one operand as one, and what pins ask for.

An e-graph of the function has what equals its values by rules that may pay, and merges; calls that
are fused are further choices. The cheapest form is extracted from all that, for a device that has
the whole batch and for one that has its share of it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import gcd

from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.graph import Call, Function, Graph
from parloom.ir.samples import num_samples
from parloom.rewrite.bodies import Body
from parloom.rewrite.egraph import Class, Way, ways
from parloom.rewrite.follows import rules_for, with_few_rules
from parloom.rewrite.horizontal import fusions
from parloom.rewrite.merge import merges_in, merges_of_fewer
from parloom.rewrite.rewrites import rule_names
from parloom.rewrite.substitutions import applied, by_rules, differences, takes_between
from parloom.rewrite.take import Take, compatible, ends_of, taken_bodies
from parloom.rewrite.terms import names_in
from parloom.search.extraction import ANY, Choices, Extraction
from parloom.search.may_pay import MayPay, Values
from parloom.search.one_device import FunctionCosts, OneDevice
from parloom.search.request import Request

# Calls of an e-graph at most beside those of the function, and rounds of rules: where operators
# take as long whatever they compute, all rules may pay.
CALLS, ROUNDS = 300, 15
# How many rewrites are made first where what pins ask for applies nowhere.
FIRST = 100
# The share of what a device computes that each new call must save: choices make planning longer.
LEAST = 1e-3


def worthwhile(request: Request, functions: Sequence[Function]) -> Iterator[Take]:
    """Ways to compute values of these functions by rules that pins leave."""
    if not any(request.pinned.allows_rewrite((rule,)) for rule in rule_names()):
        return
    every = (*request.graph.functions, request.graph.main)
    costs, more_ps = dict[str, list[FunctionCosts]](), list[float]()
    for device in _devices(request):
        each = {own.name: FunctionCosts(device, own.name) for own in every}
        more_ps.append(LEAST * sum(each[own.name].of(own) for own in every))
        for name, own in each.items():
            costs.setdefault(name, []).append(own)
    for function in functions:
        forms = WholeForms(request, function, costs[function.name], more_ps)
        takes = filter(forms.can_be_made, dict.fromkeys(forms.takes()))
        yield from compatible(function, takes)


def _devices(request: Request) -> Iterator[OneDevice]:
    """One that has the whole batch, and one with a share of it: of as many as samples leave."""
    yield OneDevice(request)
    if (devices := request.cluster.num_devices) > 1:
        share = gcd(devices, num_samples(factorize(request.graph)))
        yield OneDevice(request, share if share > 1 else devices)


class WholeForms:
    """Other forms of a function of the graph of `request`: of those that have the whole batch and
    those that have a share of it, the `costs`, and what each new call costs beside its time.
    """

    def __init__(
        self,
        request: Request,
        function: Function,
        costs: Sequence[FunctionCosts],
        more_ps: Sequence[float],
    ) -> None:
        self.request, self.function = request, function
        self.costs, self.more_ps = costs, more_ps
        self.ends = ends_of(request.graph, function)
        allowed = request.pinned.allows_rewrite
        self.rules = [rule for rule in rules_for(function) if allowed((rule.id,))]
        merges = [take for take in merges_in(function) if allowed(take.rules)]
        fused = [take for take in fusions(request.graph, function) if allowed(take.rules)]
        self.as_one = (*merges, *fused)
        # The rules of all merges of products that were there at some time.
        self.merged = dict.fromkeys(rule for take in merges for rule in take.rules)
        self.body = Body(function, len(function.body) + CALLS)
        weights = weights_of(request.graph, function)
        self.values = Values(self.body, costs, weights)
        self.may_pay = MayPay(self.values)
        classes, grows = self.body.classes, self.values.grows
        self.merges = [take for take in merges if not grows(take.call, classes)]
        self.fused = [take for take in fused if not grows(take.call, classes)]
        fewer = (take for take in merges_of_fewer(function) if allowed(take.rules))
        self.fewer = [take for take in fewer if not grows(take.call, classes)]

    def takes(self) -> Iterator[Take]:
        """What pins ask for, what forms have, merges of products that no form changes, and those of
        fewer of them.
        """
        yield from self._wanted()
        values = set[str]()
        for take in self._of_forms():
            values.update(name for _, name in take.taken)
            yield take
        yield from (take for take in self.merges if values.isdisjoint(take.values))
        yield from self.fewer

    def can_be_made(self, take: Take) -> bool:
        """Whether the graph may have a take alone."""
        try:
            return bool(taken_bodies(self.request.graph, [take]))
        except InputError:
            return False

    def _of_forms(self) -> Iterator[Take]:
        """What the cheapest forms have and the function has not."""
        self.body.saturate(self.rules, ROUNDS, self.may_pay)
        for take in self.merges:
            self.body.unite(take, self.body.classes)
        choices = self._choices()
        if not any(own.place == ANY for own in choices.every):
            return
        forms = self._cheapest(choices)
        if self._add_merges(choices, forms):
            choices = self._choices()
            forms = self._cheapest(choices)
        for taken in forms:
            yield from self._named(choices, taken)

    def _choices(self) -> Choices:
        return Choices(self.body, self.ends, self.fused)

    def _cheapest(self, choices: Choices) -> list[Mapping[Class, int]]:
        """The choices of the forms that take a device least, with the whole batch and a share."""
        found, whole = [], choices.times(self.costs[0])
        for costs, more_ps in zip(self.costs, self.more_ps, strict=True):
            times = [
                (first if self._is_of_weights(own.reads) else ps) + more_ps * (own.place == ANY)
                for own, first, ps in zip(choices.every, whole, choices.times(costs), strict=True)
            ]
            found.append(Extraction(choices, times).solve())
        return found

    def _is_of_weights(self, read: Sequence[Class]) -> bool:
        return bool(read) and all(self.values.made(one).of_weights for one in read)

    def _add_merges(self, choices: Choices, forms: Iterable[Mapping[Class, int]]) -> bool:
        """Add merges of products in these forms; whether there are any."""
        before = self.body.graph.num_nodes
        allowed = self.request.pinned.allows_rewrite
        classes = {name: one for one, name in choices.name.items()} | self.body.classes
        for taken in forms:
            for take in merges_in(choices.function(taken)):
                named = {*names_in(take.call), *take.values}
                known = classes.keys() >= named and not self.values.grows(take.call, classes)
                if known and allowed(take.rules):
                    self.body.unite(take, classes)
                    self.merged |= dict.fromkeys(take.rules)
        return self.body.graph.num_nodes > before

    def _named(self, choices: Choices, taken: Mapping[Class, int]) -> Iterator[Take]:
        """What a form has and the function has not, by as few rules as are needed."""
        fused = choices.takes(taken)
        values = {name for take in fused for _, name in take.taken}
        yield from fused
        rules = (*self.merged, *self.body.graph.fired)
        for take in differences(self.function, choices.function(taken), rules):
            if values.isdisjoint(name for _, name in take.taken):
                named = with_few_rules(self.function, take)
                if named is not None:
                    yield named

    def _wanted(self) -> Iterator[Take]:
        """What pins ask for, wherever it applies to the function as it is; where that is nowhere,
        to what another rule makes of it.
        """
        if not self.request.pinned.wanted_rewrites:
            return
        wanted, graph = self.request.pinned.wants_rewrite, self.request.graph
        takes = [take for take in self.as_one if wanted(take.rules)]
        of = [way for rule in self.rules for way in ways(rule) if wanted((rule.id,))]
        for found in by_rules(graph, self.function, of):
            every = (with_few_rules(self.function, take) for take in found.takes)
            takes += (take for take in every if take is not None and wanted(take.rules))
        yield from takes or self._wanted_next(of)

    def _wanted_next(self, of: Sequence[Way]) -> Iterator[Take]:
        """What pins ask for after one other rule."""
        wanted, graph = self.request.pinned.wants_rewrite, self.request.graph
        every = (way for rule in self.rules for way in ways(rule))
        for first in islice(by_rules(graph, self.function, every), FIRST if of else 0):
            if (body := applied(graph, self.function, first)) is None:
                continue
            for found in by_rules(graph, body, of):
                if after := applied(graph, body, found):
                    takes = takes_between(self.function, after, (*first.rules, *found.rules)) or ()
                    yield from (take for take in takes if wanted(take.rules))


def weights_of(graph: Graph, function: Function) -> frozenset[str]:
    """The inputs of a function that do not depend on the batch, in any of its calls."""
    batch = {entry.value.name for entry in graph.of_kind("batch")}
    if function.name == graph.main.name:
        return frozenset(value.name for value in function.inputs) - batch
    every = (item for item in graph.main.body if isinstance(item, Call))
    calls = [call for call in every if call.function == function.name]
    inputs = {entry.value.name for entry in graph.inputs} - batch
    return frozenset(
        value.name
        for at, value in enumerate(function.inputs)
        if calls and all(call.args[at] in inputs for call in calls)
    )
