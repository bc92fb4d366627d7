"""Settings of other frameworks: they say what the plan is, or list what they cannot."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from parloom import cli
from parloom.capture import capture
from parloom.comparators.baselines import METHODS, data_parallel
from parloom.comparators.configuration import Configuration, laid_out
from parloom.cost.clusters import resolve_cluster
from parloom.errors import InputError, ParloomError
from parloom.export import accelerate, deepspeed, description, megatron, torchtitan
from parloom.export.description import Irregular, Kind, describe
from parloom.export.differences import split_words
from parloom.exporting import FRAMEWORKS, TARGETS
from parloom.ir.graph import Graph
from parloom.ir.microbatches import of_microbatch
from parloom.ir.plan import ModelSource, NodeDecision, Optimizer, ParameterDecision, Plan
from parloom.ir.plan_json import plan_from_json, plan_to_json
from parloom.ir.text import parse_graph, print_graph
from parloom.report.folded import names_text
from parloom.rewrite.merge import merges
from parloom.rewrite.rewrites import rewritten
from parloom.zoo import gshard
from tests.exported import BATCH, BLOCKS, PLAIN, gpt, plan_of, planned
from tests.megatron_flags import megatron_args
from tests.unit.graphs import graph, node


def changed(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, decisions=replace(plan.decisions, **changes))


def without_factor(plan: Plan, key: str, factor: str) -> Plan:
    """The plan with a factor of one operator replicated."""
    nodes = [
        NodeDecision(n.key, tuple(f for f in n.factors if f[0] != factor)) if n.key == key else n
        for n in plan.decisions.nodes
    ]
    assert nodes != list(plan.decisions.nodes)
    return changed(plan, nodes=tuple(nodes))


def test_one_other_layout_is_listed() -> None:
    plan = planned(PLAIN)
    assert megatron_args(plan)[1] == ()
    _, missing = megatron_args(without_factor(plan, "blocks.2.up:linear#0", "n"))
    assert "blocks.2.up.weight: laid out as [64, 16], not [2/tensor·32, 16]" in missing
    assert "blocks.2.up.bias: laid out as [64], not [2/tensor·32]" in missing
    assert not any("blocks.1" in line for line in missing)


def test_one_other_storage_is_listed() -> None:
    plan = planned(PLAIN)
    first, *others = plan.decisions.parameters
    whole = ParameterDecision(first.name)
    _, missing = megatron_args(changed(plan, parameters=(whole, *others)))
    wanted = f"{first.name}: optimizer state stored whole, not over 8 data-parallel ranks"
    assert missing == (wanted,)


def test_layouts_are_found_by_what_axes_split() -> None:
    plan = planned(PLAIN)
    text = plan_to_json(plan).replace('"tensor"', '"x"').replace('"data"', '"y"')
    renamed = plan_from_json(text, "renamed")
    assert renamed.decisions != plan.decisions
    assert describe(renamed).chosen == describe(plan).chosen == PLAIN
    assert describe(renamed).irregular == ()


def test_uneven_stages() -> None:
    chosen = Configuration(
        pipeline=2, data=8, microbatch=1, num_microbatches=2, zero=1, master_dtype=None
    )
    plan = planned(chosen, blocks=(3, 1))
    args, missing = megatron_args(plan)
    assert (args.pipeline_model_parallel_layout, missing) == ("Et*3|t*1L", ())
    found = describe(plan)
    assert not found.even
    wanted = "pipeline of 2 uneven stages (3, 1 blocks) over 2 groups of ranks, schedule 1f1b"
    for framework in (accelerate, deepspeed):
        assert wanted in framework.settings(found).missing
    config = torchtitan_config(plan)
    assert config.parallelism.module_fqns_per_model_part == [
        ["tokens", "positions", "blocks.0", "blocks.1", "blocks.2"],
        ["blocks.3", "norm", "head"],
    ]


def test_other_schedules_are_listed() -> None:
    chosen = Configuration(
        pipeline=2, data=8, num_microbatches=2, microbatch=1, schedule="gpipe", master_dtype=None
    )
    plan = planned(chosen)
    assert megatron_args(plan)[1] == ("schedule gpipe (1F1B there)",)
    config = torchtitan_config(plan)
    assert config.parallelism.pipeline_parallel_schedule == "GPipe"
    assert torchtitan.settings(describe(plan)).missing == ()


def test_stages_of_other_degrees_are_listed() -> None:
    chosen = Configuration(pipeline=2, tensor=4, data=2, microbatch=8, master_dtype=None)
    plan, other = planned(chosen), planned(replace(chosen, tensor=2, data=4, microbatch=4))
    first, last = plan.decisions.stages[0], other.decisions.stages[1]
    own = {item for item in last.items}
    nodes = [n for n in plan.decisions.nodes if not owned(n.key, own)]
    nodes += [n for n in other.decisions.nodes if owned(n.key, own)]
    mixed = changed(plan, stages=(first, last), nodes=tuple(nodes))
    found = describe(mixed)
    assert "stage 1 split by data 4, tensor 2, not data 2, tensor 4" in [
        own.words for own in found.irregular
    ]


def owned(key: str, items: set[str]) -> bool:
    return key in items or any(
        key.startswith(f"{item}.") or key.startswith(f"{item}:") for item in items
    )


def test_rewrites_and_padding_are_listed() -> None:
    chosen = Configuration(tensor=4, data=4, microbatch=4, master_dtype=None)
    plan = planned(chosen, vocab=62)
    padding = "padding of tokens.weight from 62 to 64 rows"
    args, missing = megatron_args(plan)
    assert (args.make_vocab_size_divisible_by, missing) == (16, ())
    for framework in (accelerate, deepspeed, torchtitan):
        assert padding in framework.settings(describe(plan)).missing


CHUNKS = (
    "one chunk of positions for each of 2 context-parallel ranks (two chunks there, from both ends)"
)
RING = "blocks of keys and values that go around a ring (they are gathered there)"
OTHERS: list[tuple[Configuration, tuple[str, ...], tuple[str, ...]]] = [
    (Configuration(data=8, context=2, microbatch=2, zero=3), (CHUNKS,), ()),
    (Configuration(data=8, context=2, microbatch=2, zero=2, ring=True), (CHUNKS,), (RING,)),
    (
        Configuration(data=8, context=2, microbatch=2, striped=True),
        ("stripes of positions over 2 context-parallel ranks", CHUNKS),
        ("stripes of positions over 2 context-parallel ranks",),
    ),
    (
        Configuration(data=4, tensor=2, copies=2, microbatch=4),
        ("2 ranks that do the same work",),
        ("2 ranks that do the same work",),
    ),
]


@pytest.mark.parametrize(("chosen", "of_megatron", "of_torchtitan"), OTHERS)
def test_other_configurations(
    chosen: Configuration, of_megatron: tuple[str, ...], of_torchtitan: tuple[str, ...]
) -> None:
    chosen = replace(chosen, master_dtype=None)
    found = describe(planned(chosen))
    assert (found.chosen, found.irregular) == (chosen, ())
    assert megatron.settings(found).missing == of_megatron
    assert torchtitan.settings(found).missing == of_torchtitan


@pytest.mark.sample(2)
@pytest.mark.parametrize(("tensor", "expert"), [(1, 4), (2, 2), (2, 8)])
def test_experts(tensor: int, expert: int) -> None:
    sizes = {"vocab": 64, "width": 16, "depth": 2, "heads": 4, "head_width": 4, "inner": 32}
    own = mixture(tuple(sizes.items()))
    chosen = Configuration(
        tensor=tensor, data=8 // tensor, expert=expert, microbatch=2 * tensor, master_dtype=None
    )
    decisions = laid_out(own, chosen, resolve_cluster("8xA100").cluster).decisions(chosen)
    plan = replace(planned(PLAIN), graph=print_graph(own), cluster="8xA100", decisions=decisions)
    found = describe(plan)
    assert (found.chosen, found.irregular) == (chosen, ())
    args, missing = megatron_args(plan)
    assert args.expert_model_parallel_size == expert
    assert bool(missing) == (1 < expert <= 8 // tensor and tensor > 1)


@cache
def mixture(sizes: tuple[tuple[str, int], ...]) -> Graph:
    return capture(*gshard.build(batch=16, seq=8, experts=8, **dict(sizes)))


def test_values_computed_in_another_way_are_listed() -> None:
    shapes: dict[str, tuple[int, ...]] = {"w": (8, 8), "u": (8, 8)}
    own = graph(
        shapes,
        {"x": ((4, 8), "float32")},
        node("linear", "x", "w", to="one", shape=(4, 8), path="one"),
        node("linear", "x", "u", to="two", shape=(4, 8), path="two"),
        node("mul", "one", "two", to="both", shape=(4, 8)),
        node("sum", "both", to="loss", shape=()),
    )
    take = next(text for text in map(str, merges(own)) if "one" in text and "two" in text)
    cluster = resolve_cluster("4xcpu").cluster
    decisions = next(data_parallel(rewritten(own, (take,)), cluster))
    source = ModelSource("model.py:build")
    plan = Plan(source, "4xcpu", "0" * 16, Optimizer(), "test",
                replace(decisions, rewrites=(take,)), print_graph(own))  # fmt: skip
    for framework in FRAMEWORKS.values():
        (line,) = (line for line in framework(describe(plan)).missing if "rewrite" in line)
        assert line.startswith("rewrite: one, two: computed by")


def test_the_program_of_one_microbatch() -> None:
    own, _ = gpt()
    text = print_graph(of_microbatch(own, {"input_ids": 0, "labels": 0}, 2))
    chosen = Configuration(data=8, microbatch=2, num_microbatches=2, master_dtype=None)
    decisions = laid_out(parse_graph(text), chosen, resolve_cluster("8xcpu").cluster)
    plan = replace(planned(PLAIN), graph=text, cluster="8xcpu",
                   decisions=decisions.decisions(chosen))  # fmt: skip
    found = describe(changed(plan, batch_semantics="microbatch"))
    assert (found.chosen, found.samples, found.irregular) == (chosen, 2 * BATCH, ())
    assert "--calculate-per-token-loss" not in megatron.settings(found).text
    assert any("losses of microbatches" in line for line in torchtitan.settings(found).missing)
    assert not any("loss" in line for line in deepspeed.settings(found).missing)


def test_what_lies_beside_the_blocks() -> None:
    chosen = Configuration(pipeline=2, data=8, microbatch=1, num_microbatches=2, master_dtype=None)
    plan = planned(chosen)
    first, last = plan.decisions.stages
    order = [item for item in first.items if not item.startswith("blocks")]
    astray = order[-1]
    moved = (
        replace(first, items=(astray,)),
        replace(first, devices=last.devices, items=tuple(
            item for item in (*first.items, *last.items) if item != astray
        )),
    )  # fmt: skip
    with pytest.raises(ParloomError):  # what comes before it is in a later stage
        describe(changed(plan, stages=moved))
    before, after = order[:1], (*first.items[1:], *last.items)
    stages = (replace(first, items=tuple(before)), replace(last, items=tuple(after)))
    found = describe(changed(plan, stages=stages))
    (line,) = (line for line in megatron.settings(found).missing if "stage 1" in line)
    assert line.startswith(order[1])


def test_settings_that_are_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(PLAIN)
    asked = list[Configuration]()

    def refused(graph: Any, chosen: Configuration, cluster: Any) -> Any:
        asked.append(chosen)
        if len(asked) == 1:
            raise InputError("no")
        return laid_out(graph, chosen, cluster)

    monkeypatch.setattr(description, "laid_out", refused)
    missing = megatron.settings(describe(plan)).missing
    assert missing[0] == "these settings are no plan of the model (no)"
    wanted = "blocks.0-3.attention.qkv.weight: laid out as [3·2/tensor·8, 16], not [48, 16]"
    assert wanted in missing


@pytest.mark.parametrize("method", ["data_parallel", "fsdp", "megatron"])
def test_rules_of_thumb_are_regular(method: str) -> None:
    own, _ = gpt()
    decisions = next(METHODS[method](own, resolve_cluster("2x2xcpu").cluster, 1, 0))
    assert describe(plan_of(decisions, "2x2xcpu")).irregular == ()


def test_a_random_plan_is_not() -> None:
    own, _ = gpt()
    decisions = next(METHODS["random"](own, resolve_cluster("2x2xcpu").cluster, 1, 0))
    found = describe(plan_of(decisions, "2x2xcpu"))
    words = "; ".join(found.are(Kind.LAYOUT))
    assert "blocks.0" in words
    assert "tokens.weight" in words
    assert "results of" in words


SMALL = """
import torch
from torch import nn
def factory():
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    return model, {"input": torch.randn(16, 8)}, lambda output, batch: output.square().mean()
"""


def test_auto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    folder, out = str(tmp_path / "plan"), str(tmp_path)
    command = ["plan", f"{tmp_path / 'small.py'}:factory", "--cluster", "2xcpu", "--devices", "2"]
    assert cli.main([*command, "--budget", "40", "--no-rewrites", "--out", folder]) == 0
    for name in FRAMEWORKS:
        capsys.readouterr()
        assert cli.main(["export", folder, "--to", name, "--out", out, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert Path(document["file"]).exists()
        wanted = 3 if document["not_expressible"] else 0
        assert cli.main(["export", folder, "--to", name, "--out", out, "--strict"]) == wanted


def test_recomputation() -> None:
    chosen = replace(PLAIN, recompute="alternate")
    found = describe(planned(chosen))
    assert found.recompute.whole == (True, False, True, False)
    for framework in FRAMEWORKS.values():
        assert any("recomputation of blocks.0,2" in line for line in framework(found).missing)
    first = replace(found.plan.decisions.activations[0], prefix="blocks.1")
    plan = changed(found.plan, activations=(found.plan.decisions.activations[0], first))
    args, missing = megatron_args(plan)
    assert (args.recompute_method, args.recompute_num_layers, missing) == ("block", 2, ())
    cheap = describe(planned(replace(PLAIN, recompute="selective")))
    assert cheap.recompute.cheap
    assert any("gelu" in line for line in megatron.settings(cheap).missing)


def torchtitan_config(plan: Plan) -> Any:
    """What the file makes of a configuration, with stand-ins for torchtitan's classes."""
    text = torchtitan.settings(describe(plan)).text
    lines = [line for line in text.splitlines() if not line.startswith("from torchtitan")]
    names: dict[str, Any] = {"ParallelismConfig": SimpleNamespace}
    names |= {
        kind: SimpleNamespace(Config=lambda kind=kind: kind) for kind in ("FullAC", "SelectiveAC")
    }
    exec(compile("\n".join(lines), "settings", "exec"), names)
    return names["settings"](SimpleNamespace(training=SimpleNamespace()))


