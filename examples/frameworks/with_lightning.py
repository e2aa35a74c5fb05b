"""A Trainer of Lightning on two CPUs. It knows nothing of Phalanx.

    phalanx run -n 2 --replace gloo with_lightning.py OUTPUT

Without a launcher Lightning starts the second process itself:

    PHALANX_REPLACE=gloo python with_lightning.py OUTPUT
"""

import json
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.error = MeanSquaredError()
        self.losses = []

    def training_step(self, batch):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        self.log("training", loss, sync_dist=True)
        return loss

    def validation_step(self, batch):
        x, y = batch
        self.error(self.net(x), y)
        self.log("error", self.error)

    def test_step(self, batch):
        x, y = batch
        outputs = self.net(x)
        self.log("test", nn.functional.mse_loss(outputs, y), sync_dist=True)
        everywhere = torch.stack(self.trainer.strategy.all_gather(outputs).unbind())
        self.log("mean", everywhere.mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(output):
    lightning.seed_everything(0)
    inputs = torch.randn(64, 8)
    data = TensorDataset(inputs, inputs @ torch.randn(8, 1))
    # Said, so that it does not look for MPI and others, which may be installed but broken.
    launched = TorchElasticEnvironment.detect()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=2,
        plugins=[TorchElasticEnvironment() if launched else LightningEnvironment()],
        default_root_dir=output,
        logger=False,
        enable_progress_bar=False,
    )
    model = Regression()
    batches = DataLoader(data, batch_size=4)
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True), batches)
    backend = torch.distributed.get_backend()
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    (test,) = trainer.test(model, batches, ckpt_path="best")
    if trainer.is_global_zero:
        report = {"losses": model.losses, "metrics": metrics, "test": test, "backend": backend}
        (output / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
