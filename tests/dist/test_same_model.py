"""`parallelize` and `verify` take the model that was planned, and say how another one differs."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from parloom import api
from parloom.capture import Loaded, load_model
from parloom.capture.state.reach import key
from parloom.errors import FingerprintError, ParloomError
from parloom.execute import launch
from parloom.execute.ranks import fork_ranks
from parloom.ir.plan import Plan

BESIDE = """
def scaled(x):
    return x * 2.0
"""
MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

from BESIDE import scaled

SHIFT = 0.5
TABLE = {"slope": 0.25}
SHAPES = [3, 4]


def gate(x):
    return torch.sigmoid(x)


def closed(power):
    def raised(x):
        return x ** power
    return raised


class Block(nn.Module):
    def __init__(self, width, heads=2, p=0.1):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width)
        self.act = nn.GELU()
        self.drop = nn.Dropout(p)
        self.residual = True

    def forward(self, x):
        batch, seq, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, seq, 3, self.heads, -1).unbind(2)
        h = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        h = self.drop(self.act(h.transpose(1, 2).reshape(batch, seq, width)))
        return x + h if self.residual else h


class Settings:
    def __init__(self):
        self.slope = 0.1


class Model(nn.Module):
    factor = 3.0

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Block(8), Block(8)])
        self.bn = nn.BatchNorm1d(8)
        self.relu = nn.ReLU(inplace=True)
        self.settings = Settings()
        self.raised = closed(2)
        self.weight = nn.Parameter(torch.randn(8))
        self.mask = torch.tensor([[1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0]])
        self.register_buffer("table", torch.arange(8.0))
        self.head = nn.Linear(8, 5)

    def forward(self, x, scale=1.5):
        h = F.leaky_relu(self.mix(x), self.settings.slope)
        for layer in self.layers:
            h = layer(h)
        h = self.relu(scaled(h) + SHIFT) * scale * self.factor
        h = self.raised(gate(h)) * TABLE["slope"]
        h = (h + self.table) * self.weight
        h = h.view(4, 2, 4, 8) * self.mask[:, :, None]
        h = self.bn(h.view(4, 8, 8).transpose(1, 2))
        return self.head(h.mean(2))


def build():
    torch.manual_seed(0)
    model = Model()
    return model, {"x": torch.randn(4, 8, 8), "y": torch.tensor([0, 1, 2, 3])}, criterion


def criterion(output, batch):
    return F.cross_entropy(output, batch["y"], label_smoothing=0.1)


def factory():
    return build()
"""


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit of the model's file, or of the file beside it, and how the model then differs."""

    old: str
    new: str
    told: str = ""

    def __str__(self) -> str:
        return self.new.strip().replace("\n", " ")[:60]


LAST = "    model = Model()\n"
BUILT = LAST + "    "

