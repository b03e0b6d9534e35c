"""Data: domains, the orders in which they arrive, and the streams of the paper."""

from moetta.data.domains import Domain, Images, Unread, UnreadableImage
from moetta.data.orders import Bursts, Continual, Gradual, LabelShift, Mixed, Order
from moetta.data.streams import Batch, Stream

__all__ = [
    "Batch",
    "Bursts",
    "Continual",
    "Domain",
    "Gradual",
    "Images",
    "LabelShift",
    "Mixed",
    "Order",
    "Stream",
    "Unread",
    "UnreadableImage",
]
