"""Layers and tools of the network: norm layers, experts, SAM, bottlenecks, augmentation."""