def test_torchtitan() -> None:
    chosen = Configuration(
        tensor=2, data=8, zero=3, shard=4, microbatch=1, num_microbatches=2, recompute="full",
        sequence_parallel=True, master_dtype=None,
    )  # fmt: skip
    plan = planned(chosen)
    config = torchtitan_config(plan)
    assert config.parallelism.data_parallel_replicate_degree == 2
    assert config.parallelism.data_parallel_shard_degree == 4
    assert config.parallelism.tensor_parallel_degree == 2
    assert config.parallelism.enable_sequence_parallel
    assert config.training.local_batch_size == 1
    assert config.training.global_batch_size == BATCH
    assert config.activation_checkpoint == "FullAC"
    assert torchtitan.settings(describe(plan)).missing == ()


def test_deepspeed_and_accelerate() -> None:
    chosen = Configuration(data=16, zero=3, microbatch=1, recompute="full", master_dtype=None)
    plan = planned(chosen)
    document = json.loads(deepspeed.settings(describe(plan)).text)
    assert document["zero_optimization"]["stage"] == 3
    assert document["train_batch_size"] == BATCH
    found = accelerate.settings(describe(plan))
    config = yaml.safe_load(found.text)
    assert config["distributed_type"] == "FSDP"
    assert config["fsdp_config"]["fsdp_activation_checkpointing"]
    assert config["parallelism_config"]["parallelism_config_dp_shard_size"] == 16
    assert found.missing == ()


