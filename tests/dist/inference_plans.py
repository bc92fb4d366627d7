"""Small Hugging Face models for inference, and plans for them by hand."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    LlamaConfig,
    T5Config,
)

from parloom.capture import parameters_of
from parloom.capture.generation import Generation, capture_generation
from parloom.capture.load import Loaded
from parloom.ir.factors import factorize
from parloom.ir.graph import CACHE, Graph
from parloom.ir.layout import Layout, Shard
from parloom.ir.lower_stages import lower_stages
from parloom.ir.mesh import Mesh
from parloom.ir.plan import (
    NO_OPTIMIZER,
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

BATCH, PROMPT, TOKENS = 4, 6, 6  # of caches with room for 12 positions


def _llama() -> Any:
    return LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=40, max_position_embeddings=64,
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


CONFIGS = {"llama": _llama, "gpt2": _gpt2, "t5": _t5}


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
        found = parameters_of(self.model, self.made.decode)
        return {name: tensor.detach() for name, tensor in found.items()}

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
def served(name: str) -> Served:
    """A model by name, with programs in double precision."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kind = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
        model = kind.from_config(CONFIGS[name]()).double()
        prompts = torch.randint(40, (BATCH, PROMPT))
    made = capture_generation(model, {"input_ids": prompts, "labels": prompts}, TOKENS)
    return Served(model, prompts, made)


def two_stages(graph: Graph, chosen: Decisions, microbatches: int) -> Decisions:
    """The same decisions in two stages on devices of their own, a block in each."""
    items, mesh = stage_items(graph), chosen.mesh
    cut = next(i for i, key in enumerate(items) if key.endswith(".1") or "block.1." in key)
    ranks = range(mesh.num_ranks), range(mesh.num_ranks, 2 * mesh.num_ranks)
    stages = Stage(items[:cut], ranks[:1], mesh), Stage(items[cut:], ranks[1:], mesh)
    return replace(chosen, stages=stages, num_microbatches=microbatches, schedule="1f1b")


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