EDITS = (
    Edit("nn.GELU()", "nn.ReLU()", r"layers\.0\.act \(.*\): gelu in the plan, relu here"),
    Edit(
        "nn.GELU()",
        "nn.GELU('tanh')",
        r"layers\.0\.act: gelu .*: approximate none in the plan, tanh",
    ),
    Edit(
        "eps=1e-5", "eps=1e-6", r"layers\.0\.norm: layer_norm .*: eps 1e-05 in the plan, 1e-06 here"
    ),
    Edit("heads=2", "heads=4", r"layers\.0: \w+ \(.*\): .*2.* in the plan, .*4"),
    Edit("p=0.1):", "p=0.2):", r"layers\.0\.drop: .*dropout.*: p 0\.1 in the plan, 0\.2 here"),
    Edit("p=0.1):", "p=0.0):", r"layers\.0\.drop: .*dropout.* is missing here"),
    Edit("self.residual = True", "self.residual = False", r"layers\.0: add is missing here"),
    Edit(
        "[Block(8), Block(8)]",
        "[Block(8), Block(8, p=0.3)]",
        r"layers\.1\.drop: .* 0\.1 in the .*0\.3",
    ),
    Edit(
        "[Block(8), Block(8)]",
        "[Block(8)]",
        r"parameters differ: layers\.1\.norm\.weight \(missing",
    ),
    Edit("SHIFT = 0.5", "SHIFT = 0.25", r"add .*: other 0\.5 in the plan, 0\.25 here"),
    Edit('"slope": 0.25', '"slope": 0.75', r"mul .*: other 0\.25 in the plan, 0\.75 here"),
    Edit("torch.sigmoid(x)", "torch.tanh(x)", r"sigmoid in the plan, tanh here"),
    Edit("x * 2.0", "x * 4.0", r"mul .*: other 2\.0 in the plan, 4\.0 here"),
    Edit("x * 2.0", "x / 2.0", r"mul in the plan, div here"),
    Edit("closed(2)", "closed(3)", r"pow .*: exponent 2 in the plan, 3 here"),
    Edit("scale=1.5", "scale=2.5", r"mul .*: other 1\.5 in the plan, 2\.5 here"),
    Edit("factor = 3.0", "factor = -3.0", r"mul .*: other 3\.0 in the plan, -3\.0 here"),
    Edit(
        "self.slope = 0.1",
        "self.slope = 0.2",
        r"leaky_relu .*: negative_slope 0\.1 in the plan, 0\.2",
    ),
    Edit(
        "[0.0, 1.0, 1.0, 1.0]]",
        "[0.0, 1.0, 1.0, 0.5]]",
        r"constant mask differs at \[1, 3\]: 1\.0 in the plan, 0\.5 here \(read by ",
    ),
    Edit(
        "label_smoothing=0.1",
        "label_smoothing=0.2",
        r"cross_entropy.*: label_smoothing 0\.1 in .* 0\.2",
    ),
    Edit(
        "label_smoothing=0.1",
        "label_smoothing=0.1, ignore_index=0",
        r"ignore_index -100 in the plan, 0",
    ),
    Edit("label_smoothing=0.1)", "label_smoothing=0.1) * 0.5", r"mul .*is not in the plan"),
    Edit(
        "nn.BatchNorm1d(8)",
        "nn.BatchNorm1d(8, momentum=0.2)",
        r"bn.*: momentum 0\.1 in the plan, 0\.2",
    ),
    Edit("nn.BatchNorm1d(8)", "nn.BatchNorm1d(8, affine=False)", r"bn\.weight \(missing\)"),
    Edit("nn.ReLU(inplace=True)", "nn.SiLU()", r"relu .*: relu in the plan, silu here"),
    Edit(
        LAST, BUILT + "model.layers[0].act.forward = torch.tanh\n", r"gelu in the plan, tanh here"
    ),
    Edit(
        LAST,
        BUILT + "model.head.register_forward_hook(lambda m, a, o: o * 2)\n",
        r"mul .*not in the plan",
    ),
    Edit(
        LAST,
        BUILT + "model.head.register_forward_pre_hook(lambda m, a: (a[0] + 1,))\n",
        r"add .*not in the",
    ),
    Edit(
        LAST,
        BUILT + "model.head.weight.register_hook(lambda g: g * 2)\n",
        r"has a hook on its gradient",
    ),
    Edit(LAST, BUILT + "model.bn.eval()\n", r"bn: "),
    Edit(
        LAST,
        BUILT + "model.layers[1].drop.eval()\n",
        r"layers\.1\.drop: .*dropout.* is missing here",
    ),
    Edit(
        LAST,
        BUILT + "model.mix.bias.requires_grad_(False)\n",
        r"mix\.bias \(frozen, planned trainable\)",
    ),
    Edit(
        LAST,
        BUILT + "model.layers[1].qkv.weight = model.layers[0].qkv.weight\n",
        r"layers\.1\.qkv\.weight \(missing",
    ),
    Edit(
        LAST,
        BUILT + "model.layers = nn.ModuleList([model.layers[1], model.layers[0], nn.Identity()])\n",
    ),
    Edit(
        LAST,
        BUILT + "model.layers = nn.Sequential(*model.layers, nn.Hardtanh())\n",
        r"hardtanh .*is not in the plan",
    ),
    Edit(
        "h = self.bn(",
        "h = h.detach() if self.training else h\n        h = self.bn(",
        r"detach .*not in the plan|without a gradient here",
    ),
    Edit(
        "return self.head(h.mean(2))",
        "h = h.mean(2)\n        return self.head(h if self.training else -h)",
        r"\(in evaluation\): neg .*is not in the plan",
    ),
    Edit(
        "h = F.leaky_relu(self.mix(x)",
        "h = F.leaky_relu(self.mix(x.transpose(1, 2))",
        r"mix: linear in the plan, transpose \(.*\) here",
    ),
    Edit(
        "q, k, v = ",
        "k, q, v = ",
        r"layers\.0: transpose .*: self is result 0 of layers\.0:unbind#0 in .*, result 1 of",
    ),
    Edit("* self.weight\n", "* self.head.weight[0, :8]\n", r"weight"),
    # What no source of a module's class says.
    Edit(
        LAST, BUILT + "model.layers[0].act = nn.ReLU()\n", r"layers\.0\.act .*: gelu .* relu here"
    ),
    Edit(LAST, BUILT + "model.layers[1].norm.eps = 1e-3\n", r"layers\.1\.norm: .* 1e-05 .* 0\.001"),
    Edit(LAST, BUILT + "model.layers[1].heads = 4\n", r"layers\.1: .* in the plan, .* here"),
    Edit(
        LAST, BUILT + "model.layers[0].drop.p = 0.5\n", r"layers\.0\.drop: .* p 0\.1 .* 0\.5 here"
    ),
    Edit(LAST, BUILT + "model.layers[0].residual = False\n", r"layers\.0: add is missing here"),
    Edit(LAST, BUILT + "model.bn.momentum = 0.3\n", r"bn.*: momentum 0\.1 in the plan, 0\.3 here"),
    Edit(LAST, BUILT + "model.raised = closed(3)\n", r"pow .*: exponent 2 in the plan, 3 here"),
    Edit(LAST, BUILT + "model.factor = 2.0\n", r"mul .*: other 3\.0 in the plan, 2\.0 here"),
    Edit(
        LAST, BUILT + "model.mask[0, 3] = 0.5\n", r"constant mask differs at \[0, 3\]: 1\.0 .* 0\.5"
    ),
    Edit(LAST, BUILT + "model.relu = nn.Identity()\n", r"relu: relu is missing here"),
    # Equal programs.
    Edit("nn.ReLU(inplace=True)", "nn.ReLU()"),
    Edit("SHAPES = [3, 4]", "SHAPES = [5]"),
    Edit("class Block(nn.Module):", "class Block(nn.Module):\n    '''Another text of it.'''\n"),
    Edit("Block(", "Renamed("),
    Edit("return torch.sigmoid(x)", "y = x  # a comment\n    return torch.sigmoid(y)"),
    Edit("self.head = nn.Linear(8, 5)", "self.head = nn.Linear(8, 5)\n        self.unused = 7"),
    Edit(LAST, BUILT + "model.table.add_(0.5)\n"),
    Edit(LAST, BUILT + "model.eval()\n"),
)


