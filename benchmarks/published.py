"""A published run, read from its row: model, cluster, configurations, software.

Everything is read from what the row says, by rules that name frameworks, years and flags, never a
model or a source. Where a row is silent, its framework's documented default is assumed, and after
it what takes less memory; every run says what was assumed.
"""

import re
from dataclasses import dataclass, replace
from types import MappingProxyType

from memory_terms import memory_of
from published_models import Row, Shape, Unpredictable, graph_of, model_of, told, whole
from published_network import network
from published_schedule import schedule_of

from parloom.comparators.configuration import SELECTIVE, Configuration
from parloom.cost.attention import SCORES as UNFUSED
from parloom.cost.bands import COMPARED, COMPARED_SOFTWARE, Unknown
from parloom.cost.clusters import load_cluster
from parloom.cost.devices import KnownDevice, find_device
from parloom.cost.kernels import BLOCK, ROW, TENSOR, Kernels, slowest
from parloom.cost.software import GENERATIONS, Software
from parloom.errors import ParloomError
from parloom.ir.graph import Graph
from parloom.ir.mesh import Cluster
from parloom.ir.plan import Optimizer

GATED_FRAMEWORKS = (
    "composer", "megatron", "pytorch", "torchtitan", "deepspeed", "nemo", "internevo",
)  # fmt: skip
NOT_STATED = ("", "null", "none (not stated)")

# Which generation of software a run used: the first entry whose words are all in the framework's
# name decides.
FRAMEWORKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("composer",), "eager 2023"),
    (("llm-foundry",), "eager 2023"),
    (("torchtitan", "compile"), "compiled"),
    (("torchtitan",), "eager"),
    # InternLM, doc/en/install.md: flash-attention 1.0.5
    (("internevo",), "fused 2023"),
    (("megatron-bridge",), "engine"),
    (("nemo",), "engine"),
    (("megatron-core",), "engine"),
    (("megatron core",), "engine"),
    (("megatron",), "megatron"),
    (("deepspeed", "flash"), "fused"),
    (("deepspeed",), "megatron"),
    (("nvidia release",), "fused"),
    (("ngc pytorch",), "apex 2020"),
    (("ngc",), "megatron"),
    (("nvidia",), "fused"),
    (("torch.compile",), "compiled"),
    (("pytorch ddp",), "eager 2020"),
    (("oneflow",), "megatron"),
    (("paddle",), "eager 2020"),
    (("horovod",), "megatron"),
    (("pytorch",), "eager"),
    (("fsdp",), "eager"),
    (("mxnet",), "megatron"),
    (("maxtext",), "compiled"),
    (("jax",), "compiled"),
    (("tensorflow", "xla"), "megatron"),
    (("tensorflow",), "eager 2020"),
    (("alpa",), "megatron"),
)
# Where no entry fits: kernels of the years of a device, by words of its name.
OF_DEVICE = ((("v100", "t4", "2080"), "megatron"), (("tpu",), "compiled"), (("",), "fused"))
# Frameworks that pad the vocabulary, to a multiple of this for each tensor-parallel rank:
# Megatron-LM (--make-vocab-size-divisible-by), NVIDIA's DeepLearningExamples (run_pretraining.py).
PADS = {"megatron": 128, "nemo": 128, "ngc pytorch": 8, "nvidia": 8}
# ZeRO's level where a row names none; the first entry whose word the framework has.
ZERO = (
    ("composer", 3),  # llm-foundry, scripts/train/yamls/pretrain: fsdp_config FULL_SHARD
    ("llm-foundry", 3),
    ("torchtitan", 3),  # job_config.py: data_parallel_shard_degree -1
    ("maxtext", 3),  # base.yml: ici_fsdp_parallelism -1
    ("fsdp", 3),
    ("megatron-bridge", 1),  # recipes: use_distributed_optimizer
    ("nemo", 1),  # NeMo-Framework-Launcher, conf/training: distributed_fused_adam
    ("megatron-deepspeed", 1),  # bigscience, train/*/*.slurm: ZERO_STAGE=1
    ("megatron", 0),  # arguments.py: --use-distributed-optimizer is off
    ("", 0),  # DDP; DeepSpeed, config.py: stage 0
)  # fmt: skip
# What is recomputed where a row names nothing.
RECOMPUTED = (
    ("torchtitan", "alternate"),  # job_config.py: activation_checkpoint.mode selective
    ("maxtext", "full"),  # base.yml: remat_policy full
    ("oneflow-gpt", "full"),  # its printed arguments: checkpoint_activations True
    ("", "none"),  # arguments.py of Megatron-LM, config.py of DeepSpeed, llm-foundry: off
)
# Selective recomputation is of attention's scores in Megatron-LM (--recompute-granularity
# selective: core attention) and what grew out of it; torchtitan keeps every other product, about as
# much to compute as every other block.
SCORES = "scores"
LADDER = ("none", SCORES, SELECTIVE, "alternate", "full")
SHARES = MappingProxyType({"none": 0.0, "quarter": 0.25, "alternate": 0.5, "full": 1.0})
# Sequence parallelism with tensor parallelism where a row is silent.
SEQUENCE_PARALLEL = (
    "torchtitan",  # parallelize_llama: SequenceParallel norms, always
    "megatron-bridge",  # recipes: sequence_parallel with tensor parallelism
    "nemo",  # NeMo-Framework-Launcher, conf/training: sequence_parallel
)
OPTIMIZERS = (
    ("lamb", Optimizer("lamb", 2)),
    ("lars", Optimizer("sgd", 1)),
    ("sgd", Optimizer("sgd", 1)),
)
WIDE = r"(fp32|float32|32[- ]?bit)"
SUMS = r"(gradient|grads?\b|reduc|all-?reduce)"
WIDE_SUMS = re.compile(rf"{WIDE}[^,;+]{{0,16}}{SUMS}|{SUMS}[^,;+]{{0,24}}\b{WIDE}")