def test_accelerate_kinds() -> None:
    kinds = {
        "DEEPSPEED": Configuration(data=16, zero=1, master_dtype=None),
        "MULTI_GPU": Configuration(data=16, master_dtype=None),
    }
    for kind, chosen in kinds.items():
        found = accelerate.settings(describe(planned(chosen)))
        assert yaml.safe_load(found.text)["distributed_type"] == kind
        assert found.missing == ()


def saved(folder: Path, plan: Plan) -> str:
    file = folder / "plan.json"
    file.write_text(plan_to_json(plan))
    return str(file)


def test_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = saved(tmp_path, planned(replace(PLAIN, recompute="alternate")))
    out = tmp_path / "out"
    for name in ("deepspeed", "dtensor"):
        command = ["export", plan, "--to", name, "--out", str(out)]
        assert cli.main([*command, "--strict"]) == 3
        said = capsys.readouterr()
        assert f"not expressible in {name}:" in said.err
        assert "recomputation of blocks.0,2" in said.err
        _, *items = said.err.splitlines()
        assert all(item.startswith("  ") for item in items)
        assert cli.main([*command, "--strict", "--json"]) == 3
        listed = json.loads(capsys.readouterr().out)["not_expressible"]
        assert any("recomputation of blocks.0,2" in line for line in listed)
        assert not out.exists()
        assert cli.main([*command, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert any("blocks.0,2" in line for line in document["not_expressible"])
        assert cli.main(command) == 0
        assert "not expressible there:" in capsys.readouterr().out
        for file in out.iterdir():
            file.unlink()
        out.rmdir()


def test_strict_writes_what_is_expressible(tmp_path: Path) -> None:
    plan = saved(tmp_path, planned(PLAIN))
    command = ["export", plan, "--to", "megatron", "--strict", "--out", str(tmp_path / "out")]
    assert cli.main(command) == 0
    assert "--use-distributed-optimizer" in (tmp_path / "out" / megatron.FILE).read_text()


def test_unknown_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(tmp_path), "--to", "torchtitain"]) == 2
    said = capsys.readouterr().err
    assert "no target 'torchtitain'; did you mean 'torchtitan'" in said
    for name in TARGETS:
        assert name in said


