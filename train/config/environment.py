"""Values of a configuration that come from the environment: `key: ${oc.env:NAME}`.

They may be secrets, and another machine has its own. What is written of a configuration (config.json, checkpoints, W&B)
has the text of the interpolation in their place, which is resolved anew where it is read. The section `data` may read
none: its files are passed on with data sets, and what is in it goes into paths, logs and requests to servers.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from train.config.schema import Config

Texts = dict[tuple[Any, ...], str]
"""Path of keys and list indices -> text of the interpolation."""
KEPT = ("runtime", "run_dir")  # which says where the files of a run are
_NAME = "_environment"
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
PASSWORD = re.compile(r"\w://[^/\s@:]*:[^/\s@]+@")


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


def refuse_in_data(composed: DictConfig) -> None:
    """ValueError for a value of `data` that reads more than other keys, `${key}`, or keys that read the environment."""
    texts = {path: text for path, text in _strings(OmegaConf.to_container(composed, resolve=False)) if "${" in text}
    for path, text in texts.items():
        plain = "${" not in REFERENCE.sub("", text) and "${." not in text
        if path[0] == "data" and (not plain or _from_environment(text, texts)):
            key = ".".join(map(str, path))
            raise ValueError(
                f"{key} is {text}: nothing in `data` may read the environment, because its files are passed on with "
                f"data sets; let your shell fill in what you mean on the command line, e.g. {key}=$HOME/shop"
            )


def refuse_other_sections(hydra: HydraConf) -> None:
    """ValueError for a chosen file of the group `data` that sets, or brings in, other sections than `data`."""
    choice = f"{hydra.runtime.choices.get('data')}.yaml"
    folders = [Path(source.path) / "data" for source in hydra.runtime.config_sources if source.schema == "file"]
    for path in [folder / choice for folder in folders if (folder / choice).is_file()][:1]:
        text = path.read_text(encoding="utf-8")
        header = re.search(r"^\s*#\s*@package\s+(\S+)", text, re.MULTILINE)
        if header and header[1] not in ("data", "_group_"):
            raise ValueError(f"{path} sets the section {header[1]}; a file of data/ sets `data` alone: remove @package")
        content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        entries = content.get("defaults", [])
        for name in (name for entry in entries for name in (entry if isinstance(entry, dict) else [entry])):
            if re.search(r"[/@ ]", name):
                raise ValueError(
                    f"{path} brings in {name!r}; the defaults of a file of data/ name other files of that folder, e.g. "
                    "defaults: [events_schema, _self_]"
                )


def refuse_passwords(config: Config) -> None:
    """ValueError, which does not hold the value, for a URL with a password: configurations are written and logged."""
    for path, text in _strings(dataclasses.asdict(config)):
        if PASSWORD.search(text):
            raise ValueError(
                f"{'.'.join(map(str, path))} is a URL with a password, which would be written to config.json, logs and "
                "checkpoints; leave it out, and give it by the environment, e.g. AWS_SECRET_ACCESS_KEY for s3://"
            )


def _strings(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], str]]:
    if isinstance(value, str):
        return [(path, value)]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [each for key, item in items for each in _strings(item, (*path, key))]


def _from_environment(text: str, texts: Texts) -> bool:
    """Whether a value reads the environment, or another one that does."""
    if "${oc.env:" in text:
        return True
    keys = (tuple(name.split(".")) for name in REFERENCE.findall(text))
    return any(key in texts and _from_environment(texts[key], texts) for key in keys)
