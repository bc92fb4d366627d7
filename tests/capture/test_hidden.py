"""What a model does behind the back of a trace: assigned state, hooks on gradients, shared memory.

Each is either in the graph, and then equal to the module over several calls, or refused.
"""

import copy
import types
from collections.abc import Callable
from random import Random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from parloom.capture import capture
from parloom.errors import CaptureError
from tests.capture.models import assert_equal, run_graph


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


class Inner(nn.Module):
    mean: Tensor
    other: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("other", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        return h


class Net(nn.Module):
    """A loss over two layers, of which one is a subclass of `Inner`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), inner

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.inner(self.first(x)).square().sum()
        return loss


BATCH = {"x": torch.linspace(-1.0, 1.0, 12).reshape(3, 4)}


class Average(Inner):
    """Replaces its buffer instead of writing to it, and reads both values."""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        before = self.mean
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h * self.mean + before


class Exchanged(Inner):
    def forward(self, x: Tensor) -> Tensor:
        self.mean, self.other = self.other, self.mean + 1
        h: Tensor = self.a(x) * self.mean
        return h


class Inference(Inner):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            target: Tensor = self.a(x) * 2
        return x + target


@pytest.mark.parametrize("kind", [Average, Exchanged, Inference])
def test_what_is_assigned_or_inferred_is_in_the_graph(kind: type[Inner]) -> None:
    model = Net(kind())
    assert_equal(capture(model, BATCH), model, BATCH)


def test_assigned_buffers_are_updates_and_the_model_stays_as_it_was() -> None:
    inner = Average()
    model, mean = Net(inner), inner.mean
    assert [name for name, _ in capture(model, BATCH).updates] == ["inner.mean"]
    assert inner.mean is mean
    assert torch.equal(mean, torch.ones(4))


class Once(Inner):
    """Makes a table in its first call."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(4.0), persistent=False)
        h: Tensor = self.a(x) * self.get_buffer("table")
        return h


def test_a_buffer_made_once_does_not_stay_in_the_model() -> None:
    model = Net(Once())
    graph = capture(model, BATCH)
    assert "table" not in dict(model.inner.named_buffers())
    assert_equal(graph, model, BATCH)


class Noted(Inner):
    """Notes what a loss function then reads, and a table that it makes once."""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        if not hasattr(self, "mask"):
            self.mask = torch.arange(4.0)
        self.noted = h.square().mean()
        return h * self.mask


def test_what_is_noted_in_a_call_does_not_stay_in_the_model() -> None:
    model = Net(Noted())

    def loss(output: Tensor, _: dict[str, Tensor]) -> Tensor:
        noted: Any = model.inner
        total: Tensor = output + noted.noted
        return total

    graph = capture(model, BATCH, loss=loss)
    assert not {"noted", "mask"} & vars(model.inner).keys()
    found = run_graph(graph, model, BATCH)["loss"]
    assert found is not None
    assert torch.equal(found, loss(model(**BATCH), BATCH))


class Lazy(Inner):
    late: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        self.late = h.detach() if self.late is None else self.late + h.detach()
        return h * self.late


class Wider(Inner):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        self.mean = h.detach()
        return h


class NewWeight(Inner):
    def forward(self, x: Tensor) -> Tensor:
        self.a.weight = nn.Parameter(self.a.weight * 2)
        h: Tensor = self.a(x)
        return h


class Carried(Inner):
    """Keeps a tensor that is no buffer for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Tensor] = {"last": torch.ones(4)}

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x) + self.state["last"]
        self.state["last"] = 0.5 * self.state["last"]
        return h


class CarriedLate(Inner):
    """The same, in an attribute that its first call makes."""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        self.total = getattr(self, "total", 0) + h.detach()
        return h * self.total


class Held(Inner):
    """Counts in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = types.SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        self.notes.calls += 1
        h: Tensor = self.a(x)
        return h if self.notes.calls % 2 else -h.relu()


class Warm(Inner):
    """Does something else from the hundredth call on."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h: Tensor = self.a(x)
        return h if self.calls < 100 else h.relu()


class Drawing(Inner):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        return h if self.generator.random() < 0.5 else h.relu()


class Hooked(Inner):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        h.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
        return h


STATE = r" and then does something else in the next call"
REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (Lazy, r"Net\.inner: forward makes the buffer self\.late float32\[3, 4\], and it was None"),
    (Wider, r"makes the buffer self\.mean float32\[3, 4\], and it was float32\[4\]"),
    (NewWeight, r"Net\.inner\.a: forward assigns a new parameter to self\.weight"),
    (Carried, r"Net\.inner: forward changes self\.state" + STATE),
    (CarriedLate, r"Net\.inner: forward changes self\.total" + STATE),
    (Held, r"Net: forward changes self\.inner\.notes\.calls" + STATE),
    (Warm, r"changes self\.calls and then does something else in a later call"),
    (lambda: Drawing(Random(3)), r"forward draws from self\.inner\.generator, and"),
    (lambda: Drawing(numpy.random.default_rng(3)), r"forward draws from self\.inner\.generator"),
    (Hooked, r"Net\.inner \(test_hidden\.py:\d+\): it registers a hook on a gradient"),
]


@pytest.mark.parametrize(("build", "reason"), REFUSED, ids=lambda p: getattr(p, "__name__", ""))
def test_what_a_plan_would_not_repeat_is_refused(
    build: Callable[[], nn.Module], reason: str
) -> None:
    model = Net(build())
    before = copy.deepcopy(dict(model.named_buffers()))
    with pytest.raises(CaptureError, match=reason):
        capture(model, BATCH)
    after = dict(model.named_buffers())
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_an_observer_in_evaluation_is_no_matter() -> None:
    graph = capture(Net(Hooked()), BATCH, training=False)
    assert graph.loss is not None


def hook_on_module(model: Net) -> None:
    model.first.register_full_backward_hook(lambda *_: None)


def hook_before_module(model: Net) -> None:
    model.first.register_full_backward_pre_hook(lambda *_: None)


def hook_on_weight(model: Net) -> None:
    model.first.weight.register_hook(torch.neg)  # type: ignore[no-untyped-call]


def hook_after_gradient(model: Net) -> None:
    weight = model.first.weight
    weight.register_post_accumulate_grad_hook(torch.neg)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (hook_on_module, r"Net\.first: it has a backward hook"),
        (hook_before_module, r"Net\.first: it has a backward hook"),
        (hook_on_weight, r"parameter 'first\.weight' has a hook"),
        (hook_after_gradient, r"parameter 'first\.weight' has a hook"),
    ],
)
def test_hooks_on_gradients_are_refused(change: Callable[[Net], None], where: str) -> None:
    model = Net(Inner())
    change(model)
    with pytest.raises(CaptureError, match=where):
        capture(model, BATCH)
    assert capture(model, BATCH, training=False).loss is not None


def same_storage(model: Net) -> None:
    model.first.weight.data = model.inner.get_parameter("a.weight").data


def in_a_part(model: Net) -> None:
    whole = torch.randn(24)
    model.first.weight = nn.Parameter(whole[:16].view(4, 4))
    model.inner.get_submodule("a").register_parameter("bias", nn.Parameter(whole[13:17]))


def a_buffer(model: Net) -> None:
    model.inner.register_buffer("mean", model.first.bias.detach())


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (same_storage, r"'(first|inner\.a)\.weight' and '(first|inner\.a)\.weight' lie"),
        (in_a_part, r"'first\.weight' and 'inner\.a\.bias' lie in the same memory"),
        (a_buffer, r"'(first\.bias|inner\.mean)' and '(first\.bias|inner\.mean)' lie"),
    ],
)
def test_memory_that_is_shared_is_refused(change: Callable[[Net], None], names: str) -> None:
    model = Net(Inner())
    change(model)
    with pytest.raises(CaptureError, match=names):
        capture(model, BATCH)


def test_memory_side_by_side_is_not_shared() -> None:
    model = Net(Inner())
    whole = torch.randn(4, 8)
    model.first.weight = nn.Parameter(whole[:, :4])
    model.inner.get_submodule("a").register_parameter("weight", nn.Parameter(whole[:, 4:]))
    assert capture(model, BATCH).loss is not None
    model.first.requires_grad_(False)
    model.inner.register_buffer("mean", model.first.bias.detach())  # neither ever changes
    assert capture(model, BATCH).loss is not None


class Strided(Inner):
    """Reads by stride what another view of the same memory is."""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        return torch.as_strided(h[:, 1:], (3, 2), (2, 1))


class Frames(Inner):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        return torch.as_strided(h.view(12), (5, 4), (2, 1))


def test_strides_are_read_in_memory_of_their_own_only() -> None:
    model = Net(Frames())
    assert_equal(capture(model, BATCH), model, BATCH)
    with pytest.raises(CaptureError, match=r"as_strided reads memory by stride, and its operand"):
        capture(Net(Strided()), BATCH)


class Lookup(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.one = nn.Embedding(6, 4, sparse=sparse)
        self.bag = nn.EmbeddingBag(6, 4, mode="sum", sparse=sparse)
        self.ragged = nn.EmbeddingBag(6, 4, mode="max", sparse=sparse)

    def forward(self, rows: Tensor, starts: Tensor) -> Tensor:
        found = self.one(rows).sum(1) + self.bag(rows)
        loss: Tensor = found.square().sum() + self.ragged(rows.flatten(), starts).sum()
        return loss


def test_sparse_gradients_are_dense_ones() -> None:
    batch = {"rows": torch.randint(6, (4, 3)), "starts": torch.tensor([0, 2, 7])}
    model, plain = Lookup(True), Lookup(False)
    model.ragged = plain.ragged  # torch has no sparse gradient of a maximum
    plain.load_state_dict(model.state_dict())
    graph = capture(model, batch)
    assert_equal(graph, plain, batch)


class Clipped(torch.autograd.Function):
    """Does what it says unless gradients are large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].clamp(-1e3, 1e3)


