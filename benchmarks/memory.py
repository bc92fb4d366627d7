"""Predicted against allocated memory: generated programs on one and on four CPU ranks.

    python benchmarks/memory.py [--models gpt,cnn] [--plans fsdp] [--json FILE]

Every allocation and release of torch's CPU allocator is counted, from before the trainer is made to
the end of its third step. `base` is the least in that step (weights, optimizer states, buffers, the
batch, memory kept for collectives), `peak` the most. A row is one rank; of several, the one that
holds most. Not seen, and not predicted: what libraries take past torch's allocator (packed
operands of matrix products, scratch of convolutions, sockets' buffers).
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from common import report
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from parloom import zoo
from parloom.capture import capture, parameters_of
from parloom.capture.hugging_face import build_from_config
from parloom.comparators.baselines import METHODS
from parloom.cost.clusters import load_cluster
from parloom.cost.simulate import simulate
from parloom.cost.tasks import COMPONENTS
from parloom.errors import ParloomError
from parloom.execute.optimizers import named_optimizer
from parloom.execute.program import compile_pcg
from parloom.execute.ranks import fork_ranks
from parloom.ir.graph import Call, Graph, Node
from parloom.ir.lower import lower
from parloom.ir.plan import ActivationDecision
from parloom.rewrite.rewrites import rewritten
from parloom.runtime import DistributedComm, Program, Trainer, required_groups
from parloom.runtime.comm import Group
from parloom.runtime.optimizer import OPTIMIZERS
from parloom.runtime.work import Work

Built = tuple[nn.Module, dict[str, Tensor]]
LIMIT = 0.1
OPTIMIZER = "adamw"
STEP = "the step that is measured"


def _hugging_face(name: str, batch: int = 16, seq: int = 64, **sizes: Any) -> Callable[[], Built]:
    def build() -> Built:
        config = getattr(transformers, name).config_class(**sizes)
        config.architectures = [name]
        return build_from_config(config, batch, seq)

    return build


def _zoo(name: str, **sizes: Any) -> Callable[[], Built]:
    return lambda: zoo.build(name, **sizes)


_TEXT = {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 512, "max_position_embeddings": 64,
}  # fmt: skip
_SMALL = {"batch": 16, "seq": 32, "vocab": 512, "width": 64}
MODELS: Mapping[str, Callable[[], Built]] = {
    "mlp": _zoo("mlp"),
    "gpt": _zoo("gpt"),
    "llama": _zoo("llama"),
    "cnn": _zoo("cnn"),
    "dlrm": _zoo("dlrm"),
    "bert_large": _zoo("bert_large", **_SMALL, depth=3, heads=4, inner=256),
    "dit_xl": _zoo("dit_xl", batch=8, image=16, width=64, depth=3, heads=4, classes=10),
    "gnmt": _zoo("gnmt", **_SMALL, depth=4),
    "inception_v3": _zoo("inception_v3", batch=8, scale=1 / 4, crop=107, classes=16),
    "resnext50": _zoo("resnext50", batch=8, channels=16, cardinality=4, classes=16, crop=64),
    "unet": _zoo("unet", batch=8, channels=32, multipliers=(1, 2), resolution=16, attention=8,
                 norm_groups=8),
    "GPT2": _hugging_face("GPT2LMHeadModel", n_layer=3, n_embd=128, n_head=4, vocab_size=512,
                          n_positions=64, use_cache=False, bos_token_id=0, eos_token_id=0),
    "Llama": _hugging_face("LlamaForCausalLM", **_TEXT, num_key_value_heads=2, use_cache=False),
    "Bert": _hugging_face("BertForMaskedLM", **_TEXT),
    "T5": _hugging_face("T5ForConditionalGeneration", vocab_size=512, d_model=128, d_kv=32,
                        d_ff=256, num_layers=2, num_heads=4, use_cache=False,
                        decoder_start_token_id=0),
    "ViT": _hugging_face("ViTForImageClassification", hidden_size=128, num_hidden_layers=3,
                         num_attention_heads=4, intermediate_size=512, image_size=64,
                         patch_size=8, num_labels=16),
    "ResNet": _hugging_face("ResNetForImageClassification", embedding_size=16,
                            hidden_sizes=(32, 64), depths=(2, 2), num_labels=16),
    "Mixtral": _hugging_face("MixtralForCausalLM", **_TEXT | {"intermediate_size": 256},
                             num_key_value_heads=2, num_local_experts=4, use_cache=False),
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A plan: baseline method, ranks, microbatches, and what happens to blocks' activations: a
    policy, or the name of a pattern of the operators whose values are recomputed.
    """

    method: str
    ranks: int
    microbatches: int = 1
    policy: str = "keep"

    @property
    def name(self) -> str:
        words = [self.method if self.ranks > 1 else "one rank"]
        words += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        words += [self.policy] if self.policy == "recompute" else []
        words += [f"recompute values of {self.policy}"] if self.policy in VALUES else []
        return ", ".join(words)


