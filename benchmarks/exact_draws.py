"""What exact draws cost: a step whose masks do not depend on the plan against one of fast draws.

The same four forked ranks take turns with both kinds of step. Each pair of neighbors gives a ratio
by the slowest rank's clock and one by the CPU time of all ranks, which a shared machine moves less.
"""

import argparse
import time
from statistics import quantiles

import torch
import torch.distributed as dist
from common import report
from torch import nn
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel

from parloom.capture import capture, parameters_of
from parloom.comparators.baselines import METHODS
from parloom.cost.clusters import load_cluster
from parloom.execute.program import compile_pcg
from parloom.execute.ranks import fork_ranks
from parloom.ir.lower import lower
from parloom.runtime import DistributedComm, Program, Trainer

RANKS = 4
LIMIT = 1.02
Tensors = dict[str, torch.Tensor]


def gpt2(batch: int, seq: int) -> tuple[nn.Module, Tensors]:
    config = GPT2Config(
        n_layer=4, n_embd=256, n_head=8, vocab_size=5008, n_positions=seq, use_cache=False,
        bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    ids = torch.randint(0, 5008, (batch, seq), generator=torch.Generator().manual_seed(1))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


def pairs(
    program: Program, tensors: Tensors, batch: Tensors, count: int
) -> list[tuple[float, float]]:
    """An exact step over the fast one before it, by the clock and by CPU time."""
    torch.set_num_threads(1)
    trainer = Trainer(
        program,
        tensors,
        optimizer=lambda named: AdamW(named, lr=1e-3),
        comm=DistributedComm(program.mesh, program.groups),
    )

    def step_s(exact: bool) -> tuple[float, float]:
        trainer.parts[0].ctx.exact_random = exact
        dist.barrier()
        start, worked = time.perf_counter(), time.process_time()
        trainer.step(batch)
        taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        work = torch.tensor(time.process_time() - worked, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        dist.all_reduce(work)
        return float(taken), float(work)

    for exact in (True, False):
        step_s(exact)
    found = []
    for _ in range(count):
        (fast_s, fast_work_s), (exact_s, exact_work_s) = step_s(exact=False), step_s(exact=True)
        found.append((exact_s / fast_s, exact_work_s / fast_work_s))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name, batch, seq in (("gpt2 8 x 64", 8, 64), ("gpt2 16 x 128", 16, 128)):
        model, example = gpt2(batch, seq)
        graph = capture(model, example)
        tensors = {n: t.detach().clone() for n, t in parameters_of(model, graph).items()}
        for method in ("data_parallel", "megatron"):
            plan = next(iter(METHODS[method](graph, load_cluster(f"{RANKS}xcpu"), 1, 0)))
            program = compile_pcg(lower(graph, plan), name).program
            ratios = fork_ranks(
                RANKS, pairs, program, tensors, example, args.pairs, timeout_s=1200
            )[0]
            for clock, values in zip(("wall", "cpu"), zip(*ratios, strict=True), strict=True):
                low, median, high = quantiles(values, n=4)
                verdict = "within" if median <= LIMIT else "beyond"
                print(f"{name:14} {method:14} {clock:5} exact / fast {median:.3f}"
                      f" ({low:.3f} .. {high:.3f})  {verdict} {LIMIT}", flush=True)  # fmt: skip
                rows.append({"model": name, "method": method, "clock": clock, "median": median,
                             "low": low, "high": high, "pairs": len(values)})  # fmt: skip
    report("exact_draws", rows, args.json)


if __name__ == "__main__":
    main()
