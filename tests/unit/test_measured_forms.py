"""What `benchmarks/measured_forms.py` measures and says."""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from parloom.ir.graph import Graph, Node

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module() -> Iterator[Any]:
    """A module of the benchmark by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield import_module


def row(form: str, predicted_s: float, ratio: float = 1.0, **more: Any) -> dict[str, Any]:
    measured = {"s": ratio, "quartiles_s": [ratio, ratio], "ratio": [ratio, ratio, ratio]}
    return {
        "model": "nasrnn", "mode": "training", "form": form, "rules": {}, "rewrites": [],
        "predicted_s": predicted_s, "eager": measured, **more,
    }  # fmt: skip


def test_published_speedups_are_of_the_methods_that_chose_a_form(module: Any) -> None:
    tables = module("measured_forms_tables")
    assert tables.published(row("tensat", 1.0)) == f"tensat {1 / 1.689:.3f}"
    assert "taso 0.688" in tables.published(row("original, taso, tensat", 1.0))
    assert tables.published(row("auto", 1.0)) == ""
    assert tables.published(row("taso", 1.0, model="lora")) == ""


def test_a_form_that_is_slower_than_predicted_faster_is_told(module: Any) -> None:
    tables = module("measured_forms_tables")
    rows = [row("original", 1.0), row("auto", 0.5, 1.25), row("taso", 1.5, 0.75)]
    said = list(tables.wrong(rows))
    assert [line.partition(":")[0] for line in said] == [
        "nasrnn, training, eager, auto", "nasrnn, training, eager, taso",
    ]  # fmt: skip
    assert not list(tables.wrong([rows[0], row("auto", 0.5, 0.9), row("taso", 1.0, 1.25)]))
    again = row("original, again", 0.5, 1.25)
    assert not list(tables.wrong([rows[0], again]))
    assert "| nasrnn | auto | - | 500.0 | 0.500 | 1250.0" in tables.tables(rows)


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_losses_that_differ_are_refused(module: Any, wrong: float) -> None:
    forms = module("measured_forms")
    forms.check({"one": 1.0, "other": 1.0 + 1e-6}, forms.CLOSE)
    with pytest.raises(forms.WrongError, match="that of other"):
        forms.check({"one": 1.0, "other": wrong}, forms.CLOSE)


@pytest.mark.slow
def test_a_form_that_computes_something_else_is_refused(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, forms = module("measured_forms_plans"), module("measured_forms")
    subject = forms.Subject("nasrnn", forms.TRAINING, small=True, double=True)
    rewrites = plans.rewrites_of(plans.merges(subject.graph))
    original, merged = (
        plans.Form(texts, (("it", 0.0),), plans.alone(subject.graph), 1.0, "spec")
        for texts in ((), rewrites)
    )
    forms.prove(subject, {"original": original, "merged": merged})

    def wrong(graph: Graph, texts: Any) -> Graph:
        (cell,) = graph.functions
        body = tuple(
            replace(item, op="sigmoid") if isinstance(item, Node) and item.op == "tanh" else item
            for item in cell.body
        )
        return replace(graph, functions=(replace(cell, body=body),)) if texts else graph

    monkeypatch.setattr(forms, "derived", wrong)
    with pytest.raises(forms.WrongError, match="that of merged"):
        forms.prove(subject, {"original": original, "merged": merged})


def test_models_have_the_published_sizes(module: Any) -> None:
    subjects = module("measured_forms_models").SUBJECTS
    sizes = {"squeezenet": 1_235_496, "nasrnn": 5 * 16 * 512 * 512}  # torchvision's; TASO's example
    for name, size in sizes.items():
        model, _ = subjects[name].built(small=False)
        assert sum(p.numel() for p in model.parameters()) == size


@pytest.mark.parametrize("frozen", [True, False])
def test_only_what_should_trains_in_adapted_models(module: Any, frozen: bool) -> None:
    name = "lora_frozen" if frozen else "lora"
    model, batch = module("measured_forms_models").SUBJECTS[name].built(small=True)
    model(**batch)[0].backward()
    trained = {n.split(".")[-2] for n, p in model.named_parameters() if p.grad is not None}
    assert trained == {"head"} | (set() if frozen else {"down", "up"})


@pytest.mark.slow
def test_a_merged_form_is_measured_and_trains_alike(module: Any) -> None:
    plans, forms = module("measured_forms_plans"), module("measured_forms")
    torch.set_num_threads(1)
    subject = forms.Subject("nasrnn", forms.TRAINING, small=True)
    costs = plans.Costs(plans.ProcessorClock(torch.device("cpu"), 1e-3))
    found = plans.Forms(subject.graph, costs, lambda line: None).found((plans.MERGES,))
    assert [form.rules for form in found] == [{}, {"merge_linear": 2}]
    assert all(form.source == "measured" for form in found)
    assert any("parloom.linears" in timed.key for timed in costs.calibration.operators)
    steps = {form.methods[0][0]: subject.step(form.pcg, forms.EAGER) for form in found}
    forms.compare(steps, forms.CLOSE)
    summary = forms.measured(steps, 3)
    assert summary["original"]["ratio"] == (1.0, 1.0, 1.0)
    assert summary[plans.MERGES]["steps"] == 3


def test_forms_of_a_forward_pass_have_the_weights_of_training(module: Any) -> None:
    plans, forms = module("measured_forms_plans"), module("measured_forms")
    subject = forms.Subject("nasrnn", forms.FORWARD, small=True)
    step = subject.step(plans.alone(subject.graph), forms.EAGER)
    loss = subject.model(**subject.batch)[0].item()
    assert step() == pytest.approx(loss)
    assert step() == pytest.approx(loss)  # nothing is trained
