"""One rank of the cluster benchmark: parloom and its counterpart in torch, step by step in turns.

Started by `cluster_in_a_box.py` on every device of the bed. Both sides train the same model from
the same weights on the same batch with the same optimizer; rank 0 prints one JSON line per pair.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import torch
import torch.distributed as dist
from cluster_models import MODELS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from parloom import api

Batch = dict[str, Tensor]
Step = Callable[[], Tensor]
LEARNING_RATE = 0.05


def _loss(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _plain_step(model: nn.Module, batch: Batch) -> Step:
    """The training step that everyone writes."""
    optimizer = SGD(model.parameters(), lr=LEARNING_RATE)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model(**batch))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def _mine(batch: Batch) -> Batch:
    rank, size = dist.get_rank(), dist.get_world_size()
    return {name: t.chunk(size)[rank].contiguous() for name, t in batch.items()}


def torch_data_parallel(model: nn.Module, batch: Batch) -> Step:
    """DistributedDataParallel, gradients living in its buckets."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _plain_step(wrapped, _mine(batch))


def torch_fsdp(model: nn.Module, batch: Batch) -> Step:
    """FSDP2: every layer or block a unit, the rest in the root."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in ("layers", "blocks"):
        for block in getattr(model, name, ()):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain_step(model, _mine(batch))


def torch_megatron(model: nn.Module, batch: Batch) -> Step:
    """DTensor: columns then rows; for the GPT also vocabulary and loss over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if hasattr(model, "layers"):
        plan: dict[str, ParallelStyle] = {
            f"layers.{i}": RowwiseParallel() if i % 2 else ColwiseParallel()
            for i in range(len(model.layers))  # type: ignore[arg-type]
        }
        return _plain_step(parallelize_module(model, mesh, plan), batch)
    _fused_heads_apart(model)
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }
    parallelize_module(model, mesh, plan)
    model.head.weight = model.tokens.weight  # type: ignore[union-attr]
    step = _plain_step(model, batch)

    def with_parallel_loss() -> Tensor:
        with loss_parallel():
            loss = step()
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss

    return with_parallel_loss


def _fused_heads_apart(model: nn.Module) -> None:
    """Reorder fused QKV rows so that a rank's columns are whole heads, and use them as such."""
    size = dist.get_world_size()
    for block in model.blocks:  # type: ignore[union-attr]
        attention = block.attention
        width, heads = attention.out.in_features, attention.heads
        with torch.no_grad():
            for tensor in (attention.qkv.weight, attention.qkv.bias):
                parts = tensor.view(3, size, width // size, *tensor.shape[1:])
                tensor.copy_(parts.transpose(0, 1).reshape(tensor.shape).clone())
        attention.forward = partial(_attention, attention, heads // size, width // heads)


def _attention(module: nn.Module, heads: int, head_width: int, x: Tensor) -> Tensor:
    batch, seq, _ = x.shape
    fused = module.qkv(x).view(batch, seq, 3, heads, head_width)  # type: ignore[operator]
    q, k, v = (part.transpose(1, 2) for part in fused.unbind(2))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out: Tensor = module.out(y.transpose(1, 2).reshape(batch, seq, -1))  # type: ignore[operator]
    return out


OTHERS: dict[str, tuple[str, Callable[[nn.Module, Batch], Step]]] = {
    "data_parallel": ("DDP", torch_data_parallel),
    "fsdp": ("FSDP2", torch_fsdp),
    "megatron": ("DTensor", torch_megatron),
}


def parloom_step(name: str, method: str, plans: Path) -> Step:
    """The trainer of a plan that was made beforehand."""
    model, batch = MODELS[name]()
    trainer = api.parallelize(
        model,
        plans / name / method,
        optimizer=lambda named: SGD(named, lr=LEARNING_RATE),
    )
    return lambda: trainer.step(batch).loss


def _timed(step: Step) -> tuple[float, Tensor]:
    dist.barrier()
    started = time.perf_counter()
    loss = step()
    return time.perf_counter() - started, loss


def _slowest(times: list[float]) -> list[float]:
    """Each step's time on the rank that took longest."""
    longest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    found: list[float] = longest.tolist()
    return found


def _mean(loss: Tensor) -> float:
    """The loss of the whole batch: parts differ where ranks have samples of their own."""
    total = loss.double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def compare(name: str, method: str, plans: Path, steps: int, first: int) -> dict[str, object]:
    """Time both sides in turns; `first` begins."""
    other, make = OTHERS[method]
    sides = [parloom_step(name, method, plans), make(*MODELS[name]())]
    order = (first, 1 - first)
    times: list[list[float]] = [[], []]
    losses = [torch.zeros(()), torch.zeros(())]
    for index in range(2 + steps):
        for side in order:
            seconds, losses[side] = _timed(sides[side])
            if index >= 2:  # buckets are formed in the first step, memory is warm in the second
                times[side].append(seconds)
    return {
        "model": name,
        "method": method,
        "other": other,
        "parloom_s": _slowest(times[0]),
        "torch_s": _slowest(times[1]),
        "losses": [_mean(loss) for loss in losses],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--plans", type=Path, required=True)
    parser.add_argument("--pairs", required=True, help="model:method,...")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for pair in args.pairs.split(","):
        name, method = pair.split(":")
        with redirect_stdout(StringIO()):  # the log of the steps
            row = compare(name, method, args.plans, args.steps, args.first)
        if dist.get_rank() == 0:
            print("RESULT " + json.dumps(row), flush=True)
    dist.barrier()
    sys.stdout.flush()
    # Not by the interpreter: threads of gloo now and then abort a process that takes itself apart.
    os._exit(0)


if __name__ == "__main__":
    main()
