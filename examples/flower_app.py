"""Four clients train a CNN together without showing their records, in Flower's simulation engine.

    python examples/flower_app.py            # scikit-learn's digits
    python examples/flower_app.py --quick    # fewer rounds, less accurate

Every client has one privacy budget for all rounds, kept in a ledger of its own. In each round it
gets the server's weights, takes a few private steps and returns new weights. DP-KFC clients build
their preconditioner themselves, from pink noise: no second-order statistics are sent.

Prints, for each method, the test accuracy of the averaged model and what the first client's ledger
has counted; with --quick:

    DP-SGD  test accuracy 0.642  epsilon 2.9999987611637406
    DP-KFC  test accuracy 0.728  epsilon 2.9999987611637406

The noise is secret and differs in every run, so the accuracies differ too.

Needs an environment of its own: pip install 'dpkfc[demo,flower]'
"""

from __future__ import annotations

import argparse
import os
import tempfile

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # before the import
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - clients are not to wait for other programs

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.app.models import digits_cnn
from dpkfc.app.readers.digits import digits
from dpkfc.integrations.flower import PrivateClient, only_private_replies

CLIENTS = 4
LOCAL_STEPS = 10
RECORDS = 350  # per client, a public number; how many it really has stays private
EPSILON = 3.0
DELTA = 1e-4
# Preconditioned gradients have a different scale.
LEARNING_RATES = {"DP-SGD": 1.0, "DP-KFC": 0.5}


def ledger_of(folder: str, method: str, number: int) -> dpkfc.Ledger:
    file = f"{folder}/{method}-{number}.db"
    return dpkfc.Ledger(file, f"client {number}", budget=(EPSILON, DELTA))


def client_app(rounds: int, folder: str) -> ClientApp:
    app = ClientApp(mods=[only_private_replies])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        images, labels = digits()[0].tensors
        records = TensorDataset(images[number::CLIENTS], labels[number::CLIENTS])
        # Geometry and learning rate may come from the server. The budget may not.
        method = message.content["config"]["method"]
        probe = dpkfc.probes.PinkNoise(shape=(1, 8, 8), classes=10, mean=0.3, std=0.3)
        model = digits_cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=message.content["config"]["lr"])
        client = PrivateClient(
            model,
            optimizer,
            records,
            loss=dpkfc.losses.cross_entropy,
            epsilon=EPSILON,
            delta=DELTA,
            rounds=rounds,
            local_steps=LOCAL_STEPS,
            batch_size=64,
            records=RECORDS,
            geometry=dpkfc.KFC(probe) if method == "DP-KFC" else None,
            ledger=ledger_of(folder, method, number),
        )
        for images, labels in client.round(message):
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        return client.reply(message)

    return app


def server_app(rounds: int, folder: str) -> ServerApp:
    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        images, labels = digits()[1].tensors  # public test records
        for method, lr in LEARNING_RATES.items():
            model = digits_cnn()
            # An evaluation at the clients would send statistics that epsilon does not cover.
            strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=CLIENTS)
            result = strategy.start(
                grid,
                ArrayRecord(model.state_dict()),
                num_rounds=rounds,
                train_config=ConfigRecord({"method": method, "lr": lr}),
            )
            model.load_state_dict(result.arrays.to_torch_state_dict())
            with torch.no_grad():
                accuracy = float((model(images).argmax(1) == labels).float().mean())
            epsilon = ledger_of(folder, method, 0).epsilon(DELTA)
            print(f"{method}  test accuracy {accuracy:.3f}  epsilon {epsilon}")

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description="Private federated learning on digits.")
    parser.add_argument("--quick", action="store_true", help="train for fewer rounds")
    rounds = 2 if parser.parse_args().quick else 12
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    with tempfile.TemporaryDirectory() as folder:
        run_simulation(
            server_app(rounds, folder),
            client_app(rounds, folder),
            num_supernodes=CLIENTS,
            backend_config=resources,
        )


if __name__ == "__main__":
    main()