NARROW, ATTENTION = "norms and elementwise", "attention"
VALUES = {NARROW: "norm|gelu|silu|relu|add|mul|dropout", ATTENTION: "attention|softmax"}
KINDS = (
    Kind("data_parallel", 1),
    Kind("data_parallel", 1, 2),
    Kind("data_parallel", 1, 1, "recompute"),
    Kind("data_parallel", 4),
    Kind("data_parallel", 4, 2),
    Kind("fsdp", 4),
    Kind("fsdp", 4, 2),
    Kind("fsdp", 4, 1, "recompute"),
    Kind("megatron", 4),
    Kind("megatron", 4, 2, "recompute"),
    Kind("data_parallel", 1, 1, NARROW),
    Kind("data_parallel", 1, 2, ATTENTION),
    Kind("fsdp", 4, 1, NARROW),
    Kind("megatron", 4, 2, NARROW),
)


class _Waited:
    """A collective that is over some time before its last reference goes, so that the thread of
    gloo that ran it has let go: what such a thread frees is reported to nobody.
    """

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()
        time.sleep(0.002)


class _Patient:
    """A group whose collectives are `_Waited`."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        if name not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
            return found
        return lambda *args, **kwargs: _Waited(found(*args, **kwargs))


class _PatientComm(DistributedComm):
    def group(self, axes: tuple[str, ...]) -> Group:
        return _Patient(super().group(axes))


@dataclass(frozen=True)
class Predicted:
    """A program, and the memory that its step is said to take."""

    program: Program
    components: tuple[tuple[str, int], ...]
    base: int
    peak: int


@dataclass(frozen=True)
class Allocated:
    """The least and the most bytes in a step, and what is stored between steps."""

    base: int
    peak: int
    weights: int
    optimizer: int


def decided(graph: Graph, call: Call, policy: str) -> ActivationDecision:
    """What a call does with its activations."""
    if policy not in VALUES:
        return ActivationDecision(call.prefix, policy)
    keys = [item.key for item in graph.by_name[call.function].body if isinstance(item, Node)]
    values = tuple(key for key in keys if re.search(VALUES[policy], key.partition(":")[2]))
    return ActivationDecision(call.prefix, "recompute", values)


def predict(graph: Graph, kind: Kind) -> Predicted:
    """Lower and simulate; raises `ParloomError` where there is no such plan."""
    cluster = load_cluster(f"{kind.ranks}xcpu")
    chosen = list(METHODS[kind.method](graph, cluster, kind.microbatches, 0))[-1]
    calls = (item for item in graph.main.body if isinstance(item, Call))
    activations = tuple(decided(graph, call, kind.policy) for call in calls)
    decisions = replace(chosen, activations=activations)
    pcg = lower(rewritten(graph, decisions.rewrites), decisions)
    played = simulate(pcg, cluster, decisions, named_optimizer(OPTIMIZER))
    process = played.processes[0]
    components = tuple(zip(COMPONENTS, process.memory.peaks, strict=True))
    made = compile_pcg(pcg, "memory").program
    return Predicted(made, components, sum(process.base), process.memory.peak)


def allocated(
    program: Program, tensors: dict[str, Tensor], batch: dict[str, Tensor], optimizer: str
) -> Allocated:
    """What one rank allocates in the third step and has between steps."""
    maker: Any = OPTIMIZERS[optimizer].maker
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        batch = {name: tensor.clone() for name, tensor in batch.items()}
        trainer = Trainer(
            program,
            tensors,
            optimizer=lambda named: maker(named, lr=1e-4),
            comm=_PatientComm(program.mesh, required_groups(program)),
        )
        for _ in range(2):
            trainer.step(batch)
        with record_function(STEP):
            trainer.step(batch)
    base, peak = _held(recorded)
    helds = trainer.parts[0].store.helds.values()
    stored = [t for held in helds for t in (held.stored, held.weight) if t is not None]
    kept = [t for s in trainer.optimizer.state.values() for t in s.values() if t.dim()]
    kept += [held.owned for held in helds]
    weights = _storages(stored)
    own = sum(size for key, size in _storages(kept).items() if key not in weights)
    return Allocated(base, peak, sum(weights.values()), own)


def _held(recorded: profile) -> tuple[int, int]:
    """The least and the most bytes in the measured step, by address."""
    assert recorded.profiler is not None
    found: Any = recorded.profiler.kineto_results
    changes: list[tuple[int, int, int]] = []
    nodes = list(found.experimental_event_tree())
    began = 0
    while nodes:
        node = nodes.pop()
        nodes += node.children
        began = node.start_time_ns if node.name == STEP else began
        if node.tag == _EventType.Allocation:
            change = node.extra_fields
            changes.append((node.start_time_ns, change.ptr, change.alloc_size))
    live: dict[int, int] = {}
    held = most = 0
    least = -1
    for when, address, size in sorted(changes, key=lambda change: change[0]):
        held -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            held += size
        if when >= began:
            most = max(most, held)
            least = held if least < 0 else min(least, held)
    return least, most


def _storages(tensors: list[Tensor]) -> dict[int, int]:
    """Bytes of each distinct memory."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def on_rank(
    programs: list[Program],
    tensors: dict[str, Tensor],
    batch: dict[str, Tensor],
    optimizer: str = OPTIMIZER,
) -> list[Allocated | str]:
    found: list[Allocated | str] = []
    for program in programs:
        try:
            found.append(allocated(program, tensors, batch, optimizer))
        except RuntimeError as error:  # all ranks run the same program and fail alike
            found.append(f"does not run: {error}")
    return found


