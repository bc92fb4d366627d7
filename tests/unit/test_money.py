"""Prices, counts of tokens, and what fronts and scaling curves print."""

import json
from dataclasses import replace
from math import nextafter

import pytest
from rich.console import RenderableType

from parloom import arguments
from parloom.cost import units
from parloom.cost.cluster_file import one_line
from parloom.cost.clusters import load_cluster, resolve_cluster
from parloom.cost.devices import known_devices
from parloom.cost.money import (
    Prices,
    Work,
    check_priced,
    parse_prices,
    usd_per_hour,
    work_of,
)
from parloom.cost.pareto import pareto_front
from parloom.errors import InputError
from parloom.ir.expected import Aim, Objective
from parloom.ir.mesh import HourlyPrice
from parloom.ir.plan import Decisions
from parloom.ir.plan_json import plan_from_json, plan_to_json
from parloom.report.chart import HEIGHT, WIDTH, Axis, Mark, chart
from parloom.report.costs import aim_words, cost_lines, plan_cost_document
from parloom.report.fronts import Front, FrontRow, Priced, best_words, front_document, front_screen
from parloom.report.output import rendered
from parloom.report.scaling import Point, Scaling, scaling_document, scaling_screen
from tests.unit.graphs import graph, node, perceptron
from tests.unit.test_plan_json import example

A100, H100 = "A100-SXM4-80GB", "H100-SXM5-80GB"


@pytest.mark.parametrize(
    ("text", "usd"),
    [("2.10/gpu-h", 2.1), ("$2.10/gpu-h", 2.1), ("2USD/device-h", 2.0), ("1e1/GPU-h", 10.0)],
)
def test_prices_have_units(text: str, usd: float) -> None:
    assert units.parse_hourly(text) == usd
    (entry,) = parse_prices(text).listed
    assert entry == ("", HourlyPrice(usd, "--price", "as given"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "2.10",
            "--price: '2.10' has no unit; write 2.10/gpu-h: dollars for an hour of one device",
        ),
        ("H100=2.10", "--price: '2.10' has no unit"),
        ("2.10/h", "--price: '2.10/h' has the unit '/h'; write 2.10/gpu-h"),
        ("2.10EUR/gpu-h", "has the unit 'EUR/gpu-h'"),
        ("", "--price: '' is no quantity"),
        ("-1/gpu-h", "it is negative"),
        ("H100=2/gpu-h,H100-SXM5-80GB=3/gpu-h", "--price: H100-SXM5-80GB: two prices"),
        ("1,000/gpu-h", "--price: '1' has no unit"),
    ],
)
def test_prices_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        parse_prices(text)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [("2T", 2e12), ("300B", 3e11), ("1.5e12", 1.5e12), ("64M", 6.4e7), ("5 k", 5e3), ("7", 7.0)],
)
def test_counts_of_tokens(text: str, number: float) -> None:
    assert units.parse_count(text) == number


@pytest.mark.parametrize("text", ["2 trillion", "2t", "", "-3B", "0", "nan", "1e30", "2TB"])
def test_counts_that_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        units.parse_count(text)


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (1234567.8, "$1,234,568"),
        (12.3, "$12.30"),
        (0.0123456, "$0.0123"),
        (0.999, "$0.999"),
        (2.0e-7, "$0.000000200"),
        (0.0, "$0.00"),
    ],
)
def test_dollars(usd: float, text: str) -> None:
    assert units.format_dollars(usd) == text


def test_given_prices_replace_those_of_the_table() -> None:
    usual = resolve_cluster("2x8xH100")
    priced = resolve_cluster("2x8xH100", parse_prices("H100=2.10/gpu-h"))
    assert priced.cluster == replace(
        usual.cluster,
        device=replace(usual.cluster.device, price=HourlyPrice(2.1, "--price", "as given")),
    )
    assert load_cluster(priced.spec) == priced.cluster  # as a plan file holds it
    assert usual.spec == "2x8xH100-SXM5-80GB"
    others = resolve_cluster("2x8xH100", parse_prices("A100=2.10/gpu-h"))
    assert others == usual
    a100 = resolve_cluster("8xA100"), resolve_cluster("8xA100", parse_prices("9/gpu-h"))
    lines = ["\n".join(loaded.assumptions) for loaded in a100]
    assert ["price_per_hour" in text for text in lines] == [True, False]


