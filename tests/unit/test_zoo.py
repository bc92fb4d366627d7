"""Every zoo model builds, trains and is the same each time; a new model is covered at once."""

import ast
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

import parloom.zoo
from parloom import zoo
from parloom.zoo.dit import discretised_log_likelihood, gaussian_divergence
from parloom.zoo.gshard import Experts
from tests.zoo_sizes import SMALL, small


@pytest.mark.parametrize("name", zoo.names())
def test_loss_and_gradients_are_finite(name: str) -> None:
    model, batch = small(name)
    loss = model(**batch)[0]
    assert loss.shape == ()
    assert loss.isfinite()
    loss.backward()
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, path
            assert parameter.grad.isfinite().all(), path


@pytest.mark.parametrize("name", zoo.names())
def test_same_seed_same_model_and_batch(name: str) -> None:
    (first, a), (second, b) = small(name), small(name)
    assert a.keys() == b.keys()
    assert all(a[k].equal(b[k]) for k in a)
    assert all(v.equal(second.state_dict()[k]) for k, v in first.state_dict().items())
    torch.manual_seed(1)
    loss = first(**a)[0]
    torch.manual_seed(1)
    assert second(**b)[0].equal(loss)


@pytest.mark.parametrize("name", zoo.names())
def test_every_batch_tensor_has_the_batch_first(name: str) -> None:
    _, batch = small(name)
    assert {t.shape[0] for t in batch.values()} == {4}


@pytest.mark.parametrize("name", zoo.names())
def test_builds_on_meta_with_a_real_batch(name: str) -> None:
    with torch.device("meta"):
        model, batch = zoo.build(name, batch=4)
    assert all(p.is_meta for p in model.parameters())
    assert all(t.device.type == "cpu" for t in batch.values())


def count(name: str, **sizes: Any) -> int:
    """Parameters, without building them."""
    with torch.device("meta"):
        model, _ = zoo.build(name, batch=1, **sizes)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", zoo.names())
def test_scale_shrinks(name: str) -> None:
    assert count(name, scale=0.25) < count(name, scale=0.5) < count(name)


@pytest.mark.parametrize("name", zoo.denoisers())
def test_a_denoiser_is_the_network_that_is_trained(name: str) -> None:
    """One step gives what the loss is computed of, as large as what is denoised."""
    sizes = {"batch": 4, **SMALL[name.removesuffix("_denoiser")]}
    torch.manual_seed(0)
    model, batch = zoo.build(name, **sizes)
    torch.manual_seed(0)
    whole, _ = zoo.build(name.removesuffix("_denoiser"), **sizes)
    trained = whole.get_submodule("denoiser").state_dict()
    assert all(v.equal(trained[k]) for k, v in model.state_dict().items())
    assert model(**batch).shape[2:] == batch["noisy"].shape[2:]
    assert zoo.sizes(name) == zoo.sizes(name.removesuffix("_denoiser"))


