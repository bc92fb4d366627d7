"""The equality matrix: every plan of every model against one device.

    python benchmarks/equality.py [--plans 50] [--models gpt2,llama] [--json FILE]

For each model and mesh (2x2 and 2x3 forked gloo ranks): data_parallel, fsdp, megatron at every
degree, and random legal plans with every operator's layout drawn from all that its rule allows.
Each trains three steps in float64; losses, gradients, weights and buffers must agree with the
reference to 1e-9 (DESIGN section 3). Prints the matrix; exit code 1 where a plan differs.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from common import report
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from parloom import zoo
from parloom.capture import capture, parameters_of
from parloom.cost.clusters import load_cluster
from parloom.execute.optimizers import named_optimizer
from parloom.execute.program import compile_pcg
from parloom.execute.ranks import fork_ranks
from parloom.execute.verify import Trace, assemble, compare, reference_trace, train_rank
from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import Graph, widened
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.plan import Decisions
from parloom.rewrite.pad import rewritten
from parloom.runtime import Program
from parloom.search.baselines import METHODS, random_plan

MESHES = ((2, 2), (2, 3))
CHUNK = 10  # plans per fork: bounds the memory of results on their way home
Built = tuple[nn.Module, dict[str, Tensor]]


def _tokens(vocab: int, batch: int = 12, seq: int = 12) -> dict[str, Tensor]:
    """Random tokens; some labels are ignored, unevenly over samples."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocab, (batch, seq), generator=g)
    labels = ids.clone()
    labels[:, :2] = -100
    labels[0, :7] = -100
    return {"input_ids": ids, "labels": labels}


def _gpt2() -> Built:
    config = GPT2Config(
        n_layer=2, n_embd=48, n_head=6, vocab_size=97, n_positions=16, use_cache=False,
        bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config), _tokens(97)


def _llama() -> Built:
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=48, intermediate_size=72, num_attention_heads=6,
        num_key_value_heads=2, vocab_size=96, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), _tokens(96)


MODELS: dict[str, Callable[[], Built]] = {
    "mlp": lambda: zoo.build("mlp", batch=12, features=24, hidden=48, classes=12),
    "gpt2": _gpt2,
    "llama": _llama,
    "cnn": lambda: zoo.build("cnn", batch=12, channels=12, image=24, classes=12),
    "dlrm": lambda: zoo.build("dlrm", batch=12, rows=24, width=12, hidden=24, dense=12),
}


@dataclass(frozen=True)
class Case:
    """One plan to prove."""

    name: str
    program: Program


def programs(
    graph: Graph, factored: Factored, shape: tuple[int, int], count: int
) -> Iterator[Case]:
    """The baselines and `count` random plans on one mesh."""
    cluster = load_cluster(f"{shape[0]}x{shape[1]}xcpu")
    for method in ("data_parallel", "fsdp", "megatron"):
        for decisions in METHODS[method](graph, cluster, 1, 0):
            degrees = "x".join(str(a.size) for a in decisions.mesh.axes)
            yield Case(f"{method} {degrees}", _compiled(graph, factored, decisions))
    mesh = grid({"x": shape[0], "y": shape[1]})
    for seed in range(count):
        decisions = random_plan(graph, factored, mesh, seed)
        yield Case(f"random {seed}", _compiled(graph, factored, decisions))


def _compiled(graph: Graph, factored: Factored, decisions: Decisions) -> Program:
    if decisions.rewrites:
        graph = rewritten(graph, decisions.rewrites)
        factored = factorize(graph)
    return compile_pcg(lower(graph, decisions, factored=factored), "equality").program


def _ranks(cases: list[Case], tensors: dict[str, Tensor], batch: dict[str, Tensor]) -> list[object]:
    optimizer = named_optimizer("adamw")
    return [train_rank(case.program, optimizer, tensors, batch) for case in cases]


def run_model(name: str, count: int) -> Iterator[dict[str, object]]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    graph = widened(capture(model, batch))
    factored = factorize(graph)
    tensors = {
        n: t.detach().double() if t.is_floating_point() else t.detach().clone()
        for n, t in parameters_of(model, graph).items()
    }
    batch = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
    reference = reference_trace(graph, named_optimizer("adamw"), tensors, batch)
    for shape in MESHES:
        yield _row(name, shape, graph, factored, count, tensors, batch, reference)


def _row(
    name: str, shape: tuple[int, int], graph: Graph, factored: Factored, count: int,
    tensors: dict[str, Tensor], batch: dict[str, Tensor], reference: Trace,
) -> dict[str, object]:  # fmt: skip
    started = time.perf_counter()
    ranks = shape[0] * shape[1]
    cases = list(programs(graph, factored, shape, count))
    worst, where, failed = 0.0, "", []
    for first in range(0, len(cases), CHUNK):
        chunk = cases[first : first + CHUNK]
        homes = fork_ranks(ranks, _ranks, chunk, tensors, batch, timeout_s=1200)
        for index, case in enumerate(chunk):
            parallel = assemble([home[index] for home in homes])  # type: ignore[misc]
            found = compare(reference, parallel, ranks)
            if found.worst_error > worst:
                worst, where = found.worst_error, f"{case.name}: {found.worst_tensor}"
            if not found.passed:
                failed.append(f"{case.name}: {found.first_difference}")
    return {
        "model": name,
        "mesh": f"{shape[0]}x{shape[1]}",
        "plans": len(cases),
        "passed": len(cases) - len(failed),
        "worst relative error": worst,
        "worst tensor": where,
        "failed": failed,
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--plans", type=int, default=50, help="random plans per model and mesh")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)  # ranks are forked
    rows = []
    for name in args.models.split(","):
        for row in run_model(name, args.plans):
            rows.append(row)
            print(
                f"{row['model']:6} {row['mesh']}: {row['passed']}/{row['plans']} plans equal, worst"
                f" {row['worst relative error']:.1e} ({row['worst tensor']}), {row['seconds']} s",
                flush=True,
            )
            for failure in row["failed"]:  # type: ignore[attr-defined]
                print(f"  FAILED {failure}", flush=True)
    report("equality", rows, args.json)
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
