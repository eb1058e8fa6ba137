"""Classes and functions from outside this repository, by their dotted names."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def import_object(name: str, key: str) -> Any:
    """The object `package.module.attribute`. If there is none, a ValueError names the configuration's `key`."""
    module, dot, attribute = name.rpartition(".")
    try:
        if not dot:
            raise ImportError("no module is named")
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{key}={name} cannot be imported ({error}); it is module.attribute, such as my_code.{attribute}, and the "
            "folder that holds the module has to be installed or on PYTHONPATH"
        ) from error