def test_prices_of_parts_and_of_unknown_devices() -> None:
    parts = [
        {"name": "old", "device": "V100",
         "levels": [{"name": "l", "size": 2, "bandwidth": "9GB/s"}]},
        {"name": "own", "device": {"name": "chip", "memory": "9GB", "memory_bandwidth": "1TB/s",
                                   "rates": {"fp32": "1TFLOP/s"}},
         "levels": [{"name": "l", "size": 4, "bandwidth": "9GB/s"}]},
    ]  # fmt: skip
    text = json.dumps({"name": "lab", "join": {"name": "e", "bandwidth": "1GB/s"}, "parts": parts})
    with pytest.raises(
        InputError, match=r"no price is known for chip; add --price chip=2\.10/gpu-h"
    ):
        check_priced([load_cluster(text)], "--pareto")
    given = parse_prices("chip=0.5/gpu-h,V100=1/gpu-h")
    loaded = resolve_cluster(text, given)
    assert loaded.cluster.price_per_hour == 4 * 0.5 + 2 * 1.0
    assert load_cluster(loaded.spec) == loaded.cluster
    check_priced([loaded.cluster], "--pareto")
    with pytest.raises(InputError, match="no cluster has a device 'chop'; did you mean 'chip'"):
        parse_prices("chop=1/gpu-h").check([loaded.cluster])


def test_every_price_of_the_table_says_who_says_so() -> None:
    priced = [known.device.price for known in known_devices() if known.device.price]
    assert len(priced) > 5
    assert all(price.source for price in priced)
    dated = [price for price in priced if price.source.startswith("aws.amazon.com")]
    assert dated
    assert all(price.date == "end of 2024" for price in dated)
    assert str(HourlyPrice(2.1, "them", "May")) == "$2.10 an hour of a device (them, May)"
    assert str(HourlyPrice(1.844, "recalled")) == "$1.844 an hour of a device (recalled, no date)"


def test_a_file_may_say_where_its_price_is_from() -> None:
    levels = [{"name": "NVLink3", "size": 2, "bandwidth": "300GB/s"}]

    def file(**more: str) -> str:
        return json.dumps({"device": "A100", "levels": levels, **more})

    plain = load_cluster(file(price_per_hour="1.5USD"))
    assert plain.device.price == HourlyPrice(1.5, "cluster file")
    source, date = "our contract", "2026-01"
    said = load_cluster(file(price_per_hour="1.5USD", price_source=source, price_date=date))
    assert said.device.price == HourlyPrice(1.5, source, date)
    assert load_cluster(one_line(said)) == said
    with pytest.raises(InputError, match="price_date: goes with price_per_hour"):
        load_cluster(file(price_date=date))


def test_work_of_a_run() -> None:
    work = Work("token", 4_000_000, 2e12)
    assert work.days(1.728) == pytest.approx(10.0)
    assert work.usd_of_run(0.5) == pytest.approx(250_000.0)
    assert work.usd_per_billion(0.5) == pytest.approx(125.0)
    unknown = Work("token", 4_000_000)
    assert (unknown.days(1.0), unknown.usd_of_run(1.0), work.usd_of_run(None)) == (None,) * 3


