"""What is fuzzed: the files that are mutated, and the command lines that read them.

Every case is a function of kind, seed and index.
"""

import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from fuzz_mutations import as_json, changed, mutated_bytes

from parloom import api
from parloom.cost.calibration import (
    Calibration,
    Fingerprint,
    Product,
    Stream,
    TimedCollective,
    calibration_to_json,
)

KINDS = ("cluster", "plan", "calibration", "hugging_face", "flags")
Command = tuple[str, ...]

MODELS = """
import torch
from torch import nn
from torch.nn import functional as F


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))).square().mean()


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x, labels):
        h = F.dropout(torch.relu(self.norm(self.conv(x))).mean((2, 3)), 0.1, self.training)
        return F.cross_entropy(self.head(h), labels)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, h):
        q, k, v = self.qkv(self.norm(h)).view(*h.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return h + self.out(a.transpose(1, 2).reshape(h.shape))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, 8), nn.ModuleList([Block(), Block()])

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy((h @ self.embed.weight.T).flatten(0, 1), ids.flatten())


def mlp():
    return Mlp(), {"x": torch.randn(4, 8)}


def wide():
    return Mlp(), {"x": torch.randn(256, 8)}


def conv():
    return Conv(), {"x": torch.randn(4, 3, 6, 6), "labels": torch.randint(4, (4,))}


def tokens():
    return Tokens(), {"ids": torch.randint(16, (4, 6))}


def broken():
    raise RuntimeError("no data here")
"""
TRAIN = "print('trained')\n"

CLUSTERS = {
    "levels": """\
name: lab
device: A100-40GB
backend: nccl
price_per_hour: 1.50USD
host: {memory: 1TiB, devices: 4, bandwidth: 25GB/s}
levels:
  - {name: NVLink3, size: 4, bandwidth: 300GB/s}
  - {name: leaf, size: 8, bandwidth: 25Gbit/s, latency: 5us}
  - {name: spine, size: 2, bandwidth: {up: 25Gbit/s, down: 10Gbit/s}, oversubscription: 2}
""",
    "torus": """\
device:
  name: chip
  memory: 64GiB
  memory_bandwidth: 1.6TB/s
  rates: {bf16: 200TFLOP/s, fp32: 50TFLOP/s}
  price_per_hour: 2.10USD
backend: other
levels:
  - {name: links, torus: [2, 4], bandwidth: 50GB/s, latency: 1us}
  - {name: network, size: 2, bandwidth: 25Gbit/s, latency: 50us}
""",
    "parts": """\
name: mixed
parts:
  - device: H100
    count: 2
    levels: [{name: NVLink4, size: 8, bandwidth: 450GB/s}]
  - device: A100-80GB
    levels: [{name: NVLink3, size: 4, bandwidth: 300GB/s}]
    uplink: {bandwidth: 10GB/s, latency: 8us}
join: {name: InfiniBand, bandwidth: 50GB/s}
""",
    "cpus": "device: cpu\nlevels:\n  - {name: loopback, size: 4, bandwidth: 2GB/s}\n",
}

