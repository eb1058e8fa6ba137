"""Values of a configuration that come from the environment: `key: ${oc.env:NAME}`.

They may be secrets, and another machine has its own. What is written of a configuration (config.json, checkpoints, W&B)
has the text of the interpolation in their place, which is resolved anew where it is read.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from train.config.schema import Config

Texts = dict[tuple[Any, ...], str]
"""Path of keys and list indices -> text of the interpolation."""
KEPT = ("runtime", "run_dir")  # which says where the files of a run are
_NAME = "_environment"


def note(config: Config, composed: DictConfig) -> None:
    """Remember which values of `config` came from the environment in `composed`, of which it was made."""
    raw = OmegaConf.to_container(composed, resolve=False)
    texts = {path: text for path, text in _strings(raw) if "${" in text and path != KEPT}
    object.__setattr__(config, _NAME, {path: text for path, text in texts.items() if _from_environment(text, texts)})


def to_saved(config: Config) -> dict[str, Any]:
    """The configuration as dictionaries, to be written to files and read by `from_dict`."""
    saved = dataclasses.asdict(config)
    texts: Texts = getattr(config, _NAME, {})
    for (*path, last), text in texts.items():
        holder: Any = saved
        for key in path:
            holder = holder[key]
        holder[last] = text
    return saved


def _strings(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], str]]:
    if isinstance(value, str):
        return [(path, value)]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [each for key, item in items for each in _strings(item, (*path, key))]


def _from_environment(text: str, texts: Texts) -> bool:
    """Whether a value reads the environment, or another one that does."""
    if "${oc.env:" in text:
        return True
    keys = (tuple(name.split(".")) for name in re.findall(r"\$\{([\w.]+)\}", text))
    return any(key in texts and _from_environment(texts[key], texts) for key in keys)
