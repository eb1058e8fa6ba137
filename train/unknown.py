"""Keys that a schema of dataclasses does not have, found by their misspelling."""

from __future__ import annotations

import dataclasses
import difflib


def refuse_unknown(section: object, path: str = "") -> None:
    """ValueError for an attribute below `section` that its dataclass does not have; `path` leads there, with its dot.

    Hydra and OmegaConf refuse them but behind a plus, which Hydra's own message proposes.
    """
    if isinstance(section, dict):
        for name, value in section.items():
            refuse_unknown(value, f"{path}{name}.")
    if not dataclasses.is_dataclass(section):
        return
    known = {field.name for field in dataclasses.fields(section)}
    for name, value in vars(section).items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {path}{close[0]}?" if close else f"there are {', '.join(sorted(known))}"
            raise ValueError(f"{path}{name} is no key of the configuration; {hint}")
        refuse_unknown(value, f"{path}{name}.")
