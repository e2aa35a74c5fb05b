"""A training loop of Hugging Face Accelerate on CPUs. It knows nothing of Phalanx.

phalanx run -n 2 --replace gloo with_accelerate.py OUTPUT
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 2


def main(output):
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    inputs = torch.randn(64, 8)
    data = TensorDataset(inputs, inputs @ torch.randn(8, 1))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    loader = DataLoader(data, batch_size=5, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    losses = []
    for epoch in range(EPOCHS):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if epoch == 0:
            accelerator.save_state(str(output / "checkpoint"))
    accelerator.wait_for_everyone()

    model.eval()
    with torch.no_grad():
        outputs = [accelerator.gather_for_metrics(model(x)) for x, _ in loader]
    accelerator.load_state(str(output / "checkpoint"))
    rank = accelerator.process_index
    uneven = accelerator.pad_across_processes(torch.ones(1 + rank))
    report = {
        "losses": losses,
        "outputs": torch.cat(outputs).flatten().tolist(),
        "restored": [p.tolist() for p in accelerator.unwrap_model(model).parameters()],
        "objects": gather_object([f"from {rank}"]),
        "padded": accelerator.gather(uneven).tolist(),
        "first": broadcast(torch.tensor([rank + 5.0])).item(),
        "kind": str(accelerator.distributed_type),
        "backend": torch.distributed.get_backend(),
    }
    if accelerator.is_main_process:
        (output / "report.json").write_text(json.dumps(report))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
