"""A Hugging Face classifier: keyword inputs, outputs with .logits. Random weights, no download."""

import torch
from transformers import ViTConfig, ViTForImageClassification

import moetta

config = ViTConfig(
    hidden_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=96,
    image_size=32,
    patch_size=8,
    num_labels=10,
)
adapter = moetta.adapt(ViTForImageClassification(config), "moetta", experts=4)
logits = adapter(pixel_values=torch.randn(8, 3, 32, 32))
print("logits", tuple(logits.shape))
for layer, experts in adapter.last.routing.items():
    print(f"{layer}: experts {experts.flatten().tolist()}")
