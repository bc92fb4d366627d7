"""Rules that pins name, and what plans have of them."""

import re

import torch
from torch import Tensor, nn

from parloom import api
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


def rules_of(plan: Plan) -> set[str]:
    return {rule for take in takes_of(plan.decisions.rewrites) for rule in take.rules}


def test_a_rule_is_pinned_and_forbidden_with_its_cases() -> None:
    """Found by a user: plans name the case of a number, messages the rule."""
    captured = api.capture(f"{__file__}:averaged", optimizer="adamw")
    rules = rules_of(api.search(captured, cluster="1xcpu"))
    (case,) = (own for own in rules if re.fullmatch("mul_linear_[0-9a-f]{6}_0p5", own))
    name = case.removesuffix("_0p5")
    plan = api.search(captured, cluster="1xcpu", forbid=[f"rewrite={name}"])
    assert not any(rule.startswith(name) for rule in rules_of(plan))
    (line,) = constraint_lines(plan)
    assert re.search(r"(the same by other rules|other rules for head): \w+", line)
    plan = api.search(captured, cluster="1xcpu", pin=[f"rewrite={name}"])
    assert case in rules_of(plan)