class Clipping(Inner):
    def forward(self, x: Tensor) -> Tensor:
        clipped: Tensor = Clipped.apply(self.a(x))  # type: ignore[no-untyped-call]
        return clipped


def test_a_backward_is_tried_on_large_gradients() -> None:
    with pytest.raises(CaptureError, match="Clipped has a backward that is not the derivative"):
        capture(Net(Clipping()), BATCH)


class Attention(nn.Module):
    """Attention in which one query sees no key."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.project, self.p = nn.Linear(4, 12), p

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        p = self.p if self.training else 0.0
        out = nn.functional.scaled_dot_product_attention(q, k, v, mask, p)
        return out.square().sum()


class All:
    """Drops nothing."""

    def mask(self, key: str, shape: tuple[int, ...], p: float) -> Tensor:
        return torch.full(shape, 1 - p)

    def draw(self, *_: Any) -> Tensor:
        raise AssertionError


def test_a_query_that_sees_nothing_gets_zeros_as_in_torch() -> None:
    mask = torch.ones(3, 5, 5, dtype=torch.bool)
    mask[:, 2] = False
    model, batch = Attention(0.25), {"x": torch.randn(3, 5, 4), "mask": mask}
    found = run_graph(capture(model, batch), model, batch, dropout=All())["loss"]
    expected = model.eval()(**batch)
    assert found is not None
    assert bool(expected.isfinite())
    torch.testing.assert_close(found, expected)
