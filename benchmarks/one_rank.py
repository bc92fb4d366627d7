"""One rank: the generated program's training step against the unmodified model in plain PyTorch.

Same weights, batch and optimizer; in every launch (a process of its own, because where memory lies
moves a ratio by some percent for as long as a process lives) both sides take turns, and the median
over pairs of steps gives one ratio. A row is the median over launches with its interval, by the
clock and, because a machine that is shared preempts either side at random, by CPU time.
"""

import argparse
import copy
import json
import statistics
import subprocess
import sys
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
from parloom.comparators.baselines import METHODS
from parloom.cost.clusters import load_cluster
from parloom.execute.program import compile_pcg
from parloom.ir.lower import lower
from parloom.runtime import SingleComm, Trainer

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


def run_model(name: str, pairs: int, launch: int) -> dict[str, Any]:
    """One launch of one model: median seconds of both sides and median ratios, (clock, CPU)."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    other = copy.deepcopy(model)
    if launch % 2:  # which side's memory comes first
        eager, generated = _eager(model, batch), _generated(other, batch)
    else:
        generated, eager = _generated(other, batch), _eager(model, batch)
    for _ in range(3):
        losses = eager(), generated()
    times: list[list[tuple[float, float]]] = [[], []]
    for pair in range(pairs):
        order = ((0, eager), (1, generated))
        for side, step in order if pair % 2 else reversed(order):
            times[side].append(_timed(step))
    kinds = range(2)
    seconds = [[statistics.median(t[kind] for t in side) for side in times] for kind in kinds]
    ratios = [
        statistics.median(b[kind] / a[kind] for a, b in zip(*times, strict=True)) for kind in kinds
    ]
    difference = abs(losses[0] - losses[1]) / abs(losses[0])
    return {"model": name, "seconds": seconds, "ratios": ratios, "loss_difference": difference}


def launched(index: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every model in a new process."""
    command = [
        sys.executable, __file__, "--one", str(index), "--models", args.models,
        "--pairs", str(args.pairs), "--threads", str(args.threads),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    ratios = " ".join(f"{row['ratios'][0]:.3f}" for row in found)
    print(f"launch {index}: {ratios}", file=sys.stderr, flush=True)
    return found


def summary(launches: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table from a model's launches."""
    row: dict[str, Any] = {"model": launches[0]["model"], "launches": len(launches)}
    for kind, unit in enumerate(("clock", "cpu")):
        ratios = [launch["ratios"][kind] for launch in launches]
        eager_s, generated_s = (
            statistics.median(launch["seconds"][kind][side] for launch in launches)
            for side in range(2)
        )
        ratio, low, high = median_and_interval(ratios)
        row |= {
            f"{unit}_eager_s": eager_s,
            f"{unit}_generated_s": generated_s,
            f"{unit}_ratio": (ratio, low, high),
            f"{unit}_ratios": ratios,
            f"{unit}_verdict": verdict(low, high, LIMIT),
        }
    row["loss_difference"] = max(launch["loss_difference"] for launch in launches)
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
    parser.add_argument("--launches", type=int, default=15)
    parser.add_argument("--pairs", type=int, default=9, help="pairs of steps per launch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", type=int, default=None, help="run this launch, print JSON")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    names = args.models.split(";")
    if args.one is not None:
        torch.set_num_threads(args.threads)
        print(json.dumps([run_model(name, args.pairs, args.one) for name in names]))
        return 0
    launches = [launched(index, args) for index in range(args.launches)]
    rows = [summary([launch[index] for launch in launches]) for index in range(len(names))]
    print(
        "| model | eager | generated | ratio (95 %) | <= 1.05 | eager, CPU | generated, CPU |"
        " ratio (95 %) | <= 1.05 | loss differs by |"
    )
    print("|" + "---|" * 10)
    for row in rows:
        print(_line(row))
    report("one_rank", rows, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
