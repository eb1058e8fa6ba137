"""Values of a configuration that come from the environment: `key: ${oc.env:NAME}`.

They may be secrets, and another machine has its own. What is written of a configuration (config.json, checkpoints, W&B)
has the text of the interpolation in their place, which is resolved anew where it is read. The section `data` may read
none: its files are passed on with data sets, and what is in it goes into paths, logs and requests to servers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from train.config.schema import Config
from train.config.secrets import dotted, strings

Path = tuple[Any, ...]
"""Keys and list indices that lead to a value."""
KEPT = ("runtime", "run_dir")  # which says where the files of a run are
CLOSED = (
    "${oc.env:...} stands in a defaults list: which files are read does not depend on the environment; name the file, "
    "or choose it on the command line, e.g. model=din"
)
_NAME = "_environment"
SHORT = 6
"""Values of fewer characters, such as numbers, are also parts of other words."""
REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass
class Values:
    """Which values of a configuration read the environment, and what they read."""

    texts: dict[Path, str] = field(default_factory=dict)  # of the interpolations
    read: dict[str, str] = field(default_factory=dict)  # value -> name of the variable

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """ValueErrors name variables in the place of what was read."""
        try:
            yield
        except ValueError as error:  # OmegaConf's are such
            text = told = getattr(error, "msg", None) or str(error)
            if key := getattr(error, "full_key", None):
                text = told = f"{key}: {told}"
            for value, name in self.read.items():
                edge = r"\b" if len(value) < SHORT else ""
                text = re.sub(edge + re.escape(value) + edge, lambda _, name=name: f"${{oc.env:{name}}}", text)
            if text == told and not isinstance(error, OmegaConfBaseException):
                raise
            raise ValueError(text) from None


@contextmanager
def _answered(answer: Callable[..., Any]) -> Iterator[None]:
    """`oc.env` is this function."""
    OmegaConf.register_new_resolver("oc.env", answer, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


@contextmanager
def closed() -> Iterator[None]:
    """Nothing reads the environment: no error can show what a defaults list would have named by it."""

    def refuse(*_: Any) -> None:
        raise ValueError(CLOSED)

    with _answered(refuse):
        yield


def read_by(composed: DictConfig) -> Values:
    """Which values read the environment, however they are written: each is resolved, and `oc.env` notes its calls."""
    values, calls = Values(), list[str]()

    def note_call(name: str, *default: Any) -> Any:
        calls.append(name)
        found = oc.env(name, *default)
        if found:
            values.read[str(found)] = name
        return found

    with _answered(note_call):
        for path, text in strings(OmegaConf.to_container(composed, resolve=False)):
            if "${" not in text or path == KEPT:
                continue
            calls.clear()
            try:
                holder: Any = composed
                for key in path:
                    holder = holder[key]
                if OmegaConf.is_config(holder):  # of which values may be interpolations in their turn
                    OmegaConf.to_container(holder, resolve=True)
            except OmegaConfBaseException as error:
                if calls and "not found" in str(error):
                    raise ValueError(
                        f"{dotted(path)} is {text}, and the environment has no {calls[-1]}: set it, or give a "
                        f"default, ${{oc.env:{calls[-1]},default}}"
                    ) from None
            if calls:
                values.texts[path] = text
    return values


def note(config: Config, values: Values) -> None:
    """Remember which values of `config` came from the environment."""
    object.__setattr__(config, _NAME, values.texts)


def to_saved(config: Config) -> dict[str, Any]:
    """The configuration as dictionaries, to be written to files and read by `from_dict`."""
    saved = dataclasses.asdict(config)
    texts: dict[Path, str] = getattr(config, _NAME, {})
    for (*path, last), text in texts.items():
        holder: Any = saved
        for key in path:
            holder = holder[key]
        holder[last] = text
    return saved


def refuse_in_data(composed: DictConfig, values: Values) -> None:
    """ValueError for a value of `data` that reads more than other keys, `${key}`, or keys that read the environment."""
    for path, text in strings(OmegaConf.to_container(composed, resolve=False)):
        plain = "${" not in REFERENCE.sub("", text) and "${." not in text
        if path[0] == "data" and "${" in text and (not plain or path in values.texts):
            raise ValueError(
                f"{dotted(path)} is {text}: nothing in `data` may read the environment, because its files are passed "
                "on with data sets; let your shell fill in what you mean on the command line, e.g. "
                f"{dotted(path)}=$HOME/shop"
            )