def test_tokens_are_what_embedding_looks_up() -> None:
    """Positions and labels are as many; a table of categories reads no sequence."""
    ids: dict[str, tuple[tuple[int, ...], str]] = {
        "ids": ((8, 5), "int64"),
        "kinds": ((8, 5), "int64"),
    }
    rows = graph(
        {"table": (11, 4)},
        ids,
        node("_to_copy", "ids", to="same", shape=(8, 5), dtype="int64"),
        node("embedding", "table", "same", to="rows", shape=(8, 5, 4)),
        node("embedding", "table", "kinds", to="more", shape=(8, 5, 4)),
        node("add", "rows", "more", to="both", shape=(8, 5, 4)),
        node("mean", "both", to="loss", shape=()),
    )
    assert work_of(rows) == Work("token", 40)
    assert work_of(rows, 3, 1e9) == Work("token", 120, 1e9)
    assert work_of(perceptron(batch=6)) == Work("sample", 6)
    flat = graph(
        {"table": (11, 4)},
        {"ids": ((8,), "int64")},
        node("embedding", "table", "ids", to="rows", shape=(8, 4)),
        node("mean", "rows", to="loss", shape=()),
    )
    assert work_of(flat) == Work("sample", 8)


def test_clusters_with_commas() -> None:
    assert arguments.clusters_of("4xA100, 8xH100,4xA100") == ["4xA100", "8xH100"]
    assert arguments.clusters_of('{"a": 1, "b": 2}') == ['{"a": 1, "b": 2}']
    for text in ("", "4xA100,", ",,"):
        with pytest.raises(InputError, match="with commas between them"):
            arguments.clusters_of(text)


# --- what is printed ----------------------------------------------------------------------------

PRICES = ((H100, HourlyPrice(2.1, "--price", "as given")), (A100, HourlyPrice(5.12, "recalled")))


def row(cluster: str, count: int, step_s: float, usd: float | None) -> FrontRow:
    found = Priced(f"auto on {count}", step_s, 1 << 30, 0.4, usd)
    return FrontRow(cluster, f"{count} x {H100}", count, found)


ROWS = (
    row("32x8xH100", 256, 4.0, 0.6),
    row("64x8xH100", 512, 2.1, 0.63),
    row("128x8xH100", 1024, 1.2, 0.72),
    row("128x8xH100", 512, 2.2, 0.64),
    FrontRow("1x8xH100", f"8 x {H100}", 8, reason="no plan fits; it needs 1 TiB of 74 GiB"),
)
FRONT = Front("big.yaml", Objective.COST, Work("token", 4_000_000, 2e12), ROWS, PRICES, ROWS[0])


def test_a_document_of_a_front() -> None:
    document = front_document(replace(FRONT, bound_usd=0.5), "runs/plan.json")
    assert [r["num_devices"] for r in document["pareto"]] == [256, 512, 1024]
    first = document["pareto"][0]
    assert first == document["best"] == document["rows"][0]
    assert first["cost"] == {
        "usd": pytest.approx(300_000.0),
        "usd_per_step": 0.6,
        "usd_per_billion_tokens": pytest.approx(150.0),
        "days": pytest.approx(4.0 * 500_000 / 86400),
    }
    assert [r["pareto"] for r in document["rows"]] == [True, True, True, False, False]
    assert document["rows"][4]["cost"] is None
    assert document["rows"][4]["reason"].startswith("no plan fits")
    assert document["prices"][1] == {
        "device": A100,
        "price_per_hour": 5.12,
        "price_source": "recalled",
        "price_date": None,
    }
    assert document["bound_usd_per_step"] == 0.5
    json.dumps(document, allow_nan=False)
    unpriced = replace(FRONT, rows=(row("8xcpu", 8, 1.0, None),), best=None)
    assert front_document(unpriced, None)["pareto"] == []


def lines(screen: RenderableType, width: int) -> list[str]:
    return rendered(screen, width).split("\n")


