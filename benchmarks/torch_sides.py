"""What torch offers to train a model on several ranks, as a user of torch would write it.

Every side takes a model, the global batch and a learning rate and gives a step, which returns this
rank's loss: the mean over ranks is the loss of the batch. What torch raises says that a side cannot
express a model.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
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

Batch = dict[str, Tensor]
Step = Callable[[], Tensor]
LAYERS = nn.Linear, nn.Embedding, nn.Conv2d
MICROBATCHES_PER_STAGE = 2


def _loss(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _plain_step(model: nn.Module, batch: Batch, rate: float) -> Step:
    """The training step that everyone writes."""
    optimizer = SGD(model.parameters(), lr=rate)

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


def layers_of(model: nn.Module) -> list[str]:
    """Paths of the blocks, or where the model has none, of all layers with weights."""
    blocks = [f"blocks.{i}" for i in range(len(getattr(model, "blocks", ())))]
    return blocks or [path for path, m in model.named_modules() if isinstance(m, LAYERS)]


def one_device(model: nn.Module, batch: Batch, rate: float) -> Step:
    """The model as it is on the whole batch: what every way of sharing the work has to beat."""
    return _plain_step(model, batch, rate)


def data_parallel(model: nn.Module, batch: Batch, rate: float) -> Step:
    """DistributedDataParallel, gradients living in its buckets."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _plain_step(wrapped, _mine(batch), rate)


def fsdp(model: nn.Module, batch: Batch, rate: float) -> Step:
    """FSDP2: every block a unit, or else every module but the root that calls layers; what the root
    calls are units, too.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for path in sorted({_caller(model, path) or path for path in layers_of(model)}):
        fully_shard(model.get_submodule(path), mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain_step(model, _mine(batch), rate)


def _caller(model: nn.Module, path: str) -> str:
    """The block itself, or the module that calls a layer: lists have no forward of their own."""
    while isinstance(model.get_submodule(path), (*LAYERS, nn.ModuleList, nn.ModuleDict)):
        path = path.rpartition(".")[0]
    return path


def tensor_parallel(model: nn.Module, batch: Batch, rate: float) -> Step:
    """DTensor: columns then rows; for a GPT also vocabulary and loss over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if not hasattr(model, "blocks"):
        split = parallelize_module(model, mesh, _columns_then_rows(model))
        return _plain_step(split, batch, rate)
    _fused_heads_apart(model)
    plan: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }
    parallelize_module(model, mesh, plan)
    model.head.weight = model.tokens.weight  # type: ignore[union-attr]
    step = _plain_step(model, batch, rate)

    def with_parallel_loss() -> Tensor:
        with loss_parallel():
            loss = step()
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss

    return with_parallel_loss


def _columns_then_rows(model: nn.Module) -> dict[str, ParallelStyle]:
    """Linear layers of one list in pairs, a last one alone stays whole; tables by columns."""
    plan: dict[str, ParallelStyle] = {}
    lists: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            plan[path] = ColwiseParallel(output_layouts=Replicate())
        elif isinstance(module, nn.Linear):
            lists.setdefault(path.rpartition(".")[0], []).append(path)
    for paths in lists.values():
        for first, second in zip(paths[::2], paths[1::2], strict=False):
            plan |= {first: ColwiseParallel(), second: RowwiseParallel()}
    return plan


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


def one_f_one_b(model: nn.Module, batch: Batch, rate: float, *, by_flops: bool = False) -> Step:
    """torch.distributed.pipelining's 1F1B: as many layers or blocks on every rank, or as many
    FLOPs as the layers allow.

    Every rank has the batch; what is tied between stages is kept equal as Megatron-LM does it, by
    summing its gradients.
    """
    rank, stages = dist.get_rank(), dist.get_world_size()
    count = MICROBATCHES_PER_STAGE * stages
    microbatch = {name: t.chunk(count)[0] for name, t in batch.items()}
    parts = split_layers(model, microbatch, stages, by_flops=by_flops)
    held = [{name for name, _ in part.named_parameters()} for part in parts]
    mine = dict(parts[rank].named_parameters())
    stage = PipelineStage(parts[rank], rank, stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, count, loss_fn=lambda output, _: _loss(output))
    optimizer = SGD(mine.values(), lr=rate)
    tied: list[tuple[str, dist.ProcessGroup]] = []
    for name in sorted({name for names in held for name in names}):
        owners = [index for index, names in enumerate(held) if name in names]
        if len(owners) > 1:
            tied.append((name, dist.new_group(owners)))
    target = torch.zeros(count)
    entries: dict[str, Any] = dict(batch)

    def step() -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        schedule.step(target=target, losses=losses, return_outputs=False, **entries)
        for name, group in tied:
            if name in mine:
                dist.all_reduce(mine[name].grad, group=group)
        optimizer.step()
        # Only the last stage has the loss: as many times as there are ranks to take the mean of.
        return stages * torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return step


