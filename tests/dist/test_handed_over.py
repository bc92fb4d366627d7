"""After `parallelize` the script's own module says whose its weights are."""

import abc
import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parloom import api
from parloom.errors import InputError
from parloom.execute.handed_over import hand_over
from parloom.execute.ranks import fork_ranks
from parloom.execute.train import Trainer
from parloom.ir.plan import Plan
from tests.capture import models

FACTORY = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.0), nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (self.norm(self.layers(x)) * self.scale).square().mean()


def factory():
    torch.manual_seed(0)
    return Model(), {"x": torch.randn(8, 4)}
"""
Batch = dict[str, Tensor]

STATE = r"trainer\.state_dict\(\).*trainer\.export"
RUN = r"trainer\.step.*trainer\.evaluate"
LOAD = r"trainer\.load_state_dict"
MADE = r"change the model before parallelize"


def class_of(model: nn.Module) -> Any:
    """The class that the script wrote."""
    return type(model).__mro__[2]


USES: dict[str, tuple[Callable[[Any, Batch], object], str]] = {
    "call": (lambda m, b: m(**b), RUN),
    "forward": (lambda m, b: m.forward(**b), RUN),
    "forward of the class": (lambda m, b: class_of(m).forward(m, **b), RUN),
    "call of a layer": (lambda m, b: m.layers[0](b["x"]), RUN),
    "call in a wrapper": (lambda m, b: nn.Sequential(m.layers)(b["x"]), RUN),
    "functional call": (lambda m, b: torch.func.functional_call(m, {}, (b["x"],)), STATE),
    "state_dict": (lambda m, b: m.state_dict(), STATE),
    "state_dict of a layer": (lambda m, b: m.layers[3].state_dict(), STATE),
    "state_dict of a wrapper": (lambda m, b: nn.Sequential(m).state_dict(), STATE),
    "parameters": (lambda m, b: list(m.parameters()), STATE),
    "parameters of a wrapper": (lambda m, b: list(nn.Sequential(m).parameters()), STATE),
    "named_parameters": (lambda m, b: dict(m.named_parameters()), STATE),
    "buffers": (lambda m, b: list(m.buffers()), STATE),
    "a weight": (lambda m, b: m.layers[0].weight, STATE),
    "a weight by name": (lambda m, b: m.get_parameter("layers.0.weight"), STATE),
    "a buffer": (lambda m, b: m.norm.running_mean, STATE),
    "its own parameter": (lambda m, b: m.scale.data, STATE),
    "deepcopy": (lambda m, b: copy.deepcopy(m), STATE),
    "deepcopy of a layer": (lambda m, b: copy.deepcopy(m.norm), STATE),
    "pickle": (lambda m, b: pickle.dumps(m), STATE),
    "save": (lambda m, b: torch.save(m, io.BytesIO()), STATE),
    "average": (lambda m, b: torch.optim.swa_utils.AveragedModel(m), STATE),
    "optimizer": (lambda m, b: torch.optim.SGD(m.parameters(), lr=1.0), STATE),
    "zero_grad": (lambda m, b: m.zero_grad(), STATE),
    "load_state_dict": (lambda m, b: m.load_state_dict({}), LOAD),
    "load into a layer": (lambda m, b: m.layers[0].load_state_dict({}), LOAD),
    "another parameter": (lambda m, b: setattr(m, "scale", nn.Parameter(torch.ones(4))), MADE),
    "another layer": (lambda m, b: setattr(m, "norm", nn.Identity()), MADE),
    "an attribute": (lambda m, b: setattr(m.layers[2], "p", 0.5), MADE),
    "a deleted layer": (lambda m, b: delattr(m, "norm"), MADE),
    "a hook": (lambda m, b: m.layers[0].register_forward_hook(print), MADE),
    "freezing": (lambda m, b: m.requires_grad_(False), MADE),
    "cast": (lambda m, b: m.double(), MADE),
    "move": (lambda m, b: m.layers.to("meta"), MADE),
    "eval": (lambda m, b: m.eval(), RUN),
    "eval of a layer": (lambda m, b: m.norm.eval(), RUN),
}


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "handed_over_model.py"
    path.write_text(FACTORY)
    return f"{path}:factory"


@pytest.fixture(scope="module")
def plan(spec: str) -> Plan:
    return api.plan(spec, cluster="1xcpu", method="data_parallel", optimizer="sgd")


def made(spec: str) -> tuple[Any, Batch]:
    namespace: dict[str, Any] = {"__name__": "handed_over_script"}
    exec(Path(spec.partition(":")[0]).read_text(), namespace)
    model, batch = namespace["factory"]()
    return model, batch


def trainer_of(model: nn.Module, plan: Plan) -> Trainer:
    return api.parallelize(model, plan, optimizer=lambda named: torch.optim.SGD(named, lr=0.1))


@pytest.fixture(scope="module")
def handed_over(spec: str, plan: Plan) -> tuple[Any, Batch, Trainer]:
    model, batch = made(spec)
    return model, batch, trainer_of(model, plan)


@pytest.mark.parametrize("use", USES)
def test_its_module_names_the_call_to_use(
    handed_over: tuple[Any, Batch, Trainer], use: str
) -> None:
    model, batch, _ = handed_over
    call, told = USES[use]
    with pytest.raises(InputError, match=told):
        call(model, batch)


def test_the_trainer_works_and_the_module_prints(spec: str, plan: Plan) -> None:
    model, batch = made(spec)
    before, text = copy.deepcopy(model), repr(model)
    names = list(model.state_dict())
    trainer = trainer_of(model, plan)
    assert repr(model) == text
    assert isinstance(model, type(before))
    assert type(model).__name__ == "Model"
    assert model.train() is model
    first = trainer.step(batch).loss
    assert list(trainer.state_dict()) == names
    trainer.load_state_dict(trainer.state_dict())
    assert trainer.step(batch).loss < first
    torch.testing.assert_close(before(**batch).detach(), first)
    trained = made(spec)[0]
    trained.load_state_dict(trainer.state_dict())
    found = trained.eval()(**batch).detach()
    torch.testing.assert_close(trainer.evaluate(batch).loss, found)


def test_one_module_has_one_trainer(handed_over: tuple[Any, Batch, Trainer], plan: Plan) -> None:
    model, _, _ = handed_over
    with pytest.raises(InputError, match="this model was handed over to another trainer"):
        trainer_of(model, plan)
    with pytest.raises(InputError, match=r"module '0\.norm' of the model was handed over"):
        trainer_of(nn.Sequential(nn.ModuleDict({"norm": model.norm})), plan)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.scale.add_(1),
        lambda model: model.layers[0].weight.zero_(),
        lambda model: model.norm.running_mean.fill_(1),
        lambda model: torch.nn.init.normal_(model.layers[3].weight),
        lambda model: model.scale[1:].mul_(2),
    ],
)
def test_a_write_through_a_tensor_that_was_kept_is_refused(
    spec: str, plan: Plan, change: Callable[[Any], object]
) -> None:
    model, batch = made(spec)
    kept = _Kept(model)
    trainer = trainer_of(model, plan)
    trainer.step(batch)
    with torch.no_grad():
        change(kept)
    for call in (trainer.step, trainer.evaluate):
        with pytest.raises(InputError, match=r"changed after parallelize.*load_state_dict"):
            call(batch)


def test_another_memory_of_a_tensor_that_was_kept_is_refused(spec: str, plan: Plan) -> None:
    model, batch = made(spec)
    scale = model.scale
    trainer = trainer_of(model, plan)
    scale.data = torch.zeros(4)
    with pytest.raises(InputError, match="scale of the model was changed after parallelize"):
        trainer.step(batch)


class _Kept:
    """The tensors of a model, taken before it was handed over."""

    def __init__(self, model: Any) -> None:
        self.scale = model.scale
        self.layers = [_Layer(layer) for layer in model.layers]
        self.norm = _Layer(model.norm)


class _Layer:
    def __init__(self, layer: Any) -> None:
        self.weight = getattr(layer, "weight", None)
        self.running_mean = getattr(layer, "running_mean", None)


def _on_a_rank(spec: str, plan: Plan) -> str:
    model, batch = made(spec)
    trainer = trainer_of(model, plan)
    trainer.step(batch)
    with pytest.raises(InputError) as caught:
        model(**batch)
    return str(caught.value)


def test_an_optimizer_made_before_is_refused(spec: str, plan: Plan) -> None:
    model, batch = made(spec)
    early = torch.optim.AdamW(model.parameters(), lr=0.1)
    other = nn.Linear(2, 2)
    before = other.weight.detach().clone()
    trainer = trainer_of(model, plan)
    first = trainer.step(batch).loss
    with pytest.raises(InputError, match=r"AdamW\.step\(\) would update scale.*trainer\.step"):
        early.step()
    assert trainer.step(batch).loss != first
    # An optimizer of other weights is fine, and one that has some of the model's as wrong.
    torch.autograd.backward(other.weight.sum())
    torch.optim.SGD([other.weight], lr=0.1).step()
    assert not torch.equal(before, other.weight)
    groups = [{"params": [other.weight]}, {"params": early.param_groups[0]["params"][1:2]}]
    mixed = torch.optim.SGD(groups, lr=1.0)
    with pytest.raises(InputError, match="SGD"):
        mixed.step()


def test_on_many_ranks_too(spec: str) -> None:
    plan = api.plan(spec, cluster="2xcpu", devices=2, method="data_parallel", optimizer="sgd")
    told = fork_ranks(2, _on_a_rank, spec, plan)
    assert all("trainer.evaluate(batch)" in text for text in told)


class Picky(type(nn.Module)):  # type: ignore[misc]
    """A metaclass that is told something of every class."""

    def __new__(cls, name: str, bases: Any, body: Any, *, kind: str) -> Any:
        made = super().__new__(cls, name, bases, body)
        made.kind = kind
        return made

    def __init__(cls, name: str, bases: Any, body: Any, *, kind: str) -> None:
        super().__init__(name, bases, body)


class Told(nn.Linear, metaclass=Picky, kind="told"):
    pass


class Abstract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def size(self) -> int: ...


class Concrete(Abstract):
    __slots__ = ("extra",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.extra = 1

    def size(self) -> int:
        return 3

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


class Sealed(nn.Linear):
    """Lets nobody write to it, or inherit from it."""

    def __init_subclass__(cls) -> None:
        raise TypeError("sealed")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise TypeError("sealed")
        super().__setattr__(name, value)


class Frozen(nn.Module):
    """The idiom of frozen batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4)

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
                module.weight.requires_grad = False
        return self


