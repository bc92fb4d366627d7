"""How the scoreboard reads rows and scores predictions."""

import math
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROW = {
    "id": "a", "source_key": "s", "model": "M", "family": "gpt", "framework": "Megatron-LM 2021",
    "gpu_type": "A100-SXM4-80GB", "gpu_key": "A100-SXM4-80GB", "num_gpus": "16", "nodes": "2",
    "gpus_per_node": "8", "tp": "2", "pp": "2", "vpp": "1", "dp": "4", "cp": "1", "ep": "1",
    "sequence_parallel": "", "zero_or_fsdp": "ZeRO-1", "micro_batch": "2", "global_batch": "32",
    "activation_checkpointing": "full", "precision": "bf16", "interconnect_inter": "",
    "interconnect_intra": "", "layers": "4", "hidden": "64", "heads": "4", "kv_heads": "",
    "ffn_hidden": "256", "vocab": "1000", "seq_len": "32", "other_plan": "",
    "target_seconds_per_iter": "1.5", "mem_gb_per_gpu": "", "plan_complete": "1",
    "duplicate_of": "",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def path() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def published(path: None) -> ModuleType:
    return import_module("published")


@pytest.fixture(scope="module")
def fidelity(path: None) -> ModuleType:
    return import_module("fidelity")


def test_a_row_from_its_text_to_seconds(fidelity: ModuleType, published: ModuleType) -> None:
    found = fidelity.predict(ROW, True, [])
    assert found.predicted_s is not None
    assert found.predicted_s > 0
    assert found.reason == ""
    assert len(found.slopes) == len(fidelity.SHARED)
    assert all(slope <= 0 for slope in found.slopes)  # nothing is slower for a better constant
    chosen = published.configuration(ROW)
    assert (chosen.tensor, chosen.pipeline, chosen.data, chosen.num_microbatches) == (2, 2, 4, 4)
    assert (chosen.zero, chosen.recompute) == (1, "full")
    assert published.configuration(ROW | {"cp": "4"}).zero == 1  # over these, where data is 1
    assert published.configuration(ROW | {"num_gpus": "4"}).zero == 0  # nobody to share with


def test_scores_that_are_kept_take_memory_in_every_block(fidelity: ModuleType) -> None:
    # A microbatch, heads of a rank, rows, keys; probabilities, what dropout makes, and its mask.
    scores = 2 * 2 * 32 * 32 * (2 + 2 + 1)
    one = ROW | {"pp": "1", "num_gpus": "8", "nodes": "1", "global_batch": "8"}
    peaks = {
        what: fidelity.predict(one | {"activation_checkpointing": what}, False, []).peak_bytes
        for what in ("none", "selective (attention core)")
    }
    kept = peaks["none"] - peaks["selective (attention core)"]
    assert 2 * scores <= kept <= 4 * scores  # four blocks, of which one is at work


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"family": "diffusion"}, "no model of the family"),
        ({"family": "cnn"}, "no convolutional network"),
        ({"gpu_key": "Abacus", "gpu_type": ""}, "is not described"),
        ({"ep": "8"}, "GPT has none"),
        ({"family": "moe"}, "n_experts is"),
        ({"global_batch": "33"}, "is not 4 ranks"),
        ({"layers": "3", "vpp": "2"}, "do not make 4 stages"),
        ({"micro_batch": ""}, "micro_batch is not stated"),
        ({"precision": "INT3"}, "is not known"),
        ({"layers": "inf"}, "no number"),
        ({"heads": "0"}, "at least 1"),
        ({"kv_heads": "3", "family": "llama"}, "3 key heads do not divide"),
        ({"nodes": "-2"}, "at least 1"),
        ({"micro_batch": "nan"}, "no number"),
    ],
)
def test_what_cannot_be_predicted_has_a_reason(
    fidelity: ModuleType, changes: dict[str, str], reason: str
) -> None:
    found = fidelity.predict(ROW | changes, False, [])
    assert found.predicted_s is None
    assert reason in found.reason


def test_a_fault_in_one_row_is_its_reason(
    fidelity: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("by nothing\nat all")

    monkeypatch.setattr(fidelity, "program", fail)
    assert fidelity.predict(ROW, False, []).reason == "ZeroDivisionError: by nothing"


def test_rows_without_a_time_are_no_rows(fidelity: ModuleType, tmp_path: Path) -> None:
    times = ["1.5", "", "0", "-1", "nan", "inf", "soon"]
    rows = [",".join((ROW | {"target_seconds_per_iter": t, "id": t}).values()) for t in times]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([",".join(ROW), *rows]) + "\n", encoding="utf-8")
    assert [r["id"] for r in fidelity.chosen_rows(path, None, lambda row: True)] == ["1.5"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (0, 0)),
        ("none (plain DDP)", (0, 0)),
        ("ZeRO-1", (1, 0)),
        ("ZeRO-1 sharded within 8 GPUs", (1, 4)),
        ("ZeRO-1 sharded within 4 DP ranks", (1, 4)),
        ("FSDP FULL_SHARD (ZeRO-3)", (3, 0)),
        ("FSDP group 64", (3, 64)),
        ("DDP/dist-optimizer (FSDP=0)", (1, 0)),
        ("ZeRO-2", (2, 0)),
    ],
)
def test_zero_is_read(published: ModuleType, text: str, expected: tuple[int, int]) -> None:
    levels, told = published.zero_levels(ROW | {"zero_or_fsdp": text}, 2)
    assert levels[0] == expected
    assert told == bool(text)


