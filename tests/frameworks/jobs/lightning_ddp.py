"""PyTorch Lightning with its DDP strategy."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as lightning
import torch
from parts import BATCH, Model, TokenDataset, loss_of, progress, set_up_torch
from pytorch_lightning.strategies import DDPStrategy
from torch.utils.data import DataLoader


class LanguageModel(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        tokens, targets = batch
        return loss_of(self.model(tokens), targets)

    def on_train_batch_end(self, *arguments: Any) -> None:
        progress.next_step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


set_up_torch()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=4,
    strategy=DDPStrategy(process_group_backend="gloo"),
    max_epochs=-1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(LanguageModel(), DataLoader(TokenDataset(), batch_size=BATCH, drop_last=True))