KINDS: dict[str, Callable[[], nn.Module]] = {
    "metaclass": lambda: Told(2, 2),
    "abstract": Concrete,
    "sealed": lambda: Sealed(2, 2),
    "frozen": lambda: Frozen().train(),
    "recurrent": lambda: nn.LSTM(2, 2),
    "parameter list": lambda: nn.ParameterList([nn.Parameter(torch.ones(2))]),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2),
    "made at run time": lambda: type("Made", (nn.Linear,), {})(2, 2),
    "tied": lambda: tied(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))),
}


def tied(model: Any) -> nn.Module:
    model[1].weight = model[0].weight
    return nn.Sequential(model)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_module_is_handed_over_and_frees_its_weights(name: str) -> None:
    model = nn.Sequential(KINDS[name]())
    inner, text, kind = model[0], repr(model), type(model[0])
    parts = [n for n, _ in model.named_modules()]
    weights = [weakref.ref(t) for t in (*model.parameters(), *model.buffers())]
    original = hand_over(model, torch.device("cpu"))
    gc.collect()
    assert not any(reference() is not None for reference in weights)
    assert repr(model) == text
    assert [n for n, _ in model.named_modules()] == parts
    assert isinstance(inner, kind)
    assert isinstance(inner, nn.Module)
    assert type(inner).__name__ == kind.__name__
    assert model.train() is model
    for use in (inner, inner.forward, inner.state_dict, lambda: inner.load_state_dict({})):
        with pytest.raises(InputError, match=r"after parallelize.*trainer\."):
            use()
    with pytest.raises(InputError, match=r"trainer\.step"):
        model.eval()
    with original.restored():
        assert type(inner) is kind
        assert all(p.is_meta for p in model.parameters())
    assert type(inner) is not kind


