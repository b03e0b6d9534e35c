"""The option `--ray [ADDRESS]`, which several commands have."""

from __future__ import annotations

from typing import Annotated

import tyro

HERE = "local"
"""The address that `--ray` without one stands for."""
RayAddress = Annotated[
    str | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=(0, 1),
        metavar="[ADDRESS]",
        instance_from_str=lambda given: given[0] if given else HERE,
        is_instance=lambda value: value is None or isinstance(value, str),
        str_from_instance=lambda value: ["None"] if value is None else [value],
    ),
]
"""None without the option."""
