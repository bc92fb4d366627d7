"""How published rows become models, plans, networks; rows are written here."""

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from parloom.cost.devices import find_device
from tests.unit.test_fidelity import ROW

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BARE = ROW | {"vocab": "", "ffn_hidden": "", "head_dim": "", "n_experts": "", "experts_topk": "",
              "moe_ffn_hidden": "", "notes": ""}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def path() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def published(path: None) -> ModuleType:
    return import_module("published")


@pytest.fixture(scope="module")
def models(path: None) -> ModuleType:
    return import_module("published_models")


@pytest.fixture(scope="module")
def networks(path: None) -> ModuleType:
    return import_module("published_network")


@pytest.fixture(scope="module")
def fidelity(path: None) -> ModuleType:
    return import_module("fidelity")


@pytest.mark.parametrize(
    ("text", "name", "node_gbit_per_s", "ports"),
    [
        ("400 Gb/s per node", "InfiniBand", 400, 4),
        ("400 Gb/s per GPU", "InfiniBand", 3200, 8),
        ("8x400Gb/s", "InfiniBand", 3200, 8),
        ("4x100 Gb/s Omni-Path per node (doc: 400Gbps inter-node)", "Omni-Path", 400, 4),
        ("3.2 Tbps EFA", "EFA", 3200, 8),
        ("EFA", "EFA", 1600, 8),  # at the device's usual rate
        ("200 Gbps IB HDR", "InfiniBand", 200, 1),
        ("8 HDR NICs", "InfiniBand", 1600, 8),
        ("50 GB/s per GPU", "InfiniBand", 3200, 8),
        ("Management: 1x Ethernet 40GB/Sec, Compute: 8x ConnectX-6 IB HDR 200Gb/Sec",
         "InfiniBand", 1600, 8),
        ("Storage: 2x NDR 400Gb/s, Compute: 4x ConnectX-7 RoCE 200Gb/s", "RoCE", 800, 4),
        ("GCP A3 GPUDirect-TCPX 4x200 Gb/s per VM", "Ethernet", 800, 4),
        ("BF3 200Gbps for NS and 2xBF3 400Gbps for EW", "RoCE", 800, 2),
        ("InfiniBand; data bandwidth for GPU-PCIe: 504 GB/s", None, 0, 0),
        ("Gig Ethernet", None, 0, 0),
        ("N/A", None, 0, 0),
        ("TODO", None, 0, 0),
    ],
)  # fmt: skip
def test_networks(
    networks: ModuleType, text: str, name: str | None, node_gbit_per_s: float, ports: int
) -> None:
    usual = find_device("A100").network
    found = networks.network({"interconnect_inter": text}, 8, usual)
    if name is None:
        assert found is None
        return
    assert found.interconnect.name == name
    assert found.bytes_per_s * 8e-9 == pytest.approx(node_gbit_per_s)
    assert found.ports == ports


@pytest.mark.parametrize(
    ("text", "framework", "policy"),
    [
        ("none", "Megatron-LM", "none"),
        ("full (uniform, every layer)", "Megatron-LM", "full"),
        ("full (remat)", "MaxText", "full"),
        ("block 1 layers", "Megatron-LM", "alternate"),  # of each of two stages, of four
        ("full, 1 of 4 blocks", "DeepSpeed", "quarter"),
        ("selective", "Megatron-LM", "scores"),
        ("selective (attention core)", "Megatron-LM", "scores"),
        ("selective (layernorm, moe_act)", "Megatron-Bridge", "selective"),
        ("selective (mla_up_proj, mlp)", "Megatron-Bridge", "alternate"),
        ("selective", "torchtitan", "alternate"),
        ("selective (per-op)", "torchtitan", "alternate"),
        ("minimal", "MaxText", "selective"),
        ("qkv_proj_offloaded", "MaxText", "full"),
        ("yes", "DeepSpeed", "full"),
        ("none (not stated)", "DeepSpeed", None),
        ("null", "DeepSpeed", None),
        ("see paper", "DeepSpeed", None),
    ],
)
def test_recomputation(
    published: ModuleType, text: str, framework: str, policy: str | None
) -> None:
    assert published.recompute_policy(text, framework.lower(), ROW) == policy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("stage 3", (3, 0)),
        ("DeepSpeed ZeRO stage-2", (2, 0)),
        ("ZeRO-3 (fp16)", (3, 0)),
        ("ZeRO++", (3, 0)),
        ("zero_stage=1", (1, 0)),
        ("distributed optimizer", (1, 0)),
        ("DDP", (0, 0)),
        ("HSDP 8x16", (3, 16)),
        ("HSDP, shard group size 4", (3, 4)),
        ("hybrid shard", (3, 4)),  # of a node of 8 devices, two of which share a weight
        ("FSDP2 over 8 (x CP)", (3, 8)),
        ("FSDP over ICI (16), data parallel across slices", (3, 16)),
    ],
)
def test_zero(published: ModuleType, text: str, expected: tuple[int, int]) -> None:
    levels, told = published.zero_levels(ROW | {"zero_or_fsdp": text}, 2)
    assert levels == [expected]
    assert told


