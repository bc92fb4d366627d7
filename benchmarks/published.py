"""A published run, read from its row: model, cluster, configuration, software.

Everything is read from what the row says, by rules that name frameworks, years and flags, never a
model or a source. Where a row is silent, the rule says what is assumed.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parloom.capture import capture
from parloom.capture.load import cast_model
from parloom.comparators.configuration import Configuration
from parloom.cost.clusters import load_cluster
from parloom.cost.devices import Network, find_device, find_interconnect
from parloom.cost.kernels import Kernels
from parloom.cost.software import GENERATIONS, Software
from parloom.errors import ParloomError
from parloom.ir.graph import Graph
from parloom.ir.mesh import Cluster
from parloom.ir.repeat import repeated
from parloom.zoo import bert, gpt, llama

Row = Mapping[str, str]
Build = Callable[..., tuple[nn.Module, dict[str, Tensor]]]

GATED_FRAMEWORKS = (
    "composer", "megatron", "pytorch", "torchtitan", "deepspeed", "nemo", "internevo",
)  # fmt: skip
NOT_STATED = ("", "null", "none (not stated)")

# Which generation of software a run used: the first entry whose words are all in the framework's
# name decides.
FRAMEWORKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("composer",), "eager"),
    (("torchtitan", "compile"), "compiled"),
    (("torchtitan",), "eager"),
    (("internevo",), "fused"),
    (("megatron-bridge",), "fused"),
    (("nemo",), "fused"),
    (("megatron",), "megatron"),
    (("nvidia release",), "fused"),
    (("ngc",), "megatron"),
    (("nvidia",), "fused"),
    (("pytorch ddp",), "megatron"),
    (("oneflow",), "megatron"),
    (("paddle",), "megatron"),
    (("horovod",), "megatron"),
    (("pytorch",), "eager"),
    (("mxnet",), "megatron"),
    (("tensorflow",), "megatron"),
    (("alpa",), "megatron"),
)
# Frameworks that pad the vocabulary, to a multiple of this for each tensor-parallel rank:
# Megatron-LM (--make-vocab-size-divisible-by), NVIDIA's DeepLearningExamples (run_pretraining.py).
PADS = {"megatron": 128, "nemo": 128, "ngc pytorch": 8, "nvidia": 8}
FAMILIES = {
    "gpt": "gpt", "gpt(mpt)": "gpt", "gpt(bloom)": "gpt", "gpt(bloom, ALiBi)": "gpt",
    "llama": "llama", "llama-like": "llama", "bert": "bert", "moe": "moe",
}  # fmt: skip
# Vocabularies of the tokenizers that a family is trained with where a row names none: GPT-2's,
# Llama's, BERT's.
VOCABULARY = {"gpt": 50257, "llama": 32000, "bert": 30522}
FABRICS = (
    ("omni-path", "Omni-Path"), ("roce", "RoCE"), ("rdma", "RoCE"), ("ib", "InfiniBand"),
    ("infiniband", "InfiniBand"), ("ethernet", "Ethernet"),
)  # fmt: skip
PORTS = re.compile(r"(\d+) ?x ?[^,:]*?(\d+) ?Gb/s", re.IGNORECASE)
RATE = re.compile(r"(\d+) ?Gb/s", re.IGNORECASE)
PER_NODE = re.compile(r"(\d+) Gb/s/node", re.IGNORECASE)
PER_DEVICE = re.compile(r"(\d+) Gb/s RDMA per GPU", re.IGNORECASE)


class Unpredictable(Exception):
    """Why there is no prediction for a row."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is captured: a zoo model's sizes, the global batch, the dtype."""

    family: str
    sizes: Mapping[str, int]
    samples: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Run:
    """A published run as the simulator takes it."""

    graph: Graph
    cluster: Cluster
    chosen: Configuration
    kernels: Kernels


def gated(row: Row) -> bool:
    """Whether a row belongs to the gate: a plan that is known in full, of frameworks on PyTorch."""
    return (
        row["plan_complete"] == "1"
        and not row["duplicate_of"]
        and row["activation_checkpointing"] not in NOT_STATED
        and any(name in row["framework"].lower() for name in GATED_FRAMEWORKS)
    )


