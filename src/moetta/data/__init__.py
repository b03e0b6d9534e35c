"""Data: domains, the orders in which they arrive, and the streams of the paper."""

from moetta.data.datasets import cifar10, corrupted, image_folder, imagenet, imagenet_c
from moetta.data.domains import Domain, Images, Unread, UnreadableImage
from moetta.data.images import ImageFiles
from moetta.data.labels import imagenet_synsets, label_map, logit_mask
from moetta.data.mixture import Mixture, mixture, read_mixture
from moetta.data.named import STREAMS, stream
from moetta.data.orders import Bursts, Continual, Gradual, LabelShift, Mixed, Order, make_order
from moetta.data.preprocess import Preprocess, check_preprocess, preprocess_for
from moetta.data.streams import Batch, Stream

__all__ = [
    "STREAMS",
    "Batch",
    "Bursts",
    "Continual",
    "Domain",
    "Gradual",
    "ImageFiles",
    "Images",
    "LabelShift",
    "Mixed",
    "Mixture",
    "Order",
    "Preprocess",
    "Stream",
    "Unread",
    "UnreadableImage",
    "check_preprocess",
    "cifar10",
    "corrupted",
    "image_folder",
    "imagenet",
    "imagenet_c",
    "imagenet_synsets",
    "label_map",
    "logit_mask",
    "make_order",
    "mixture",
    "preprocess_for",
    "read_mixture",
    "stream",
]
