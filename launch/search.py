"""Search settings by random draws or successive halving, each trial a torchrun of its own, decided by validation.

    python -m launch.search +experiment=NAME --space optimizer.lr=1e-4..1e-2 model.dim=16,32,64 --trials 16 [--out DIR]
    python -m launch.search +experiment=NAME --space ... --trials 27 --halving runtime.epochs=1..9 --eta 3

A value `low..high` is drawn evenly on a logarithmic scale, a whole number if both ends are; of `a,b,c` each is as
likely. With `--halving KEY=LEAST..MOST` all trials run at the least length; the best of them by validation, one in
`--eta`, run again at a length that is as many times longer, and so on up to the most. They begin anew, since the
learning rate's schedule is that of a run's length. Tables, folders, failures and signals are as those of
`launch.sweep`. Draws depend on `--seed` and their number alone: started again with the same `--out`, a search runs what
is not finished, and more `--trials` may be asked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import NamedTuple

from launch.runs import Runner, parser_of, shared_by_all
from launch.sweep import claim, finish, folder_of
from launch.trials import Trial
from train.config.overrides import split_values
from train.process import errors
from train.process.files import new_folder
from train.process.jobs import unfinished


class Range(NamedTuple):
    """Numbers between two, both included; whole ones if both are."""

    low: float
    high: float
    whole: bool

    @classmethod
    def parse(cls, text: str) -> Range:
        """`low..high`. ValueError unless 0 < low < high."""
        ends = text.split("..")
        try:
            low, high = map(float, ends)
        except ValueError:
            low, high = 0.0, 0.0
        if not 0 < low < high < math.inf:
            raise ValueError(f"{text}: expected low..high, two numbers above 0, e.g. 1e-4..1e-2")
        return cls(low, high, all(end.isdigit() for end in ends))

    def draw(self, random: Random) -> str:
        if self.whole:  # as if each had the logarithms that round to it
            number = math.exp(random.uniform(math.log(self.low - 0.5), math.log(self.high + 0.5)))
            return str(min(int(self.high), max(int(self.low), round(number))))
        return f"{math.exp(random.uniform(math.log(self.low), math.log(self.high))):.4g}"


Axis = Range | list[str]


def parse_space(texts: Iterable[str]) -> dict[str, Axis]:
    """Key -> what its values are drawn from. ValueError for what cannot be read."""
    space: dict[str, Axis] = {}
    for text in texts:
        key, _, values = text.partition("=")
        choices = split_values(values)
        if not key or "" in choices:
            raise ValueError(f"--space {text}: expected key=low..high or key=a,b,c, e.g. optimizer.lr=1e-4..1e-2")
        if key in space:
            raise ValueError(f"--space names {key} twice")
        space[key] = Range.parse(values) if ".." in values and len(choices) == 1 else choices
    return space


def draw(space: dict[str, Axis], seed: int, number: int) -> dict[str, str]:
    """The values of a trial."""
    random = Random(f"{seed} {number}")
    return {key: axis.draw(random) if isinstance(axis, Range) else random.choice(axis) for key, axis in space.items()}


def lengths(least: int, most: int, eta: int) -> list[int]:
    """Those of the rungs: the most, and what is `eta` times shorter again and again down to the least."""
    found = [most]
    while found[0] >= least * eta:
        found.insert(0, found[0] // eta)
    return found


def promoted(trials: list[Trial], eta: int) -> list[Trial]:
    """One in `eta`, at least one: those of the smallest NE in validation. None that has no validation."""
    judged = [trial for trial in trials if trial.best_ne is not None and math.isfinite(trial.best_ne)]
    return sorted(judged, key=lambda trial: trial.best_ne or 0.0)[: max(1, len(trials) // eta)]


def search(
    out: Path, runner: Runner, settings: list[dict[str, str]], rungs: list[dict[str, str]], eta: int
) -> list[Trial]:
    """Run the settings at each of the rungs, fewer at each; all trials, those of the last rung first."""
    alive, tried = list(enumerate(settings)), []
    for rung in rungs:
        values = {number: {**own, **rung} for number, own in alive}
        trials = [Trial(out / folder_of(number, own), values=own) for number, own in values.items()]
        runner.run(unfinished(trials))
        tried = [*trials, *tried]
        best = {id(trial) for trial in promoted(trials, eta)}
        alive = [setting for setting, trial in zip(alive, trials, strict=True) if id(trial) in best]
    return tried


def main(arguments: list[str]) -> int:
    parser = parser_of("launch.search", __doc__)
    parser.add_argument("--space", nargs="+", required=True, metavar="KEY=LOW..HIGH|A,B", help="what to draw from")
    parser.add_argument("--trials", type=int, default=16, help="settings to draw")
    parser.add_argument("--halving", metavar="KEY=LEAST..MOST", help="lengths of successive halving; without: random")
    parser.add_argument("--eta", type=int, default=3, help="of so many settings one runs again, so many times longer")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--nproc", type=int, default=2, help="processes a job")
    parser.add_argument("--parallel", type=int, default=1, help="jobs at a time")
    parser.add_argument("--out", type=Path, help="folder of the search; default runs/search-<time>")
    options = parser.parse_intermixed_args(arguments)
    shared = shared_by_all(options)
    try:
        if options.trials < 1 or options.eta < 2:
            raise ValueError(f"--trials {options.trials} must be at least 1 and --eta {options.eta} at least 2")
        space, rungs = parse_space(options.space), [{}]
        if options.halving:
            key, _, values = options.halving.partition("=")
            least, most, whole = Range.parse(values)
            if not whole:
                raise ValueError(f"--halving {options.halving}: lengths are whole numbers, e.g. runtime.epochs=1..9")
            rungs = [{key: str(length)} for length in lengths(int(least), int(most), options.eta)]
        runner = Runner(shared, options.nproc, options.parallel)
        out = options.out or new_folder(Path(f"runs/search-{time.strftime('%Y%m%d-%H%M%S')}"))
        described = {"overrides": shared, "space": options.space, "seed": options.seed, "rungs": rungs}
        claim(out, "search", {**described, "eta": options.eta})
    except ValueError as error:
        parser.error(str(error))
    settings = [draw(space, options.seed, number) for number in range(options.trials)]
    return finish(out, search(out, runner, settings, rungs, options.eta))


if __name__ == "__main__":
    errors.run(main)