@dataclass(frozen=True, slots=True)
class Run:
    """A published run as the simulator takes it, and what of it was assumed."""

    graph: Graph
    cluster: Cluster
    chosen: Configuration
    kernels: Kernels
    optimizer: Optimizer
    assumed: tuple[str, ...] = ()

    def unknown(self, memory_share: float) -> Unknown:
        """What a prediction does not know of this run, which takes `memory_share` of memory."""
        return Unknown(
            self.cluster.device.name not in COMPARED,
            self.kernels.software.name not in COMPARED_SOFTWARE,
            bool(self.assumed),
            memory_share,
        )


def gated(row: Row) -> bool:
    """Whether a row belongs to the gate: a plan that is known in full, of frameworks on PyTorch."""
    return (
        row["plan_complete"] == "1"
        and not row["duplicate_of"]
        and row["activation_checkpointing"] not in NOT_STATED
        and any(name in row["framework"].lower() for name in GATED_FRAMEWORKS)
    )


def runs_of_row(row: Row, known: list[tuple[Shape, Graph]]) -> list[Run]:
    """What a row may describe, the most plausible first; raises `Unpredictable` with the reason
    where it cannot be built.

    Each later run takes less memory than the ones before it. `known` holds graphs that were
    captured, for rows that share them.
    """
    row, framework = _completed(row)
    try:
        options = configurations(row)
        cluster = cluster_of(row)
        chosen = options[0][0]
        padded = [n for word, n in PADS.items() if word in told(row, "framework")]
        multiple = padded[0] * chosen.tensor if padded else 1
        model = model_of(row, precision(row)[0], multiple)
        kernels = kernels_of(row, cluster)
        graph = graph_of(model, chosen.samples, known)
    except ParloomError as error:
        raise Unpredictable(str(error)) from error
    common = (*model.assumed, *framework, *_assumed_software(row), *_assumed_cluster(row))
    optimizer = optimizer_of(row)
    found: list[Run] = []
    for configured, scores, assumed in options:
        software = replace(kernels.software, keeps_scores=not scores)
        run = Run(
            graph, cluster, configured, replace(kernels, software=software), optimizer,
            (*common, *assumed),
        )  # fmt: skip
        # Where attention is one kernel, there are no scores to recompute.
        if not (found and scores and software.attention != UNFUSED):
            found.append(run)
    return found