@pytest.mark.parametrize(
    ("framework", "level"),
    [("torchtitan", 3), ("Composer", 3), ("NeMo 24.07", 1), ("Megatron-LM", 0), ("DeepSpeed", 0)],
)
def test_zero_that_is_not_told_is_the_default(
    published: ModuleType, framework: str, level: int
) -> None:
    levels, told = published.zero_levels(ROW | {"zero_or_fsdp": "", "framework": framework}, 2)
    assert levels[0] == (level, 0)
    assert not told


def test_gradients_are_reduced_as_told(published: ModuleType) -> None:
    for text, dtype in (
        ("bf16, fp32 gradient accumulation", "float32"),
        ("gradients reduced in fp32", "float32"),
        ("AMP fp16", "float32"),
        ("bf16", None),
        ("fp16 (grads accumulated in 16 bit)", None),
    ):
        assert published.configuration(ROW | {"precision": text}).reduce_dtype == dtype, text


def test_frameworks(published: ModuleType) -> None:
    names = {
        "DeepSpeed ZeRO-3": "megatron",
        "PyTorch FSDP + torch.compile": "compiled",
        "MaxText": "compiled",
        "CUDA 12.0": "fused",  # nothing is known; by the years of its device
    }
    for framework, name in names.items():
        assert published.software_of(ROW | {"framework": framework}).name == name, framework
    volta = ROW | {"framework": "", "gpu_key": "V100-SXM2-16GB"}
    assert published.software_of(volta).name == "megatron"


def test_interleaved_stages_of_nvidias_pytorch_are_megatron_cores(published: ModuleType) -> None:
    row = BARE | {"framework": "PyTorch NVIDIA Release 23.09", "vpp": "4"}
    completed, assumed = published._completed(row)
    assert published.software_of(completed).name == "engine"
    assert assumed == ("Megatron-Core",)
    for other in ({"vpp": "1"}, {"framework": "NVIDIA NeMo Framework, PyTorch NVIDIA Release"}):
        assert published._completed(row | other) == (row | other, ())


def test_devices(published: ModuleType) -> None:
    for text, name in {
        "NVIDIA A30": "A30", "NVIDIA RTX A5000": "RTX-A5000", "NVIDIA L40": "L40",
        "NVIDIA A100-PCIE-40GB (250W)": "A100-PCIe-40GB", "V100 (memory not stated)":
        "V100-SXM2-16GB", "NVIDIA A100 - PCIe - 80 GB": "A100-PCIe-80GB",
        "NVIDIA H100 80GB HBM3": "H100-SXM5-80GB", "GB300 (NVL72)": "GB300-NVL72",
    }.items():  # fmt: skip
        row = ROW | {"gpu_key": "", "gpu_type": text}
        assert published.device_of(row).device.name == name
    blackwell = find_device("B200").device
    assert blackwell.rate("float4") == 2 * blackwell.rate("float8")