def written(folder: Path, name: str, edit: Edit | None = None) -> str:
    """The spec of the model's factory, with the edit in it."""
    texts = {f"model_{name}": MODEL.replace("BESIDE", f"beside_{name}"), f"beside_{name}": BESIDE}
    for file, text in texts.items():
        text = text.replace(edit.old, edit.new) if edit else text
        (folder / f"{file}.py").write_text(text)
    changed = not edit or any(edit.old in t for t in (MODEL, BESIDE))
    assert changed, edit
    return f"{folder}/model_{name}.py:factory"


def planned(spec: str, cluster: str = "1xcpu", **asked: Any) -> Plan:
    asked |= {"cluster": cluster, "devices": int(cluster.removesuffix("xcpu"))}
    return api.plan(spec, method="data_parallel", optimizer="sgd", dtype="fp64", **asked)


def loaded(spec: str) -> Loaded:
    return load_model(spec, dtype="fp64")


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def plan(folder: Path) -> Plan:
    return planned(written(folder, "planned"))


@pytest.fixture(scope="module")
def plan_2(folder: Path) -> Plan:
    return planned(written(folder, "two"), "2xcpu")


@pytest.mark.sample(8)
@pytest.mark.parametrize("number", range(len(EDITS)), ids=lambda n: f"{n}:{EDITS[n]}")
def test_an_edited_model_is_told_from_the_planned_one(
    plan: Plan, folder: Path, number: int
) -> None:
    edit = EDITS[number]
    made = loaded(written(folder, str(number), edit))
    if not edit.told:
        eager = loaded(written(folder, f"{number}_again", edit))
        trainer = api.parallelize(made.model, plan, optimizer=sgd, loss=made.loss)
        found = trainer.evaluate(made.batch)
        assert eager.loss is not None
        expected = eager.loss(eager.model.eval()(x=eager.batch["x"]), eager.batch)
        torch.testing.assert_close(found.loss, expected.detach())
        return
    with pytest.raises(FingerprintError, match=edit.told) as caught:
        api.parallelize(made.model, plan, optimizer=sgd, loss=made.loss)
    assert plan.command() in str(caught.value)


