"""Federations in Flower's simulation engine: private clients, and a server that averages.

The engine runs clients in processes of its own. They get the setting alone, and read their records
themselves. Every client has its own ledger in every federation.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.app.models import digits_cnn
from dpkfc.app.models.mlp import mlp
from dpkfc.app.readers.digits import digits
from dpkfc.app.readers.idx import idx_images
from dpkfc.app.workflow.evaluation import accuracy

CLASSES = 10
HIDDEN = 128
METHODS = ("DP-SGD", "DP-KFC")


@dataclass(frozen=True)
class Federation:
    """All that a federation depends on.

    Args:
        dataset: "mnist", "fashion-mnist" or "digits".
        method: "DP-SGD" or "DP-KFC".
        lr: the learning rate of the clients.
        seed: of weights, split, samples and noise.
        alpha: of the Dirichlet distribution from which each client's label shares are drawn; None
            splits at random.
        held_out: training records that no client has, for the choice of the learning rate.
        epsilon, delta: of every client, for all rounds together.
    """

    dataset: str
    method: str
    lr: float
    seed: int
    alpha: float | None
    clients: int = 10
    rounds: int = 10
    local_steps: int = 5
    batch_size: int = 128
    held_out: int = 5000
    epsilon: float = 1.0
    delta: float = 1e-5


@dataclass(frozen=True)
class FederationResult:
    """Accuracies of the averaged model, and what the clients' ledgers say."""

    validation: float
    test: float
    epsilon: float  # the largest of all clients, by its ledger
    replies: int  # of all clients in all rounds
    seconds: float


Simulate = Callable[[Federation], FederationResult]


def in_simulation(work: Callable[[Simulate], None], clients: int, data_dir: Path | None) -> None:
    """Start Flower's engine once, and let `work` simulate as many federations as it likes."""
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # all before the first import
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default is 15
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    def main(grid: Grid, context: Context) -> None:
        work(lambda setting: federate(grid, setting, data_dir))

    server = ServerApp()
    server.main()(main)
    run_simulation(
        server,
        client_app(data_dir),
        num_supernodes=clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


def federate(grid: Any, setting: Federation, data_dir: Path | None) -> FederationResult:
    """The server: average the clients' weights, and measure the final model."""
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.serverapp.strategy import FedAvg

    started = time.perf_counter()
    model = new_model(setting)
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=setting.clients)
    with tempfile.TemporaryDirectory() as ledgers:
        config = ConfigRecord({"setting": json.dumps(asdict(setting)), "ledgers": ledgers})
        arrays = ArrayRecord(model.state_dict())
        result = strategy.start(grid, arrays, num_rounds=setting.rounds, train_config=config)
        spent, replies = read_ledgers(setting, Path(ledgers))
    model.load_state_dict(result.arrays.to_torch_state_dict())
    _, validation, test = load(setting.dataset, setting.held_out, data_dir)
    return FederationResult(
        validation=accuracy(model, *validation.tensors),
        test=accuracy(model, *test.tensors),
        epsilon=spent,
        replies=replies,
        seconds=round(time.perf_counter() - started, 1),
    )


def client_app(data_dir: Path | None) -> Any:
    """The app that every client runs."""
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    from dpkfc.integrations.flower import only_private_replies

    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        number = int(context.node_config["partition-id"])
        config = message.content["config"]
        # In a simulation only: a real client takes its budget from its own configuration.
        setting = Federation(**json.loads(config["setting"]))
        return train_round(message, number, setting, data_dir, Path(config["ledgers"]))

    app = ClientApp(mods=[only_private_replies])
    app.train()(train)
    return app


