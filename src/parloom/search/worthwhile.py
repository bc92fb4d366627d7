"""Which other ways to compute values are worth a choice: those with which one device computes
little more than with the best of all.

What is not may still be what layouts need, but rules make hundreds of forms that no layout mends.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from parloom.ir.graph import Function
from parloom.ir.plan import Decisions
from parloom.rewrite.alternatives import alternatives, with_few_rules
from parloom.rewrite.forms import Forms
from parloom.rewrite.take import Take
from parloom.search.contexts import Contexts
from parloom.search.least_compute import model_of_forms, times_on_one_device
from parloom.search.request import Request
from parloom.search.solve.minimum import Minimizer

# Ways of a block kind that are kept, and by which share of what it replaces one may be slower.
MOST, SLOWER = 6, 0.1


def worthwhile(
    request: Request, base: Decisions, functions: Sequence[Function], others: Sequence[Take]
) -> Iterator[Take]:
    """Ways by known rules to compute values of these functions, beside the `others`."""
    found = {own.name: list(alternatives(request.graph, own)) for own in functions}
    takes = [one.take for own in found.values() for one in own]
    if not takes:
        return
    forms = Forms(request.graph, [*others, *takes])
    _, program, times = times_on_one_device(Contexts(request, base, forms))
    model, places = model_of_forms(program, times)
    least = Minimizer(model).least(np.ones(1), 0.0)
    best = max(float(costs.min()) for costs in least)

    def beyond(take: Take) -> float:
        """What one device computes at least beyond the best, with a take."""
        costs = []
        for place, at in forms.positions[take]:
            index = program.indices[place]
            costs.append(float(least[index][places[index].index(at)]))
        return max(costs) - best

    for function in functions:
        near = []
        for one in found[function.name]:
            gone = (program.indices[forms.place_of(function.name, node)] for node in one.gone)
            if beyond(one.take) <= SLOWER * sum(times[index] for index in gone):
                near.append(one.take)
        for take in sorted(near, key=beyond)[:MOST]:
            named = with_few_rules(function, take)
            if named is not None:
                yield named