def told_on_each(plan: Plan, specs: tuple[str, ...]) -> list[str]:
    """The error of every rank; each builds the model of the spec that has its number."""

    def rank() -> str:
        made = loaded(specs[torch.distributed.get_rank() % len(specs)])
        try:
            api.parallelize(made.model, plan, optimizer=sgd, loss=made.loss)
        except ParloomError as error:
            return f"{error.exit_code} {type(error).__name__}: {error}"
        return ""

    return fork_ranks(plan.decisions.mesh.num_ranks, rank)


@pytest.mark.slow
def test_every_rank_ends_with_what_rank_0_found(folder: Path) -> None:
    plan = planned(written(folder, "four"), "4xcpu")
    other = written(folder, "four_other", Edit("nn.GELU()", "nn.ReLU()"))
    told = told_on_each(plan, (other,))
    assert told[0].startswith("5 FingerprintError: ")
    assert "layers.0.act" in told[0]
    assert "gelu in the plan, relu here" in told[0]
    assert told == [told[0]] * 4
    told = told_on_each(plan, (plan.source.spec, plan.source.spec, other, plan.source.spec))
    assert told == [told[0]] * 4
    assert told[0].startswith("5 FingerprintError: rank 2 built another model than rank 0: ")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "edit",
    [
        Edit("SHIFT = 0.5", "SHIFT = 0.75"),
        Edit("closed(2)", "closed(4)"),
        Edit("label_smoothing=0.1", "label_smoothing=0.3"),
        Edit(LAST, BUILT + "model.head.register_forward_hook(lambda m, a, o: o * 2)\n"),
        Edit(LAST, BUILT + "model.bn.eval()\n"),
    ],
    ids=str,
)
def test_a_rank_with_another_model_is_named(plan_2: Plan, folder: Path, edit: Edit) -> None:
    other = written(folder, f"other_{abs(hash(edit))}", edit)
    told = told_on_each(plan_2, (plan_2.source.spec, other))
    assert told == [told[0]] * 2
    assert told[0].startswith("5 FingerprintError: rank 1 built another model than rank 0: ")
    assert " on rank 1 and " in told[0]


def test_a_proof_says_how_the_model_has_changed(folder: Path) -> None:
    spec = written(folder, "proved")
    plan = planned(spec)
    assert api.verify(plan).passed
    written(folder, "proved", Edit("eps=1e-5", "eps=1e-6"))
    with pytest.raises(FingerprintError, match=r"layers\.0\.norm: .*: eps 1e-05 in the plan"):
        api.verify(plan)


def test_a_program_that_was_edited_is_not_the_models(plan: Plan, folder: Path) -> None:
    made = loaded(written(folder, "unedited"))
    for name in ("graph", "evaluation_graph"):
        text = getattr(plan, name)
        edited = text.replace("1e-05", "0.001")
        assert edited != text
        other = replace(plan, **{name: edited})
        where = "" if name == "graph" else r"\(in evaluation\)"
        told = rf"{where}: .*eps 0\.001 in the plan, 1e-05"
        with pytest.raises(FingerprintError, match=told):
            api.parallelize(made.model, other, optimizer=sgd, loss=made.loss)


