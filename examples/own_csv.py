"""Train a private classifier on a CSV file through the library, with a ledger that caps all runs.

    python examples/own_csv.py            # a few seconds
    python examples/own_csv.py --quick    # fewer epochs

The example writes its own CSV file: 4,000 invented patients. Three things keep the data private
besides the noise:

* The schema declares ranges and categories. A number is scaled by its declared range, never by a
  minimum, maximum, mean or vocabulary that was computed from the records.
* records= states a public number of records. Sampling rate, number of steps and normalisation
  follow from it, so the true number stays private.
* The ledger is a file that charges every step before its result can be seen. It composes all runs
  on the same data set and refuses a run that would exceed the budget.

Prints the plan of the run, the test accuracy, the epsilon of the run and of the ledger, and why a
second run is refused:

    test accuracy 0.899
    epsilon of this run 1.9999914531488374
    epsilon of all runs in the ledger 1.9999914531488374
    a second run is refused: run ... does not fit on data set 'patients' ...

`dpkfc train people.csv --target ill --schema schema.json --epsilon 2` does the same from
the command line.
"""

from __future__ import annotations

import argparse
import csv
import random
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.app.models import mlp
from dpkfc.app.readers.records import split
from dpkfc.app.readers.tables import read_table, read_tabular, target_classes

TARGET = "diagnosis"
SCHEMA = {
    "age": [0, 120],
    "pressure": [60, 220],
    "smoker": ["no", "yes"],
    "activity": ["none", "some", "much"],
    TARGET: ["healthy", "ill"],
}
RECORDS = 3000  # a public estimate of the number of training records
DELTA = 1e-5


def write_patients(path: Path, count: int) -> None:
    """Write invented patients, whose risk grows with age, blood pressure and smoking."""
    generator = random.Random(0)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(SCHEMA)
        for _ in range(count):
            age = generator.randint(18, 95)
            pressure = round(generator.gauss(105 + 0.4 * age, 12))
            smoker = generator.choice(["no", "no", "yes"])
            activity = generator.choice(["none", "some", "much"])
            risk = age / 20 + pressure / 25 + 1.5 * (smoker == "yes") - 1.5 * (activity == "much")
            ill = risk + generator.gauss(0, 0.7) > 8
            writer.writerow([age, pressure, smoker, activity, "ill" if ill else "healthy"])


def main() -> None:
    parser = argparse.ArgumentParser(description="A private classifier of a CSV file.")
    parser.add_argument("--quick", action="store_true", help="train for fewer epochs")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "patients.csv")
        write_patients(path, 4000)
        classes = target_classes(SCHEMA, TARGET)
        source = read_tabular(read_table(path), TARGET, SCHEMA, classes, indicators=False)
        # A record's split depends only on its own content, so an added record moves no other.
        train, test = split(source.train, 0.2)

        # Ledger and budget belong to the data set, not to a run: keep one file per data set.
        ledger = dpkfc.Ledger(Path(folder, "privacy.db"), dataset="patients", budget=(2.5, DELTA))
        model = mlp([train.x.shape[1], 32, len(classes)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        settings = {
            "loss": dpkfc.losses.cross_entropy,
            "epsilon": 2.0,
            "delta": DELTA,
            "epochs": 3 if args.quick else 10,
            "batch_size": 200,
            "geometry": dpkfc.KFC(source.probe),
            "records": RECORDS,
            "ledger": ledger,
        }
        data = TensorDataset(train.x, train.y)
        run = dpkfc.make_private(model, optimizer, data, **settings)
        print(run.plan)
        for features, labels in run.loader:
            F.cross_entropy(model(features), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

        # Real test records are private too: epsilon does not cover numbers computed from them.
        with torch.no_grad():
            accuracy = float((model(test.x).argmax(1) == test.y).float().mean())
        print(f"test accuracy {accuracy:.3f}")
        print("epsilon of this run", run.epsilon())
        print("epsilon of all runs in the ledger", ledger.epsilon(DELTA))
        run.detach()

        second = dpkfc.make_private(model, optimizer, data, **settings)
        try:
            next(iter(second.loader))
        except dpkfc.PrivacyError as error:
            print("a second run is refused:", error)


if __name__ == "__main__":
    main()