@pytest.mark.slow
def test_what_is_not_told_is_the_first_that_fits(
    published: ModuleType, fidelity: ModuleType
) -> None:
    row = ROW | {"activation_checkpointing": "", "zero_or_fsdp": "", "hidden": "256",
                 "ffn_hidden": "1024", "seq_len": "512"}  # fmt: skip
    runs = list(published.runs_of_row(row, []))
    assert [(run.chosen.zero, run.chosen.recompute) for run in runs][:3] == [
        (0, "none"), (1, "none"), (1, "none"),
    ]  # fmt: skip
    assert [run.kernels.software.keeps_scores for run in runs][:3] == [True, True, False]
    assert runs[-1].chosen.recompute == "full"
    assert runs[0].assumed[-2:] == ("ZeRO-0", "none recomputation")
    peaks = [
        fidelity._play(fidelity.program(run.graph, run.chosen, run.cluster), run, run.cluster)
        for run in runs
    ]
    assert peaks[-1].peak_bytes < peaks[1].peak_bytes < peaks[0].peak_bytes
    assert len(list(published.runs_of_row(ROW, []))) == 1  # all is told
    found = fidelity.predict(row, False, [])
    assert found.assumed == runs[0].assumed
    large = row | {"hidden": "2048", "ffn_hidden": "8192", "seq_len": "2048", "heads": "16",
                   "layers": "48", "micro_batch": "8", "gpu_type": "",
                   "gpu_key": "V100-SXM2-16GB"}  # fmt: skip
    assert "full recomputation" in fidelity.predict(large, False, []).assumed


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("changes", "millions", "trained"),
    [
        # As published: 671 B, 1.03 T, 116.83 B and 30.5 B (model cards), 340 M with the pooler
        # (Devlin et al.: 336 M without the padding of positions), 25.56 M (torchvision).
        ({"family": "moe", "model": "DeepSeek-V3", "layers": "61", "hidden": "7168",
          "heads": "128", "ffn_hidden": "18432", "vocab": "129280", "n_experts": "256",
          "experts_topk": "8", "moe_ffn_hidden": "2048"}, 671_026, 671_026),
        ({"family": "moe-mla", "model": "Kimi-K2", "layers": "61", "hidden": "7168",
          "heads": "64", "ffn_hidden": "18432", "vocab": "163840", "n_experts": "384",
          "experts_topk": "8", "moe_ffn_hidden": "2048"}, 1_026_408, 1_026_408),
        ({"family": "moe", "model": "GPT-OSS 120B", "layers": "36", "hidden": "2880",
          "heads": "64", "kv_heads": "8", "head_dim": "64", "vocab": "201088",
          "n_experts": "128", "experts_topk": "4", "moe_ffn_hidden": "2880"}, 116_789, 116_789),
        ({"family": "moe", "layers": "48", "hidden": "2048", "heads": "32", "kv_heads": "4",
          "head_dim": "128", "vocab": "151936", "n_experts": "128", "experts_topk": "8",
          "moe_ffn_hidden": "768"}, 30_532, 30_532),
        ({"family": "llama", "model": "Llama2-70B LoRA", "layers": "80", "hidden": "8192",
          "heads": "64", "kv_heads": "8", "ffn_hidden": "28672", "vocab": "32000"},
         69_042, 65.5),
        ({"family": "bert", "layers": "24", "hidden": "1024", "heads": "16", "seq_len": "512"},
         336, 336),
        ({"family": "transformer-xl", "layers": "16", "hidden": "512", "heads": "8",
          "ffn_hidden": "2048", "seq_len": "192"}, 191.7, 191.7),
        ({"family": "cnn", "model": "ResNet-50"}, 25.557, 25.557),
    ],
)  # fmt: skip
def test_parameters_of_models(
    models: ModuleType, changes: dict[str, str], millions: float, trained: float
) -> None:
    row = BARE | {"kv_heads": ""} | changes
    graph = models.graph_of(models.model_of(row, "bfloat16", 1), 8, [])
    sizes = [(p.value.spec.num_elements / 1e6, p.trainable) for p in graph.of_kind("parameter")]
    assert sum(size for size, _ in sizes) == pytest.approx(millions, rel=2e-3)
    assert sum(size for size, moves in sizes if moves) == pytest.approx(trained, rel=2e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["gpt", "llama", "moe", "latent", "bert", "xl", "window"])
