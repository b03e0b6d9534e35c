"""Adapt a model of your own: three lines.

Random weights keep the example offline; pass pretrained=True for real ones.
"""

import timm
import torch

import moetta

model = timm.create_model("vit_tiny_patch16_224", num_classes=10)

adapter = moetta.adapt(model, "moetta")
for _ in range(2):
    logits = adapter(torch.randn(4, 3, 224, 224))  # predicts, then learns

print("logits", tuple(logits.shape))
print("this step:", adapter.last.losses, f"{adapter.last.backwards} of 4 samples learnt from")