def _completed(row: Row) -> tuple[Row, tuple[str, ...]]:
    """A row whose framework is named in full, and what that assumes: a PyTorch program of NVIDIA's
    with interleaved stages is Megatron-Core's.
    """
    framework = told(row, "framework")
    if "nvidia release" in framework and whole(row, "vpp", 1) > 1 and "nemo" not in framework:
        return {**row, "framework": f"{row['framework']}, Megatron-Core"}, ("Megatron-Core",)
    return row, ()


Option = tuple[Configuration, bool, tuple[str, ...]]


def configurations(row: Row) -> list[Option]:
    """Plans that a row may mean: each with whether attention's scores are recomputed, and what is
    assumed.
    """
    devices = whole(row, "num_gpus")
    tensor, pipeline = whole(row, "tp", 1), whole(row, "pp", 1)
    context = whole(row, "cp", 1)
    if devices % (tensor * pipeline * context):
        raise Unpredictable(f"tp x pp x cp do not divide {devices} devices")
    data = devices // (tensor * pipeline * context)
    common: list[str] = []
    micro, batch = _microbatch(row, data, common), whole(row, "global_batch")
    if batch % (data * micro):
        raise Unpredictable(f"a batch of {batch} is not {data} ranks times {micro} samples")
    steps = batch // (data * micro)
    played = schedule_of(row, pipeline, steps, whole(row, "layers"))
    common += played.assumed
    base = Configuration(
        tensor,
        pipeline,
        played.chunks,
        data,
        context,
        whole(row, "ep", 1),
        microbatch=micro,
        num_microbatches=steps,
        sequence_parallel=tensor > 1 and _sequence_parallel(row, common),
        master_dtype=None if precision(row)[0] == "float32" else "float32",
        reduce_dtype=_reduce_dtype(row),
        schedule=played.name,
        synchronizes=played.synchronizes,
        ring=context > 1 and _ring(row),
        striped=context > 1,  # zigzag in all frameworks, which balances ranks as stripes do
    )
    levels, told_level = zero_levels(row, tensor)
    policies, told_policy = recomputed(row)
    if data * context == 1:
        levels, told_level = [(0, 0)], True
    found: list[Option] = []
    # ZeRO takes less time than recomputation for the memory it saves.
    pairs = [(level, policies[0]) for level in levels]
    pairs += [(levels[-1], policy) for policy in policies[1:]]
    for (level, shard), policy in pairs:
        zeroed = replace(base, zero=level, shard=min(shard, data))
        assumed = [*common]
        assumed += [] if told_level else [f"ZeRO-{level}"]
        assumed += [] if told_policy else [f"{policy} recomputation"]
        blocks = "none" if policy == SCORES else policy
        found.append((replace(zeroed, recompute=blocks), policy == SCORES, tuple(assumed)))
    return found


def _ring(row: Row) -> bool:
    """Whether keys and values go around: by default they do with TransformerEngine (Megatron-LM's
    cp_comm_type is p2p); torchtitan gathers them (context_parallel_rotate_method is allgather).
    """
    return "torchtitan" not in row["framework"].lower()


def configuration(row: Row) -> Configuration:
    """The most plausible plan of a row."""
    return configurations(row)[0][0]


def _microbatch(row: Row, data: int, assumed: list[str]) -> int:
    if (row.get("micro_batch") or "").strip():
        return whole(row, "micro_batch")
    batch, steps = whole(row, "global_batch"), whole(row, "num_microbatches", 0)
    if steps and batch % (data * steps) == 0:
        return batch // (data * steps)
    if whole(row, "pp", 1) > 1 or batch % data:
        raise Unpredictable("micro_batch is not stated")
    assumed.append("one microbatch")
    return batch // data


