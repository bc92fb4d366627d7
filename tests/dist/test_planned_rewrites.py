"""Rewrites that `auto` chooses together with layouts, from the model to the proof."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parloom import api
from parloom.errors import InputError
from parloom.execute.machine import machine_of
from parloom.explain import explain
from parloom.ir.graph import Call
from parloom.ir.lower_stages import lower_stages
from parloom.ir.mesh import Mesh
from parloom.ir.plan import ActivationDecision, Decisions, Plan, Stage, one_stage
from parloom.ir.stages import stage_items
from parloom.ir.text import parse_graph
from parloom.report.output import rendered
from parloom.rewrite.rewrites import rewritten, takes_of

torch.set_num_threads(1)
# Two devices, as searches over four take twice as long; one model has a mesh of two axes.
CLUSTERS = {"towers": "2x2xcpu"}


class Siamese(nn.Module):
    """Products of two operands with one weight: one is added up, functions of another joined."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)
        self.head = nn.Linear(512, 256)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        both = torch.cat([F.gelu(self.v(x)), F.gelu(self.v(y))], -1)
        loss: Tensor = (self.w(x) + self.w(y) + self.head(both)).square().mean()
        return loss


class Chain(nn.Module):
    """A low-rank product, made of its factors first."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(256, 4) / 16)
        self.q = nn.Parameter(torch.randn(4, 256) / 2)
        self.last = nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.last(torch.relu(x @ (self.p @ self.q))).square().mean()
        return loss


class Below(nn.Module):
    """A low-rank product in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.inner(x).square().mean()
        return loss


class Inner(Chain):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(torch.relu(x @ (self.p @ self.q)))
        return made


