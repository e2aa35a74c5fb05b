"""Train a small byte-level GPT on the sources of Python's standard library, on several ranks.

    python examples/train_gpt.py                          # starts its own ranks
    torchrun --nproc-per-node 2 examples/train_gpt.py     # or is started by a launcher

Each rank computes gradients for its own batches. They all lie in one shared tensor, so that one
`all_reduce` averages them in place, without a copy.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx as dist
from phalanx.launch.processes import run_processes


class Block(nn.Module):
    """One transformer layer: causal attention, then a perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.perceptron(x)


class GPT(nn.Module):
    """Predict the next byte at each place of a text."""

    def __init__(self, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.context = context
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.bytes, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places.weight[: text.shape[-1]]
        # The embedding of the bytes also reads out the prediction.
        return self.norm(self.blocks(x)) @ self.bytes.weight.T

    @torch.no_grad()
    def write(self, prompt: bytes, length: int, temperature: float = 0.7) -> bytes:
        """Continue a text by `length` bytes."""
        text = torch.frombuffer(bytearray(prompt), dtype=torch.uint8).long()
        for _ in range(length):
            scores = self(text[None, -self.context :])[0, -1]
            byte = torch.multinomial(F.softmax(scores / temperature, dim=-1), 1)
            text = torch.cat([text, byte])
        return bytes(text.tolist())


class Text:
    """The Python files of the standard library, one after the other."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        data = bytearray(b"\n".join(path.read_bytes() for path in files))
        self.data = torch.frombuffer(data, dtype=torch.uint8)

    def batch(self, size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return random pieces of the text, and the same pieces one byte further on."""
        starts = torch.randint(len(self.data) - context, (size,), generator=generator)
        pieces = torch.stack([self.data[i : i + context + 1] for i in starts.tolist()]).long()
        return pieces[:, :-1], pieces[:, 1:]


def share_gradients(model: nn.Module) -> Tensor:
    """Give all parameters gradients that are views of one tensor in shared memory; return it."""
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    bucket = dist.empty_shared(sum(sizes)).zero_()
    for parameter, part in zip(parameters, bucket.split(sizes), strict=True):
        parameter.grad = part.view_as(parameter)
    return bucket


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rise to `peak` in the first twentieth of the steps, then fall along a cosine."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def train(options: argparse.Namespace) -> None:
    """Be one rank of the training."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    torch.manual_seed(options.seed)
    text = Text()
    pieces = torch.Generator().manual_seed(options.seed + 1 + rank)
    model = GPT(options.context, options.width, options.heads, options.layers)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    gradients = share_gradients(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), fused=True)

    console = Console(quiet=rank != 0)
    console.print(
        f"{size} ranks, {len(gradients):,} parameters, {len(text.data) / 1e6:.1f} MB of text"
    )
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
        console=console,
    )
    losses: list[float] = []
    start = time.perf_counter()
    with progress:
        task = progress.add_task("", total=options.steps, loss=math.nan, speed=0)
        for step in range(options.steps):
            inputs, targets = text.batch(options.batch, options.context, pieces)
            gradients.zero_()
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            dist.all_reduce(gradients, op=dist.ReduceOp.AVG)
            optimizer.param_groups[0]["lr"] = learning_rate(step, options.steps, options.lr)
            optimizer.step()

            mean = loss.detach()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            losses.append(mean.item())
            tokens = (step + 1) * size * targets.numel()
            speed = tokens / (time.perf_counter() - start)
            progress.update(task, advance=1, loss=losses[-1], speed=speed)

    if rank == 0:
        picture = plot(losses, options.out)
        console.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, curve in {picture}")
        console.print("a sample:", style="bold")
        sample = model.write(b"def read(self, ", options.sample).decode(errors="replace")
        console.print(sample, markup=False, highlight=False)


def plot(losses: list[float], directory: Path) -> Path:
    """Draw the loss curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="loss per byte, nats", title="a byte-level GPT on Phalanx")
    axes.grid(alpha=0.3)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "loss.png"
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="how many (without a launcher)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16, help="pieces of text per rank and step")
    parser.add_argument("--context", type=int, default=64, help="bytes in a piece")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--sample", type=int, default=400, help="bytes to write at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="where the plot goes")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if "RANK" in os.environ:  # started by a launcher, once per rank
        dist.init_process_group()
        train(options)
        dist.destroy_process_group()
    else:
        run_processes(train, options.ranks, options)


if __name__ == "__main__":
    main()
