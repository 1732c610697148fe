"""Differentially private training for PyTorch: preconditions gradients before clipping and noise.

>>> import dpkfc
>>> plan = dpkfc.Plan.make(
...     records=10_000, batch_size=100, epochs=2, clip=1.0, epsilon=3.0, delta=1e-6
... )
>>> plan.steps
200

Names are imported on first use, so that ``import dpkfc`` costs little more than ``import torch``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpkfc import diagnostics, losses, noise, optim, probes, tuning
    from dpkfc.accounting.ledger import Ledger
    from dpkfc.clipping import AutomaticClipping
    from dpkfc.engine.fix import fix
    from dpkfc.engine.make_private import make_private
    from dpkfc.engine.options import Options
    from dpkfc.engine.run import PrivateRun
    from dpkfc.errors import PrivacyError
    from dpkfc.geometry.diagonal import Diagonal
    from dpkfc.geometry.identity import Identity
    from dpkfc.geometry.kfc import KFC
    from dpkfc.per_sample.registry import register_layer
    from dpkfc.planning.plan import Plan
    from dpkfc.planning.recipe import recipe
    from dpkfc.tuning.search import tune, tune_privately

__version__ = "0.1.0"
__all__ = [
    "KFC",
    "AutomaticClipping",
    "Diagonal",
    "Identity",
    "Ledger",
    "Options",
    "Plan",
    "PrivacyError",
    "PrivateRun",
    "diagnostics",
    "fix",
    "losses",
    "make_private",
    "noise",
    "optim",
    "probes",
    "recipe",
    "register_layer",
    "tune",
    "tune_privately",
    "tuning",
]

_MODULE_OF = {
    "KFC": "geometry.kfc",
    "AutomaticClipping": "clipping",
    "Diagonal": "geometry.diagonal",
    "Identity": "geometry.identity",
    "Ledger": "accounting.ledger",
    "Options": "engine.options",
    "Plan": "planning.plan",
    "PrivacyError": "errors",
    "PrivateRun": "engine.run",
    "fix": "engine.fix",
    "make_private": "engine.make_private",
    "recipe": "planning.recipe",
    "register_layer": "per_sample.registry",
    "tune": "tuning.search",
    "tune_privately": "tuning.search",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"dpkfc.{_MODULE_OF[name]}"), name)
    elif name in __all__:
        value = import_module(f"dpkfc.{name}")
    else:
        raise AttributeError(f"module 'dpkfc' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
