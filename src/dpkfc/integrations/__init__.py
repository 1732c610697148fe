"""Private training inside the frameworks that people use.

Each module needs its own framework and is imported by its full name, for example
``from dpkfc.integrations.transformers import PrivateTrainer``.
"""