def test_a_resized_graph_is_the_captured_one(models: ModuleType, family: str) -> None:
    attention = {"groups": 2, "head_width": 16}
    latent = {"q_rank": 32, "kv_rank": 16, "nope": 16, "rope": 8, "value": 16}
    experts = {"experts": 8, "slots": 2, "expert_inner": 48, "shared": 1, "dense": 0}
    kind, more = {
        "gpt": ("gpt", {}), "llama": ("llama", attention | {"adapters": 4}),
        "moe": ("moe", attention | experts), "latent": ("moe", latent | experts | {"dense": 2}),
        "bert": ("bert", {"masked": 9}), "xl": ("xl", {"head_width": 16}),
        "window": ("moe", attention | experts | {"window": 16}),
    }[family]  # fmt: skip
    sizes = {"seq": 64, "width": 64, "heads": 4, "inner": 192} | more
    shape = models.Shape(kind, tuple(sorted(sizes.items())), "bfloat16")
    samples, vocab = (prime for _, prime in models._primes(shape))
    found = models.captured(shape)
    assert models.resized(found, {samples: 24, vocab: 1000}) == models.captured(shape, 24, 1000)
    other = models.resized(found, {samples: 12, vocab: 1000})
    assert other != models.captured(shape, 24, 1000)


def test_windows_cost_less(fidelity: ModuleType) -> None:
    row = ROW | {"family": "moe", "kv_heads": "2", "head_dim": "16", "n_experts": "4",
                 "experts_topk": "2", "moe_ffn_hidden": "32", "seq_len": "8192", "pp": "1",
                 "framework": "NeMo"}  # fmt: skip
    plain, windowed = (fidelity.predict(row | {"model": m}, False, []) for m in ("", "gpt-oss"))
    assert plain.reason == windowed.reason == ""
    assert windowed.predicted_s < plain.predicted_s


def test_bert_skips_what_is_padding_or_not_masked(models: ModuleType) -> None:
    row = BARE | {"family": "bert", "seq_len": "512"}
    sizes = dict(models.model_of(row, "float16", 1).shape.sizes)
    assert (sizes["seq"], sizes["masked"]) == (512, 80)
    packed = row | {"notes": "unpadded/packed variable-length sequences"}
    model = models.model_of(packed, "float16", 1)
    assert dict(model.shape.sizes)["seq"] == 256
    assert model.assumed[-1] == "50% of positions are no padding"
    old = models.model_of(packed | {"framework": "PyTorch NVIDIA Release 20.06"}, "float16", 1)
    assert dict(old.shape.sizes)["seq"] == 512
    all_words = models.model_of(row | {"framework": "NGC PyTorch"}, "float16", 1)
    assert dict(all_words.shape.sizes)["masked"] == 512
    graph = models.graph_of(models.model_of(row, "float16", 1), 4, [])
    logits = {v.spec.shape for i in graph.main.body for v in i.results if 30522 in v.spec.shape}
    assert (4, 80, 30522) in logits
    assert (4, 512, 30522) not in logits


def test_lamb_takes_two_more_passes(fidelity: ModuleType, published: ModuleType) -> None:
    row = ROW | {"tp": "1", "pp": "1", "num_gpus": "1", "nodes": "1", "global_batch": "2",
                 "zero_or_fsdp": "none", "vocab": "4096"}  # fmt: skip
    plain, lamb = (
        fidelity.predict(row | {"framework": f"Megatron-LM{text}"}, False, [])
        for text in ("", ", LAMB")
    )
    (run,) = published.runs_of_row(row, [])
    weights = sum(p.value.spec.num_elements * 4 for p in run.graph.of_kind("parameter"))
    passes = run.kernels.stream_s(2 * weights)
    assert lamb.predicted_s - plain.predicted_s == pytest.approx(passes, rel=1e-3)