def run_of_row(row: Row, known: list[tuple[Shape, Graph]]) -> Run:
    """What a row describes; raises `Unpredictable` with the reason where it cannot be built.

    `known` holds the graph that was captured last, for rows that share it.
    """
    try:
        chosen = configuration(row)
        cluster = cluster_of(row)
        kernels = kernels_of(row, cluster)
        return Run(graph_of(row, chosen, known), cluster, chosen, kernels)
    except ParloomError as error:
        raise Unpredictable(str(error)) from error


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


def configuration(row: Row) -> Configuration:
    """The plan of a row."""
    devices = whole(row, "num_gpus")
    tensor, pipeline = whole(row, "tp", 1), whole(row, "pp", 1)
    context = whole(row, "cp", 1)
    if devices % (tensor * pipeline * context):
        raise Unpredictable(f"tp x pp x cp do not divide {devices} devices")
    data = devices // (tensor * pipeline * context)
    micro, batch = whole(row, "micro_batch"), whole(row, "global_batch")
    if batch % (data * micro):
        raise Unpredictable(f"a batch of {batch} is not {data} ranks times {micro} samples")
    zero, shard = _zero(row, tensor)
    steps = batch // (data * micro)
    chunks = whole(row, "vpp", 1)
    return Configuration(
        tensor,
        pipeline,
        chunks if chunks > 1 and steps % pipeline == 0 else 1,
        data,
        context,
        whole(row, "ep", 1),
        zero=zero if data * context > 1 else 0,
        shard=min(shard, data),
        recompute=_recompute(row),
        microbatch=micro,
        num_microbatches=steps,
        sequence_parallel=row["sequence_parallel"].lower() == "yes" and tensor > 1,
        master_dtype=None if precision(row)[0] == "float32" else "float32",
        # Automatic mixed precision keeps gradients as wide as its weights.
        reduce_dtype="float32" if "amp" in row["precision"].lower() else None,
        ring=context > 1 and _ring(row),
        striped=context > 1,  # zigzag in all frameworks, which balances ranks as stripes do
    )


def _ring(row: Row) -> bool:
    """Whether keys and values go around: by default they do with TransformerEngine (Megatron-LM's
    cp_comm_type is p2p); torchtitan gathers them (context_parallel_rotate_method is allgather).
    """
    return "torchtitan" not in row["framework"].lower()


def _zero(row: Row, tensor: int) -> tuple[int, int]:
    """ZeRO's level, and over how many data-parallel ranks; 0 is all."""
    text = row["zero_or_fsdp"].lower()
    within = re.search(r"within (\d+) (gpus|dp ranks)", text)
    group = re.search(r"group (\d+)", text)
    if not text or text.startswith(("none", "zero-0")):
        return 0, 0
    if within:
        ranks = int(within[1])
        return 1, ranks // tensor if within[2] == "gpus" else ranks
    if group:
        return 3, int(group[1])
    if "zero-1" in text or "dist-optimizer" in text:
        return 1, 0
    # FSDP's SHARD_GRAD_OP stores weights in shards, too, and gathers them for the forward pass.
    return (2, 0) if "zero-2" in text and "fsdp" not in text else (3, 0)


def _recompute(row: Row) -> str:
    """Of the blocks; the attention core is the kernels' business."""
    text = row["activation_checkpointing"].lower()
    if text.startswith("full"):
        return "full"
    if text.startswith("selective") and "attention" not in text:
        # torchtitan keeps every other product: about as much to compute as every other block.
        return "alternate"
    return "none"


def precision(row: Row) -> tuple[str, str | None]:
    """The dtype of activations, and that of products where it is another."""
    text = row["precision"].lower()
    volta = row["gpu_type"].startswith("V100")
    half = "float16" if volta else "bfloat16"
    if "fp8" in text or "float8" in text:
        return half, "float8"
    if "fp4" in text:
        raise Unpredictable("no rate is known for 4-bit products")
    if "tf32" in text:
        return "float32", "tfloat32"
    if "fp16" in text or "bf16" in text or "bfloat16" in text or "amp" in text:
        return half, None
    if "fp32" in text:
        return "float32", None
    if not text:
        return half, None
    raise Unpredictable(f"precision {row['precision']!r} is not known")


