"""Side-by-side runs against the peers; every figure is a ratio within one run."""
