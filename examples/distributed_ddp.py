"""Train privately on several devices with DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/distributed_ddp.py    # scikit-learn's digits, a minute
    python examples/distributed_ddp.py                         # the same in one process
    python examples/distributed_ddp.py --quick                 # a few seconds, less accurate

Every rank runs the same loop. The ranks draw one batch together, of 256 expected records over all
of them; each computes the gradients of its share, and the clipped sums are added up once per step,
before the noise. So the number of ranks changes neither the privacy nor, up to rounding, the
result. The model may be wrapped before or after make_private, which broadcasts the weights of the
first rank.

Prints, on the first rank, the number of ranks, the test accuracy and the epsilon spent:

    2 ranks, 225 steps
    test accuracy 0.947  epsilon 2.999962039949833

The noise is secret and differs in every run, so the accuracy differs too.

Needs: pip install 'dpkfc[demo]'
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dpkfc
from dpkfc.app.models import paper_cnn
from dpkfc.app.readers.digits import digits


def main() -> None:
    parser = argparse.ArgumentParser(description="Private training on several devices.")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--quick", action="store_true", help="train for fewer steps")
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if use_cuda else "cpu")
    rank, ranks = 0, 1
    if "RANK" in os.environ:  # started by torchrun
        if use_cuda:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if use_cuda else "gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()

    data, test = digits()
    shape = tuple(data.tensors[0].shape[1:])
    model: nn.Module = paper_cnn(shape).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if ranks > 1:
        model = DistributedDataParallel(model, device_ids=[device.index] if use_cuda else None)

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        images, labels = (part.to(device) for part in batch)
        return F.cross_entropy(model(images), labels)

    probe = dpkfc.probes.PinkNoise(shape=shape, classes=10, mean=0.3, std=0.3)
    run = dpkfc.make_private(
        model,
        optimizer,
        data,
        loss=loss,
        epsilon=args.epsilon,
        delta=1e-5,
        epochs=20 if args.quick else 40,
        batch_size=256,  # over all ranks
        geometry=dpkfc.KFC(probe, every=20),
    )
    for batch in run.loader:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    if rank == 0:
        images, labels = (part.to(device) for part in test.tensors)
        with torch.no_grad():
            accuracy = (run.model(images).argmax(1) == labels).float().mean()
        print(f"{ranks} ranks, {run.steps} steps")
        print(f"test accuracy {accuracy:.3f}  epsilon {run.epsilon()}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
