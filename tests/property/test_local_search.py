"""Local search simulates what may make a difference."""

from math import inf

import pytest

from parloom.cost.clusters import load_cluster
from parloom.ir.text import parse_graph
from parloom.search import local_search
from parloom.search.contexts import EstimateErrors
from parloom.search.local_search import improved
from parloom.search.meshes import logical_meshes
from parloom.search.step_rows import ShadowPrices
from tests.property.searched import PLENTY, context_of

TWO = load_cluster("2xH100")
GRAPH = parse_graph(
    'graph "Bias" training=True\n\n'
    'input weight: float32[1024, 1024] = parameter("weight", trainable=True)\n'
    'input bias: float32[1024] = parameter("bias", trainable=True)\n'
    'input x: float32[4194304, 1024] = batch("x")\n\n'
    "main main:\n"
    "    v: float32[4194304, 1024] = linear(x, weight, bias)  # product\n"
    "    loss: float32[] = sum(v)\n    return loss\n\nloss loss\n"
)


@pytest.mark.parametrize("least", [local_search.BETTER, 0.0])
def test_storage_that_moves_next_to_no_time_is_not_simulated(
    least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_search, "BETTER", least)
    (mesh,) = logical_meshes(TWO)
    context = context_of(GRAPH, TWO, mesh, limit=PLENTY)
    context.run(ShadowPrices())
    seen = EstimateErrors()
    context.improve(inf, seen)
    known = [found.candidate for found in context.judged.values()]
    improved([context], seen)
    targets = [weight.targets for weight in context.layouts.program.weights]
    others = [i for i, names in enumerate(targets) if names != ("bias",)]
    bias_alone = [
        found
        for found in context.judged.values()
        for start in known
        if found.candidate.values == start.values
        and found.candidate.levels != start.levels
        and all(found.candidate.levels[i] == start.levels[i] for i in others)
    ]
    assert bool(bias_alone) == (least == 0.0)


def test_storage_that_a_composition_chose_need_not_be_an_option() -> None:
    """Compositions price messages apart, so other levels may be the best ones there."""
    (mesh,) = logical_meshes(TWO)
    context = context_of(GRAPH, TWO, mesh, limit=PLENTY)
    context.run(ShadowPrices())
    candidate = next(iter(context.candidates()))
    weight = next(
        i for i, w in enumerate(context.layouts.program.weights) if w.targets == ("weight",)
    )
    options = context.stored(weight, candidate.values)
    level, part = next((level, part) for level, part in options.items() if level.axes)
    known = context.stored_parts(weight, candidate.values, ((level, 2),))
    assert known.tolist() == (2 * part).tolist()
    context._stored = {key: {} for key in context._stored}
    assert context.stored_parts(weight, candidate.values, ((level, 2),)).tolist() == known.tolist()
    other = next(some for some in options if some != level)
    assert context.stored_parts(weight, candidate.values, ((other, 2),)).tolist() != known.tolist()
