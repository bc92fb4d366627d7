"""Branches that only raise are not taken; those that do something are still refused."""

from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal, kl_divergence

from parloom.capture import capture
from parloom.errors import CaptureError
from tests.capture.models import assert_equal, run_graph


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 4)

    def check(self, x: Tensor, h: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.tokens(x)
        self.check(x, h)
        return h.square().sum()


class Plain(Net):
    def check(self, x: Tensor, h: Tensor) -> None:
        if x.max() >= 8:
            raise ValueError(f"a token of {x.shape}")
        if not torch.isfinite(h).all():
            message = "not finite"
            raise ValueError(message)


class Mixed(Net):
    def check(self, x: Tensor, h: Tensor) -> None:
        limit = 8
        if (
            (limit is not None and not (x < limit).all())
            or x.min() < 0
            or not (h.abs() < 1e9).all()
        ):
            raise ValueError("out of range")


class Chosen(Net):
    def check(self, x: Tensor, h: Tensor) -> None:
        if x.max() >= 8:
            raise ValueError("too large")
        elif x.min() < 0:
            h.mul_(2)


class Clamped(Net):
    def check(self, x: Tensor, h: Tensor) -> None:
        if not torch.isfinite(h).all():
            h.clamp_(-1, 1)


class Variational(Net):
    """What torch.distributions checks is no branch of the model either."""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.tokens(x)
        wanted = Normal(h, F.softplus(h) + 0.1)
        prior = Normal(torch.zeros_like(h), torch.ones_like(h))
        drawn = wanted.rsample()
        chosen: Tensor = Categorical(logits=drawn).log_prob(x % 4)  # type: ignore[no-untyped-call]
        loss: Tensor = kl_divergence(wanted, prior).mean() - chosen.mean()
        return loss


class Balanced(Net):
    """Weighs classes by how often they come, as losses that balance experts do."""

    def __init__(self, bins: int = 8) -> None:
        super().__init__()
        self.bins = bins

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.tokens(x)
        flat = x.flatten()
        counts = torch.bincount(flat, minlength=self.bins)
        sizes = flat.bincount(h.detach().sum(-1).flatten(), self.bins)
        return (h.mean((0, 1)).sum() * counts.float().square().sum()) + (h.sum() * sizes).sum()


class Seq2Seq(Net):
    """Torch's transformer looks into its mask; its Gaussian loss refuses negative variances."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.tokens(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out = self.body(h, h, tgt_mask=mask)
        return F.gaussian_nll_loss(out, h.detach(), F.softplus(h))


def batch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randint(8, (4, 3))}


@pytest.mark.parametrize("kind", [Plain, Mixed])
def test_branches_that_only_raise_go(kind: type[Net]) -> None:
    model = kind()
    graph = capture(model, batch())
    assert [node.op for _, node in graph.unfolded()] == ["embedding", "square", "sum"]
    assert_equal(graph, model, batch())


@pytest.mark.parametrize("kind", [Chosen, Clamped])
def test_other_branches_are_refused(kind: type[Net]) -> None:
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(kind(), batch())


def test_assertions_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a file of their own: pytest writes the assertions of tests anew.
    (tmp_path / "asserting.py").write_text(
        "def check(x, h):\n"
        "    assert (x >= 0).all()\n"
        '    assert h is not None and not (h > 1e9).any(), "too large"\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = Net()
    model.check = import_module("asserting").check  # type: ignore[method-assign]
    assert [node.op for _, node in capture(model, batch()).unfolded()] == [
        "embedding", "square", "sum",
    ]  # fmt: skip


def test_what_torch_itself_asks_is_answered() -> None:
    model = Seq2Seq()
    graph = capture(model, batch())
    found = run_graph(graph, model, batch())["loss"]
    assert found is not None
    torch.testing.assert_close(found, model(**batch()), rtol=1e-6, atol=0)
    assert nn.modules.transformer._detect_is_causal_mask.__module__.startswith("torch.")


def test_distributions_are_captured() -> None:
    model = Variational()
    graph = capture(model, batch())
    assert_equal(graph, model, batch())
    assert "randn" in {node.op for _, node in graph.unfolded()}


def test_counts_have_the_bins_that_are_asked_for() -> None:
    model = Balanced()
    graph = capture(model, batch())
    assert_equal(graph, model, batch())
    assert "scatter_add" in {node.op for _, node in graph.unfolded()}
    assert {v.spec.shape for _, n in graph.unfolded() for v in n.results if n.op == "zeros"} == {
        (8,)
    }
    few = Balanced(2)
    with pytest.raises(RuntimeError, match="out of bounds"):  # torch would make more bins
        run_graph(capture(few, batch()), few, batch())