PUBLISHED = {
    # "60 million" in the paper; the sum over its section 3.5, as in BVLC's Caffe model.
    "alexnet": 60_965_224,
    # torchvision's alexnet (61,100,840) with 10 classes.
    "alexnet_artifact": 61_100_840 - 990 * 4097,
    # "340M" in the paper; the published checkpoint with both heads.
    "bert_large": 336_226_108,
    "bert_large_artifact": 12 * 6 * 1024**2 + 1024,
    # ECP-CANDLE/Benchmarks, Pilot1/Uno/README.md.
    "candle_uno": 21_275_001,
    "candle_uno_artifact": 4192 * (942 + 2 * 5270 + 2 * 2048 + 5 * 4192 + 2)
    + 4192**2 * (5 * 7 + 3)
    + 4192,
    # facebookresearch/DiT; "675M" in table 1 of the paper.
    "dit_xl": 675_129_632,
    "dlrm_artifact": 4 * 10**6 * 64 + 4 * 64 + 64 * 64 + 320 * 64 + 64 * 2,
    # MLPerf, GNMT.
    "gnmt": 160_671_297,
    # openai-community/gpt2.
    "gpt2": 124_439_808,
    # torchvision's inception_v3 with its auxiliary head.
    "inception_v3": 27_161_264,
    # torchvision's without that head (23,834,568), a bias for each of the 17,216 pairs of batch
    # norm, and 10 classes.
    "inception_v3_artifact": 23_834_568 - 17_216 - 990 * 2049,
    "mlp_unify": 2 * (1024 * 8192 + 7 * 8192**2),
    # Four branches of eight layers: attention, a perceptron and two norms; a head.
    "mmt": 4 * 8 * (4 * 1024 * 1025 + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024) + 4 * 1024 + 1,
    # torchvision's resnext50_32x4d; "25.0 x 10^6" in table 1 of the paper.
    "resnext50": 25_028_904,
    # A bias for each of 30,272 pairs of batch norm, and no skips: 2,768,896 and 7,680 weights.
    "resnext50_artifact": 25_028_904 - 30_272 - 2_768_896 - 7_680,
    # "35.7 million" in appendix B of the paper; google/ddpm-cifar10-32.
    "unet": 35_746_307,
    # Wan-AI/Wan2.1-T2V-1.3B and 14B.
    "wan_1_3b": 1_418_996_800,
    "wan_14b": 14_288_491_584,
    # torchvision's wide_resnet50_2; "68.9M" in table 8 of the paper.
    "wide_resnet": 68_883_240,
    "xdl": 4 * 10**6 * 64 + 2 * 256**2 + 256 * 2,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_size_is_the_published_one(name: str) -> None:
    assert count(name) == PUBLISHED[name]


def test_rounded_sizes_that_were_published() -> None:
    # Section 5.1 of the DLRM paper: "approximately 540M".
    assert count("dlrm_criteo") == pytest.approx(540e6, rel=2e-3)
    # Shazeer et al. 2017, table 2: 278M for GNMT, whose embeddings are not shared.
    assert count("gnmt", depth=8) + 32320 * 1024 == pytest.approx(278e6, rel=2e-3)


def test_gpt_and_llama_of_any_size() -> None:
    gpt_2 = {"vocab": 50257, "width": 768, "depth": 12, "heads": 12}
    assert count("gpt", seq=1024, **gpt_2) == 124_439_808  # the published checkpoint
    # Brown et al. 2020, table 2.1: 175.0B.
    gpt_3 = {"vocab": 50257, "width": 12288, "depth": 96, "heads": 96}
    assert count("gpt", seq=2048, **gpt_3) == pytest.approx(175e9, rel=3e-3)
    llama_3 = {
        "vocab": 128256, "width": 4096, "depth": 32, "heads": 32, "groups": 8, "inner": 14336,
    }  # fmt: skip
    assert count("llama", **llama_3) == 8_030_261_248  # the published checkpoint


def test_gshard_has_the_experts_of_the_paper() -> None:
    """Table 1, rows (6) and (1); its "36684" experts of row (1) are 18 times 2048 misprinted.

    Modules of 2 and of 4 layers are counted: every further pair of layers is alike.
    """
    for experts, depth, total, weights in ((128, 12, 768, 12.5e9), (2048, 36, 18 * 2048, 600e9)):
        inside, everything = [], []
        for layers in (2, 4):
            with torch.device("meta"):
                model, _ = zoo.build("gshard", batch=1, experts=experts, depth=layers)
            sizes = {n: p.numel() for n, p in model.named_parameters()}
            inside.append(sum(size for n, size in sizes.items() if ".experts." in n))
            everything.append(sum(sizes.values()))
        pairs = depth // 2
        gates = pairs * 1024 * experts
        assert inside[1] == 2 * inside[0]
        assert pairs * inside[0] - gates == total * 2 * 1024 * 8192
        whole = everything[0] + (pairs - 1) * (everything[1] - everything[0])
        assert whole == pytest.approx(weights, rel=0.06)


def test_experts_follow_algorithm_1() -> None:
    torch.manual_seed(0)
    experts, tokens, capacity = 4, 12, 6
    layer = Experts(8, 16, experts).double()
    x = torch.randn(3, tokens, 8, dtype=torch.float64)
    combine, balance = layer.route(x)
    assert combine.shape == (3, tokens, experts, capacity)
    expected = torch.zeros_like(combine)
    losses, dropped = [], 0
    for g in range(3):
        gates = (x[g] @ layer.gate.weight.T).softmax(-1)
        counts = [0] * experts
        for choice in (0, 1):
            for s in range(tokens):
                best = gates[s].topk(2)
                e = int(best.indices[choice])
                if counts[e] < capacity:
                    expected[g, s, e, counts[e]] = best.values[choice] / best.values.sum()
                else:
                    dropped += 1
                counts[e] += 1
            if choice == 0:
                share = torch.tensor(counts, dtype=torch.float64) / tokens
                losses.append((share * gates.mean(0)).mean())
    assert dropped
    torch.testing.assert_close(combine, expected)
    torch.testing.assert_close(balance, torch.stack(losses).mean())
    # With room for all, a token gets its two experts' outputs, weighed.
    y, _ = layer(x)
    outputs = torch.relu(x[:, :, None, None] @ layer.up) @ layer.down
    weighed = (combine.sum(-1)[..., None] * outputs[..., 0, :]).sum(2)
    torch.testing.assert_close(y, weighed)


def test_variational_bound_of_dit() -> None:
    g = torch.Generator().manual_seed(0)
    mean_1, log_1, mean_2, log_2 = torch.randn(4, 50, generator=g, dtype=torch.float64)
    first = Normal(mean_1, (log_1 / 2).exp())
    second = Normal(mean_2, (log_2 / 2).exp())
    expected = kl_divergence(first, second)
    torch.testing.assert_close(gaussian_divergence(mean_1, log_1, mean_2, log_2), expected)
    levels = torch.linspace(-1, 1, 256, dtype=torch.float64)
    likelihood = discretised_log_likelihood(levels, torch.tensor(0.3), torch.tensor(-2.0)).exp()
    torch.testing.assert_close(likelihood.sum().item(), 1.0, rtol=1e-9, atol=0)


def test_padding_of_bert_does_not_matter() -> None:
    model, batch = small("bert_large")
    model.eval()
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][batch["attention_mask"] == 0] += 1
    assert not other["input_ids"].equal(batch["input_ids"])
    torch.testing.assert_close(model(**other)[0], model(**batch)[0])


