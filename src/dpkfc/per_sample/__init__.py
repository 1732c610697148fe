"""Per-sample gradients from one forward and one backward pass, without forming weight gradients."""

from dpkfc.per_sample import layers  # registers the built-in layers  # noqa: F401
