"""From configuration files and `key=value` overrides to one configuration: the only place that has Hydra compose.

Of Hydra, programs here use the composition alone. Nothing of its own section `hydra` is run or instantiated: callbacks,
launchers and logging of that section would be code that a file chooses. It is what the shipped files say, or refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import DefaultsTreeNode
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigLoadError
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from train.config import environment, written
from train.config.overrides import closest, unknown
from train.config.places import CONFIGS
from train.config.schema import register_schema
from train.config.secrets import refuse_secrets

MAIN = "train"
SEARCHPATH = "hydra.searchpath"
WORDS = {
    r"Invalid value assigned: \w+ is not a ListConfig, list or tuple\.": "must be a list, e.g. [a] or [a, b]",
    r"(Key \S+ \(\w+\)) is incompatible with \(str\)": r"\1 must be text: put it in quotes",
    r"Merge error: \w+ is not a subclass of \w+\. value: .*": "a section takes keys, as in data.batch_size=64",
    r"Cannot merge DictConfig with ListConfig": "a list stands where keys with values belong: KEY: VALUE, not - VALUE",
}
"""What is said in the place of OmegaConf's words."""
VOLATILE = ("runtime", "overrides", "job", "searchpath")
"""Keys of Hydra's section that say how it was called."""


def composed(overrides: Sequence[str], config_dir: Path | None = None) -> DictConfig:
    """What configs/train.yaml becomes with these overrides; `config_dir` is a folder of further files.

    Raises ValueError for what cannot be composed, for a file of the group `data` that sets another section, and for
    files that set one of Hydra's keys, before anything of them is used. No environment is read for a defaults list.
    """
    if config_dir is not None:
        if not config_dir.is_dir():
            raise ValueError(f"--config-dir {config_dir} is no folder; name one with files such as data/mine.yaml")
        overrides = [*overrides, searchpath(config_dir)]
    known = [_parsed(text) for text in overrides]
    given: list[Any] = [each.value() for each in known if each.key_or_group == SEARCHPATH]
    if len(given) > 1:
        raise ValueError(f"--config-dir and {SEARCHPATH} name folders more than once; give {SEARCHPATH}=[a,b] alone")
    folders = [Path(str(path).removeprefix("file://")) for paths in given for path in paths]
    register_schema()
    try:
        with environment.closed(), written.bounded(), initialize_config_dir(str(CONFIGS), version_base="1.3"):
            if folders:
                _check_origins(overrides, folders)
            config = compose(MAIN, list(overrides), return_hydra_config=True)
            if folders:
                _check_hydra(config)
            choices = {str(group): file for group, file in config.hydra.runtime.choices.items()}
            written.check([*folders, CONFIGS], choices)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_explained(error, known)) from error
    except RecursionError:
        raise ValueError("defaults lists bring in each other without end; let each name files of others only") from None
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    OmegaConf.set_struct(config, True)
    return config


def searchpath(folder: Path) -> str:
    """The override that adds a folder of configurations."""
    return f"{SEARCHPATH}=[{_quoted(f'file://{folder.absolute()}')}]"


def _quoted(value: str) -> str:
    """As Hydra's grammar quotes: a backslash stands for itself but before a quote, also the last one."""
    escaped = re.sub(r'(\\*)(?="|$)', lambda found: found[0] * 2, value).replace('"', '\\"')
    return f'"{escaped}"'


