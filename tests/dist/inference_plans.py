"""Small models for inference, and plans for them by hand."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    RobertaConfig,
    T5Config,
    ViTConfig,
    ViTForImageClassification,
)

from parloom import zoo
from parloom.capture.generation import Generation, capture_generation
from parloom.capture.inference import capture_inference
from parloom.capture.load import Loaded
from parloom.capture.quantized import state_of
from parloom.execute.eager_inference import drawn
from parloom.ir.factors import factorize
from parloom.ir.graph import CACHE, Graph
from parloom.ir.layout import Layout, Shard
from parloom.ir.lower_stages import lower_stages
from parloom.ir.mesh import Mesh
from parloom.ir.plan import (
    NO_OPTIMIZER,
    ONE_DEVICE,
    Decisions,
    Inference,
    ModelSource,
    Plan,
    Stage,
    one_stage,
)
from parloom.ir.stages import stage_items
from parloom.ir.text import print_graph
from parloom.search.answers import decided_beside
from parloom.search.spread import decisions, spread, unfold
from tests.zoo_sizes import SMALL

BATCH, PROMPT, TOKENS = 4, 8, 8


def _llama() -> Any:
    return LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=40, max_position_embeddings=64,
    )  # fmt: skip


def _gpt2() -> Any:
    return GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=40, n_positions=64, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip


def _t5() -> Any:
    return T5Config(
        d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, vocab_size=40,
        decoder_start_token_id=0,
    )  # fmt: skip


def _opt() -> Any:
    """Positions are looked up in a table."""
    return OPTConfig(
        hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=4, vocab_size=40, max_position_embeddings=64,
    )  # fmt: skip


def _mixtral() -> Any:
    """Each token has two of four experts."""
    return MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=40, max_position_embeddings=64, num_local_experts=4,
    )  # fmt: skip


def _bart() -> Any:
    return BartConfig(
        d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=40,
        max_position_embeddings=64,
    )  # fmt: skip


def _roberta() -> Any:
    """Positions that a model is not told begin behind that of padding."""
    return RobertaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=40, max_position_embeddings=64, is_decoder=True,
    )  # fmt: skip


OF_BLOCK = re.compile(r"(?:layers?|h|blocks?)\.([01])(?:\.|$)")
CONFIGS = {
    "llama": _llama, "gpt2": _gpt2, "t5": _t5, "opt": _opt, "mixtral": _mixtral, "bart": _bart,
    "roberta": _roberta,
}  # fmt: skip
ENCODE = ("t5", "bart")  # the prompts


@dataclass(frozen=True)
class Served:
    """A model with its prompts and programs."""

    model: nn.Module
    prompts: Tensor
    made: Generation

    @property
    def loaded(self) -> Loaded:
        return Loaded(self.model, {"input_ids": self.prompts, "labels": self.prompts})

    @property
    def tensors(self) -> dict[str, Tensor]:
        return state_of(self.model, self.made.decode, self.made.prefill)

    def plan(self, chosen: Decisions) -> Plan:
        """The plan of these decisions about the program of tokens, prompts laid out like it."""
        graph, other = self.made.decode, self.made.prefill
        prompts = decided_beside(other, chosen, lower_stages(graph, chosen))
        return Plan(
            ModelSource("test"), f"{chosen.num_ranks}xcpu", "0" * 8, NO_OPTIMIZER, "by hand",
            chosen, print_graph(graph),
            inference=Inference(TOKENS, print_graph(other), prompts.nodes),
        )  # fmt: skip


@cache
def served(name: str, weights: str | None = None, dtype: torch.dtype = torch.float64) -> Served:
    """A model by name, with programs in double precision where nothing else is said."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kind = AutoModelForSeq2SeqLM if name in ENCODE else AutoModelForCausalLM
        model = drawn(kind.from_config(CONFIGS[name]()).to(dtype))
        prompts = torch.randint(40, (BATCH, PROMPT))
    made = capture_generation(model, {"input_ids": prompts, "labels": prompts}, TOKENS, weights)
    return Served(model, prompts, made)


def _vit() -> Loaded:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = ViTConfig(**sizes, num_attention_heads=4, image_size=8, patch_size=4, num_labels=4)
    model, labels = ViTForImageClassification(config), torch.zeros(BATCH).long()
    return Loaded(model, {"pixel_values": torch.randn(BATCH, 3, 8, 8), "labels": labels})


def _denoiser(name: str) -> Loaded:
    sizes = {**SMALL[name.removesuffix("_denoiser")], "heads": 4}
    return Loaded(*zoo.build(name, batch=BATCH, **sizes))


