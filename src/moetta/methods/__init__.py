"""The methods, one file each. Importing this package registers every one of them."""

import importlib
import pkgutil

from moetta.methods.registry import (
    GROUPS,
    Citation,
    Drawn,
    Method,
    find,
    list_methods,
    of_adapter,
    of_config,
    register,
)

__all__ = [
    "GROUPS",
    "Citation",
    "Drawn",
    "Method",
    "find",
    "list_methods",
    "of_adapter",
    "of_config",
    "register",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
