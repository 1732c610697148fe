"""Ready-made models for the app, the experiments and the benchmarks: ordinary `nn.Module`s.

`default.build` chooses among them by name. None of them contains anything about privacy.
"""

from dpkfc.app.models.cnn import digits_cnn, paper_cnn
from dpkfc.app.models.mlp import mlp
from dpkfc.app.models.resnet import groupnorm_resnet
from dpkfc.app.models.transformer import tiny_vit

__all__ = ["digits_cnn", "groupnorm_resnet", "mlp", "paper_cnn", "tiny_vit"]
