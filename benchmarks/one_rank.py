"""One rank: the generated program's training step against the unmodified model in plain PyTorch.

Same weights, batch and optimizer; both sides take turns in one process, each pair of steps gives
one ratio. A row is the median of the ratios with its interval, by the clock and, because a machine
that is shared preempts either side at random, by the process's CPU time.
"""

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from common import median_and_interval, report, verdict
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from parloom import zoo
from parloom.capture import capture, parameters_of
from parloom.cost.clusters import load_cluster
from parloom.execute.program import compile_pcg
from parloom.ir.lower import lower
from parloom.runtime import SingleComm, Trainer
from parloom.search.baselines import METHODS

LIMIT = 1.05
Built = tuple[nn.Module, dict[str, Tensor]]


def _tokens(vocab: int, batch: int, seq: int) -> dict[str, Tensor]:
    ids = torch.randint(0, vocab, (batch, seq), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def _gpt2(dropout: float) -> Built:
    config = GPT2Config(
        n_layer=4, n_embd=256, n_head=8, vocab_size=5003, n_positions=128, use_cache=False,
        bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM", resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return GPT2LMHeadModel(config), _tokens(5003, 4, 128)


def _llama() -> Built:
    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=256, intermediate_size=704, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=5000, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), _tokens(5000, 4, 128)


MODELS: dict[str, Callable[[], Built]] = {
    "gpt2": lambda: _gpt2(0.0),
    "gpt2, dropout": lambda: _gpt2(0.1),
    "llama": _llama,
    "cnn": lambda: zoo.build("cnn", batch=16, channels=32, image=64),
    "mlp": lambda: zoo.build("mlp", batch=256, features=1024, hidden=2048, depth=4),
}


def _eager(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], float]:
    optimizer = AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        optimizer.zero_grad()
        result = model(**batch)
        loss: Tensor = result[0] if isinstance(result, tuple) else result.loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step


def _generated(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], float]:
    graph = capture(model, batch)
    decisions = next(iter(METHODS["data_parallel"](graph, load_cluster("1xcpu"), 1, 0)))
    program = compile_pcg(lower(graph, decisions), "one rank").program
    trainer = Trainer(
        program,
        parameters_of(model, graph),
        optimizer=lambda named: AdamW(named, lr=1e-4),
        comm=SingleComm(program.mesh),
    )

    def step() -> float:
        return trainer.step(batch).loss.item()

    return step


def _timed(step: Callable[[], float]) -> tuple[float, float]:
    """(clock, CPU) seconds of a step."""
    started, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - started, time.process_time() - cpu


def run_model(name: str, pairs: int) -> dict[str, Any]:
    """Time one model; the losses of both sides must agree where nothing is random."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    generated = _generated(copy.deepcopy(model), batch)
    eager = _eager(model, batch)
    for _ in range(3):
        losses = eager(), generated()
    times: list[list[tuple[float, float]]] = [[], []]
    for pair in range(pairs):
        order = ((0, eager), (1, generated))
        for side, step in order if pair % 2 else reversed(order):
            times[side].append(_timed(step))
    row: dict[str, Any] = {"model": name, "pairs": pairs}
    for kind, unit in enumerate(("clock", "cpu")):
        sides = [[pair[kind] for pair in side] for side in times]
        ratio, low, high = median_and_interval([b / a for a, b in zip(*sides, strict=True)])
        row |= {
            f"{unit}_eager_s": median_and_interval(sides[0])[0],
            f"{unit}_generated_s": median_and_interval(sides[1])[0],
            f"{unit}_ratio": (ratio, low, high),
            f"{unit}_verdict": verdict(low, high, LIMIT),
        }
    row["loss_difference"] = abs(losses[0] - losses[1]) / abs(losses[0])
    return row


def _line(row: dict[str, Any]) -> str:
    parts = [f"| {row['model']}"]
    for unit in ("clock", "cpu"):
        ratio, low, high = row[f"{unit}_ratio"]
        parts.append(
            f"{row[f'{unit}_eager_s']:.3f} s | {row[f'{unit}_generated_s']:.3f} s |"
            f" {ratio:.3f} ({low:.3f} .. {high:.3f}) | {row[f'{unit}_verdict']}"
        )
    return " | ".join([*parts, f"{row['loss_difference']:.0e} |"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=";".join(MODELS), help="names, separated by ;")
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    print(
        "| model | eager | generated | ratio (95 %) | <= 1.05 | eager, CPU | generated, CPU |"
        " ratio (95 %) | <= 1.05 | loss differs by |"
    )
    print("|" + "---|" * 10)
    for name in args.models.split(";"):
        rows.append(run_model(name, args.pairs))
        print(_line(rows[-1]), flush=True)
    report("one_rank", rows, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
