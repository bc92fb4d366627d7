"""Rules that pins name, and what plans have of them."""

import re
from collections.abc import Mapping
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from parloom import api
from parloom.errors import InputError
from parloom.explain import explain
from parloom.ir.graph import Call
from parloom.ir.plan import Plan
from parloom.ir.text import parse_graph
from parloom.report.output import rendered
from parloom.report.words import constraint_lines
from parloom.rewrite.rewrites import takes_of
from tests.dist.test_planned_rewrites import planned

torch.set_num_threads(1)


class Averaged(nn.Module):
    """The mean of two towers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256, bias=False))
            for _ in range(2)
        )
        self.head = nn.Linear(256, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.head(0.5 * self.a(x) + 0.5 * self.b(y)).square().mean()
        return loss


def averaged() -> tuple[nn.Module, dict[str, Tensor]]:
    return Averaged(), {"x": torch.randn(512, 256), "y": torch.randn(512, 256)}


@cache
def captured() -> api.Captured:
    return api.capture(f"{__file__}:averaged", optimizer="adamw")


def rules_of(plan: Plan) -> set[str]:
    return {rule for take in takes_of(plan.decisions.rewrites) for rule in take.rules}


def test_a_rule_is_pinned_and_forbidden_with_its_cases() -> None:
    """Found by a user: plans name the case of a number, messages the rule."""
    rules = rules_of(api.search(captured(), cluster="1xcpu"))
    (case,) = (own for own in rules if re.fullmatch("mul_linear_[0-9a-f]{6}_0p5", own))
    name = case.removesuffix("_0p5")
    plan = api.search(captured(), cluster="1xcpu", forbid=[f"rewrite={name}"])
    assert not any(rule.startswith(name) for rule in rules_of(plan))
    (line,) = constraint_lines(plan)
    assert re.search(r"(the same by other rules|other rules for head): \w+", line)
    plan = api.search(captured(), cluster="1xcpu", pin=[f"rewrite={name}"])
    assert case in rules_of(plan)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", ["mul_linear_069230", "mul_linear_8c707d"])
def test_no_rule_that_is_forbidden_makes_the_plan_faster(rule: str) -> None:
    """Found by a user: with half as many calls in its e-graph the search missed the better form."""
    free, without = (
        api.search(captured(), cluster="1xcpu", forbid=forbid)
        for forbid in ([], [f"rewrite={rule}"])
    )
    assert free.prediction is not None
    assert without.prediction is not None
    assert free.prediction.step_s <= without.prediction.step_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"pin": ["rewrite=merge_linear"], "forbid": ["rewrite=*"]},
            "--pin rewrite=merge_linear and --forbid rewrite=* (--no-rewrites) contradict each"
            " other; leave one out",
        ),
        (
            {"pin": ["rewrite=mul_linear_8c707d_0p5"], "forbid": ["rewrite=mul_linear_8c707d"]},
            "--pin rewrite=mul_linear_8c707d_0p5 and --forbid rewrite=mul_linear_8c707d contradict"
            " each other; leave one out",
        ),
        (
            {"pin": ["rewrite=fold_scale"], "forbid": ["rewrite=fold_shift"]},
            "--pin rewrite=fold_scale: it applies nowhere: no operators of this model have the form"
            " that it rewrites, or the ranks and dtypes that it is for",
        ),
        (
            {"pin": ["rewrite=fold_scale", "head=replicated"]},
            "--pin rewrite=fold_scale: it applies nowhere: no operators of this model have the form"
            " that it rewrites, or the ranks and dtypes that it is for, but for those in blocks"
            " that other pins leave as they are",
        ),
    ],
)
def test_why_a_rewrite_cannot_be_pinned(asked: Mapping[str, list[str]], said: str) -> None:
    with pytest.raises(InputError) as caught:
        api.search(captured(), cluster="1xcpu", **asked)  # type: ignore[arg-type]
    assert str(caught.value) == said


def test_explain_says_what_took_the_place_of_a_name() -> None:
    plan = planned("attention")
    blocks = [own.prefix for own in parse_graph(plan.graph).main.body if isinstance(own, Call)]
    assert len(blocks) == 3
    whole = explain(plan).document
    (found,) = whole["rewrites"]
    assert f" in {blocks[0]} and in 2 more blocks: computed by " in found["where"]
    assert found["proof"].endswith("found as the rewrite was made; there is no second proof")
    first = blocks[1]
    into = f"{first}:parloom.linears#0"
    for name in (f"{first}.q", f"{first}.q.weight", f"{first}.q:linear#0", f"{first}.q:linear"):
        answer = explain(plan, name=name)
        (line,) = answer.document["replaced"]
        assert line == (
            f"the model's {first}.q:linear#0 is merged with {first}.k:linear#0,"
            f" {first}.v:linear#0 by merge_linear into the plan's {into}"
        )
        assert line in rendered(answer.screen, 200)
        assert (answer.document["name"] == into) == (":" in name)
    for name in (first, into):
        assert explain(plan, name=name).document["replaced"] == []
    averages = api.search(captured(), cluster="1xcpu")
    for name, gone in (("head.weight", "head"), ("a.2", "a.2"), ("a.2:linear#0", "a.2")):
        document = explain(averages, name=name).document
        (line,) = document["replaced"]
        how = "in another way, by " if gone == "head" else "with head:linear#0, made of it, by "
        assert line.startswith(f"the model's {gone}:linear#0 is computed {how}")
        assert document["name"].startswith("head:" if ":" in name else name)
