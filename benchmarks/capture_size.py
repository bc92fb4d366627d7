"""How long capture of a full-size model takes, and how much memory.

    python benchmarks/capture_size.py [--models "llama-3.1-405b;t5-11b"] [--json FILE] [--profile]

Models are built on the meta device, one process each. Imports are counted by themselves: all that
a process has done once it has captured one layer. `--profile` prints the slowest functions.
"""

import argparse
import cProfile
import multiprocessing
import pstats
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from common import report
from rules import coverage
from torch import Tensor, nn

from parloom import zoo
from parloom.capture import capture, fingerprint
from parloom.capture.hugging_face import build_from_config, library
from parloom.ir.graph import Call
from parloom.ir.text import print_graph

# Of capture for training and for evaluation together, for a decoder of any depth.
LIMIT_S, LIMIT_BYTES = 8.0, 2_000_000_000
BATCH, SEQ = 4, 2048
Built = tuple[nn.Module, dict[str, Tensor]]


def hugging_face(architecture: str, batch: int = BATCH, **sizes: Any) -> Callable[[], Built]:
    def build() -> Built:
        kind = getattr(library(), architecture)
        config = kind.config_class(architectures=[architecture], **sizes)
        config.architectures = [architecture]
        return build_from_config(config, batch, SEQ)

    return build


# Sizes from the published configurations.
MIXTRAL: dict[str, Any] = {
    "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
    "num_attention_heads": 48, "num_key_value_heads": 8, "vocab_size": 32768,
    "num_local_experts": 8, "max_position_embeddings": 65536, "output_router_logits": True,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
GPT: dict[str, Any] = {"n_embd": 4096, "n_head": 32, "vocab_size": 50304, "n_positions": SEQ}
DEPTHS = (8, 32, 126)
DECODERS: dict[str, Callable[[], Built]] = {
    **{f"llama, {n} layers": hugging_face("LlamaForCausalLM", num_hidden_layers=n, **LLAMA)
       for n in DEPTHS},
    **{f"gpt-2, {n} layers": hugging_face("GPT2LMHeadModel", n_layer=n, **GPT) for n in DEPTHS},
    **{f"qwen3-moe, {n} layers": hugging_face("Qwen3MoeForCausalLM", num_hidden_layers=n)
       for n in DEPTHS},
}  # fmt: skip
MODELS: dict[str, Callable[[], Built]] = {
    **DECODERS,
    "llama-3.1-405b": hugging_face(
        "LlamaForCausalLM", hidden_size=16384, intermediate_size=53248, num_hidden_layers=126,
        num_attention_heads=128, num_key_value_heads=8, vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "gpt-3-175b": lambda: zoo.build(
        "gpt", batch=BATCH, seq=SEQ, width=12288, depth=96, heads=96, vocab=50257
    ),
    "mixtral-8x22b": hugging_face("MixtralForCausalLM", **MIXTRAL),
    "mixtral-8x22b, batch 64": hugging_face("MixtralForCausalLM", 64, **MIXTRAL),
    "deepseek-v3-671b": hugging_face("DeepseekV3ForCausalLM"),
    "t5-11b": hugging_face(
        "T5ForConditionalGeneration", d_model=1024, d_ff=65536, d_kv=128, num_heads=128,
        num_layers=24, vocab_size=32128,
    ),
    "llama-3.1-8b": hugging_face(
        "LlamaForCausalLM", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "resnet-50": hugging_face("ResNetForImageClassification"),
    "swin-t": hugging_face("SwinForImageClassification", image_size=224),
}  # fmt: skip


def measure(name: str, profile: bool) -> dict[str, Any]:
    """CPU seconds of imports, building and capture, and the process's peak memory."""
    torch.set_num_threads(1)
    library()
    capture(nn.Linear(2, 2), {"input": torch.ones(2, 2)}, loss=lambda output, batch: output.sum())
    imported = time.process_time()
    with torch.device("meta"):
        model, batch = MODELS[name]()
    built = time.process_time()
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    graph = capture(model, batch)
    trained = time.process_time()
    capture(model, batch, training=False)
    profiler.disable()
    evaluated = time.process_time()
    fingerprint(model, batch)
    text = print_graph(graph)
    ended = time.process_time()
    if profile:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(70)
    calls: dict[str, int] = {}
    for item in graph.main.body:
        if isinstance(item, Call):
            calls[item.function] = calls.get(item.function, 0) + 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = coverage(graph)
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "imports_cpu_s": round(imported, 1),
        "build_cpu_s": round(built - imported, 1),
        "training_cpu_s": round(trained - built, 1),
        "evaluation_cpu_s": round(evaluated - trained, 1),
        "text_cpu_s": round(ended - evaluated, 1),
        "peak_bytes": peak,
        "calls": found["calls"],
        "rule_calls": found["rule_calls"],
        "rule_flops": found["rule_flops"],
        "forward_flops": found["flops"],
        "unsplit": found["unsplit"],
        "text_lines": text.count("\n"),
        "kinds": calls,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=";".join(MODELS))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    rows = []
    print(f"{'CPU seconds of':24} {'parameters':>10} imports build training evaluation      peak")
    context = multiprocessing.get_context("spawn")  # each with a memory of its own
    for name in args.models.split(";"):
        with context.Pool(1) as pool:
            row = pool.apply(measure, (name, args.profile))
        rows.append(row)
        print(
            f"{name:24} {row['parameters'] / 1e9:8.1f} B {row['imports_cpu_s']:7}"
            f" {row['build_cpu_s']:5} {row['training_cpu_s']:8} {row['evaluation_cpu_s']:10}"
            f" {row['peak_bytes'] / 1e6:6.0f} MB"
            f"  {row['calls']} calls, {row['rule_calls']:.2%} of them and {row['rule_flops']:.3%}"
            f" of {row['forward_flops']:.3g} FLOPs with a rule, {row['text_lines']} lines,"
            f" {row['kinds']} {row['unsplit'] or ''}",
            flush=True,
        )
        report("capture_size", rows, args.json)
    limited = [r for r in rows if r["model"] in DECODERS or r["model"] == "llama-3.1-405b"]
    seconds = [r["training_cpu_s"] + r["evaluation_cpu_s"] for r in limited]
    peaks = [r["peak_bytes"] for r in limited]
    return int(max(seconds, default=0) > LIMIT_S or max(peaks, default=0) > LIMIT_BYTES)


if __name__ == "__main__":
    raise SystemExit(main())
