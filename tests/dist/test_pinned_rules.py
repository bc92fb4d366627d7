"""Rules that pins name, and what plans have of them."""

import re
from collections.abc import Mapping
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from parloom import api
from parloom.errors import InputError
from parloom.ir.plan import Plan
from parloom.report.words import constraint_lines
from parloom.rewrite.rewrites import takes_of

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
            " that it rewrites",
        ),
        (
            {"pin": ["rewrite=fold_scale", "head=replicated"]},
            "--pin rewrite=fold_scale: it applies nowhere: no operators of this model have the form"
            " that it rewrites, but for those in blocks that other pins leave as they are",
        ),
    ],
)
def test_why_a_rewrite_cannot_be_pinned(asked: Mapping[str, list[str]], said: str) -> None:
    with pytest.raises(InputError) as caught:
        api.search(captured(), cluster="1xcpu", **asked)  # type: ignore[arg-type]
    assert str(caught.value) == said