class Linear(nn.Module):
    """Attention without softmax, the scores of all pairs of positions first."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            own(x).unflatten(-1, (2, 16)).transpose(1, 2)
            for own in (self.query, self.key, self.value)
        )
        scores = F.elu(query) @ F.elu(key).transpose(-1, -2) / 3
        loss: Tensor = (scores @ value).square().mean()
        return loss


class Attention(nn.Module):
    """Blocks whose queries, keys and values are of one operand; the dropout has masks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (own(x).unflatten(-1, (4, 8)).transpose(1, 2) for own in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(q, k, v)
        made: Tensor = x + self.dropout(found.transpose(1, 2).flatten(-2))
        return made


class Unequal(nn.Module):
    """Products of one operand, of unequal widths: as one, their dims have other factors."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(256, 768), nn.Linear(256, 512)
        self.d, self.e = nn.Linear(768, 256), nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.d(self.a(x).relu()) + self.e(self.b(x).tanh())).square().mean()
        return loss


class Chains(nn.Module):
    """Ways that build on each other: of one value there are several."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((64, 4), (4, 64), (64, 4), (4, 64))
        self.parts = nn.ParameterList(torch.randn(*shape) / 8 for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        p, q, r, t = self.parts
        loss: Tensor = (x @ (p @ q) @ (r @ t)).square().mean()
        return loss


class Masked(nn.Module):
    """Sums of masks are "or"."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        h = self.w(x)
        loss: Tensor = (h * a + h * b).square().mean()
        return loss


class Frozen(nn.Module):
    """Convolutions that are trained, with norms of fixed statistics behind them: torch's, and one
    that is written out, as torchvision's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 32, 3, padding=1, bias=False)
        self.second = nn.Conv2d(32, 32, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(32).eval()
        for name, start in (("scale", 0.5), ("shift", 0.0), ("mean", 0.0), ("variance", 0.5)):
            self.register_buffer(name, torch.rand(32) + start)
        self.norm.running_mean.normal_()  # type: ignore[union-attr]
        for own in self.norm.parameters():
            own.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift, mean, variance = (
            getattr(self, name).reshape(1, -1, 1, 1)
            for name in ("scale", "shift", "mean", "variance")
        )
        x = self.norm(self.first(x)).relu()
        times = scale * (variance + 1e-5).rsqrt()
        loss: Tensor = (self.second(x) * times + (shift - mean * times)).square().mean()
        return loss


class Adapter(nn.Module):
    """A frozen product with a low-rank one beside it."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.whole = nn.Linear(256, 256).requires_grad_(False)
        self.down = nn.Linear(256, 8, bias=False).requires_grad_(trained)
        self.up = nn.Linear(8, 256, bias=False).requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.whole(x) + self.up(self.down(x)) * 2.0
        return found


class Adapted(nn.Module):
    """Products with adapters between trained ones."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.first, self.adapter = nn.Linear(32, 256), Adapter(trained)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.adapter(self.first(x)).square().mean()
        return loss


class Unread(nn.Module):
    """The loss does not depend on the part that one weight makes, whose gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 128))
        self.v, self.unread = nn.Parameter(torch.randn(128)), nn.Parameter(torch.randn(128))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        both = torch.cat((x * self.v, y * self.unread), 1)
        loss: Tensor = (torch.split(both, [128, 128], 1)[0].relu() * self.w).sum()
        return loss


class Mixed(nn.Module):
    """Calls that only their dtype keeps apart."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(16))

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        narrow = torch.tanh(a * 2.0).float().sum() + torch.tanh(b * 2.0).float().sum()
        loss: Tensor = narrow + torch.tanh(c * 2.0).sum() + torch.tanh(d * 2.0).sum() + self.v.sum()
        return loss


class Stacked(nn.Module):
    """As many tensors as each has rows are stacked: no shape tells where."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(4, 2, 2)), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        one, other = torch.split(torch.cat((x * self.v, y * self.v), 1), [2, 2], 1)
        loss: Tensor = (torch.stack((one, z), 1).relu() * self.w).sum() + other.relu().sum()
        return loss


def unread() -> tuple[nn.Module, dict[str, Tensor]]:
    return Unread(), {"x": torch.randn(64, 128), "y": torch.randn(64, 128)}


def mixed() -> tuple[nn.Module, dict[str, Tensor]]:
    narrow = {name: torch.randn(8, 16).bfloat16() for name in "ab"}
    return Mixed(), {**narrow, **{name: torch.randn(8, 16) for name in "cd"}}


def stacked() -> tuple[nn.Module, dict[str, Tensor]]:
    return Stacked(), {name: torch.randn(4, 2) for name in "xyz"}


def unequal() -> tuple[nn.Module, dict[str, Tensor]]:
    return Unequal(), {"x": torch.randn(64, 256)}


def chains() -> tuple[nn.Module, dict[str, Tensor]]:
    return Chains(), {"x": torch.randn(32, 64)}


def masked() -> tuple[nn.Module, dict[str, Tensor]]:
    masks = {name: torch.rand(512, 256) > 0.3 for name in "ab"}
    return Masked(), {"x": torch.randn(512, 256), **masks}


class Towers(nn.Module):
    """Two inputs of different lengths through the same layers, which are one."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.tower(x).square().mean() + self.head(self.tower(y)).mean()
        return loss


def towers() -> tuple[nn.Module, dict[str, Tensor]]:
    return Towers(), {"x": torch.randn(16, 32), "y": torch.randn(48, 32)}


def frozen() -> tuple[nn.Module, dict[str, Tensor]]:
    return Frozen(), {"x": torch.randn(32, 4, 24, 24)}


def adapted() -> tuple[nn.Module, dict[str, Tensor]]:
    return Adapted(trained=False), {"x": torch.randn(2048, 32)}


def adapting() -> tuple[nn.Module, dict[str, Tensor]]:
    return Adapted(trained=True), {"x": torch.randn(2048, 32)}


def siamese() -> tuple[nn.Module, dict[str, Tensor]]:
    return Siamese(), {"x": torch.randn(512, 256), "y": torch.randn(512, 256)}


def chain() -> tuple[nn.Module, dict[str, Tensor]]:
    return Chain(), {"x": torch.randn(512, 256)}


def below() -> tuple[nn.Module, dict[str, Tensor]]:
    return Below(), {"x": torch.randn(512, 256)}


def attention() -> tuple[nn.Module, dict[str, Tensor]]:
    return Attention(), {"x": torch.randn(16, 8, 32)}


def linear() -> tuple[nn.Module, dict[str, Tensor]]:
    return Linear(), {"x": torch.randn(8, 256, 32)}


@cache
def captured(name: str) -> api.Captured:
    return api.capture(f"{__file__}:{name}", optimizer="adamw")


def asked(name: str, **pins: Any) -> Plan:
    return api.search(captured(name), cluster=CLUSTERS.get(name, "2xcpu"), **pins)


@cache
def planned(name: str, *forbid: str) -> Plan:
    return asked(name, forbid=list(forbid))


def rules_of(plan: Plan) -> set[str]:
    return {rule for take in takes_of(plan.decisions.rewrites) for rule in take.rules}


CHOSEN: Mapping[str, str] = {
    "siamese": "linear_add",
    "chain": "matmul_",
    "attention": "merge_linear",
    "linear": "div_matmul",
    "towers": "linear_along_d0",
    "frozen": "fold_",
    "adapted": "linear_matmul",
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CHOSEN)
def test_what_pays_is_chosen_and_proved(name: str) -> None:
    plan = planned(name)
    assert any(rule.startswith(CHOSEN[name]) for rule in rules_of(plan))
    report = api.verify(plan)
    assert report.passed
    without = planned(name, "rewrite=*")
    assert not without.decisions.rewrites
    assert plan.prediction is not None
    assert without.prediction is not None
    assert plan.prediction.step_s < without.prediction.step_s
    # What rewrites save is what forbidding them costs.
    (cost,) = without.constraints
    assert cost.text == "--forbid rewrite=*"


@pytest.mark.parametrize(
    ("name", "asked_for"),
    [
        ("unread", {}),
        ("mixed", {"pin": ["rewrite=tanh_along_d0"]}),
        ("stacked", {"method": "taso"}),
    ],
)
def test_what_shapes_and_dtypes_do_not_tell_is_proved(name: str, asked_for: Any) -> None:
    """Found by an attacker: no gradient where it is zero, calls apart by dtype alone, and dims of
    stacks.
    """
    plan = asked(name, **asked_for)
    assert takes_of(plan.decisions.rewrites)
    assert api.verify(plan).passed


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CHOSEN)
def test_explain_says_what_each_saves(name: str) -> None:
    plan = planned(name)
    rewrites = explain(plan).document["rewrites"]
    assert len(rewrites) == len(plan.decisions.rewrites)
    longest_s = explain(planned(name, "rewrite=*")).document["step_s"]
    for found in rewrites:
        assert set(found["rules"]) <= rules_of(plan)
        assert found["before"]
        assert found["after"]
        assert abs(found["saved_s"]) < longest_s
    assert max(found["saved_s"] for found in rewrites) > 0


def test_generated_source_names_the_rule(tmp_path: Path) -> None:
    api.save(planned("attention"), tmp_path)
    text = (tmp_path / "program.py").read_text()
    assert "(merge_linear)" in text
    assert "(merge_linear)" not in "".join(parse_graph(planned("attention").graph).name)


def test_a_pinned_rewrite_is_made_wherever_it_applies() -> None:
    plan = asked("attention", pin=["rewrite=merge_linear"])
    (take,) = takes_of(plan.decisions.rewrites)
    calls = [i for i in parse_graph(plan.graph).main.body if isinstance(i, Call)]
    assert {call.function for call in calls} == {take.function}
    for name, pin, said in (
        ("chain", "merge_linear", "applies nowhere: no operators of this model have the form"),
        ("chain", "merge_lineer", "did you mean 'merge_linear'"),
        ("attention", "softmax_cat*", "applies nowhere"),
    ):
        with pytest.raises(InputError, match=said):
            asked(name, pin=[f"rewrite={pin}"])


def test_an_edited_rewrite_is_refused() -> None:
    plan = planned("chain")
    (text,), (take,) = plan.decisions.rewrites, takes_of(plan.decisions.rewrites)
    rule = take.rules[0]
    for old, new, said in (
        (f" by {rule}", f" by x{rule}", f"no rule 'x{rule}"),
        (", q)", ", relu(q))", f"does not follow from {rule}"),
    ):
        assert old in text
        wrong = replace(plan.decisions, rewrites=(text.replace(old, new),))
        with pytest.raises(InputError, match=said):
            api.verify(replace(plan, decisions=wrong))


@pytest.mark.slow
def test_a_pin_on_an_operator_leaves_its_block_as_it_is() -> None:
    plan = asked("attention", pin=["blocks.0.q=d0:x"])
    assert not plan.decisions.rewrites
    assert api.verify(plan).passed


@pytest.mark.slow
def test_products_of_unequal_widths_are_planned_on_several_devices() -> None:
    """Where they stay apart, their splits are said in their own factors."""
    plan = asked("unequal", devices=2)
    assert api.verify(plan).passed
    assert explain(asked("unequal", devices=2, pin=["rewrite=merge_linear"])).document["rewrites"]


def test_pinned_ways_that_build_on_each_other_are_made_together() -> None:
    plan = asked("chains", pin=["rewrite=linear_matmul*"])
    values = [value for take in takes_of(plan.decisions.rewrites) for value in take.values]
    assert len(values) == len(set(values)) > 0
    assert api.verify(plan).passed


def test_pins_of_stages_and_of_a_rewrite_are_held_together() -> None:
    plan = asked("attention", pin=["stages=2", "rewrite=merge_linear"])
    assert len(plan.decisions.stages) == 2
    assert "merge_linear" in rules_of(plan)
    assert api.verify(plan).passed


def test_products_with_masks_stay_apart() -> None:
    plan = asked("masked")
    assert not plan.decisions.rewrites
    assert api.verify(plan).passed


def test_norms_with_fixed_statistics_are_folded() -> None:
    """Each form of them, while the kernels train."""
    assert {"fold_batch_norm", "fold_scale", "fold_shift"} <= rules_of(planned("frozen"))


def products(plan: Plan) -> list[str]:
    """The calls by which values are computed in other ways than the model says."""
    return [str(take.call) for take in takes_of(plan.decisions.rewrites)]


def test_factors_are_multiplied_where_none_of_them_is_trained() -> None:
    """While they train, the product of all weights has a gradient of its own: its price."""
    (call,) = products(planned("adapted"))
    assert call.startswith("linear(")
    assert "adapter_whole_weight" in call
    assert not any("adapter_whole_weight" in call for call in products(planned("adapting")))
    assert not any("matmul(" in call or "mm(" in call for call in products(planned("adapting")))
    assert api.verify(planned("adapting")).passed


def in_stages(plan: Plan, *at: int, rewrites: tuple[str, ...] | None = None) -> Plan:
    """A pipeline on one device each, cut before these items, with the rewrites of `plan`."""
    rewrites = plan.decisions.rewrites if rewrites is None else rewrites
    items = stage_items(rewritten(parse_graph(plan.graph), rewrites))
    ends = zip((0, *at), (*at, len(items)), strict=True)
    stages = tuple(Stage(items[a:b], (range(i, i + 1),), Mesh(())) for i, (a, b) in enumerate(ends))
    made = Decisions(stages, num_microbatches=4, schedule="1f1b", rewrites=rewrites)
    return replace(plan, cluster="1x2xV100", decisions=made, prediction=None, constraints=())


def step_s(plan: Plan) -> float:
    programs = lower_stages(
        rewritten(parse_graph(plan.graph), plan.decisions.rewrites), plan.decisions
    )
    return machine_of(plan).play(programs, plan.decisions, plan.optimizer).step_s


# Where each is cut with and without its rewrite: one in a block, one in main.
CUTS = {"attention": (1, 1), "chain": (2, 2)}


@pytest.mark.parametrize("name", CUTS)
def test_explain_says_what_rewrites_save_in_pipelines(name: str) -> None:
    with_it, without_it = CUTS[name]
    plan = in_stages(planned(name), with_it)
    answer = explain(plan)
    (found,) = answer.document["rewrites"]
    assert found["rules"]
    assert found["before"]
    assert found["after"]
    assert not found["changed"]
    # On one device each there are no other ways: the same pipeline of the model as it is.
    plain = in_stages(planned(name), without_it, rewrites=())
    assert found["saved_s"] == pytest.approx(step_s(plain) - step_s(plan), abs=1e-12)
    assert found["saved_s"] != pytest.approx(
        step_s(in_stages(planned(name), 1 + without_it, rewrites=())) - step_s(plan), abs=1e-12
    )
    assert found["stages"]
    shown = rendered(answer.screen, 200)
    assert "against the plan without it" in shown
    assert all(own["name"] in shown for own in found["stages"])


def test_explain_says_what_rewrites_save_beside_blocks() -> None:
    """Modules of the rewritten graph are blocks, which are made again."""
    plan = planned("below")
    rewrites = (*plan.decisions.rewrites, "block inner")
    made = Decisions(
        one_stage(Mesh(())),
        activations=(ActivationDecision("inner", "recompute"),),
        rewrites=rewrites,
    )
    blocked = replace(plan, cluster="1x1xV100", decisions=made, prediction=None, constraints=())
    (found,) = explain(blocked).document["rewrites"]
    decisions = replace(made, rewrites=("block inner",))
    plain = replace(blocked, decisions=decisions)
    assert found["saved_s"] == pytest.approx(step_s(plain) - step_s(blocked), abs=1e-12)
    assert not found["changed"]
    assert not found["stages"]