PASSES: dict[str, Callable[[], Loaded]] = {
    "vit": _vit,
    "dit": partial(_denoiser, "dit_xl_denoiser"),
    "wan": partial(_denoiser, "wan_1_3b_denoiser"),
}


@cache
def passed(name: str, weights: str | None = None) -> tuple[Loaded, Graph]:
    """A model that makes one pass, in double precision, and the program of its outputs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = PASSES[name]()
    model = drawn(made.model.double())
    batch = {n: t.double() if t.is_floating_point() else t for n, t in made.batch.items()}
    loaded = Loaded(model, batch)
    graph, other = capture_inference(loaded, 0, weights)
    assert other is None
    return loaded, graph


def plan_of_pass(graph: Graph, chosen: Decisions) -> Plan:
    """The plan of these decisions about a program of one pass."""
    return Plan(
        ModelSource("test"), f"{chosen.num_ranks}xcpu", "0" * 8, NO_OPTIMIZER, "by hand", chosen,
        print_graph(graph), inference=Inference(),
    )  # fmt: skip


def two_stages(graph: Graph, chosen: Decisions, microbatches: int) -> Decisions:
    """The same decisions in two stages on devices of their own, a block in each."""
    return in_stages(graph, chosen, block_cuts(graph)[1:2], microbatches)


def four_stages(graph: Graph, microbatches: int) -> Decisions:
    """A device for each of two blocks, for what is before them and for what is after them."""
    return in_stages(graph, Decisions(ONE_DEVICE), block_cuts(graph), microbatches)


def block_cuts(graph: Graph) -> tuple[int, ...]:
    """The places of the first item of either block, and of the first one after them."""
    found = [(i, OF_BLOCK.search(key)) for i, key in enumerate(stage_items(graph))]
    blocks = [(i, match[1]) for i, match in found if match]
    second = [i for i, number in blocks if number == "1"]
    return blocks[0][0], second[0], second[-1] + 1


def in_stages(
    graph: Graph, chosen: Decisions, cuts: tuple[int, ...], microbatches: int
) -> Decisions:
    """The same decisions in stages of so many items, on devices of their own."""
    items, mesh = stage_items(graph), chosen.mesh
    size = mesh.num_ranks
    stages = tuple(
        Stage(items[first:last], (range(index * size, (index + 1) * size),), mesh)
        for index, (first, last) in enumerate(pairwise((0, *cuts, len(items))))
    )
    return replace(chosen, stages=stages, num_microbatches=microbatches, schedule="1f1b")


# The first product of a pair, whose columns tensor parallelism shards; a fused one has three parts.
COLUMNS = re.compile(r"(?:qkv|q|k|v|[qkv]_proj|up|fc1)\.(?:weight|bias)$")


def columns_cut(graph: Graph, mesh: Mesh) -> Decisions:
    """Decisions that follow from weights whose columns all axes shard, by heads and units."""
    names = [e.target for e in graph.of_kind("parameter") if COLUMNS.search(e.target)]
    return inputs_cut(graph, mesh, dict.fromkeys(names, 0))


def inputs_cut(graph: Graph, mesh: Mesh, dims: Mapping[str, int]) -> Decisions:
    """Decisions that follow from inputs whose dim, by name, all axes shard."""
    seeds: dict[str, Layout] = {}
    for entry in graph.inputs:
        if (dim := dims.get(entry.target)) is not None:
            left = entry.value.spec.shape[dim] // (3 if "qkv" in entry.target else 1)
            shards = list[Shard]()
            for axis in mesh.axes:
                left //= axis.size
                shards.append(Shard(axis.name, dim, left))
            seeds[entry.value.name] = Layout(tuple(shards))
    program = unfold(graph, factorize(graph), mesh)
    return Decisions(one_stage(mesh), decisions(program, spread(program, seeds)))


def caches_cut(graph: Graph, mesh: Mesh, **axes: int) -> Decisions:
    """Decisions that follow from caches whose dim `axes[axis]` each axis shards, by prompt where
    that is 0.
    """
    seeds: dict[str, Layout] = {}
    for entry in graph.inputs:
        if entry.kind not in (CACHE, "batch"):
            continue
        shape, shards, left = entry.value.spec.shape, list[Shard](), dict[int, int]()
        for axis, dim in axes.items():
            if (entry.kind == CACHE or dim == 0) and len(shape) > dim:
                left[dim] = left.get(dim, shape[dim]) // mesh[axis].size
                shards.append(Shard(axis, dim, left[dim]))
        seeds[entry.value.name] = Layout(tuple(shards))
    program = unfold(graph, factorize(graph), mesh)
    return Decisions(one_stage(mesh), decisions(program, spread(program, seeds)))
