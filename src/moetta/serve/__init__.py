"""An adaptive classifier behind HTTP: a queue, one thread that owns the adapters, and routes.

`Classifier` says what is served, `Settings` within which bounds, `create_app` makes the ASGI
application and `run` serves it until a signal says stop.
"""

from moetta.serve.app import create_app
from moetta.serve.classifier import Classifier
from moetta.serve.server import run
from moetta.serve.settings import Settings

__all__ = ["Classifier", "Settings", "create_app", "run"]
