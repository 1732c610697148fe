"""The models that the experiments and benchmarks train; ordinary `nn.Module`s, none of them knows of privacy."""

from dpkfc.app.models.cnn import digits_cnn, paper_cnn
from dpkfc.app.models.mlp import mlp
from dpkfc.app.models.resnet import groupnorm_resnet
from dpkfc.app.models.transformer import tiny_vit

__all__ = ["digits_cnn", "groupnorm_resnet", "mlp", "paper_cnn", "tiny_vit"]