def test_questions_that_need_no_values_are_answered() -> None:
    model = Concrete()
    hand_over(model, torch.device("meta"))
    assert model.device == torch.device("meta")  # where the trainer has them
    assert model.dtype == torch.float32
    assert model.num_parameters() == 3
    assert model.size() == 3
    assert model.training
    with pytest.raises(InputError, match=r"trainer\.device"):
        next(model.parameters())


def test_a_hugging_face_model_says_what_it_is(tmp_path: Path) -> None:
    model: Any = models.llama()[0]
    count, dtype, footprint = model.num_parameters(), model.dtype, model.get_memory_footprint()
    vocabulary = model.config.vocab_size
    hand_over(model, torch.device("cpu"))
    assert (model.num_parameters(), model.dtype) == (count, dtype)
    assert model.get_memory_footprint() == footprint
    assert model.device == torch.device("cpu")
    assert model.config.vocab_size == vocabulary
    with pytest.raises(InputError, match=STATE):
        model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="after parallelize"):
        model.generate(torch.ones(1, 2, dtype=torch.int64), max_new_tokens=2)
    with pytest.raises(InputError, match="after parallelize"):
        model.resize_token_embeddings(10)


def test_frozen_norms_stay_frozen() -> None:
    model: Any = nn.Sequential(Frozen())
    model.train()
    hand_over(model, torch.device("cpu"))
    for module in (model, model[0]):
        assert module.train() is module
        with pytest.raises(InputError, match=RUN):
            module.train(False)
    with pytest.raises(InputError, match=RUN):
        model[0].norm.train()
    assert (model.training, model[0].norm.training) == (True, False)


def test_the_trainer_keeps_no_weight_of_the_model(spec: str, plan: Plan) -> None:
    model, batch = made(spec)
    weights = [weakref.ref(t) for t in (*model.parameters(), *model.buffers())]
    trainer = trainer_of(model, plan)
    gc.collect()
    assert not any(reference() is not None for reference in weights)
    trainer.step(batch)
