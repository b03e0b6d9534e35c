"""The nine methods, one file each. Importing this package registers them, in the paper's order."""

import sys  # noqa: I001  (the order of the methods is the paper's)
from types import ModuleType

from moetta.methods import noadapt, tent, eata, cotta, sar, deyo, mgtta, becotta, moetta  # noqa: F401
from moetta.methods.registry import Method, find, methods, of_config, register

__all__ = ["Method", "Package", "find", "methods", "of_config", "register"]


class Package(ModuleType):
    """This package, made callable: `moetta.methods()` works, and so does `moetta.methods.mgtta`."""

    def __call__(self) -> dict[str, Method]:
        """All methods by name, in the paper's order."""
        return methods()


sys.modules[__name__].__class__ = Package
