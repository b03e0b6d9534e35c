"""The nine methods, one file each. Importing this package registers them, in the paper's order."""

from moetta.methods import noadapt, tent, eata, cotta, sar, deyo, mgtta, becotta, moetta  # noqa: F401, I001
from moetta.methods.registry import Method, find, methods, of_config, register

__all__ = ["Method", "find", "methods", "of_config", "register"]
