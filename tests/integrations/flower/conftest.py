"""Tests with Flower, which needs an environment of its own: `make test-flower`."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

sys.path.insert(0, str(Path(__file__).parent))  # messages.py
collect_ignore_glob = ["*.py"] if find_spec("flwr") is None else []
