"""Zoo models small enough for tests that run them: sizes that divide by two and by four."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from parloom import zoo

IMAGES = {"classes": 8, "scale": 1 / 16}
STAGES = {"channels": 4, "depths": (2, 1, 1, 1), "classes": 8, "crop": 32}
TABLES = {"tables": 2, "rows": 24, "width": 8, "hidden": 8}
UNO = {
    "rnaseq": 8, "descriptors": 12, "fingerprints": 16, "hidden": 8, "depth": 2, "top_depth": 2,
}  # fmt: skip
VIDEO = {
    "width": 24, "inner": 32, "heads": 4, "depth": 2, "latent": 2, "frames": 2, "rows": 4,
    "columns": 8, "text_width": 8, "tokens": 4,
}  # fmt: skip
BERT = {"seq": 8, "width": 16, "depth": 2, "heads": 4}

SMALL: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "alexnet": {"channels": 6, "hidden": 16, "classes": 8, "crop": 67},
        "alexnet_artifact": {"channels": 4, "hidden": 16, "classes": 8, "crop": 67},
        "bert_large": {**BERT, "vocab": 24, "inner": 32},
        "bert_large_artifact": BERT,
        "candle_uno": UNO,
        "candle_uno_artifact": UNO,
        "cnn": {"channels": 4, "depth": 1, "classes": 8, "image": 8},
        "dit_xl": {"image": 8, "width": 16, "depth": 2, "heads": 2, "classes": 6},
        "dlrm": {**TABLES, "dense": 8},
        "dlrm_artifact": TABLES,
        "dlrm_criteo": {"scale": 0.002, "width": 2000},
        "gnmt": {"seq": 6, "vocab": 24, "width": 8, "depth": 3},
        "gpt": {"seq": 8, "vocab": 24, "width": 16, "depth": 2, "heads": 4},
        "gpt2": {"seq": 8, "vocab_size": 24, "width": 16, "depth": 2, "heads": 4, "n_positions": 8},
        "gshard": {
            "seq": 8, "vocab": 24, "width": 8, "depth": 4, "heads": 2, "head_width": 4,
            "inner": 16, "experts": 4,
        },
        "inception_v3": {**IMAGES, "depths": (1, 1, 1), "crop": 75},
        "inception_v3_artifact": {**IMAGES, "depths": (1, 1, 1), "crop": 75},
        "llama": {
            "seq": 8, "vocab": 24, "width": 16, "depth": 2, "heads": 4, "groups": 2, "inner": 16,
        },
        "mlp": {"features": 8, "hidden": 16, "depth": 2, "classes": 8},
        "mlp_unify": {"features": 8, "hidden": 16, "depth": 2},
        "mmt": {"seq": 4, "width": 16, "depth": 2, "heads": 4, "inner": 32},
        "resnext50": {**STAGES, "cardinality": 2},
        "resnext50_artifact": {**STAGES, "cardinality": 2},
        "unet": {
            "channels": 8, "multipliers": (1, 2), "depth": 1, "resolution": 8, "attention": 4,
            "norm_groups": 4,
        },
        "wan_1_3b": VIDEO,
        "wan_14b": VIDEO,
        "wide_resnet": STAGES,
        "xdl": TABLES,
    }
)  # fmt: skip


def small(name: str, **sizes: Any) -> zoo.Built:
    """A small model, with four samples unless `sizes` say otherwise, the same each time."""
    torch.manual_seed(0)
    return zoo.build(name, **{"batch": 4, **SMALL[name], **sizes})
