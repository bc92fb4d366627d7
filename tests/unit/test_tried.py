"""Splits that a search simulates: each once, and what cannot be lowered."""

from dataclasses import replace

from parloom.errors import LayoutError
from parloom.ir.factors import factorize
from parloom.search.pipelines.judge import Judge, JudgedSplit, Tried
from parloom.search.pipelines.split import Split
from parloom.search.refusals import Refusals
from tests.property.test_every_split import drawn


class _Refusing(Judge):
    def judge(self, split: Split) -> JudgedSplit | None:
        raise LayoutError("no stages")


def test_splits_of_layouts_that_are_gone_are_told_apart() -> None:
    """Python gives the address of an object that nothing refers to any more to the next one."""
    request, layouts = drawn(1, 3)
    costs, played = layouts[2][1][0], list[None]()
    judge = _Refusing(request, factorize(request.graph), Refusals())
    tried = Tried(judge, lambda: played.append(None))
    for _ in range(10):
        own = replace(costs, whole=replace(costs.whole))
        tried.play(Split((1, len(costs.items)), (0, 1), (own, own)))
        tried.play(Split((1, len(costs.items)), (0, 1), (own, own)))
    assert len(played) == 10