def test_graphs_are_shared(models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    row = BARE | {"vocab": "1000", "ffn_hidden": "256"}
    known: list[object] = []
    first = models.graph_of(models.model_of(row, "bfloat16", 1), 8, known)

    def fail(*_: object) -> None:
        raise AssertionError("captured again")

    monkeypatch.setattr(models, "captured", fail)
    other = row | {"layers": "6", "vocab": "2000"}
    second = models.graph_of(models.model_of(other, "bfloat16", 1), 16, known)
    assert first != second
    with pytest.raises(AssertionError, match="captured again"):
        models.graph_of(models.model_of(row | {"hidden": "128"}, "bfloat16", 1), 8, known)


@pytest.mark.slow
def test_rows_in_processes_are_the_same(fidelity: ModuleType) -> None:
    rows = [ROW | {"id": str(i), "hidden": str(64 * (1 + i % 2))} for i in range(4)]
    assert fidelity.predicted(rows, False, 2) == fidelity.predicted(rows, False, 1)
    assert [row.id for row in fidelity.predicted(rows, False, 1)] == ["0", "1", "2", "3"]


@pytest.mark.sample(47)
@pytest.mark.parametrize("name", sorted(set(ROW) - {"target_seconds_per_iter", "id"}))
@pytest.mark.parametrize("text", ["", "-1", "3.5 x, b; c: 4 or ??"])
def test_whatever_a_cell_says_there_is_a_prediction_or_a_reason(
    fidelity: ModuleType, name: str, text: str, known: list[object]
) -> None:
    found = fidelity.predict(ROW | {name: text}, False, known)
    assert (found.predicted_s is None) == bool(found.reason)
    assert not re.match(r"\w+(Error|Exception|Iteration):", found.reason), found.reason


@pytest.fixture(scope="module")
def known() -> list[object]:
    return []


@pytest.fixture(scope="module")
def schedules(path: None) -> ModuleType:
    return import_module("published_schedule")


@pytest.mark.parametrize(
    ("framework", "other_plan", "vpp", "name", "chunks", "synchronizes"),
    [
        ("Megatron-LM (zero bubble) ZB-2p", "", "", "zb_2p", 1, False),
        ("Megatron-LM (zero bubble)", "schedule=ZB-1p", "", "zb_1p", 1, False),
        ("zero-bubble Megatron", "ZBH1", "", "zb_h1", 1, False),
        ("zero-bubble Megatron", "zb_h2, no post-validation", "", "zb_h2", 1, True),
        ("Megatron-LM (zero bubble) 1F1B", "", "", "1f1b", 1, True),
        ("Megatron-LM (zero bubble)", "schedule=1F1B-I", "", "", 3, True),  # (22 + 2) / 8 blocks
        ("Megatron-LM (zero bubble), runs ZB-2p, too", "schedule=1F1B", "", "1f1b", 1, True),
        ("Megatron-LM (zero bubble)", "", "", "", 1, True),
        ("torchtitan", "Interleaved1F1B", "2", "", 2, True),
        ("torchtitan", "ZBVZeroBubble", "2", "zb_1p", 1, True),
        ("Megatron-LM 2021, 1F1B (interleaved where vpp>1)", "", "1", "1f1b", 1, True),
        ("Megatron-LM 2021, 1F1B (interleaved where vpp>1)", "", "3", "", 3, True),
        ("DeepSpeed", "AFAB", "", "gpipe", 1, True),
        ("Megatron-LM", "GPipe schedule", "", "gpipe", 1, True),
        ("Megatron-LM", "", "4", "", 4, True),
        ("Megatron-LM", "", "", "", 1, True),
    ],
)
def test_schedules_in_words(
    schedules: ModuleType,
    framework: str,
    other_plan: str,
    vpp: str,
    name: str,
    chunks: int,
    synchronizes: bool,
) -> None:
    row = {"framework": framework, "other_plan": other_plan, "notes": "", "vpp": vpp}
    found = schedules.schedule_of(row, 8, 24, 22)
    assert (found.name, found.chunks, found.synchronizes) == (name, chunks, synchronizes)
    assert schedules.schedule_of(row, 1, 24, 22) == schedules.RowSchedule()  # no pipeline


def test_rounds_and_chunks_that_a_row_does_not_say_are_assumed(schedules: ModuleType) -> None:
    row = {"framework": "Megatron-LM", "other_plan": "1F1B-I", "notes": "", "vpp": "2"}
    assert schedules.schedule_of(row, 4, 8, 16).assumed == ()
    assert schedules.schedule_of(row, 4, 6, 16).assumed == ("rounds of 6 microbatches",)
    blank = schedules.schedule_of(row | {"vpp": ""}, 4, 8, 16)
    assert (blank.chunks, blank.assumed) == (4, ("4 chunks a rank",))