def _sequence_parallel(row: Row, assumed: list[str]) -> bool:
    said = told(row, "sequence_parallel").strip()
    if said:
        return said in ("yes", "true", "1", "on", "sp")
    used = any(word in told(row, "framework") for word in SEQUENCE_PARALLEL)
    if used:
        assumed.append("sequence parallelism")
    return used


def _reduce_dtype(row: Row) -> str | None:
    """Automatic mixed precision keeps gradients as wide as its weights."""
    said = told(row, "precision", "other_plan", "zero_or_fsdp", "framework")
    wide = WIDE_SUMS.search(said) or "amp" in told(row, "precision")
    return "float32" if wide else None


def zero_levels(row: Row, tensor: int) -> tuple[list[tuple[int, int]], bool]:
    """ZeRO's level, and over how many data-parallel ranks (0: all); whether the row tells them."""
    text = told(row, "zero_or_fsdp").strip()
    level = zero_level(text)
    if level is not None:
        return [(level, _shard(text, tensor, row) if level else 0)], True
    framework = told(row, "framework", "other_plan")
    usual = next(level for word, level in ZERO if word in framework)
    return [(usual, 0)] + ([(1, 0)] if usual == 0 else []), False


def zero_level(text: str) -> int | None:
    """ZeRO's level in the words of a row; None where it says nothing."""
    if not text or re.match(r"(not stated|unknown|n/?a|null|\?)", text):
        return None
    if re.match(r"(none|no\b|off|false|zero-?0|ddp\s*$|plain ddp|replicated|dp\s*$)", text):
        return 0
    number = re.search(r"(?:zero|stage)[-_ ]*(?:stage)?[-_ =:]*([0-3])(?![\d.])", text)
    fsdp = re.search(r"fsdp|fully[- ]sharded|full[-_ ]shard|hsdp|hybrid[-_ ]shard|zero ?\+\+", text)
    off = re.search(r"fsdp ?= ?0", text)
    if fsdp and not off:
        # FSDP's SHARD_GRAD_OP stores weights in shards, too, and gathers them for the forward pass.
        return 3
    if number:
        return int(number[1])
    if re.search(r"dist\w*[- _]?(fused[- _]\w+|opt\w*)|optimizer (state )?shard|zero", text):
        return 1
    return 0 if "ddp" in text or "data parallel" in text else None


