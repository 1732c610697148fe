"""scikit-learn's handwritten digits: 1,797 real 8x8 images, nothing to download."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import TensorDataset

TRAINING_RECORDS = 1437
LARGEST_PIXEL = 16  # by the definition of the data set


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training (1,437) and test (360) images [1, 8, 8] in [0, 1] with labels 0..9.

    The split is always the same.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ImportError("the digits come with scikit-learn: pip install 'dpkfc[demo]'") from None
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    x = torch.tensor(images[order], dtype=torch.float32).view(-1, 1, 8, 8) / LARGEST_PIXEL
    y = torch.tensor(labels[order], dtype=torch.long)
    train = TensorDataset(x[:TRAINING_RECORDS], y[:TRAINING_RECORDS])
    return train, TensorDataset(x[TRAINING_RECORDS:], y[TRAINING_RECORDS:])