def kernels_of(row: Row, cluster: Cluster) -> Kernels:
    """Kernels of the row's device under its software."""
    software = software_of(row)
    if "attention" in row["activation_checkpointing"]:
        software = replace(software, keeps_scores=False)
    by_row = "row" in row["precision"].lower()
    return Kernels(cluster.device, software, None, precision(row)[1], by_row)


def software_of(row: Row) -> Software:
    """The generation of software that a row's framework and flags name."""
    framework = row["framework"].lower()
    for words, name in FRAMEWORKS:
        if all(word in framework for word in words):
            found = GENERATIONS[name]
            return replace(found, hides_moves=True) if "asynctp" in framework else found
    raise Unpredictable(f"the kernels of the framework {row['framework']!r} are not known")


def cluster_of(row: Row) -> Cluster:
    """The row's devices, with the network that it states."""
    name = row["gpu_key"] or row["gpu_type"]
    try:
        known = find_device(name)
    except ParloomError:
        raise Unpredictable(f"the device {name!r} is not described") from None
    nodes, per_node = whole(row, "nodes"), whole(row, "gpus_per_node")
    devices = whole(row, "num_gpus")
    if nodes * per_node != devices:
        nodes, per_node = (1, devices) if devices <= per_node else (devices // per_node, per_node)
    if nodes * per_node != devices:
        raise Unpredictable(f"{devices} devices are no whole number of nodes of {per_node}")
    cluster = load_cluster(f"{nodes}x{per_node}x{known.device.name}")
    network = _network(row, per_node)
    outer = cluster.levels[-1]
    if nodes > 1 and network is not None and outer.link != known.scale_up.level.link:
        levels = (*cluster.levels[:-1], network.level(outer.size, per_node))
        cluster = replace(cluster, levels=levels)
    return cluster


def _network(row: Row, per_node: int) -> Network | None:
    """What a row says of the network between nodes; None where it says nothing."""
    text = row["interconnect_inter"]
    kind = next((n for word, n in FABRICS if re.search(rf"\b{word}\b", text.lower())), None)
    if kind is None:
        return None
    compute = re.search(r"compute: ?([^+]*?)(?=, [a-z+]*: |$)", text, re.IGNORECASE)
    text = compute[1] if compute else text
    link = find_interconnect(kind)
    assert link is not None
    if device := PER_DEVICE.search(text):
        return Network(link, int(device[1]) / 8e-9 * per_node, per_node, per_node)
    if node := PER_NODE.search(text):
        return Network(link, int(node[1]) / 8e-9, per_node, per_node)
    ports = [(int(found[1]), int(found[2])) for found in PORTS.finditer(text)]
    ports += [(1, int(found[1])) for found in RATE.finditer(text)]
    if not ports:
        return None
    count, rate = max(ports, key=prod)  # others are for storage and management
    return Network(link, count * rate / 8e-9, per_node, count)


def graph_of(row: Row, chosen: Configuration, known: list[tuple[Shape, Graph]]) -> Graph:
    """The row's model on its global batch; `known` keeps the last one captured."""
    family = FAMILIES.get(row["family"])
    if family is None:
        raise Unpredictable(f"no model of the family {row['family']!r} is built here")
    vocab = whole(row, "vocab", VOCABULARY.get(family))
    padded = [n for word, n in PADS.items() if word in row["framework"].lower()]
    multiple = padded[0] * chosen.tensor if padded else 1
    vocab = -(-vocab // multiple) * multiple
    heads, width = whole(row, "heads"), whole(row, "hidden")
    groups = whole(row, "kv_heads", heads) if family in ("llama", "moe") else heads
    # Llama's rule: 8/3 of the width, rounded up to 256.
    usual = -(-8 * width // 3 // 256) * 256 if family == "llama" else 4 * width
    inner = whole(row, "moe_ffn_hidden") if family == "moe" else whole(row, "ffn_hidden", usual)
    if family == "gpt" and inner != 4 * width:
        raise Unpredictable(f"zoo:gpt has perceptrons of 4 widths, not {inner} / {width}")
    shape = Shape(
        family,
        {"seq": whole(row, "seq_len"), "vocab": vocab, "width": width, "heads": heads}
        | ({"groups": groups} if family in ("llama", "moe") else {})
        | (_of_experts(row, width // heads) if family == "moe" else {})
        | ({"inner": inner} if family != "gpt" else {}),
        chosen.samples,
        precision(row)[0],
    )
    if not known or known[0][0] != shape:
        known[:] = [(shape, captured(shape))]
    return repeated(known[0][1], whole(row, "layers"))


def _of_experts(row: Row, head_width: int) -> dict[str, int]:
    return {
        "experts": whole(row, "n_experts"),
        "slots": whole(row, "experts_topk"),
        "head_width": whole(row, "head_dim", head_width),
    }


def language_loss(output: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy in float32, as frameworks compute it, of labels that are already shifted."""
    _, logits, *others = output
    loss = F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())
    for other in others:
        loss = loss + F.cross_entropy(other.float(), batch["next_sentence_label"])
    return loss


def captured(shape: Shape) -> Graph:
    """Two blocks of a model on a batch of `samples`."""
    builders: Mapping[str, Build] = {
        "gpt": gpt.build, "llama": llama.build, "bert": bert.build, "moe": mixture,
    }  # fmt: skip
    with torch.device("meta"):
        model, batch = builders[shape.family](batch=1, depth=2, **shape.sizes)
    cast_model(model, getattr(torch, shape.dtype))
    shaped = {
        name: torch.empty((shape.samples, *value.shape[1:]), dtype=value.dtype, device="meta")
        for name, value in batch.items()
    }
    return capture(model, shaped, loss=language_loss)


class WideAttention(llama.Attention):
    """Attention whose heads together are wider than the model, or narrower."""

    def __init__(self, width: int, heads: int, groups: int, head_width: int) -> None:
        super().__init__(heads * head_width, heads, groups)
        self.q = nn.Linear(width, heads * head_width, bias=False)
        self.k = nn.Linear(width, groups * head_width, bias=False)
        self.v = nn.Linear(width, groups * head_width, bias=False)
        self.out = nn.Linear(heads * head_width, width, bias=False)


class Experts(nn.Module):
    """Every token to the best experts of its router; pairs of token and slot with their matrices.

    Shape suffixes: T tokens, D width, P pairs.
    """

    def __init__(self, width: int, inner: int, experts: int, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.flatten(0, 1)
        weights, ids = torch.softmax(self.router(x_TD), -1, dtype=torch.float32).topk(self.slots)
        rows_PD, ids_P = x_TD.repeat_interleave(self.slots, 0), ids.reshape(-1)
        gate, up = torch.bmm(self.up[ids_P], rows_PD.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        inner = (F.silu(gate) * up).unsqueeze(-1)
        rows_PD = torch.bmm(self.down[ids_P], inner).squeeze(-1)
        rows_PD = rows_PD * weights.to(x.dtype).reshape(-1).unsqueeze(-1)
        return rows_PD.view(len(x_TD), self.slots, -1).sum(1).view_as(x)


class MixtureBlock(nn.Module):
    """A Llama's block with `experts` in place of its perceptron."""

    def __init__(self, width: int, attention: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.attention_norm = llama.RMSNorm(width)
        self.attention = attention
        self.mlp_norm = llama.RMSNorm(width)
        self.experts = experts

    def forward(self, x: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos_SK, sin_SK)
        y: Tensor = x + self.experts(self.mlp_norm(x))
        return y


def mixture(
    *,
    batch: int,
    seq: int,
    depth: int,
    vocab: int,
    width: int,
    heads: int,
    groups: int,
    **rest: int,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """zoo:llama with mixtures of experts for perceptrons: `inner` wide, `experts` of them, of which
    `slots` take a token; its heads are `head_width` wide.
    """
    model, entries = llama.build(
        batch=batch, seq=seq, depth=1, vocab=vocab, width=width, heads=heads, groups=groups
    )
    assert isinstance(model, llama.Llama)
    model.blocks = nn.ModuleList(
        MixtureBlock(
            width,
            WideAttention(width, heads, groups, rest["head_width"]),
            Experts(width, rest["inner"], rest["experts"], rest["slots"]),
        )
        for _ in range(depth)
    )
    model.frequencies = torch.ones(rest["head_width"] // 2)
    return model, entries
