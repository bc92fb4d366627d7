"""The model of a published run, from its row, as a captured graph.

A graph is captured once per architecture, with two blocks, a prime number of samples and of words,
and resized to each row's: every number that such a prime divides counts samples or words.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from published_modules import (
    AnyBlock,
    Experts,
    GatheredBERT,
    LatentAttention,
    Pair,
    SwiGLU,
    TransformerXL,
    WideAttention,
    adapted,
)
from torch import Tensor, nn
from torch.nn import functional as F

from parloom.capture import capture
from parloom.capture.load import cast_model
from parloom.ir.graph import Arg, Call, Function, Graph, Node, TensorSpec, Value
from parloom.ir.repeat import repeated
from parloom.zoo import gpt, llama
from parloom.zoo.resnet import ResNet

Row = Mapping[str, str]
Batch = dict[str, Tensor]
Sizes = Mapping[str, int]

# What a family of the rows is built as: the first entry whose expression its name begins with.
FAMILIES = (
    (r"gpt", "gpt"), (r"llama|qwen|mistral|gemma|internlm|dense", "llama"), (r"moe|mixtral", "moe"),
    (r"mla|deepseek", "moe"), (r"bert|roberta", "bert"), (r"transformer-?xl", "xl"),
    (r"cnn|resnet", "resnet"),
)  # fmt: skip
# Vocabularies of the tokenizers that a family is trained with where a row names none: GPT-2's,
# Llama 2's, BERT's.
VOCABULARY = MappingProxyType({"gpt": 50257, "llama": 32000, "moe": 32000, "bert": 30522})
# Multi-head latent attention, by the words that tell of it, with the blocks before the first
# mixture of experts and the experts that see every token (config.json of deepseek-ai/DeepSeek-V2
# and V3 and of moonshotai/Kimi-K2-Base on the Hugging Face Hub: first_k_dense_replace,
# n_shared_experts; they agree on ranks and head widths).
LATENT = (
    (r"kimi", 1, 1), (r"deepseek[-_ ]?v2", 1, 2), (r"deepseek|\bmla\b|latent attention", 3, 1),
)  # fmt: skip
RANKS = MappingProxyType({"q_rank": 1536, "kv_rank": 512, "nope": 128, "rope": 64, "value": 128})
# A window in every other block (openai/gpt-oss-120b config.json: layer_types, sliding_window 128,
# attention_bias true).
WINDOWS = ((r"gpt[-_ ]?oss", 128),)
# Frameworks whose GPT has dropout of 0.1 on hidden states and probabilities unless told otherwise:
# Megatron-LM (arguments.py, --attention-dropout and --hidden-dropout) and what was derived from it.
DROPS = ("megatron-lm", "megatron-deepspeed", "oneflow-gpt")
# LoRA on the projections of attention with rank 16 (MLPerf Training llama2_70b_lora, reference
# README: r = 16 on q, k, v and o projections).
LORA_RANK, LORA_NAMES = 16, ("q", "k", "v", "qkv", "out")
# Masked positions of a sample, by its length (NVIDIA DeepLearningExamples, BERT,
# pretrain_config.sh: max_predictions_per_seq); elsewhere 15 in 100 (Devlin et al., appendix A.1).
MASKED, MASKED_SHARE = MappingProxyType({128: 20, 512: 80}), 0.15
# Wikipedia in samples of 512 is half padding (Krell et al., arXiv:2107.02027, abstract), which runs
# that pack or unpad skip.
PRESENT = 0.5
# The words of WikiText-103 and where bands of them begin (NVIDIA DeepLearningExamples,
# Transformer-XL, wt103_large.yaml: n_token, cutoffs; div_val 4 in the wide model, 1 in the other).
WORDS, CUTOFFS, WIDE_FROM, NARROWS = 267735, (0, 19997, 39997, 199997), 1024, 4
# Of a segment, how many tokens are words of the rarer bands (recalled of WikiText-103's counts:
# about 3, 3 and 1 in 100).
RARE = (32, 32, 128)
# Primes that stand for samples and words in a captured graph; the first that divides no size.
SAMPLES = (1009, 1013, 1019, 1021, 1031)
VOCABULARIES = (65537, 65539, 65543)
KEPT = 16  # graphs


class Unpredictable(Exception):
    """Why there is no prediction for a row."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is captured: a family's sizes and a dtype, whatever its samples and words."""

    family: str
    sizes: tuple[tuple[str, int], ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Model:
    """A row's model: what to capture, words (0: not counted), blocks in a row (0: none are
    repeated), and what its row does not say.
    """

    shape: Shape
    vocab: int
    blocks: int
    assumed: tuple[str, ...] = ()


def whole(row: Row, name: str, default: int | None = None) -> int:
    """A whole number of a row."""
    text = (row.get(name) or "").strip()
    if not text and default is not None:
        return default
    try:
        number = round(float(text))
    except (ValueError, OverflowError):
        raise Unpredictable(f"{name} is {text!r}, no number") from None
    if number < 1:
        raise Unpredictable(f"{name} is {text!r}: at least 1 is needed")
    return number


def told(row: Row, *names: str) -> str:
    """The words of some cells, in lower case."""
    return " ".join(row.get(name) or "" for name in names).lower()


def model_of(row: Row, dtype: str, multiple: int) -> Model:
    """What a row says of its model; its vocabulary padded to a `multiple`."""
    named = (row.get("family") or "").lower()
    family = next((known for words, known in FAMILIES if re.match(words, named)), None)
    if family is None:
        raise Unpredictable(f"no model of the family {row['family']!r} is built here")
    assumed: list[str] = []
    if family == "resnet":
        return _resnet(row, dtype)
    sizes = {"width": whole(row, "hidden"), "heads": whole(row, "heads")}
    blocks = whole(row, "layers")
    if family == "xl":
        return _transformer_xl(row, sizes, blocks, dtype)
    sizes["seq"] = whole(row, "seq_len")
    if not (row.get("vocab") or "").strip():
        assumed.append(f"{VOCABULARY[family]} words")
    vocab = -(-whole(row, "vocab", VOCABULARY[family]) // multiple) * multiple
    if family == "bert":
        sizes |= _bert(row, sizes["seq"], assumed)
        sizes["inner"] = whole(row, "ffn_hidden", 4 * sizes["width"])
    elif family == "gpt":
        sizes["inner"] = whole(row, "ffn_hidden", 4 * sizes["width"])
        sizes["drops"] = int(any(word in told(row, "framework") for word in DROPS))
        if "mla" not in named and whole(row, "kv_heads", sizes["heads"]) != sizes["heads"]:
            assumed.append("keys for every head")
    else:
        blocks = _decoder(row, family, sizes, blocks, assumed)
    if re.search(r"\blora\b|\bqlora\b", told(row, "model", "framework", "other_plan", "notes")):
        sizes["adapters"] = LORA_RANK
        assumed.append(f"adapters of rank {LORA_RANK} on the projections of attention")
    shape = Shape(family, tuple(sorted(sizes.items())), dtype)
    return Model(shape, vocab, blocks, tuple(assumed))


def _resnet(row: Row, dtype: str) -> Model:
    if not re.search(r"resnet-?50", told(row, "model")):
        raise Unpredictable(f"no convolutional network {row['model']!r} is built here")
    return Model(Shape("resnet", (("crop", 224),), dtype), 0, 0, ("images of 224 x 224",))


def _transformer_xl(row: Row, sizes: dict[str, int], blocks: int, dtype: str) -> Model:
    sizes |= {
        "seq": whole(row, "seq_len"),
        "inner": whole(row, "ffn_hidden", 4 * sizes["width"]),
        "head_width": whole(row, "head_dim", sizes["width"] // sizes["heads"]),
    }
    assumed = ("memory as long as a segment", "shares of rare words")
    return Model(Shape("xl", tuple(sorted(sizes.items())), dtype), 0, blocks, assumed)


def _bert(row: Row, seq: int, assumed: list[str]) -> dict[str, int]:
    """Positions and masked positions of a sample, of which a packed run has no padding."""
    said = told(row, "notes", "other_plan", "framework")
    framework = told(row, "framework")
    release = re.search(r"(?:release|pytorch|mxnet|ngc)[ -]*(\d\d)\.\d\d", framework)
    # NVIDIA's BERT for MLPerf skips padding since v1.0, of 2021.
    old = release is not None and int(release[1]) < 21
    masked = MASKED.get(seq, math.ceil(MASKED_SHARE * seq))
    if "ngc pytorch" in said:
        # DeepLearningExamples of 2020, PyTorch/LanguageModeling/BERT/modeling.py: every position
        # has logits, of which the loss ignores most.
        masked = seq
    if re.search(r"unpad|packed|packing", said) and not old:
        assumed.append(f"{PRESENT:.0%} of positions are no padding")
        seq = max(1, round(PRESENT * seq))
        masked = math.ceil(MASKED_SHARE * seq)
    elif "pytorch" in framework and release is None:
        # NVIDIA's PyTorch example judges every position before sequence_output_is_dense (2021).
        assumed.append("words of every position")
        masked = seq
    return {"seq": seq, "masked": min(masked, seq)}


def _decoder(row: Row, family: str, sizes: dict[str, int], blocks: int, assumed: list[str]) -> int:
    """Sizes of a Llama or a mixture of experts; blocks after those without experts."""
    width, heads = sizes["width"], sizes["heads"]
    said = told(row, "family", "model", "other_plan", "notes")
    # Llama's rule: 8/3 of the width, rounded up to 256.
    usual = -(-8 * width // 3 // 256) * 256
    if family == "llama" or (row.get("ffn_hidden") or "").strip():
        sizes["inner"] = whole(row, "ffn_hidden", usual)
    latent = next((rest for words, *rest in LATENT if re.search(words, said)), None)
    if latent:
        sizes |= RANKS
        assumed.append("ranks of latent attention")
    else:
        sizes["groups"] = whole(row, "kv_heads", heads)
        sizes["head_width"] = whole(row, "head_dim", width // heads)
        if heads % sizes["groups"]:
            raise Unpredictable(f"{sizes['groups']} key heads do not divide {heads} query heads")
        window = next((size for words, size in WINDOWS if re.search(words, said)), 0)
        if window:
            sizes["window"] = window
            assumed.append(f"a window of {window} in every other block")
            blocks //= 2
    if family == "moe":
        sizes |= {"experts": whole(row, "n_experts"), "slots": whole(row, "experts_topk")}
        sizes["expert_inner"] = whole(row, "moe_ffn_hidden", sizes.get("inner"))
        shared = re.search(r"(\d+) shared expert", said)
        dense = re.search(r"(\d+) (?:first )?dense (?:layer|block)", said)
        usual_dense, usual_shared = latent or (0, 0)
        sizes["shared"] = int(shared[1]) if shared else usual_shared
        sizes["dense"] = min(int(dense[1]) if dense else usual_dense, blocks - 1)
        sizes.setdefault("inner", sizes["expert_inner"] * (sizes["slots"] + sizes["shared"]))
        blocks -= sizes["dense"]
    return blocks


def graph_of(model: Model, samples: int, known: list[tuple[Shape, Graph]]) -> Graph:
    """The model on a global batch; `known` keeps the graphs that were captured last."""
    found = next((graph for shape, graph in known if shape == model.shape), None)
    if found is None:
        found = captured(model.shape)
    known[:] = [(model.shape, found), *(k for k in known if k[0] != model.shape)][:KEPT]
    stand_in = dict(_primes(model.shape))
    counts = {stand_in["samples"]: samples, stand_in["vocab"]: model.vocab or stand_in["vocab"]}
    graph = resized(found, counts)
    return repeated(graph, model.blocks) if model.blocks else graph


def _primes(shape: Shape) -> tuple[tuple[str, int], ...]:
    """What stands for samples and words of a shape."""
    sizes = [size for _, size in shape.sizes]
    chosen = [
        next(p for p in primes if all(size % p for size in sizes if size))
        for primes in (SAMPLES, VOCABULARIES)
    ]
    return ("samples", chosen[0]), ("vocab", chosen[1])


def captured(shape: Shape, samples: int = 0, vocab: int = 0) -> Graph:
    """Two blocks of a model on a batch of `samples`, with `vocab` words (0: stand-ins)."""
    stand_in, sizes = dict(_primes(shape)), dict(shape.sizes)
    samples, vocab = samples or stand_in["samples"], vocab or stand_in["vocab"]
    rank = sizes.pop("adapters", 0)
    with torch.device("meta"):
        model, batch, loss = BUILDERS[shape.family](vocab, sizes)
        if rank:
            adapted(model, rank, LORA_NAMES)
    cast_model(model, getattr(torch, shape.dtype))
    wide = getattr(torch, shape.dtype)
    shaped = {
        name: torch.empty(
            (samples, *value.shape[1:]),
            dtype=wide if value.is_floating_point() else value.dtype,
            device="meta",
        )
        for name, value in batch.items()
    }
    return capture(model, shaped, loss=loss)


def resized(graph: Graph, counts: Mapping[int, int]) -> Graph:
    """The graph with every prime factor that is a key of `counts` replaced by its value."""

    def number(n: int) -> int:
        times = 1
        for prime, count in counts.items():
            while n and n % prime == 0:
                n, times = n // prime, times * count
        return n * times

    def arg(a: Arg) -> Arg:
        if isinstance(a, tuple):
            return tuple(arg(x) for x in a)
        return number(a) if isinstance(a, int) and not isinstance(a, bool) else a

    def value(v: Value) -> Value:
        shape = tuple(number(n) for n in v.spec.shape)
        return v if shape == v.spec.shape else Value(v.name, TensorSpec(shape, v.spec.dtype))

    def item(i: Node | Call) -> Node | Call:
        results = tuple(value(v) for v in i.results)
        if isinstance(i, Call):
            return replace(i, results=results)
        kwargs = tuple((k, arg(v)) for k, v in i.kwargs)
        return replace(i, args=tuple(arg(a) for a in i.args), kwargs=kwargs, results=results)

    def function(f: Function) -> Function:
        inputs = tuple(value(v) for v in f.inputs)
        return replace(f, inputs=inputs, body=tuple(item(i) for i in f.body))

    return replace(
        graph,
        functions=tuple(function(f) for f in graph.functions),
        main=function(graph.main),
        inputs=tuple(replace(i, value=value(i.value)) for i in graph.inputs),
    )


Loss = Callable[[tuple[Tensor, ...], Mapping[str, Tensor]], Tensor]
Built = tuple[nn.Module, Batch, Loss | None]


def language_loss(output: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy in float32, as frameworks compute it, of labels that are already shifted."""
    _, logits, *others = output
    loss = F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())
    for other in others:
        loss = loss + F.cross_entropy(other.float(), batch["next_sentence_label"])
    return loss


def _ids(*shape: int) -> Tensor:
    return torch.empty((1, *shape), dtype=torch.int64)


def _gpt(vocab: int, sizes: Sizes) -> Built:
    seq, width, inner = sizes["seq"], sizes["width"], sizes["inner"]
    dropout = 0.1 if sizes.get("drops") else 0.0
    model = gpt.GPT(vocab, width, 2, sizes["heads"], seq, dropout)
    for block in model.blocks:
        assert isinstance(block, gpt.Block)
        block.up, block.down = nn.Linear(width, inner), nn.Linear(inner, width)
    return model, {"input_ids": _ids(seq), "labels": _ids(seq)}, language_loss


def _llama(vocab: int, sizes: Sizes) -> Built:
    """A Llama whose blocks are any: with experts, latent attention or windows."""
    width, heads, seq = sizes["width"], sizes["heads"], sizes["seq"]
    experts, dense = sizes.get("experts", 0), sizes.get("dense", 0)
    rotated = sizes["rope"] if "q_rank" in sizes else sizes["head_width"]

    def attention(window: int = 0) -> nn.Module:
        if "q_rank" in sizes:
            return LatentAttention(width, heads, **{name: sizes[name] for name in RANKS})
        groups, biased = sizes["groups"], "window" in sizes
        return WideAttention(width, heads, groups, sizes["head_width"], window, biased)

    def block(mixed: bool, window: int = 0) -> nn.Module:
        if not mixed:
            return AnyBlock(width, attention(window), SwiGLU(width, sizes["inner"]))
        slots, shared = sizes["slots"], sizes["shared"]
        mixture = Experts(width, sizes["expert_inner"], experts, slots, shared)
        return AnyBlock(width, attention(window), mixture)

    model = llama.Llama(vocab, width, 0, heads, heads, 1)
    blocks = [block(False) for _ in range(dense)]
    for _ in range(max(2, dense + 1)):
        one = block(bool(experts), sizes.get("window", 0))
        blocks.append(Pair(one, block(bool(experts))) if "window" in sizes else one)
    model.blocks = nn.ModuleList(blocks)
    model.frequencies = torch.ones(rotated // 2)
    return model, {"input_ids": _ids(seq), "labels": _ids(seq)}, language_loss


def _bert_model(vocab: int, sizes: Sizes) -> Built:
    seq, masked = sizes["seq"], sizes["masked"]
    width, heads, inner = sizes["width"], sizes["heads"], sizes["inner"]
    model = GatheredBERT(vocab, width, 2, heads, inner, seq, 0.1)
    batch = {name: _ids(seq) for name in ("input_ids", "token_type_ids", "attention_mask")}
    batch |= {"masked": _ids(masked), "labels": _ids(masked), "next_sentence_label": _ids()}
    return model, batch, language_loss


def _transformer_xl_model(_: int, sizes: Sizes) -> Built:
    seq, width = sizes["seq"], sizes["width"]
    bands = [b - a for a, b in zip(CUTOFFS, (*CUTOFFS[1:], WORDS), strict=True)]
    widths = [width // NARROWS**i if width >= WIDE_FROM else width for i in range(len(bands))]
    each = width, sizes["heads"], sizes["head_width"], sizes["inner"]
    rare = [max(1, seq // share) for share in RARE]
    model = TransformerXL(bands, widths, rare, 2, each, 2 * seq, 0.1)
    memory = torch.empty(1, seq, width)
    return model, {"input_ids": _ids(seq), "labels": _ids(seq), "memory": memory}, None


def _resnet_model(_: int, sizes: Sizes) -> Built:
    model = ResNet((3, 4, 6, 3), 64, 64, 256, 1, 1000, plain=False)
    crop = sizes["crop"]
    return model, {"image": torch.empty(1, 3, crop, crop), "labels": _ids()}, None


BUILDERS: Mapping[str, Callable[[int, Sizes], Built]] = MappingProxyType(
    {
        "gpt": _gpt, "llama": _llama, "moe": _llama, "bert": _bert_model,
        "xl": _transformer_xl_model, "resnet": _resnet_model,
    }
)  # fmt: skip
