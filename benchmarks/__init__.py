"""Side-by-side runs against the peers; every figure is a ratio within one run."""

import os

# Threads that wait for each other by spinning lose whole time slices to any other process, and times become those of
# the scheduler. This has to be set before torch is imported; it holds for all arms alike.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
