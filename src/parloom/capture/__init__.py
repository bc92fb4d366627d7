"""nn.Module -> Graph."""

from parloom.capture.build import capture, capture_flat, parameters_of
from parloom.capture.check import remarks, scalars_apart
from parloom.capture.compare import first_difference, has_loss_function
from parloom.capture.fingerprint import cast_needed, differences, fingerprint
from parloom.capture.hugging_face import set_for_training, with_culprit
from parloom.capture.load import Loaded, load_abstract, load_model, sizes_of
from parloom.capture.program import Loss, arguments_of, mode, named_tensors, select_loss
from parloom.capture.spelling import decompositions

__all__ = [
    "capture",
    "capture_flat",
    "parameters_of",
    "remarks",
    "cast_needed",
    "differences",
    "scalars_apart",
    "fingerprint",
    "first_difference",
    "has_loss_function",
    "load_model",
    "load_abstract",
    "sizes_of",
    "arguments_of",
    "mode",
    "named_tensors",
    "select_loss",
    "set_for_training",
    "decompositions",
    "with_culprit",
    "Loaded",
    "Loss",
]