@pytest.mark.parametrize("width", [80, 120])
def test_a_front_on_the_screen(width: int) -> None:
    found = lines(front_screen(replace(FRONT, limit_days=12.5, best=ROWS[1])), width)
    assert max(map(len, found)) <= width
    assert "…" not in "".join(found)
    text = "\n".join(found)
    assert found[0] == "big.yaml: 4M tokens a step, 2T in the run"
    for words in (
        "$/billion: for a billion tokens",
        "23.1!",  # days: too many
        "1x8xH100: no plan fits; it needs 1 TiB of 74 GiB",
        "a to c are the front",
        "$2.10 an hour of a device (--price, as given)",
        "$5.12 an hour of a device (recalled, no date)",
        "the cheapest of those that take at most 12.5 days: 512 of 64x8xH100, 12.2 days,",
        "$315,000",
    ):
        assert words in text, words
    body = [line for line in found if "│" in line]
    assert len(body) == HEIGHT
    marks = "".join(line.split("│")[1] for line in body)
    assert sorted(marks.replace(" ", "")) == ["a", "b", "c", "·"]


def test_types_are_named_on_mixed_clusters() -> None:
    both = f"2 x {A100} + 4 x {H100}"
    mixed = (replace(ROWS[0], mixed=True), replace(ROWS[1], devices=both, mixed=True))
    text = " ".join(lines(front_screen(replace(FRONT, rows=mixed, best=mixed[0])), 200))
    assert f"256 x {H100} of 32x8xH100" in text
    assert f"{both} of 64x8xH100" in text


def test_words_without_a_plan_or_a_price() -> None:
    none = replace(FRONT, best=None, limit_days=1.0)
    assert best_words(none) == (
        "no plan that was found trains that in 1 days: the fastest takes 6.94, 1024 of 128x8xH100"
    )
    free = row("8xcpu", 8, 1.0, None)
    shown = Front("m", Objective.TIME, Work("sample", 8), (free,), (), free)
    assert best_words(shown) == "the fastest: 8 of 8xcpu, - a step"
    text = "\n".join(lines(front_screen(shown), 80))
    assert "the model reads no sequence of tokens: samples are counted" in text
    assert "front:" not in text
    late = replace(FRONT, interrupted=True)
    assert best_words(late).startswith("interrupted: of what was found until then, the cheapest:")


