"""MGTTA: norm layers stepped by a learned rule, and the training of that rule."""

from moetta.methods.mgtta.adapter import MGTTA, SHIPPED, MGTTAConfig
from moetta.methods.mgtta.pretraining import pretrain
from moetta.nn.mgg import MGG, convert, load_mgg

__all__ = ["MGG", "MGTTA", "SHIPPED", "MGTTAConfig", "convert", "load_mgg", "pretrain"]
