"""Tests with Flower, which needs an environment of its own: `make test-flower`."""

from __future__ import annotations

import os
from importlib.util import find_spec

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

collect_ignore_glob = ["test_*.py"] if find_spec("flwr") is None else []