def _shard(text: str, tensor: int, row: Row) -> int:
    """Over how many data-parallel ranks a row's words shard; 0 is all."""
    within = re.search(r"within (\d+) (gpus|dp ranks|ranks)", text)
    if within:
        ranks = int(within[1])
        return max(1, ranks // tensor) if within[2] == "gpus" else ranks
    # torchtitan's mesh: replicas x shards
    mesh = re.search(r"hsdp\D{0,12}(\d+) ?[x\u00d7] ?(\d+)", text)
    if mesh:
        return int(mesh[2])
    group = re.search(
        r"group (?:size |of )?(\d+)|shard\w*[ =:]+(?:group |size |over |across |within )*(\d+)"
        r"|over (\d+)\b|over ici \((\d+)\)|(\d+)-way (?:fully[- ])?shard",
        text,
    )
    if group:
        return int(next(number for number in group.groups() if number))
    if re.search(r"hsdp|hybrid", text):  # FSDP's HYBRID_SHARD: within a node
        return max(1, whole(row, "gpus_per_node", 8) // tensor)
    return 0


def recomputed(row: Row) -> tuple[list[str], bool]:
    """What is recomputed, of `LADDER`, from the most plausible; whether the row tells it."""
    text = told(row, "activation_checkpointing").strip()
    said = recompute_policy(text, told(row, "framework"), row)
    if said is not None:
        return [said], True
    framework = told(row, "framework")
    if re.search(r"full recompute", told(row, "notes")):
        return ["full"], False
    usual = next(policy for word, policy in RECOMPUTED if word in framework)
    return list(LADDER[LADDER.index(usual) :]), False


def recompute_policy(text: str, framework: str, row: Row) -> str | None:
    """One of `LADDER` in the words of a row; None where it says nothing."""
    if text in NOT_STATED or "not stated" in text or "unknown" in text:
        return None
    if re.match(r"(none|no\b|off|false|disabled|without)", text):
        return "none"
    share = _share(text, row)
    if share is not None and not text.startswith("selective"):
        return min(SHARES, key=lambda policy: abs(SHARES[policy] - share))
    if "selective" in text or "core_attn" in text or "core attention" in text:
        # Of Megatron-Core's recompute_modules, mlp and moe are about half of a block's work.
        if re.search(r"\b(mlp|moe)\b", text):
            return "alternate"
        if re.search(r"norm|activation|act\b|gelu|silu|up_proj", text):
            return SELECTIVE
        if "attention" in text or "attn" in text:
            return SCORES
        per_op = "per-op" in text or "layer" in text or "torchtitan" in framework
        return "alternate" if per_op else SCORES
    # MaxText's remat policies: minimal keeps all products with weights, others some of them
    # (configs/base.yml).
    if "minimal" in text:
        return SELECTIVE
    if re.search(r"save_|alternate|every (other|second|2nd)", text):
        return "alternate"
    every = r"full|every|all|block|uniform|yes|on\b|true|remat|enabled|checkpoint|offload|layer"
    return "full" if re.search(every, text) else None


def _share(text: str, row: Row) -> float | None:
    """The share of the blocks that is recomputed, where a row counts them."""
    of = re.search(r"(\d+) ?(?:/|of|out of) ?(\d+)", text)
    if of:
        return min(1.0, int(of[1]) / max(1, int(of[2])))
    count = re.search(r"(\d+) (?:layers|blocks)|(?:layers|blocks)[ =:]+(\d+)", text)
    if count and "uniform" not in text:
        stages = whole(row, "pp", 1) * whole(row, "vpp", 1) if "all" not in text else 1
        return min(1.0, int(count[1] or count[2]) * stages / whole(row, "layers"))
    return None


def optimizer_of(row: Row) -> Optimizer:
    """The optimizer that a row names; AdamW where it names none."""
    said = told(row, "framework", "other_plan", "notes")
    return next((o for word, o in OPTIMIZERS if re.search(rf"\b{word}\b", said)), Optimizer())


def precision(row: Row) -> tuple[str, str | None]:
    """The dtype of activations, and that of products where it is another."""
    text = told(row, "precision")
    volta = any(word in told(row, "gpu_type", "gpu_key") for word in ("v100", "t4", "2080"))
    half = "float16" if volta else "bfloat16"
    if "fp4" in text:
        return half, "float4"
    if "fp8" in text or "float8" in text:
        return half, "float8"
    if "tf32" in text:
        return "float32", "tfloat32"
    if not text.strip() and _engine(row):
        return half, "float8"
    if re.search(r"(fp|bf|float)\W?16|amp|mixed|half|pure", text) or not text.strip():
        return half, None
    if re.search(r"(fp|float)\W?32|single", text):
        return "float32", None
    raise Unpredictable(f"precision {row['precision']!r} is not known")


# Frameworks whose mixed precision casts operator by operator: torch.cuda.amp, TensorFlow's graph
# rewrite, MXNet's and Paddle's lists of operators. Others have models that are 16 bits wide.
AUTOCASTS = ("ngc", "pytorch ddp", "tensorflow", "tf1", "tf2", "mxnet", "paddle")


def _autocast(row: Row) -> bool:
    framework = told(row, "framework")
    return "amp" in told(row, "precision") and any(word in framework for word in AUTOCASTS)


def _engine(row: Row) -> bool:
    """Whether 8-bit products of TransformerEngine are the default: of NVIDIA's releases on Hopper
    and later (MLPerf Training v2.1 and after, NVIDIA's notes on its submissions).
    """
    releases = any(word in told(row, "framework") for word in ("nvidia", "ngc"))
    return releases and device_of(row).device.generation in ("hopper", "blackwell")


def kernels_of(row: Row, cluster: Cluster) -> Kernels:
    """Kernels of the row's device under its software."""
    said = told(row, "precision")
    scaling = (
        ROW if "row" in said else BLOCK if re.search(r"mx|block|sub-?channel|fp4", said) else TENSOR
    )
    software = replace(software_of(row), memory=memory_of(row))
    pace = slowest(cluster)
    return Kernels(
        cluster.device,
        software,
        None,
        precision(row)[1],
        scaling,
        autocast=_autocast(row),
        pace=pace,
    )


def software_of(row: Row) -> Software:
    """The generation of software that a row's framework and flags name, else its device's."""
    framework = told(row, "framework", "other_plan")
    found = next((name for words, name in FRAMEWORKS if all(w in framework for w in words)), None)
    if found is None:
        device = told(row, "gpu_key", "gpu_type")
        found = next(name for words, name in OF_DEVICE if any(w in device for w in words))
    software = GENERATIONS[found]
    return replace(software, hides_moves=True) if "asynctp" in framework else software


def _assumed_software(row: Row) -> tuple[str, ...]:
    framework = told(row, "framework", "other_plan")
    known = any(all(word in framework for word in words) for words, _ in FRAMEWORKS)
    return () if known else (f"{software_of(row).name} kernels",)


def device_of(row: Row) -> KnownDevice:
    """The row's device, by its key, or by what its type begins with."""
    names = [name for name in (row.get("gpu_key"), row.get("gpu_type")) if name]
    for name in names:
        bare = re.sub(r"^(NVIDIA|AMD|Nvidia|Intel|Google) (Tesla |GeForce )?", "", name)
        bare = re.sub(r" ?\(.*\)| ?\bCTS\b| ?\bHBM\d\w*", "", bare).strip()
        bare = re.sub(r"(\d) GB", r"\1GB", bare.replace(" - ", "-"))
        for text in (name, bare, bare.replace(" ", "-"), bare.split(" ")[0]):
            try:
                return find_device(text)
            except ParloomError:
                continue
    raise Unpredictable(f"the device {names[0] if names else ''!r} is not described")


def _assumed_cluster(row: Row) -> tuple[str, ...]:
    said = (row.get("gpu_key") or "") + (row.get("gpu_type") or "")
    assumed = ("the device's memory",) if "not stated" in said else ()
    alone = whole(row, "nodes", 1) == 1
    usual = network(row, whole(row, "gpus_per_node", 8), None) is None
    return (*assumed, "the device's usual network") if usual and not alone else assumed


def cluster_of(row: Row) -> Cluster:
    """The row's devices, with the network that it states."""
    known = device_of(row)
    devices = whole(row, "num_gpus")
    usual = known.network.devices if known.network else known.scale_up.domain or 8
    each = min(usual, devices)
    nodes = whole(row, "nodes", -(-devices // whole(row, "gpus_per_node", each)))
    per_node = whole(row, "gpus_per_node", max(1, devices // nodes))
    if nodes * per_node != devices:
        nodes, per_node = (1, devices) if devices <= per_node else (devices // per_node, per_node)
    if nodes * per_node != devices:
        raise Unpredictable(f"{devices} devices are no whole number of nodes of {per_node}")
    cluster = load_cluster(f"{nodes}x{per_node}x{known.device.name}")
    stated = network(row, per_node, known.network)
    outer = cluster.levels[-1]
    if nodes > 1 and stated is not None and outer.link != known.scale_up.level.link:
        levels = (*cluster.levels[:-1], stated.level(outer.size, per_node))
        cluster = replace(cluster, levels=levels)
    return cluster
