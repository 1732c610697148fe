import sys
from pathlib import Path

import torch

for folder in ("", "capture", "geometry"):  # the oracles and the layer cases, shared by all tests
    sys.path.insert(0, str(Path(__file__).parent / folder))
torch.set_num_threads(1)
