"""scikit-learn's bundled handwritten digits: 1,797 real 8x8 images, nothing to download."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import TensorDataset

from dpkfc.errors import PrivacyError


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training (1,437) and test (360) images [1, 8, 8] in [0, 1] with labels 0..9, split once and for all."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise PrivacyError("the digits come with scikit-learn: pip install 'dpkfc[demo]'") from None
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    x = (
        torch.tensor(images[order], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    )  # pixels are 0..16 by definition
    y = torch.tensor(labels[order], dtype=torch.long)
    return TensorDataset(x[:1437], y[:1437]), TensorDataset(x[1437:], y[1437:])