def test_chart_places() -> None:
    def written(value: float) -> str:
        return f"{value:g}"

    x, y = Axis("devices", written), Axis("speed", written)
    marks = [Mark(1.0, 1.0, "a"), Mark(10.0, 10.0, "b"), Mark(100.0, 100.0, "c")]
    found = chart(marks, x, y).plain.split("\n")
    rows_ = [line.split("│")[1] for line in found if "│" in line]
    assert rows_[-1] == "a" + " " * (WIDTH - 1)
    assert rows_[0] == " " * (WIDTH - 1) + "c"
    (middle,) = (i for i, line in enumerate(rows_) if "b" in line)
    assert middle in (HEIGHT // 2 - 1, HEIGHT // 2)
    assert found[0] == "speed (both axes are logarithmic)"
    assert found[-1].split() == ["1", "devices", "100"]
    same = chart([Mark(2.0, 3.0, "a")], x, y).plain
    assert same.count("│") == HEIGHT
    assert chart([], x, y).plain == ""


def test_what_costs_nothing_is_on_the_chart() -> None:
    """A price of zero is on no logarithmic axis."""
    x, y = Axis("days", "{:g}".format), Axis("dollars", "{:g}".format)
    free = chart([Mark(1.0, 0.0, "a"), Mark(4.0, 8.0, "b")], x, y).plain.split("\n")
    assert free[0] == "dollars (logarithmic: days)"
    rows_ = [line.split("│")[1] for line in free if "│" in line]
    assert rows_[-1].startswith("a")
    assert rows_[0].endswith("b")
    assert "a" in chart([Mark(1.0, 0.0, "a")], x, y).plain
    assert chart([Mark(0.0, 0.0, "a")], x, y).plain.startswith(
        "dollars (logarithmic: neither axis)"
    )
    rows = (row("1xA", 1, 2.0, 0.0), row("2xA", 2, 1.0, 3.6))
    shown = "\n".join(lines(front_screen(replace(FRONT, rows=rows, best=rows[0])), 100))
    assert "a to b are the front" in shown
    drawn = shown[shown.index("(logarithmic: days)") :]
    assert {"a", "b"} <= {line.split("│")[-1].strip() for line in drawn.split("\n")}


def point(count: int, step_s: float, weak: bool = False) -> Point:
    work = Work("token", 1000 * (count if weak else 1))
    found = Priced("auto", step_s, 1 << 30, 0.4, count * step_s * 2.1 / 3600)
    return Point(f"{count}xH100", count, work, count, found)


@pytest.mark.parametrize("weak", [False, True])
def test_a_scaling_curve(weak: bool) -> None:
    points = (
        point(1, 8.0, weak),
        point(2, 8.8 if weak else 4.4, weak),
        Point("4xH100", 4, Work("token", 1000), reason="no plan fits"),
        replace(point(8, 12.0 if weak else 1.5, weak), used=4),
    )
    found = Scaling("m", weak, points, PRICES[:1])
    document = scaling_document(found)
    assert document["mode"] == ("weak" if weak else "strong")
    assert [p["speedup"] for p in document["points"]] == pytest.approx(
        [1.0, 8 / 4.4, None, 8 / 1.5]
    )
    assert [p["efficiency"] for p in document["points"]][1] == pytest.approx(4 / 4.4)
    assert document["points"][2]["reason"] == "no plan fits"
    for width in (80, 120):
        text = "\n".join(lines(scaling_screen(found), width))
        assert "…" not in text
        assert "1 to 2 devices (2x): 1.82x; a token costs +10%" in text
        assert "2 to 8 devices (4x): 2.93x; 4 stay idle; a token costs" in text
        assert "4 devices: no plan fits" in text


def test_plans_keep_what_they_were_chosen_by() -> None:
    for aim in (
        Aim(Objective.COST, 0.25, 0.2),
        Aim(Objective.MEMORY, 2048.0),
    ):
        plan = replace(example(), aim=aim)
        assert plan_from_json(plan_to_json(plan), "plan.json") == plan
        assert plan.gap == (pytest.approx(0.25) if aim.bound else None)
        assert f"--objective {aim.objective.value}" in plan.command()
    assert '"aim"' not in plan_to_json(example())
    assert aim_words(Aim(Objective.COST, 0.25, 0.2)) == (
        "the cheapest step that was found: $0.250; no plan that is searched costs less than"
        " $0.200, however well it overlaps; this one is 25% above that"
    )
    assert aim_words(Aim(Objective.MEMORY, 2048.0, 1024.0)) == (
        "the least peak that was found: 2 KiB; each plan of one stage that is searched holds 1 KiB"
        " or more; this one is 100% above that"
    )
    assert aim_words(Aim(Objective.MEMORY, 2048.0)).endswith("nothing is proved of others")


def test_costs_of_one_plan() -> None:
    plan = example()
    cluster = Prices((("", HourlyPrice(3.0, "them", "May")),)).on(load_cluster(plan.cluster))
    assert plan.prediction is not None
    step_s = plan.prediction.step_s
    document = plan_cost_document(plan, cluster, step_s, 1e9)
    an_hour = usd_per_hour(cluster, plan.decisions)
    assert an_hour == document["usd_per_hour"] == 3.0 * plan.decisions.num_ranks
    assert document["usd_per_step"] == pytest.approx(an_hour * step_s / 3600)
    assert any("them, May" in line for line in cost_lines(plan, cluster, step_s))
    assert cost_lines(plan, load_cluster("4xcpu"), step_s) == []
    assert usd_per_hour(load_cluster("4xcpu"), Decisions()) is None


def test_a_front_has_all_that_is_on_the_edge() -> None:
    """Rows that differ in the last bit only are different."""
    close = (1.0, nextafter(1.0, 0.0))
    assert pareto_front([(1.0, 1.0), close], lambda p: p) == [close]
