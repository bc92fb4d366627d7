"""What pipelines could not be lowered or played is counted, wherever that happens, and said."""

from collections.abc import Callable
from functools import partial

import pytest

from parloom.cost.clusters import load_cluster
from parloom.errors import CutError, InputError, LayoutError, VerifyError
from parloom.ir.factors import factorize
from parloom.search.contexts import Contexts
from parloom.search.pipelines.alike import AlikeStages
from parloom.search.pipelines.auto import PipelineSearch, search_pipelines
from parloom.search.pipelines.costs import Pricer
from parloom.search.pipelines.judge import Judge
from parloom.search.pipelines.mixed import across_parts
from parloom.search.pipelines.replicas import Shares, replicated
from parloom.search.refusals import Refusals
from parloom.search.request import base_of
from tests.property.test_every_split import asked, drawn, every_of

MIXED = (
    "{name: two, backend: gloo, join: {name: net, bandwidth: 1Gbit/s, latency: 20us}, parts: ["
    "{name: quick, device: {name: fast, memory: 2GiB, memory_bandwidth: 9GB/s,"
    " rates: {fp32: 24GFLOP/s}}, levels: [{name: lan, size: 1, bandwidth: 1Gbit/s, latency: 9us}]},"
    "{name: slow, device: {name: tired, memory: 2GiB, memory_bandwidth: 5GB/s,"
    " rates: {fp32: 12GFLOP/s}}, levels: [{name: lan, size: 1, bandwidth: 1Gbit/s, latency: 9us}]}"
    "]}"
)
Refuse = Callable[..., None]


def refusing(error: Exception) -> Refuse:
    def refuse(*_: object) -> None:
        raise error

    return refuse


def test_errors_of_one_place_are_of_one_kind() -> None:
    """They are counted together, without advice, and most first; what no search expects goes on."""
    refusals = Refusals()
    assert refusals.words() == ""
    refusals.tried(refusing(CutError("no such cut")))
    assert refusals.words() == ""
    refusals.tried(refusing(LayoutError("a is late; wait")))
    for name in "bcd":
        refusals.tried(partial(_indivisible, name))
    assert refusals.tried(lambda: 5) == 5
    assert refusals.words() == (
        "4 layouts, stages or splits of pipelines cannot be lowered: 3 as where b does not divide;"
        " 1 as where a is late"
    )
    with pytest.raises(VerifyError):
        refusals.tried(refusing(VerifyError("a bug")))


def _indivisible(name: str) -> None:
    raise InputError(f"{name} does not divide")


@pytest.mark.parametrize("where", [(Pricer, "price"), (AlikeStages, "stage"), (Judge, "judge")])
def test_an_answer_says_what_was_refused(
    where: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layouts, stages of their own, and splits."""
    request, _ = drawn(1, 3)
    monkeypatch.setattr(*where, refusing(LayoutError("a defect; mend it")))
    found = search_pipelines(request, base_of(request), None, lambda text: None)
    assert found is not None
    assert found.left_out.endswith("as where a defect")


@pytest.mark.parametrize("where", ["stage", "lower"])
@pytest.mark.parametrize("kind", [CutError, LayoutError])
def test_splits_are_whole_but_for_cuts_that_a_model_does_not_have(
    where: str, kind: type[LayoutError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where others were refused: as a stage by itself, or beside the others of a split."""
    request, layouts = drawn(1, 3)
    contexts = Contexts(request, base_of(request))
    every = every_of(PipelineSearch(contexts, 1e18, lambda text: None), layouts)
    monkeypatch.setattr(AlikeStages, where, refusing(kind("no such stage")))
    assert not list(every.splits(every.promising(10_000)))
    assert (contexts.refusals.counts.total() > 1) == (kind is LayoutError)
    assert every.is_whole == (kind is CutError)


def test_replicas_that_are_refused_count() -> None:
    request, layouts = drawn(1, 3)
    costs = layouts[2][1][0]
    judge = Judge(request, factorize(request.graph), Refusals())
    found = [Shares(costs.whole, costs.items, {0: 1, 1: 1}, 1.0)]
    assert len(list(replicated(judge, found))) == 1
    unknown = [Shares(costs.whole, ("nothing",), {0: 1, 1: 1}, 1.0)]
    assert not list(replicated(judge, unknown))
    assert "no item 'nothing'" in judge.refusals.words()


def test_an_answer_for_a_mixed_cluster_says_what_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On all parts together."""
    request = asked(drawn(1, 3)[0].graph, load_cluster(MIXED))
    monkeypatch.setattr(Pricer, "price", refusing(LayoutError("a defect")))
    across = across_parts(request, base_of(request), 1e18, lambda text: None)
    assert across.left_out.endswith("as where a defect")