def rows_of(name: str, kinds: list[Kind]) -> Iterator[dict[str, Any]]:
    """All plans of one model."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    graph = capture(model.train(), batch)
    tensors = parameters_of(model, graph)
    for ranks in dict.fromkeys(kind.ranks for kind in kinds):
        made: list[tuple[Kind, Predicted]] = []
        for kind in (kind for kind in kinds if kind.ranks == ranks):
            try:
                made.append((kind, predict(graph, kind)))
            except ParloomError as error:
                print(f"{name}, {kind.name}: {error}", file=sys.stderr)
        programs = [predicted.program for _, predicted in made]
        on_ranks = fork_ranks(ranks, on_rank, programs, tensors, batch, timeout_s=500.0)
        for index, (kind, predicted) in enumerate(made):
            of_kind = [found[index] for found in on_ranks]
            for failure in [found for found in of_kind if isinstance(found, str)][:1]:
                print(f"{name}, {kind.name}: {failure}", file=sys.stderr)
            ran = [found for found in of_kind if isinstance(found, Allocated)]
            if ran:
                yield _row(name, kind, predicted, max(ran, key=lambda a: a.peak))


def _row(name: str, kind: Kind, predicted: Predicted, measured: Allocated) -> dict[str, Any]:
    expected = dict(predicted.components)
    return {
        "model": name,
        "plan": kind.name,
        "ranks": kind.ranks,
        "predicted_peak": predicted.peak,
        "measured_peak": measured.peak,
        "error": predicted.peak / measured.peak - 1,
        "predicted_base": predicted.base,
        "measured_base": measured.base,
        "predicted": expected,
        "measured_weights": measured.weights,
        "measured_optimizer": measured.optimizer,
    }


def _line(row: dict[str, Any]) -> str:
    def mib(key: str) -> str:
        return f"{row[key] / 2**20:.2f}"

    return (
        f"| {row['model']} | {row['ranks']} | {row['plan']} | {mib('predicted_peak')} |"
        f" {mib('measured_peak')} | {row['error']:+.1%}"
        f"{'' if abs(row['error']) <= LIMIT else ' **'} | {mib('predicted_base')} |"
        f" {mib('measured_base')} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--plans", default="", help="only plans whose name contains this")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [kind for kind in KINDS if args.plans in kind.name]
    table: list[dict[str, Any]] = []
    print("| model | ranks | plan | predicted, MiB | allocated | error | base, predicted | base |")
    print("|" + "---|" * 8)
    for name in args.models.split(","):
        for row in rows_of(name, kinds):
            table.append(row)
            print(_line(row), flush=True)
    errors = sorted(abs(row["error"]) for row in table)
    outside = sum(error > LIMIT for error in errors)
    middle = errors[len(errors) // 2]
    print(f"{len(table)} rows, median {middle:.1%}, largest {errors[-1]:.1%}, {outside} above 10 %")
    report("memory", table, args.json)
    return int(outside > 0)


if __name__ == "__main__":
    raise SystemExit(main())
