"""DLRM (Naumov et al. 2019): embedding tables, dense features, pairwise interaction, one click.

Shape suffixes: B batch, T tables plus one, E embedding width.
"""

from itertools import pairwise

from torch import Generator, Tensor, cat, nn, rand, randint, randn, stack, tril_indices
from torch.nn import functional as F


def perceptron(widths: list[int], last_relu: bool) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class DLRM(nn.Module):
    """Sums of `bag` embeddings per table meet the dense features in all pairwise products."""

    def __init__(self, dense: int, tables: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        embeddings = [nn.Embedding(rows, width) for _ in range(tables)]
        for embedding in embeddings:
            nn.init.uniform_(embedding.weight, -(rows**-0.5), rows**-0.5)
        self.tables = nn.ModuleList(embeddings)
        self.bottom = perceptron([dense, hidden, width], last_relu=True)
        pairs = (tables + 1) * tables // 2
        self.top = perceptron([width + pairs, hidden, hidden, 1], last_relu=False)

    def forward(self, dense: Tensor, sparse: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        bottom = self.bottom(dense)
        bags = [table(sparse[:, i]).sum(1) for i, table in enumerate(self.tables)]
        features_BTE = stack([bottom, *bags], dim=1)
        products_BTT = features_BTE @ features_BTE.transpose(1, 2)
        count = features_BTE.shape[1]
        row, column = tril_indices(count, count, offset=-1, device=dense.device)
        logits = self.top(cat((bottom, products_BTT[:, row, column]), dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, labels), logits


def build(
    *,
    batch: int = 128,
    seq: int | None = None,
    scale: float = 1.0,
    tables: int = 4,
    rows: int = 4096,
    width: int = 64,
    hidden: int = 256,
    dense: int = 16,
    bag: int = 2,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """1.2 M parameters at scale 1; dense [batch, dense], sparse [batch, tables, bag], labels.

    `scale` multiplies rows, embedding width and hidden width; `seq` is unused.
    """
    rows, width, hidden = (max(1, round(n * scale)) for n in (rows, width, hidden))
    g = Generator().manual_seed(0)
    features = randn(batch, dense, generator=g, device="cpu")
    sparse = randint(0, rows, (batch, tables, bag), generator=g, device="cpu")
    labels = (rand(batch, generator=g, device="cpu") < 0.3).float()
    model = DLRM(dense, tables, rows, width, hidden)
    return model, {"dense": features, "sparse": sparse, "labels": labels}