@pytest.mark.parametrize(
    ("text", "name", "device_bytes_per_s"),
    [
        ("8x200 Gb/s HDR IB per node (Selene)", "InfiniBand", 25e9),
        ("4x100 Gb/s Omni-Path per node", "Omni-Path", 6.25e9),
        ("400 Gb/s RDMA per GPU", "RoCE", 50e9),
        ("1600 Gb/s/node RoCE", "RoCE", 25e9),
        ("1x Ethernet 100Gb/Sec, 8x NVIDIA CX7 InfiniBand (400Gb/s)", "InfiniBand", 50e9),
        ("25 Gb/s Ethernet per node", "Ethernet", 0.390625e9),
        ("", "InfiniBand", 25e9),  # the device's usual network
    ],
)
def test_networks_are_read(
    published: ModuleType, text: str, name: str, device_bytes_per_s: float
) -> None:
    level = published.cluster_of(ROW | {"interconnect_inter": text}).levels[-1]
    assert level.name == name
    shared = level.link.bandwidth_bytes_per_s / level.oversubscription
    assert shared == pytest.approx(device_bytes_per_s)


def test_a_network_joins_racks(published: ModuleType) -> None:
    row = ROW | {"gpu_key": "GB200", "gpus_per_node": "4", "interconnect_inter": "4x400 Gb/s IB"}
    one = published.cluster_of(row | {"num_gpus": "64", "nodes": "16"})
    assert [level.link.bandwidth_bytes_per_s for level in one.levels] == [900e9, 900e9]
    four = published.cluster_of(row | {"num_gpus": "256", "nodes": "64"})
    assert [level.size for level in four.levels] == [4, 16, 4]
    assert four.levels[-1].name == "InfiniBand"


@pytest.mark.slow
def test_a_mixture_of_experts_from_its_row(fidelity: ModuleType) -> None:
    row = ROW | {"family": "moe", "kv_heads": "2", "head_dim": "16", "n_experts": "8", "ep": "4",
                 "experts_topk": "2", "moe_ffn_hidden": "32", "pp": "1", "dp": "8"}  # fmt: skip
    divided = fidelity.predict(row, False, [])
    whole = fidelity.predict(row | {"ep": "1"}, False, [])
    assert divided.reason == whole.reason == ""
    assert divided.peak_bytes < whole.peak_bytes


def test_software_depends_on_framework_and_flags(published: ModuleType) -> None:
    names = {
        "Composer/llm-foundry FSDP": "eager 2023",
        "torchtitan FSDP2 + torch.compile": "compiled",
        "torchtitan FSDP2": "eager",
        "Megatron-Bridge 25.09 NeMo Container": "engine",
        "Megatron-LM 2021": "megatron",
    }
    for framework, name in names.items():
        assert published.software_of(ROW | {"framework": framework}).name == name
    flagged = ROW | {"framework": "torchtitan compile, AsyncTP"}
    assert published.software_of(flagged).hides_moves
    (run,) = published.runs_of_row(
        ROW | {"activation_checkpointing": "selective (attention core)"}, []
    )
    assert not run.kernels.software.keeps_scores


def test_rules_look_at_no_source_or_model(published: ModuleType, fidelity: ModuleType) -> None:
    """The same row under another name is the same prediction."""
    one = fidelity.predict(ROW, False, [])
    other = fidelity.predict(ROW | {"source_key": "x", "model": "y", "id": "z"}, False, [])
    assert one.predicted_s == other.predicted_s
    changed = fidelity.predict(ROW | {"hidden": "128", "ffn_hidden": "512"}, False, [])
    assert changed.predicted_s != one.predicted_s


def test_scores(fidelity: ModuleType) -> None:
    assert fidelity.spearman([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == pytest.approx(1)
    assert fidelity.spearman([1.0, 2.0, 3.0], [30.0, 20.0, 10.0]) == pytest.approx(-1)
    assert fidelity.spearman([1.0, 1.0], [1.0, 2.0]) == 0
    assert fidelity.ranked([5.0, 1.0, 5.0]) == [2.5, 1.0, 2.5]
    assert fidelity.percentile([0.0, 1.0, 2.0], 0.9) == pytest.approx(1.8)
    rows = [
        fidelity.Predicted(
            str(i), "s", True, 1.0 + i, ("g",), (str(min(i, 5)),), "d", (1.0 + i) * math.exp(0.1)
        )
        for i in range(7)
    ]
    found = fidelity.score([*rows, fidelity.Predicted("x", "s", True, 1.0, (), (), "d")])
    assert found.coverage == pytest.approx(7 / 8)
    assert found.median_abs_log_error == pytest.approx(0.1)
    assert found.bias == pytest.approx(0.1)
    assert found.rank_correlation == pytest.approx(1)
    assert found.groups == 1
    assert fidelity.score(rows[:4]).rank_correlation is None  # too few plans


def test_gated_rows(published: ModuleType) -> None:
    assert published.gated(ROW)
    for changes in (
        {"plan_complete": "0"},
        {"duplicate_of": "b"},
        {"activation_checkpointing": "none (not stated)"},
        {"framework": "OneFlow"},
    ):
        assert not published.gated(ROW | changes)


def test_constants_are_found_again_without_a_source(path: None) -> None:
    """Rows made with one true efficiency: the fit finds it, and finds it without any source."""
    fit = import_module("fit")
    true, assumed = 0.5, 0.8
    samples = [
        fit.Sample(source, -slope * math.log(true / assumed), (slope, -0.1))
        for source in "abc"
        for slope in (-0.9, -0.7, -0.8, -0.85)
    ]
    assert assumed * math.exp(fit.fitted(samples)[0]) == pytest.approx(true, rel=0.05)
    held = fit.held_out(samples)
    assert max(map(abs, held)) < 0.03
    assert min(abs(s.error) for s in samples) > 0.3  # they were wrong before
