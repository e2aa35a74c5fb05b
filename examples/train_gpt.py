"""Train a small byte-level GPT on the sources of Python's standard library, on several ranks.

    python examples/train_gpt.py                          # starts two ranks; again, to go on
    python examples/train_gpt.py --ranks 4 --threads      # four, as threads of one process
    torchrun --nproc-per-node 2 examples/train_gpt.py     # or is started by a launcher

Stop it when and how you like, Ctrl-C or kill -9: the same command goes on from the last checkpoint
and ends with the same model, bit for bit, as if it had never been stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from display import Curves, Dashboard, code
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

import phalanx as dist
from phalanx import DistributedDataParallel as DDP
from phalanx import DistributedSampler
from phalanx.launch.processes import run_processes


def rotate(x: Tensor) -> Tensor:
    """Turn pairs of features by angles that grow with the place in the text (Su et al., 2021)."""
    length, half = x.shape[-2], x.shape[-1] // 2
    angles = torch.outer(torch.arange(length), 10_000 ** -torch.linspace(0, 1, half))
    (left, right), cos, sin = x.chunk(2, dim=-1), angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Block(nn.Module):
    """One transformer layer: causal attention, then a perceptron, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each batch, head, place, feature
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        x = x + self.dropout(self.projection(mixed.transpose(1, 2).flatten(2)))
        return x + self.perceptron(x)