def parse(arguments: Sequence[str], module: str, docstring: str | None) -> DictConfig:
    """What a command's arguments compose: `[--config-dir DIR] key=value ...`. `--cfg job` prints it and exits."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="+experiment=NAME, group=NAME, key=value")
    parser.add_argument("--config-dir", "-cd", type=Path, help="a folder of further configurations")
    parser.add_argument("--cfg", "-c", choices=["job"], help="print the configuration and train nothing")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: values in the place of interpolations")
    parser.add_argument("--package", "-p", help="with --cfg: this section alone")
    parser.add_argument("--multirun", "-m", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(arguments)
    if options.multirun:
        raise ValueError(
            "-m (--multirun) would run all jobs in these processes, where one's process groups and caches reach into "
            "the next; a sweep with processes for each: python -m launch.sweep +experiment=NAME --over runtime.seed=0,1"
        )
    config = composed(options.overrides, options.config_dir)
    if options.cfg:
        shown = OmegaConf.select(config, options.package) if options.package else config
        print(OmegaConf.to_yaml(shown, resolve=options.resolve), end="")
        raise SystemExit(0)
    return config


def _parsed(text: str) -> Override:
    """ValueError for an override that Hydra's grammar has no place for, or that is for Hydra's own section."""
    key, equals, value = text.partition("=")
    try:
        override = OverridesParser.create().parse_override(text)
        refuse_secrets({key.lstrip("+~"): override.value()})
    except HydraException as error:
        refuse_secrets({key: value})
        example = f"{key}={_quoted(value)}" if equals else "runtime.steps=100"
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{text!r} is no key=value of Hydra's grammar ({reason}): a value with blanks or characters such as "
            f"= , : ( ) [ ] {{ }} stands in quotes, inside those of the shell, e.g. {shlex.quote(example)}"
        ) from None
    if override.is_hydra_override() and override.key_or_group != SEARCHPATH:
        raise ValueError(
            f"{text}: of Hydra's own keys only {SEARCHPATH} is used here; a run's folder is runtime.run_dir, and "
            "launch.sweep runs several"
        )
    return override


def _check_origins(overrides: Sequence[str], folders: Sequence[Path]) -> None:
    """ValueError if a file of data/, or one that such a file brings in, sets another section than `data`.

    And for one that sets Hydra's section by its place, or takes the place of a schema, which Hydra would read although
    nobody has chosen it. Files are read for it, and nothing else is done.
    """
    found = GlobalHydra.instance().config_loader().compute_defaults_list(MAIN, list(overrides), RunMode.RUN)
    of_data = set()
    for path, package, source in _brought_in(found.defaults_tree):
        section = package.split(".")[0]
        for file in (folder / f"{path}.yaml" for folder in folders if _in_store(path)):
            if file.exists():
                raise ValueError(f"{file} has the name of a schema, whose place it would take; rename it")
        if source:
            of_data.add(path)
            if section != "data":
                raise ValueError(_reaches(source, path, package or "_global_"))
        if section == "hydra" and not path.startswith("hydra/"):
            raise ValueError(_hydra_key(package, path))
    for key, origin in found.overrides.override_metadata.items():
        place = origin.containing_config_path
        if place in of_data:
            raise ValueError(_reaches(place, key, key))
        if key.startswith("hydra/") and place != MAIN:
            raise ValueError(_hydra_key(key, place or "the command line"))


def _in_store(path: str) -> bool:
    try:
        return ConfigStore.instance().load(f"{path}.yaml") is not None
    except ConfigLoadError:
        return False


def _brought_in(tree: DefaultsTreeNode, source: str = "") -> Iterator[tuple[str, str, str]]:
    """The path of each file of a tree, the package that it sets, and the file of data/ that it comes from, or ""."""
    for child in tree.children or ():
        node, below = (child.node, child) if isinstance(child, DefaultsTreeNode) else (child, None)
        if node.is_virtual() or node.is_self() or node.get_name() is None:
            continue
        path = node.get_config_path()
        origin = source or (path if path.startswith("data/") else "")
        yield path, node.get_final_package(), origin
        if below is not None:
            yield from _brought_in(below, origin)


def _reaches(source: str, path: str, section: str) -> str:
    by = "" if path == source else f", by {path},"
    return (
        f"{source}.yaml sets{by} the section {section}; a file of data/ and those that its defaults bring in set "
        "`data` alone: remove @package and the entries of other groups, e.g. defaults: [events_schema, _self_]"
    )


def _hydra_key(key: str, path: str) -> str:
    return f"{path}.yaml sets {key.replace('/', '.')}: Hydra's own keys are those of the shipped files; remove it"


def _check_hydra(config: DictConfig) -> None:
    """ValueError unless Hydra's section is the shipped one."""
    found, shipped = _of_hydra(config), _shipped_hydra()
    for key in sorted({*found, *shipped}):
        if found.get(key) != shipped.get(key):
            raise ValueError(
                f"a file of the configuration sets hydra.{key}: Hydra's own keys are those of the shipped files; "
                "remove it"
            )


@cache
def _shipped_hydra() -> dict[str, object]:
    return _of_hydra(compose(MAIN, [], return_hydra_config=True))


def _of_hydra(config: DictConfig) -> dict[str, object]:
    section = OmegaConf.to_container(config.hydra, resolve=False)
    assert isinstance(section, dict)
    return {str(key): value for key, value in section.items() if key not in VOLATILE}


