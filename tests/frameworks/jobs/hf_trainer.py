"""Hugging Face's Trainer on a small GPT-2 made from a configuration."""

from __future__ import annotations

from typing import Any

import torch
from parts import (
    BATCH,
    BLOCKS,
    SAMPLES,
    SEQUENCE,
    VOCABULARY,
    WIDTH,
    DeviceTime,
    ScaleGradient,
    TokenDataset,
    normalize_features,
    progress,
    set_up_torch,
)
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class SlowableGpt2(GPT2LMHeadModel):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **options: Any) -> Any:
        features = normalize_features(self.transformer.wte(input_ids), 1)
        for _ in range(BLOCKS):
            features = DeviceTime.apply(features, 1.0)
        return super().forward(inputs_embeds=ScaleGradient.apply(features, 1), labels=labels, **options)


class NamedTokens(TokenDataset):
    def __getitem__(self, index: int) -> Any:
        tokens, _ = super().__getitem__(index)
        return {"input_ids": tokens, "labels": tokens}


class CountSteps(TrainerCallback):
    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        progress.next_step()


set_up_torch()
model = SlowableGpt2(
    GPT2Config(vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=WIDTH, n_layer=BLOCKS, n_head=2, use_cache=False)
)
arguments = TrainingArguments(
    output_dir="output",
    use_cpu=True,
    ddp_backend="gloo",
    per_device_train_batch_size=BATCH,
    max_steps=SAMPLES,
    logging_steps=SAMPLES,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=NamedTokens(), callbacks=[CountSteps()]).train()
