"""The table of the sanity benchmark, its closed forms, and that a wrong model of cost is told."""

import math
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from parloom.comparators.configuration import Configuration

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def sanity(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("sanity")


def test_the_table_is_whole(sanity: ModuleType) -> None:
    variants = sanity.VARIANTS
    assert len(variants) >= 40
    assert len({v.name for v in variants}) == len(variants)
    assert {v.base for v in variants} == set(sanity.BASES)
    for v in variants:
        assert 0 < v.low <= v.theory <= v.high < math.inf, v.name
        assert min(len(v.source), len(v.reason)) > 0, v.name
        assert v.measure in import_module("sanity_bases").MEASURES
        base = sanity.BASES[v.base]
        other = sanity.changed(base, v.change)
        assert other != base, v.name
        for setup in (base, other):
            assert setup.plan.ranks == setup.nodes * setup.per_node, v.name


def test_intervals_exclude_that_nothing_happened(sanity: ModuleType) -> None:
    """Links that cost nothing, and plans that make no difference, are told."""
    told = {v.name for v in sanity.VARIANTS if not v.low <= 1.0 <= v.high}
    assert len(told) >= 40
    assert "inner bandwidth x1/2, ZeRO-3" in told
    assert "outer bandwidth x1/2, ZeRO-3" in told
    for v in sanity.VARIANTS:
        if v.name in told:
            assert sanity.verdict(1.0, v.low, v.high) != sanity.INSIDE


def test_a_cost_model_to_which_all_is_equal_is_told(sanity: ModuleType) -> None:
    predictor = sanity.Predictor()
    predictor.predicted = lambda setup: {"step": 2.0, "states": 3.0, "activations": 4.0}
    for v in sanity.VARIANTS:
        row = predictor.row(v)
        assert row["ratio"] == 1.0
        assert (row["verdict"] == sanity.INSIDE) == (v.low <= 1.0 <= v.high), v.name


def test_each_row_divides_the_variant_by_its_base(sanity: ModuleType) -> None:
    predictor, variant = sanity.Predictor(), sanity.VARIANTS[0]
    base = sanity.BASES[variant.base]
    predictor.predicted = lambda setup: {variant.measure: 1.0 if setup == base else variant.theory}
    assert predictor.row(variant)["verdict"] == sanity.INSIDE
    predictor.predicted = lambda setup: {variant.measure: 1.0 if setup != base else variant.theory}
    assert predictor.row(variant)["verdict"] == sanity.BELOW


@pytest.mark.parametrize(
    ("ratio", "said"),
    [(0.9, "inside"), (1.1, "inside"), (0.899, "below"), (1.101, "above"), (math.nan, "below")],
)
def test_a_ratio_outside_is_told(sanity: ModuleType, ratio: float, said: str) -> None:
    assert sanity.verdict(ratio, 0.9, 1.1) == said


def test_closed_forms(sanity: ModuleType) -> None:
    bases = import_module("sanity_bases")
    # 2 multiplications and additions for each of 12 w^2 weights, 2 s w of causal attention.
    assert bases.flops(1, 8, 4, 10) == 2 * 12 * 64 + 2 * 4 * 8 + 2 * 8 * 10
    assert bases.pipelined(8, 8) == 15
    assert bases.pipelined(8, 8, 2) == 11.5
    # ZeRO, figure 1: 7.5 billion parameters on 64 devices take 120, 31.4, 16.6 and 1.9 GB.
    found = [round(7.5 * bases.zero_states(level, 64), 1) for level in range(4)]
    assert found == [120.0, 31.4, 16.6, 1.9]
    # Without attention two rates give the time of the products alone.
    none = bases.seconds(2.0, math.inf, 4, 1, 8)
    assert none == 3 * (bases.flops(1, 8, 4) - 2 * 4 * 8) / 2.0


def test_links_are_changed_where_a_setup_says_so(sanity: ModuleType) -> None:
    setup = sanity.Setup(nodes=2, per_node=8, plan=Configuration(data=16))
    before = sanity.cluster_of(setup).levels
    after = sanity.cluster_of(sanity.changed(setup, {"inner": 0.5, "latency": 2.0})).levels
    outer = sanity.cluster_of(sanity.changed(setup, {"outer": 0.25})).levels
    rates = [level.link.payload_bytes_per_s for level in before]
    assert [level.link.payload_bytes_per_s for level in after] == [rates[0] / 2, rates[1]]
    assert [level.link.payload_bytes_per_s for level in outer] == [rates[0], rates[1] / 4]
    assert [x.link.latency_s for x in after] == [2 * y.link.latency_s for y in before]


def test_only_the_field_that_is_named_changes(sanity: ModuleType) -> None:
    base = sanity.BASES["pipeline"]
    other = sanity.changed(base, {"plan.interleave": 2, "layers": 32})
    assert (other.plan.interleave, other.layers) == (2, 32)
    assert sanity.changed(other, {"plan.interleave": 1, "layers": 64}) == base
    with pytest.raises(TypeError):
        sanity.changed(base, {"plan.chunks": 2})