TEXT = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 16,
}  # fmt: skip
KEYED = {**TEXT, "num_key_value_heads": 2}
GPT = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 16}
IMAGE = {**TEXT, "image_size": 16, "patch_size": 8}
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT),
    "llama": ("LlamaForCausalLM", KEYED),
    "mistral": ("MistralForCausalLM", KEYED),
    "qwen2": ("Qwen2ForCausalLM", KEYED),
    "gemma": ("GemmaForCausalLM", {**KEYED, "head_dim": 4}),
    "phi": ("PhiForCausalLM", KEYED),
    "gpt_neox": ("GPTNeoXForCausalLM", TEXT),
    "opt": (
        "OPTForCausalLM",
        {
            "vocab_size": 32, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 1,
            "num_attention_heads": 4, "max_position_embeddings": 16, "word_embed_proj_dim": 16,
        },
    ),
    "bloom": ("BloomForCausalLM", {"vocab_size": 32, "hidden_size": 16, "n_layer": 1, "n_head": 4}),
    "mixtral": ("MixtralForCausalLM", {**KEYED, "num_local_experts": 4}),
    "bert": ("BertForMaskedLM", TEXT),
    "roberta": ("RobertaForSequenceClassification", {**TEXT, "max_position_embeddings": 18}),
    "distilbert": (
        "DistilBertForMaskedLM",
        {
            "vocab_size": 32, "dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 4,
            "max_position_embeddings": 16,
        },
    ),
    "electra": ("ElectraForTokenClassification", {**TEXT, "embedding_size": 16}),
    "albert": ("AlbertForQuestionAnswering", {**TEXT, "embedding_size": 8}),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1,
            "num_heads": 4, "n_positions": 16,
        },
    ),
    "bart": (
        "BartForConditionalGeneration",
        {
            "vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24, "max_position_embeddings": 16, "pad_token_id": 1,
            "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
        },
    ),
    "vit": ("ViTForImageClassification", IMAGE),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            "vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24, "num_mel_bins": 8, "max_source_positions": 16,
            "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
            "decoder_start_token_id": 0,
        },
    ),
    "clip": (
        "CLIPModel",
        {
            "projection_dim": 8,
            "text_config": {**TEXT, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
            "vision_config": IMAGE,
        },
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Commands that are run one after the other in a folder with some files.

    `named` are words of which the message of exit 2 has to have one.
    """

    kind: str
    seed: int
    index: int
    commands: tuple[Command, ...]
    files: tuple[tuple[str, bytes], ...]
    named: tuple[str, ...] = ()

    def write(self, base: Path, folder: Path) -> None:
        """The files of this case beside those that it leaves alone."""
        shutil.copytree(base, folder)
        for name, content in self.files:
            (folder / name).write_bytes(content)


def make_base(folder: Path) -> None:
    """Valid files of every kind."""
    folder.mkdir(parents=True)
    (folder / "models.py").write_text(MODELS, encoding="utf-8")
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    for name, text in CLUSTERS.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    (folder / "calibration.json").write_text(calibration_to_json(measured()), encoding="utf-8")
    for family in FAMILIES:
        (folder / f"{family}.json").write_bytes(as_json(config_of(family)))
    with chdir(folder):
        for name, model, cluster, method in (
            ("mlp", "models.py:mlp", "2xcpu", "data_parallel"),
            ("conv", "models.py:conv", "4xcpu", "fsdp"),
            ("tokens", "models.py:tokens", "4xcpu", "megatron"),
            ("one", "models.py:mlp", "1xcpu", "auto"),
            ("auto", "models.py:tokens", "2xcpu", "auto"),
        ):
            api.save(api.plan(model, cluster=cluster, method=method), folder / f"{name}.plan")
            shutil.move(folder / f"{name}.plan" / "plan.json", folder / f"{name}.plan.json")
            shutil.rmtree(folder / f"{name}.plan")


def config_of(family: str) -> dict[str, Any]:
    """A small configuration of a family of models."""
    architecture, sizes = FAMILIES[family]
    return {"model_type": family, "architectures": [architecture], **sizes}


def measured() -> Calibration:
    """A calibration of four processes on some machine."""
    here = Fingerprint("cpu", "a processor", 2, "Linux", "2.13.0+cpu", "gloo")
    products = tuple(Product("float32", n, n, n, 2e-11 * n**3 + 1e-5) for n in (64, 256, 512))
    streams = tuple(Stream(2**n, 2.0**n * 3e-10 + 1e-5) for n in (16, 20, 24))
    collectives = tuple(
        TimedCollective(kind, ((0, 4),), 2**n, 1e-3 + 2.0**n * 2e-9, 1e-4)
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
        for n in (10, 20)
    )
    return Calibration(here, 4, 2e-6, products, streams, (), collectives, 0.5, 0.05)


def case(kind: str, seed: int, index: int, base: Path) -> Case:
    """The case of that number."""
    rng = random.Random(f"{kind} {seed} {index}")
    make = {
        "cluster": cluster_case,
        "plan": plan_case,
        "calibration": calibration_case,
        "hugging_face": config_case,
        "flags": flags_case,
    }
    commands, files, named = make[kind](rng, base)
    return Case(kind, seed, index, commands, files, named)


Made = tuple[tuple[Command, ...], tuple[tuple[str, bytes], ...], tuple[str, ...]]


def cluster_case(rng: random.Random, base: Path) -> Made:
    name = f"{rng.choice(list(CLUSTERS))}.yaml"
    data = (base / name).read_bytes()
    if rng.random() < 0.6:
        document = yaml.safe_load(data)
        for _ in range(rng.choice((1, 1, 2))):
            document, _ = changed(document, rng)
        flow = rng.choice((True, False, None))
        data = yaml.safe_dump(document, default_flow_style=flow, allow_unicode=True).encode()
    if rng.random() < 0.5:
        data = mutated_bytes(data, rng)
    verb = rng.random()
    command: Command = ("cluster", rng.choice(("check", "show")), name)
    if verb < 0.4:
        method = rng.choice(("data_parallel", "data_parallel", "fsdp", "auto"))
        command = ("plan", "models.py:wide", "--cluster", name, "--method", method)
    if rng.random() < 0.3:
        command = (*command, "--json")
    return (command,), ((name, data),), (name, "do not divide", "unequal parts")


def calibration_case(rng: random.Random, base: Path) -> Made:
    name = "calibration.json"
    data = (base / name).read_bytes()
    if rng.random() < 0.7:
        document = json.loads(data)
        for _ in range(rng.choice((1, 1, 2))):
            document, _ = changed(document, rng)
        data = as_json(document)
    if rng.random() < 0.4:
        data = mutated_bytes(data, rng)
    command: Command = rng.choice(
        (
            ("simulate", "mlp.plan.json"),
            ("simulate", "tokens.plan.json", "--json"),
            ("explain", "tokens.plan.json"),
            ("plan", "models.py:mlp", "--cluster", "4xcpu", "--method", "data_parallel"),
            ("plan", "models.py:mlp", "--cluster", "2xcpu"),
        )
    )
    return ((*command, "--calibration", name),), ((name, data),), (name,)


def plan_case(rng: random.Random, base: Path) -> Made:
    name = f"{rng.choice(('mlp', 'conv', 'tokens', 'one', 'auto'))}.plan.json"
    data = (base / name).read_bytes()
    kind = rng.random()
    if kind < 0.75:
        document = json.loads(data)
        for _ in range(rng.choice((1, 1, 2, 3))):
            document = changed_plan(document, rng)
        data = as_json(document)
    else:
        data = mutated_bytes(data, rng)
    verb = rng.random()
    commands: list[Command] = [("simulate", name), ("explain", name)]
    if verb < 0.3:
        commands = [("verify", name)]
    elif verb < 0.33:
        commands = [("verify", name, "--shrink")]
    elif verb < 0.34:
        commands = [("run", name, "--", "train.py")]
    elif verb < 0.5:
        words = ("first", "weight", "head", "blocks.0", "x", "linear#0", "nothing")
        commands = [("explain", name, rng.choice(words)), ("explain", name, "--versus", "fsdp")]
    named = (name, "graph", "invalid plan", "no operator, parameter")
    return tuple(commands), ((name, data),), named


def changed_plan(document: Any, rng: random.Random) -> Any:
    """A decision, a line of the program (with its digest), or anything else."""
    kind = rng.random()
    if not isinstance(document, dict) or kind < 0.25:
        return changed(document, rng)[0]
    part = "decisions" if kind < 0.6 else rng.choice(("graph", "graph", "evaluation_graph"))
    if part not in document:
        return document
    if part == "decisions":
        return {**document, part: changed(document[part], rng)[0]}
    lines = document[part]
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines) or not lines:
        return document
    document = {**document, part: changed_program(lines, rng)}
    texts = ["\n".join(document.get(name, [])) for name in ("graph", "evaluation_graph")]
    digest = hashlib.sha256("\n\n".join(texts).encode("utf-8", "replace")).hexdigest()
    return {**document, "graphs_sha256": digest}


def changed_program(lines: list[str], rng: random.Random) -> list[str]:
    """The lines of a program with a token changed, or a line moved, repeated or left out."""
    result = list(lines)
    at = rng.randrange(len(result))
    kind = rng.random()
    if kind < 0.15:
        del result[at]
    elif kind < 0.25:
        result.insert(at, result[at])
    elif kind < 0.35:
        result.insert(rng.randrange(len(result)), result.pop(at))
    else:
        words = result[at].split(" ")
        word = rng.randrange(len(words))
        others = [w for line in lines for w in line.split(" ") if w]
        words[word] = rng.choice(
            (
                *rng.choices(others, k=6),
                *(
                    "0",
                    "-1",
                    "99999999999999999999",
                    "1.5",
                    "None",
                    "True",
                    "(",
                    "()",
                    "x",
                    "é",
                    "",
                ),
                *(
                    "aten.add.Tensor",
                    "aten.nothing",
                    "float64",
                    "[0]",
                    "[]",
                    "'x'",
                    "((((1,),),),)",
                ),
            )
        )
        result[at] = " ".join(words)
    return result


def config_case(rng: random.Random, base: Path) -> Made:
    family = rng.choice(list(FAMILIES))
    name = f"{family}.json"
    document = config_of(family)
    data, named = as_json(document), [name]
    if rng.random() < 0.9:
        for _ in range(rng.choice((1, 1, 1, 2))):
            document, key = changed(with_default(document, family, rng), rng)
            named.append(key)
            if not isinstance(document, dict):
                break
        data = as_json(document)
    else:
        data = mutated_bytes(data, rng)
    method = "auto" if rng.random() < 0.05 else "data_parallel"
    command: Command = ("plan", name, "--cluster", "2xcpu", "--method", method, "--batch", "2")
    if family not in ("vit", "resnet"):
        command = (*command, "--seq", "8")
    return (command,), ((name, data),), (name,)


def with_default(document: dict[str, Any], family: str, rng: random.Random) -> dict[str, Any]:
    """The configuration with one key more, at the family's default: to be changed next."""
    if rng.random() < 0.5:
        return document
    import transformers

    known = transformers.AutoConfig.for_model(family).to_dict()
    free = [key for key in known if key not in document and key != "model_type"]
    key = rng.choice(free)
    return {key: known[key], **document}


WORDS: Mapping[str, tuple[str, ...]] = {
    "--cluster": ("2xcpu", "1xcpu", "4xcpu", "2x2xcpu", "levels.yaml", "2xH100", "cpu", "0xcpu",
                  "9999999xcpu", "lab.yaml", "", "-1xcpu", "2xnothing", "é", "{", "{}", "."),
    "--batch": ("4", "1", "0", "-1", "x", "", "1e3", "99999999999999999999", "3"),
    "--seq": ("8", "0", "x", "1000000000"),
    "--dtype": ("fp32", "bf16", "fp64", "fp16", "int8", "", "FP32"),
    "--optimizer": ("adamw", "sgd", "AdamW", "lbfgs", "nothing", "", "os.system", "muon"),
    "--method": ("data_parallel", "fsdp", "megatron", "auto", "alpa", "random", "nothing", "",
                 "mlp.plan.json", "models.py", ".", "train.py"),
    "--memory": ("1GiB", "1B", "0", "-1GB", "x", "", "1e400GB", "nan", "70 GB", "16KiB", "70%"),
    "--microbatches": ("1", "2", "3", "0", "4", "x"),
    "--calibration": ("calibration.json", "nothing.json", "", ".", "models.py", "/dev/null"),
    "--pin": ("first=n:data", "first=replicated", "blocks.0=recompute", "mesh=2", "mesh=2x2", "",
              "=", "x=y", "first.weight=weights:sharded", "mesh=0", "first=", "*", "mesh=-1"),
    "--forbid": ("first=n:data", "mesh=2", "", "x", "blocks.0=recompute"),
    "--objective": ("time", "cost", "memory", "x", ""),
    "--budget": ("1", "100", "0", "-1", "x"),
    "--require-gap": ("0.2", "0", "nan", "inf", "-1", "x", "100"),
    "--batch-semantics": ("global", "microbatch", "x", ""),
    "--batch-norm": ("global", "local", ""),
    "--seed": ("0", "1", "-1", "x", "99999999999999999999"),
    "--out": ("out", "", "models.py", "/dev/null", "/proc/x", "a/b/c", "é \u202e", "/dev/full"),
    "--trace": ("trace.json", "", ".", "models.py/x", "/dev/full", "/proc/x"),
    "--versus": ("fsdp", "data_parallel", "megatron", "mlp.plan.json", "x", "", "auto"),
    "--to": ("deepspeed", ""),
    "--model": ("models.py:mlp",),
    "--plan": ("mlp.plan.json",),
    "--json": (), "--verbose": (), "-v": (), "--shrink": (), "--known": (), "--help": (),
    "--version": (), "--nothing": ("x",), "--": (), "-": (),
}  # fmt: skip
PLAN_FLAGS = (*tuple(WORDS)[:18], "--json", "-v")
VERBS: Mapping[str, tuple[str, ...]] = {
    "plan": PLAN_FLAGS,
    "verify": ("--shrink", "--json", "-v"),
    "simulate": ("--trace", "--calibration", "--json", "-v"),
    "explain": ("--versus", "--calibration", "--json", "-v"),
    "cluster": ("--known", "--json"),
    "calibrate": ("--cluster", "--out", "--json"),
    "doctor": ("--json",),
    "report": ("--json",),
    "export": ("--to",),
    "run": ("-v",),
}  # fmt: skip
SUBJECTS: Mapping[str, tuple[str, ...]] = {
    "plan": ("models.py:mlp", "models.py:conv", "models.py:tokens", "gpt2.json", "zoo:nothing",
             "models.py:broken", "models.py:nothing", "models.py", "models:mlp", "nothing:x", "",
             ".", "/", "x.pt2", "zoo:", "llama.json", "gpt2", "a:b:c", "é", "train.py:x", ":", "-"),
    "cluster": ("show", "check", "init", "", "show 2xcpu", "check levels.yaml", "show parts.yaml",
                "check nothing.yaml", "show 2x8xH100", "check ."),
    "run": ("mlp.plan.json -- nothing.py", "mlp.plan.json --", "mlp.plan.json", "conv.plan.json x",
            "mlp.plan.json -- .", "nothing -- train.py", "mlp.plan.json -- -m nothing_there"),
    # A valid one measures the machine for a minute.
    "calibrate": ("--model nothing:x", "--plan nothing.json", "--nothing", "x",
                  "--out models.py/x"),
    "doctor": ("", "x"),
}  # fmt: skip
PLANS = ("mlp.plan.json", "conv.plan.json", "tokens.plan.json", "auto.plan.json", "one.plan.json",
         "nothing.json", ".", "", "models.py", "calibration.json", "/dev/null", "é",
         "levels.yaml")  # fmt: skip


def flags_case(rng: random.Random, base: Path) -> Made:
    """One command line, or a plan and what follows it."""
    if rng.random() < 0.1:
        seed = str(rng.randrange(3))
        flags = flags_of("plan", rng)
        plan = ("plan", "models.py:mlp", "--cluster", "2xcpu", "--out", "out", "--seed", seed)
        after = rng.sample([("verify", "out"), ("simulate", "out"), ("explain", "out", "first")], 2)
        return ((*plan, *flags), *after), (), ()
    weights = [12 if verb == "plan" else 4 for verb in VERBS]
    weights[-1] = 1
    verb = rng.choices(list(VERBS), weights)[0]
    subject = rng.choice(SUBJECTS.get(verb, PLANS))
    words = [verb, *(subject.split(" ") if verb in SUBJECTS and subject else [subject])]
    if verb == "plan" and rng.random() < 0.9:
        words += ["--cluster", rng.choice(WORDS["--cluster"][:5])]
    if verb == "explain" and rng.random() < 0.4:
        words.append(rng.choice(("first", "second.weight", "x", "", "linear#1", "loss", "é")))
    words += flags_of(verb, rng)
    if rng.random() < 0.05:
        rng.shuffle(words)
    if rng.random() < 0.05:
        words.pop(rng.randrange(len(words)))
    return (tuple(words),), (), ()


def flags_of(verb: str, rng: random.Random) -> list[str]:
    """Flags of the verb, at times another verb's, with values that may be nonsense."""
    words = []
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        flag = rng.choice(VERBS[verb] if rng.random() < 0.9 else tuple(WORDS))
        words.append(flag)
        if WORDS[flag] and rng.random() < 0.97:
            words.append(rng.choice(WORDS[flag]))
    return words


def main_base() -> Path:
    """A folder with the base files, made anew."""
    folder = Path(tempfile.mkdtemp(prefix="parloom-fuzz-")) / "base"
    make_base(folder)
    return folder