def train_round(
    message: Any, number: int, setting: Federation, data_dir: Path | None, ledgers: Path
) -> Any:
    """A round of client `number`."""
    from dpkfc.integrations.flower import PrivateClient

    model = new_model(setting)
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.lr)
    records, _, _ = load(setting.dataset, setting.held_out, data_dir)
    client = PrivateClient(
        model,
        optimizer,
        partitions(records, setting.clients, setting.alpha, setting.seed)[number],
        loss=dpkfc.losses.cross_entropy,
        epsilon=setting.epsilon,
        delta=setting.delta,
        rounds=setting.rounds,
        local_steps=setting.local_steps,
        batch_size=setting.batch_size,
        records=len(records) // setting.clients,
        geometry=geometry_of(setting),
        ledger=ledger_of(ledgers, number),
        seed=setting.seed,
    )
    for images, labels in client.round(message):
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return client.reply(message)


def geometry_of(setting: Federation) -> dpkfc.KFC | None:
    """The only difference between the methods. It is built in every round, by every client."""
    if setting.method == "DP-SGD":
        return None
    shape = (1, 8, 8) if setting.dataset == "digits" else (1, 28, 28)
    probe = dpkfc.probes.PinkNoise(shape=shape, classes=CLASSES, mean=0.3, std=0.3)
    return dpkfc.KFC(probe, rank=32)


def new_model(setting: Federation) -> nn.Module:
    """The network with its first weights."""
    torch.manual_seed(setting.seed)
    return digits_cnn() if setting.dataset == "digits" else mlp([784, HIDDEN, CLASSES])


def ledger_of(folder: Path, number: int) -> dpkfc.Ledger:
    return dpkfc.Ledger(folder / f"client-{number}.db", f"client {number}")


def read_ledgers(setting: Federation, folder: Path) -> tuple[float, int]:
    """The largest epsilon of a client, and how many rounds all clients took part in."""
    spent: list[float] = []
    steps = 0
    for number in range(setting.clients):
        ledger = ledger_of(folder, number)
        spent.append(ledger.epsilon(setting.delta))
        steps += sum(run.charged for run in ledger.runs())
        ledger.close()
    return max(spent), steps // setting.local_steps


@cache
def load(
    dataset: str, held_out: int, data_dir: Path | None
) -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """The records of all clients together, the held-out ones, and those of the test."""
    train, test = digits() if dataset == "digits" else idx_images(dataset, data_dir)
    images, labels = train.tensors
    kept = len(images) - held_out
    return (
        TensorDataset(images[:kept], labels[:kept]),
        TensorDataset(images[kept:], labels[kept:]),
        test,
    )


@cache
def partitions(
    records: TensorDataset, clients: int, alpha: float | None, seed: int
) -> list[TensorDataset]:
    """The records of each client: equally many, of labels at random or in shares of its own."""
    images, labels = records.tensors
    rows = rows_of_clients(labels, clients, alpha, seed)
    return [TensorDataset(images[own], labels[own]) for own in rows]


def rows_of_clients(
    labels: Tensor, clients: int, alpha: float | None, seed: int
) -> list[list[int]]:
    """Rows of each client, disjoint and equally many.

    With `alpha`, a client draws its records label by label in Dirichlet(alpha) shares, as long as
    there are any of that label.

    >>> rows = rows_of_clients(torch.arange(40) % 10, clients=4, alpha=0.5, seed=0)
    >>> [len(own) for own in rows], len({row for own in rows for row in own})
    ([10, 10, 10, 10], 40)
    """
    generator = np.random.default_rng(seed)
    size = len(labels) // clients
    order = generator.permutation(len(labels))
    if alpha is None:
        return [order[k * size : (k + 1) * size].tolist() for k in range(clients)]
    left = [order[labels.numpy()[order] == label].tolist() for label in range(CLASSES)]
    shares = generator.dirichlet([alpha] * CLASSES, clients)
    rows: list[list[int]] = []
    for share in shares:
        own: list[int] = []
        while len(own) < size:
            weights = share * [bool(pool) for pool in left]
            if not weights.sum():
                weights = np.array([float(len(pool)) for pool in left])
            counts = generator.multinomial(size - len(own), weights / weights.sum())
            for pool, count in zip(left, counts, strict=True):
                own += [pool.pop() for _ in range(min(int(count), len(pool)))]
        rows.append(own)
    return rows