def _explained(error: Exception, known: Sequence[Override]) -> str:
    """Hydra's reason in one sentence, with the key that was meant where a name is close."""
    text, cause = str(error), error.__cause__ or error.__context__
    while cause is not None:
        text, cause = f"{text}\n{cause}", cause.__cause__ or cause.__context__
    if environment.CLOSED in text:
        return environment.CLOSED
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        options = [each for each in error.options or () if not each.endswith("_schema")]
        if group and options:
            close = closest(name, options)
            hint = f"did you mean {group}={close}?" if close else f"there are {', '.join(sorted(options))}"
            return f"{group}={name}: there is no file {group}/{name}.yaml; {hint}"
    if found := re.search(r"To append to your default list use (\S+)", text):
        return f"{found[1][1:]} is added to the defaults list, by a plus: {found[1]}"
    key = re.search(r"^Could not override '(.+?)'\.", text, re.MULTILINE) or re.search(r"full_key: (\S+)", text)
    if key and re.search(r"not in|No match in the defaults list|is not in struct", text):
        value = next((each for each in known if each.key_or_group == key[1]), None)
        inner = re.search(r"Key '(.+?)' (?:is )?not in", text)
        within = [inner[1]] if inner and inner[1] not in key[1].split(".") else []  # of key={inner: ...}
        if suggestion := _suggestion(".".join([key[1], *within]), value, known):
            return suggestion
    if found := re.match(r"Multiple values for (\S+)\. To override a value use 'override \S+: (\S+)'", text):
        return f"{found[1]} has a file already; without the plus another one is taken: {found[1]}={found[2]}"
    if text.startswith("Ambiguous value"):
        name, _, values = text.partition("'")[2].partition("'")[0].partition("=")
        return (
            f"{name}={values} has several values: a list is {name}=[{values}], a text with commas "
            f"'{name}=\"{values}\"', and a run for each is of launch.sweep, --over {name}={values}"
        )
    if found := re.match(r"In '(.+?)': \w+ raised while composing config:\n", text):
        return f"{found[1]}.yaml: {merge_error(error, text[found.end() :])}"
    return _sentence(text).removeprefix("Error merging override ")


def merge_error(error: BaseException, text: str, section: str = "") -> str:
    """OmegaConf's reason in one sentence, with the key that was meant where a name is close. `section`: above keys."""
    own = _key_error(error)
    kind, key = getattr(own, "object_type", None), f"{section}.{own.full_key if own else ''}".strip(".")
    if isinstance(own, ConfigKeyError | ConfigAttributeError) and dataclasses.is_dataclass(kind):
        return unknown(key.rpartition(".")[0], str(own.key), [field.name for field in dataclasses.fields(kind)])
    return f"{key}: {_sentence(text)}" if key else _sentence(text)


def _sentence(text: str) -> str:
    for pattern, words in WORDS.items():
        text = re.sub(pattern, words, text)
    lines = [line.strip() for line in text.partition("\nConfig search path")[0].splitlines()]
    dropped = ("full_key", "object_type", "reference_type")
    told = [line for line in lines if line and not line.startswith(dropped) and not re.search(r"\$(KEY|VALUE)", line)]
    return ": ".join(dict.fromkeys(told))


def _key_error(error: BaseException | None) -> OmegaConfBaseException | None:
    """The first of the errors behind an error that knows its key."""
    while error is not None and not getattr(error, "full_key", None):
        error = error.__cause__ or error.__context__
    return cast("OmegaConfBaseException | None", error)


def _suggestion(key: str, override: Override | None, known: Sequence[Override]) -> str:
    """What an unknown key should have been, by what the chosen files have; "" if it is not unknown there."""
    groups = [each for each in known if "." not in each.key_or_group or each.key_or_group == SEARCHPATH]
    chosen = [str(each.input_line) for each in groups if each is not override]
    node: Any = _composed_if_possible(chosen)
    if node is None:  # the key stands in an experiment
        node = _composed_if_possible([text for text in chosen if not text.startswith("+")])
    path = key.split(".")
    for depth, name in enumerate(path):
        if not isinstance(node, DictConfig):
            return ""
        if name in node:
            node = node[name] if not OmegaConf.is_missing(node, name) else None
            continue
        if OmegaConf.get_type(node) is dict:
            close = closest(name, map(str, node))
            meant = f"did you mean {'.'.join([*path[:depth], close])}? To add it" if close else "to add it"
            return f"{key} is a new key of the mapping {'.'.join(path[:depth])}; {meant} write +{key}=VALUE"
        value = f"={override.get_value_element_as_str()}" if override is not None and len(path) == 1 else ""
        return unknown(".".join(path[:depth]), name, map(str, node), value)
    return ""


def _composed_if_possible(overrides: list[str]) -> DictConfig | None:
    try:
        with environment.closed(), initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return compose(MAIN, overrides)
    except (HydraException, OmegaConfBaseException):
        return None
