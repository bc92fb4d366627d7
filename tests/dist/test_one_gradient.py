"""One gradient for several readers: autograd gives both addends of a sum the same memory, which is
scaled, added to and sent for each of them apart.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from parloom import runtime as rt
from parloom.execute import reference
from parloom.execute.program import compile_pcg
from parloom.execute.reference import run_step
from parloom.execute.verify import reference_trace
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.microbatches import of_microbatch
from parloom.ir.plan import Action, Decisions, one_stage
from parloom.ir.schedules import STEP
from parloom.ir.stages import stage_items
from parloom.runtime import leaves, passes
from tests.dist import lowered, staged


class Positions(nn.Module):
    """Two tables of positions that are added up, and then to what comes from a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.rows, self.columns = (nn.Parameter(torch.randn(4, 6)) for _ in range(2))
        self.last = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        places = self.rows.unsqueeze(0) + self.columns.unsqueeze(0)
        hidden = self.layer(x) + places
        loss: Tensor = (hidden.transpose(0, 1) + self.last.unsqueeze(1)).square().sum()
        return loss


def model() -> lowered.Model:
    torch.manual_seed(0)
    return lowered.of(Positions(), {"x": torch.randn(2, 4, 6)})


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_each_weight_has_a_gradient_of_its_own(steps: int, clip: float | None) -> None:
    own = model()
    plan = Decisions(one_stage(grid({"x": 1})), num_microbatches=steps)
    program = compile_pcg(lower(own.graph, plan), "test").program

    def rank(comm: rt.Comm) -> dict[str, Tensor]:
        trainer = rt.Trainer(
            program,
            own.tensors,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.0),
            comm=comm,
            clip_norm=clip,
        )
        trainer.step(own.batch)
        helds = trainer.parts[0].store.helds
        return {
            name: held.owned.grad for name, held in helds.items() if held.owned.grad is not None
        }

    (found,) = rt.run_threads(program.mesh, rank)
    expected = own.expected.gradients
    norm = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
    scale = 1.0 if clip is None else clip / (norm + 1e-6)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient * scale)


def proved(schedule: str, lists: tuple[tuple[Action, ...], ...] = ()) -> bool:
    """Whether two stages, of which the second one adds the last table, are the model: on a rank
    each, or with `lists` on one rank.
    """
    own = model()
    expected = reference_trace(own.graph, staged.PLANNED, own.tensors, own.batch)
    items = stage_items(own.graph)
    at = next(i for i, key in enumerate(items) if ":transpose" in key)
    plan = staged.drawn(
        own.graph, [items[:at], items[at:]], [1, 1], schedule="gpipe", num_microbatches=2
    )
    if lists:
        stages = tuple(replace(stage, devices=(range(1),)) for stage in plan.stages)
        plan = replace(plan, stages=stages, actions=lists)
    return staged.report(own, replace(plan, schedule=schedule), expected).passed


# All backward passes of the second stage come before those of the first one.
ONE_RANK = (
    *(Action(kind, m, stage) for stage, kind in ((0, "F"), (1, "F"), (1, "B"), (0, "B"))
      for m in range(2)),
    *STEP,
)  # fmt: skip


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_stages_send_what_no_weight_adds_to(schedule: str) -> None:
    assert proved(schedule)


def test_what_stays_on_a_rank_is_nothing_that_a_weight_adds_to() -> None:
    assert proved("listed", (ONE_RANK,))


def test_the_reference_of_microbatches_adds_to_each_weight_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of two microbatches counts half."""
    own = model()
    first = {"x": own.batch["x"][:1].float()}
    part = of_microbatch(lowered.of(Positions(), first).graph, {"x": 0}, 2)

    def found() -> dict[str, Tensor]:
        state = {name: t.clone().requires_grad_() for name, t in own.tensors.items()}
        run_step(part, state, own.batch, lambda *_: None)
        return {name: t.grad for name, t in state.items() if t.grad is not None}

    for name, gradient in found().items():
        torch.testing.assert_close(2 * gradient, own.expected.gradients[name])
    monkeypatch.setattr(reference, "separate", lambda _: None)
    assert not torch.allclose(2 * found()["rows"], own.expected.gradients["rows"])


def test_shared_memory_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_they_are(gradients: object, others: object) -> object:
        return gradients

    with monkeypatch.context() as patch:
        patch.setattr(leaves, "apart", as_they_are)
        with pytest.raises(AssertionError):
            test_each_weight_has_a_gradient_of_its_own(2, None)
        with pytest.raises(AssertionError):
            test_each_weight_has_a_gradient_of_its_own(1, 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(passes, "apart", as_they_are)
        assert not proved("listed", (ONE_RANK,))