class GPT(nn.Module):
    """Predict the next byte at each place of a text."""

    def __init__(self, context: int, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(256, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, text: Tensor) -> Tensor:
        # The embedding of the bytes also reads out the prediction.
        return self.norm(self.blocks(self.embedding(text))) @ self.embedding.weight.T

    @torch.no_grad()
    def write(self, prompt: str, length: int, temperature: float = 0.6) -> str:
        """Continue a text by `length` bytes."""
        text = torch.tensor(list(prompt.encode()))
        for _ in range(length):
            scores = self(text[None, -self.context :])[0, -1]
            byte = torch.multinomial(F.softmax(scores / temperature, dim=-1), 1)
            text = torch.cat([text, byte])
        return bytes(text.tolist()).decode(errors="replace")


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Files in pieces of `context` bytes, each with what is to be predicted: the bytes after it."""

    def __init__(self, files: list[Path], context: int) -> None:
        data = b"\n".join(path.read_bytes() for path in files)
        data = bytearray(data.replace(b"    ", b"\t"))  # more text in each piece
        self.data, self.context = torch.frombuffer(data, dtype=torch.uint8), context

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        piece = self.data[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]


class Checkpoint:
    """A file with all that a run consists of: the state of each part, and the random streams."""

    def __init__(self, path: Path, shape: dict[str, int], **parts: Any) -> None:
        self.path, self.shape, self.parts = path, shape, parts

    def save(self) -> None:
        """Write the file. All ranks call this; rank 0 writes."""
        streams: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(streams, torch.get_rng_state())
        if dist.get_rank() == 0:
            state = {name: part.state_dict() for name, part in self.parts.items()}
            new = self.path.with_suffix(".new")
            torch.save({"shape": self.shape, "streams": streams, **state}, new)
            new.replace(self.path)  # whenever we are killed, a whole file is there

    def load(self) -> None:
        """Go back to the moment of `save`, maybe on another number of ranks. All ranks read."""
        state = torch.load(self.path)
        if state["shape"] != self.shape:
            raise ValueError(
                f"{self.path} has a model with {state['shape']}, not {self.shape}: give the same "
                "options to go on with it, --fresh or another --out to begin anew"
            )
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        if (rank := dist.get_rank()) < len(state["streams"]):
            torch.set_rng_state(state["streams"][rank])


def load_text(options: argparse.Namespace) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return batches of this rank's share of the text: to learn from, and to be tested with."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = Text([path for i, path in enumerate(files) if i % 20], options.context)
    sampler = DistributedSampler(text, seed=options.seed, drop_last=True)
    held_out = Text(files[::20], options.context)
    share = Subset(held_out, range(dist.get_rank() * 20, len(held_out), dist.get_world_size() * 20))
    # A loader draws a number each time it begins, also when resumed: not from the default stream.
    own = torch.Generator()
    return (
        DataLoader(text, options.batch, sampler=sampler, generator=own),
        DataLoader(share, batch_size=16, generator=own),
    )


def endless(loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches for ever, those of each epoch in another order."""
    sampler: Any = loader.sampler
    if len(loader) == 0:
        raise ValueError("the text is too short for one batch per rank: try a smaller --context")
    while True:
        yield from loader
        sampler.set_epoch(sampler.epoch + 1)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of predicting the targets."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader[Any]) -> float:
    """Return the mean loss over the batches of all ranks."""
    model.eval()
    total = torch.zeros(2)
    for inputs, targets in batches:
        total += torch.tensor([loss_of(model, inputs, targets) * len(inputs), len(inputs)])
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rise to `peak` in the first twentieth of the steps, then fall in a straight line."""
    done = (step + 1) / (steps + 1)
    return peak * min(done * 20, (1 - done) / 0.95)


def train(options: argparse.Namespace) -> None:
    """Be one rank of the training."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)  # a core for each rank
    torch.manual_seed(options.seed)
    shape = {name: vars(options)[name] for name in ("context", "width", "heads", "layers")}
    model = DDP(GPT(dropout=options.dropout, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    loader, held_out = load_text(options)
    batches, curves = endless(loader), Curves(options.steps)
    torch.manual_seed(options.seed + rank)  # so that dropout differs

    checkpoint = Checkpoint(
        options.out / "checkpoint.pt",
        shape,
        model=model.module,
        optimizer=optimizer,
        sampler=loader.sampler,
        curves=curves,
    )
    console = Console(quiet=rank != 0, highlight=False)
    parameters, text = sum(p.numel() for p in model.parameters()), len(loader.dataset.data)
    console.print(f"ranks: {size}, parameters: {parameters:,}, text: {text / 1e6:.1f} MB")
    if checkpoint.path.exists():
        checkpoint.load()
        done = f"step {len(curves.training)} of {options.steps}"
        console.print(f"going on from {done} in {checkpoint.path} (--fresh begins anew)")
    tokens = size * options.accumulate * options.batch * options.context
    with Dashboard(curves, tokens, console) as dashboard:
        for step in range(len(curves.training), options.steps):
            mean = torch.zeros(())
            for micro_step in range(options.accumulate):
                # The last backward pass averages what all of them have added up.
                is_last = micro_step == options.accumulate - 1
                with nullcontext() if is_last else model.no_sync():
                    loss = loss_of(model, *next(batches)) / options.accumulate
                    loss.backward()
                mean += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = learning_rate(step, options.steps, options.lr)
            optimizer.step()
            optimizer.zero_grad()

            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            curves.training.append(mean.item())
            if (step + 1) % options.every == 0 or step + 1 == options.steps:
                curves.validation[step + 1] = evaluate(model.module, held_out)
                checkpoint.save()
            dashboard.advance()

    if rank == 0:
        curves.save(options.out / "loss.png", "A byte-level GPT on Phalanx")
        sample = model.module.eval().write("class Reader:\n\tdef read(self, ", options.sample)
        console.print(f"curve in {options.out}/loss.png, checkpoint in {checkpoint.path}")
        console.print(code(sample.expandtabs(4), "a sample"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=positive, default=2, help="how many (without a launcher)")
    parser.add_argument("--threads", action="store_true", help="ranks are threads, not processes")
    parser.add_argument("--fresh", action="store_true", help="forget the checkpoint")
    parser.add_argument("--out", type=Path, default=Path("out"), help="for checkpoint and curve")
    parser.add_argument("--steps", type=positive, default=2000)
    parser.add_argument("--every", type=positive, default=100, help="steps between checkpoints")
    parser.add_argument("--batch", type=positive, default=2, help="pieces of text in a batch")
    parser.add_argument("--accumulate", type=positive, default=2, help="batches per rank and step")
    parser.add_argument("--context", type=positive, default=128, help="bytes in a piece")
    parser.add_argument("--width", type=positive, default=128)
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--layers", type=positive, default=3)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=4e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=600, help="bytes to write at the end")
    options = parser.parse_args()
    if options.width % (2 * options.heads):
        parser.error(f"--width must be a multiple of twice --heads, got {options.width}")
    return options


def positive(text: str) -> int:
    """Read a number of things of which there is at least one."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


LAUNCHED = {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID"}


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        (options.out / "checkpoint.pt").unlink(missing_ok=True)
    if LAUNCHED & os.environ.keys():  # by torchrun, mpirun or srun, with a rank
        dist.init_process_group()
        train(options)
        dist.destroy_process_group()
    else:
        run = dist.run_threads if options.threads else run_processes
        try:
            run(train, options.ranks, options)
        except KeyboardInterrupt:
            Console().show_cursor()
            sys.exit("\nstopped; the same command goes on from the last checkpoint")


if __name__ == "__main__":
    main()