def test_artifact_is_short_for_a_name() -> None:
    _, batch = zoo.build("bert_large", artifact=True, batch=2, seq=4, width=16, depth=1)
    assert batch["x"].shape == (2, 4, 16)
    with pytest.raises(KeyError):
        zoo.build("gpt", artifact=True)


def test_models_that_the_proof_needs() -> None:
    gpt, batch = zoo.build("gpt", batch=2, seq=8, vocab=97, width=24, depth=2, heads=2)
    assert isinstance(gpt.get_submodule("head").weight, nn.Parameter)
    assert gpt.get_submodule("head").weight is gpt.get_submodule("tokens").weight
    assert gpt.get_submodule("head").weight.shape == (97, 24)
    assert int(batch["input_ids"].max()) < 97
    llama, _ = zoo.build("llama", heads=4, groups=2, width=32)
    assert llama.get_submodule("blocks.0.attention.k").weight.shape == (16, 32)


def test_padding_differs_between_rows() -> None:
    _, batch = zoo.build("gpt", batch=8, seq=64)
    assert len(set((batch["labels"] == -100).sum(1).tolist())) > 1


def test_unknown_names_and_sizes() -> None:
    with pytest.raises(KeyError):
        zoo.build("no-such-model")
    with pytest.raises(ValueError, match=r"zoo:mlp has no size 'widht'; it has scale, features"):
        zoo.build("mlp", widht=3)
    with pytest.raises(ValueError, match="3 key heads do not divide 8 query heads"):
        zoo.build("llama", groups=3)


def test_sizes_are_documented_defaults() -> None:
    assert zoo.sizes("mlp") == {
        "scale": 1.0, "features": 256, "hidden": 1024, "depth": 3, "classes": 16,
    }  # fmt: skip


def imported(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def test_imports_torch_only() -> None:
    package: ModuleType = parloom.zoo
    (folder,) = package.__path__
    for file in sorted(Path(folder).glob("*.py")):
        extra = imported(file.read_text()) - sys.stdlib_module_names - {"torch", "parloom"}
        assert not extra, file.name