def test_names_are_no_code() -> None:
    found = describe(planned(PLAIN))
    hostile = 'a\nrm -rf $(b) """ \' `c`'
    bad = replace(found, irregular=(Irregular(Kind.REWRITE, hostile),))
    for name, framework in FRAMEWORKS.items():
        text = framework(bad).text
        if name in ("torchtitan", "dtensor"):
            compile(text, name, "exec")
        assert "\nrm" not in text


def test_names_of_blocks_are_one() -> None:
    names = ["blocks.0.up", "blocks.1.up", "blocks.3.up", "head", "blocks.0", "layers.11.x:add#0"]
    assert names_text(names) == "blocks.0-1,3.up, head, blocks.0, layers.11.x:add#0"


def test_all_blocks_are_known() -> None:
    assert len(describe(planned(PLAIN)).blocks) == BLOCKS


@pytest.mark.parametrize(
    ("own", "other", "words"),
    [
        ("data 4", "data 2", "split by data 4, not data 2"),
        ("data 4", "", "split by data 4; not split there"),
        ("", "data 2", "not split; split by data 2 there"),
    ],
)
def test_what_is_not_split_is_said_so(own: str, other: str, words: str) -> None:
    assert split_words(own, other) == words


def test_equal_layers_and_experts_are_one() -> None:
    names = [f"layers.{i}.mlp.{j}_proj.weight" for i in range(80) for j in ("up", "down")]
    assert names_text(names) == "layers.0-79.{mlp.up_proj.weight, mlp.down_proj.weight}"
    experts = [f"layers.{i}.experts.{e}.{w}" for i in (0, 1, 3) for e in range(8) for w in "ab"]
    assert names_text(experts) == "layers.0-1,3.experts.0-7.{a, b}"
    assert names_text(["head.weight", "h.1:add#0", "h.2:add#0"]) == "head.weight, h.1-2:add#0"