def test_a_model_without_weights_is_compared_too(plan: Plan, folder: Path) -> None:
    made = loaded(written(folder, "stored"))
    save_file({n: p.detach() for n, p in made.model.named_parameters()}, folder / "w.safetensors")
    for number, (old, new) in enumerate([("p=0.1", "p=0.1"), ("p=0.1", "p=0.7")]):
        spec = written(folder, f"meta_{number}", Edit(old, new))
        abstract = loaded(spec)
        for module in abstract.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.to("meta"))
        if old != new:
            with pytest.raises(FingerprintError, match=r"p 0\.1 in the plan, 0\.7 here"):
                api.parallelize(
                    abstract.model, plan, optimizer=sgd, loss=abstract.loss,
                    weights_path=folder / "w.safetensors",
                )  # fmt: skip
            continue
        trainer = api.parallelize(
            abstract.model,
            plan,
            optimizer=sgd,
            loss=abstract.loss,
            weights_path=folder / "w.safetensors",
        )
        assert torch.isfinite(trainer.step(made.batch).loss)


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64,
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama_plan(folder: Path) -> Plan:
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA))
    return api.plan(str(path), cluster="1xcpu", method="data_parallel", batch=2, seq=8)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rms_norm_eps": 1e-5}, r"model\.layers\.0\.input_layernorm: .*1e-06 in the plan, 1e-05"),
        ({"num_key_value_heads": 4}, r"k_proj\.weight \(\(16, 16\), planned \(8, 16\)\)"),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 4},
            r"model\.layers\.0\.self_attn|model",
        ),
        ({"hidden_act": "gelu"}, r"model\.layers\.0\.mlp\.act_fn.*: silu in the plan, gelu here"),
        ({"attention_dropout": 0.1}, r"model\.layers\.0\.self_attn: .*dropout.* 0\.0 in .* 0\.1"),
        ({"rope_theta": 5e3}, r""),
        ({"tie_word_embeddings": True}, r"lm_head\.weight"),
    ],
    ids=str,
)
def test_a_changed_config_is_told(
    llama_plan: Plan, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    plan, path = llama_plan, tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **change}))
    made = load_model(str(path), batch=2, seq=8)
    if not told:  # it is in a buffer, and buffers are the script's
        trainer = api.parallelize(made.model, plan, optimizer=torch.optim.AdamW)
        eager = load_model(str(path), batch=2, seq=8)
        expected = eager.model.eval()(**eager.batch).loss.detach()
        torch.testing.assert_close(trainer.evaluate(made.batch).loss, expected)
        return
    with pytest.raises(FingerprintError, match=told):
        api.parallelize(made.model, plan, optimizer=torch.optim.AdamW)


@pytest.mark.slow
def test_a_run_with_another_model_ends_with_exit_code_5(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    plan = planned(written(folder, "run"), "2xcpu")
    other = written(folder, "run_other", Edit("nn.GELU()", "nn.SiLU()"))
    script = folder / "train.py"
    script.write_text(
        "import torch\nfrom parloom import api\nfrom parloom.capture import load_model\n"
        f"made = load_model({other!r}, dtype='fp64')\n"
        f"api.parallelize(made.model, {str(api.save(plan, folder / 'run')['plan'])!r},\n"
        "    optimizer=lambda named: torch.optim.SGD(named, lr=0.1), loss=made.loss)\n"
    )
    said: list[str] = []
    code = launch.run(plan, [str(script)], say=said.append)
    assert code == 5, said
    assert "layers.0.act" in said[-1]
    assert "gelu in the plan, silu here" in said[-1]


def test_ranks_may_know_their_device() -> None:
    def made(device: torch.device) -> nn.Module:
        model = nn.Linear(2, 2)
        vars(model)["device"] = device
        return model

    one, two = (key(made(torch.device("cuda", index))) for index in range(2))
    assert one == two
    assert one != key(made(torch.device("cpu")))
