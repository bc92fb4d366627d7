"""The equality matrix: every plan of every model against one device.

    PYTHONPATH=. python benchmarks/equality.py [--plans 50] [--models gpt2,llama] [--meshes 2x2,2x3]
        [--microbatches 2,4] [--json FILE]

For each model and mesh (forked gloo ranks): data_parallel, fsdp, megatron at every
degree, and random legal plans with every operator's layout drawn from all that its rule allows.
Each trains three steps in float64; losses, gradients, weights and buffers must agree with the
reference to 1e-9 (DESIGN section 3). A model that may not be divided into so many microbatches is
planned with `--batch-semantics microbatch`. Models may also be named as in `breadth_models` (zoo,
listed, ...; they have eight samples). Prints the matrix; exit code 1 where a plan differs.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import breadth_models
import torch
from common import report
from gate import Shape, verdicts
from tests.dist import lowered
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from parloom import zoo
from parloom.capture.microbatch import capture_microbatch
from parloom.ir.graph import widened
from parloom.ir.microbatch_counts import legal_microbatches
from parloom.ir.plan import GLOBAL, MICROBATCH

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


def run_model(
    name: str, count: int, shapes: Sequence[Shape], microbatches: Sequence[int]
) -> Iterator[dict[str, object]]:
    torch.manual_seed(0)
    model, batch = MODELS[name]() if name in MODELS else breadth_models.tiny(name)
    subject = lowered.of(model.train(), batch)
    legal = legal_microbatches(subject.factored).counts
    for number in microbatches:
        given = subject
        if number not in legal:
            given = replace(subject, graph=widened(capture_microbatch(model, batch, number)))
        for shape in shapes:
            yield row(name, given, shape, count, number)


def row(
    name: str, subject: lowered.Model, shape: Shape, count: int, microbatches: int
) -> dict[str, object]:
    """What the plans of one model on one mesh come to."""
    started = time.perf_counter()
    found = list(verdicts(subject, shape, count, microbatches))
    ran = [(v.error, v) for v in found if v.error is not None]
    worst, where = max(ran, key=lambda entry: entry[0], default=(math.nan, found[0]))
    failed = [str(verdict) for verdict in found if verdict.wrong]
    return {
        "model": name,
        "mesh": f"{shape[0]}x{shape[1]}",
        "microbatches": microbatches,
        "batch semantics": MICROBATCH if subject.graph.sample_dims else GLOBAL,
        "plans": len(found),
        "passed": len(found) - len(failed),
        "worst relative error": worst,
        "worst tensor": f"{where.plan}: {where.tensor}",
        "failed": failed,
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--plans", type=int, default=50, help="random plans per model and mesh")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--meshes", default="2x2,2x3")
    parser.add_argument("--microbatches", default="1", help="numbers of them, as 2,4")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)  # ranks are forked
    rows = []
    shapes = [(int(a), int(b)) for a, b in (text.split("x") for text in args.meshes.split(","))]
    numbers = [int(text) for text in args.microbatches.split(",")]
    groups = ([m] if m in MODELS else breadth_models.names(m) for m in args.models.split(","))
    for name in itertools.chain.from_iterable(groups):
        for found in run_model(name, args.plans, shapes, numbers):
            rows.append(found)
            error, tensor = found["worst relative error"], found["worst tensor"]
            print(
                f"{found['model']:6} {found['mesh']}, {found['microbatches']} microbatches"
                f" ({found['batch semantics']}): {found['passed']}/{found['plans']} plans equal,"
                f" worst {error:.1e} ({tensor}), {found['seconds']} s",
                flush=True,
            )
            for failure in found["failed"]:  # type: ignore[attr-defined]
                print(f"  FAILED {failure}", flush=True)
    report("equality", rows, args.json)
    return int(any(found["failed"] for found in rows))


if __name__ == "__main__":
    raise SystemExit(main())