def split_layers(
    model: nn.Module, batch: Batch, stages: int, *, by_flops: bool = False
) -> list[fx.GraphModule]:
    """The model as a chain of modules, each from the batch and what the one before hands on: of
    equally many layers, or of FLOPs whose most is the least.

    A stage begins with the first use of its first layer's weights; what is made of the batch alone
    is made where it is used. (`pipeline` of torch.distributed.pipelining splits modules, too, but
    gives entries of the batch to the first stage only.)
    """
    traced = torch.export.export(model, (), batch).module()
    assert isinstance(traced, fx.GraphModule)
    nodes = [node for node in traced.graph.nodes if node.op == "call_function"]
    trained: set[fx.Node] = set(traced.graph.find_nodes(op="get_attr"))
    for node in nodes:
        if not trained.isdisjoint(node.all_input_nodes):
            trained.add(node)
    paths = layers_of(model)
    used: dict[str, fx.Node] = {}  # layer -> where it comes first
    for node in nodes:
        for weight in (str(n.target) for n in node.all_input_nodes if n.op == "get_attr"):
            for path in paths:
                if weight.startswith(f"{path}."):
                    used.setdefault(path, node)
    order = list(used.values())
    firsts = [order[len(order) * stage // stages] for stage in range(1, stages)]
    if by_flops:
        firsts = _balanced(nodes, order, stages)
    stage_of: dict[fx.Node, int] = {}
    for node in nodes:
        before = max(stage_of.values(), default=0)
        if node in trained:
            stage_of[node] = before + (before < stages - 1 and node is firsts[before])
    (output,) = traced.graph.find_nodes(op="output")
    loss = output.all_input_nodes[0]
    sent = [
        [n for n in stage_of if stage_of[n] <= s < max(stage_of.get(u, 0) for u in n.users)]
        for s in range(stages - 1)
    ]
    return [
        _stage(
            traced,
            sent[stage - 1] if stage else [],
            [node for node in nodes if stage_of.get(node, stage) == stage],
            sent[stage] if stage < stages - 1 else [loss],
        )
        for stage in range(stages)
    ]


def _balanced(nodes: list[fx.Node], order: list[fx.Node], stages: int) -> list[fx.Node]:
    """The first node of each stage but the first, of those where layers begin; a head whose weight
    is tied is a layer, too.
    """
    read: set[fx.Node] = set()
    begins: list[fx.Node] = []
    for node in nodes:
        weights = {n for n in node.all_input_nodes if n.op == "get_attr"}
        if node in order or (_flops(node) and weights & read):
            begins.append(node)
        read |= weights
    parts = [0.0]
    for node in nodes:
        if node in begins[1:]:
            parts.append(0.0)
        parts[-1] += _flops(node)

    @cache
    def slowest(first: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return sum(parts[first:]), ()
        found = (
            (max(sum(parts[first:end]), rest), (end, *ends))
            for end in range(first + 1, len(parts) - left + 2)
            for rest, ends in (slowest(end, left - 1),)
        )
        return min(found)

    return [begins[end] for end in slowest(0, stages)[1]]


def _flops(node: fx.Node) -> float:
    """Those of a linear layer or a convolution; of anything else none."""
    if not any(name in str(node.target) for name in ("aten.linear", "aten.conv")):
        return 0.0
    weight = node.args[1]
    assert isinstance(weight, fx.Node)
    made, shape = node.meta["val"], weight.meta["val"].shape
    found: float = 2.0 * made.numel() * shape[1:].numel()
    return found


def _stage(
    traced: fx.GraphModule, received: list[fx.Node], nodes: list[fx.Node], sent: list[fx.Node]
) -> fx.GraphModule:
    """The part of a traced module that computes `nodes`."""
    graph = fx.Graph()
    known = {node: graph.placeholder(node.name) for node in received}
    for node in traced.graph.find_nodes(op="placeholder"):
        known[node] = graph.placeholder(node.name, default_value=None)
    for node in received:
        known[node] = graph.call_function(contiguous, (known[node],))
    for node in nodes:
        for given in node.all_input_nodes:
            if given.op == "get_attr" and given not in known:
                known[given] = graph.node_copy(given)
        known[node] = graph.node_copy(node, known.__getitem__)
    found = tuple(known[node] for node in sent)
    graph.output(found if len(found) > 1 else found[0])
    graph.eliminate_dead_code()
    return fx.GraphModule(traced, graph)


class Contiguous(torch.autograd.Function):
    """The value itself; its gradient as gloo sends it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def contiguous(x: Tensor) -> Tensor:
    """As above, as a function that a traced module can name."""
    found: Tensor = Contiguous.apply(x)  # type: ignore[no-untyped-call]
    return found


SIDES: dict[str, Callable[[nn.Module, Batch, float], Step]] = {
    "DDP": data_parallel,
    "FSDP2": fsdp,
    "DTensor": tensor_parallel,
    "1F1B": one_f_one_b,
    "1F1B by FLOPs": partial(one_f_one_b, by_flops=True),
    "one device": one_device,
}
