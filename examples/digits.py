"""Train a classifier of handwritten digits with SyncBatchNorm, on several ranks.

    python examples/digits.py                          # starts two ranks
    torchrun --nproc-per-node 2 examples/digits.py     # or is started by a launcher

Each rank sees few images at a time. SyncBatchNorm normalises them by the statistics of all ranks'
images, so that the ranks together compute what one process with the whole batch would.
"""

from __future__ import annotations

import argparse
import os
from itertools import chain
from typing import Any

import torch
from display import confusion_table, picture
from rich.columns import Columns
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import phalanx as dist
from phalanx import DistributedDataParallel as DDP
from phalanx import DistributedSampler, SyncBatchNorm
from phalanx.launch.processes import run_processes


def layer(inputs: int, outputs: int) -> nn.Module:
    """Return a convolution with normalisation, as if made for one process."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def classifier() -> nn.Module:
    """Return a small network for images of 8 by 8 pixels."""
    features = [layer(1, 16), layer(16, 32), nn.MaxPool2d(2), layer(32, 64), nn.MaxPool2d(2)]
    return nn.Sequential(*features, nn.Flatten(), nn.Dropout(0.3), nn.Linear(256, 10))


def load() -> tuple[Tensor, Tensor]:
    """Return all images, in an order that is always the same, and what they show."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return images[order], torch.tensor(digits.target)[order]


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, list[Any]]:
    """Return how often each digit was taken for which, and all mistakes, from all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = images[rank::size], labels[rank::size]
    model.eval()
    guesses = model(images).argmax(dim=1)
    model.train()
    confusion = torch.bincount(labels * 10 + guesses, minlength=100)
    dist.all_reduce(confusion)
    wrong = guesses != labels
    own = list(zip(images[wrong], labels[wrong], guesses[wrong], strict=True))
    mistakes: list[Any] = [None] * size
    dist.all_gather_object(mistakes, own)
    return confusion.view(10, 10), list(chain(*mistakes))


def train(options: argparse.Namespace) -> None:
    """Be one rank of the training."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)  # a core for each rank
    torch.manual_seed(options.seed)
    images, labels = load()
    training = TensorDataset(images[360:], labels[360:])
    sampler = DistributedSampler(training, seed=options.seed)
    batches = DataLoader(training, options.batch, sampler=sampler)

    model = DDP(SyncBatchNorm.convert_sync_batchnorm(classifier()))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, epochs=options.epochs, steps_per_epoch=len(batches)
    )
    torch.manual_seed(options.seed + rank)  # so that dropout differs

    console = Console(quiet=rank != 0, highlight=False)
    console.print(f"ranks: {size}, images to learn from: {len(training)}, to be tested with: 360")
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for inputs, targets in batches:
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            total += loss.detach()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        confusion, mistakes = evaluate(model.module, images[:360], labels[:360])
        accuracy = confusion.diag().sum() / confusion.sum()
        console.print(
            f"epoch {epoch + 1:2}  loss {total / len(batches):.4f}  accuracy {accuracy:.1%}"
        )
    console.print("", confusion_table(confusion), "")
    pictures = [picture(image[0], f"{label}, not {guess}") for image, label, guess in mistakes[:4]]
    console.print(Columns(pictures))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="how many (without a launcher)")
    parser.add_argument("--threads", action="store_true", help="ranks are threads, not processes")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=1e-2, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


LAUNCHED = {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID"}


def main() -> None:
    options = parse()
    if LAUNCHED & os.environ.keys():  # by torchrun, mpirun or srun, with a rank
        dist.init_process_group()
        train(options)
        dist.destroy_process_group()
    else:
        run = dist.run_threads if options.threads else run_processes
        run(train, options.ranks, options)


if __name__ == "__main__":
    main()
