"""Random plans: of as many draws as there is budget, or of `DRAWS`, those that are the best so far.

A draw is a number of microbatches, a mesh of at most two axes, and a layout of every operator.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from math import inf

from parloom.comparators.baselines import random_plans
from parloom.errors import LayoutError
from parloom.ir.factors import factorize
from parloom.ir.plan import GLOBAL, ActivationDecision, Decisions
from parloom.search.request import Request, ScoredPlan

# About as many as the search simulates of a large model.
DRAWS = 32


def drawn(request: Request, base: Decisions) -> Iterator[ScoredPlan]:
    """Plans that fit, each faster than those before, with the dtypes of `base`; first of all, and
    until one fits, the smallest so far.

    Raises `LayoutError` where none can be lowered.
    """
    graph, factored = request.graph, factorize(request.graph)
    counts = request.microbatch_counts(factored)
    rng = random.Random(request.seed)
    asked = tuple(ActivationDecision(p, "recompute") for p in graph.recomputed_calls)
    least, refused = (inf, inf), None
    for _ in range(request.budget or DRAWS):
        count = rng.choice(counts)
        # The program of one microbatch is divided no further.
        divided = count if request.batch_semantics == GLOBAL else 1
        try:
            (plan,) = random_plans(graph, request.cluster, divided, rng.getrandbits(32))
            plan = replace(
                plan,
                activations=asked,
                num_microbatches=count,
                batch_semantics=request.batch_semantics,
                master_dtype=base.master_dtype,
                reduce_dtype=base.reduce_dtype,
            )
            found = request.predict(plan, factored)
        except LayoutError as error:
            refused = error
            continue
        excess = max(0, found.peak_bytes - request.limit_bytes)
        if (excess, found.step_s) < least:
            least = excess, found.step_s
            yield ScoredPlan(plan, found)
    if least == (inf, inf) and refused is not None:
        raise refused
