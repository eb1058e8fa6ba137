"""Logs of three kinds of business, drawn with known probabilities.

python -m tools.datasets.business_logs shop      # writes prepared/shop_log, which data=shop_log reads

`shop`: impressions with clicks, carts and purchases, which come minutes and days later; items are released all the
time; users like genres, brands of their country and prices, have a mood of days, want what goes with their last
purchase and tire of what they have clicked. `news`: articles live for hours, so that most ids of the test split are
new; topics burst. `video`: pages of a feed with watch times; users follow creators whom they have liked, and tire of
what they have just seen. In all of them tastes have a part that no feature shows, and what stands below is seen less.

`log` has a row for each impression and joins `users` and `items`; a shop's `carts` and `purchases` are events at their
own times. p_TASK is the probability that its label was drawn
with, given the features, hidden tastes, position and the user's past (unconditional: of a purchase that of click, cart
and purchase). It is the ceiling of what a model can know, see `tools.quality.reachable`, and no feature.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tools.datasets.files import write

START = 1_700_006_400  # a midnight; times are seconds since 1970
HOUR, DAY = 3_600, 86_400
MATURE = 7 * DAY  # purchases later than that count for no impression; the log is read when all have had the time
Columns = dict[str, Any]


@dataclass
class Population:
    """Users with what they like, and the requests that they make in `days` days."""

    rng: np.random.Generator
    users: int
    days: int
    groups: int  # genres, topics or categories
    hidden: int = 6  # width of the part of tastes that no feature shows
    taste: np.ndarray = field(init=False)  # [users, groups], of deviation 1
    factor: np.ndarray = field(init=False)  # [users, hidden], of norm about 1
    country: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng
        self.country = rng.choice(6, self.users, p=[0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
        national = rng.normal(size=(6, self.groups))
        self.taste = 0.5 * national[self.country] + 0.87 * rng.normal(size=(self.users, self.groups))
        self.factor = rng.normal(size=(self.users, self.hidden)) / self.hidden**0.5

    def requests(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(users, times) of `count` requests in order of time; some users come often, a third after the first day."""
        rng = self.rng
        begin = np.where(rng.random(self.users) < 0.33, rng.random(self.users) * self.days * 0.9, 0)
        activity = rng.lognormal(0, 1, self.users) * (1 - begin / self.days)
        user = rng.choice(self.users, count, p=activity / activity.sum())
        day = np.floor(begin[user] + rng.random(count) * (self.days - begin[user]))
        hour = np.clip(rng.normal(np.where(rng.random(count) < 0.4, 12, 20), 2.5), 0, 23.99)
        time = np.floor(START + day * DAY + hour * HOUR + rng.integers(HOUR, size=count)).astype(np.int64)
        order = np.lexsort((user, time))
        return user[order], np.minimum(time[order], START + self.days * DAY - 1)


class Shelf:
    """Items, with how likely each one is shown; drawn for a request from all and from groups that its user likes."""

    def __init__(self, rng: np.random.Generator, weight: np.ndarray, group: np.ndarray, born: np.ndarray) -> None:
        self.rng, self.born = rng, born
        self.all = self._cumulative(np.arange(len(weight)), weight)
        self.of_group = [
            self._cumulative(np.flatnonzero(group == one), weight[group == one]) for one in range(group.max() + 1)
        ]

    def draw(self, count: int, liked: np.ndarray, time: int) -> np.ndarray:
        """At most `count` different items that are out; half are of the groups `liked`."""
        of_group = [self._draw(self.of_group[group], count) for group in liked]
        drawn = np.concatenate([self._draw(self.all, 2 * count), *of_group])
        drawn = np.unique(drawn[self.born[drawn] <= time])
        return self.rng.permutation(drawn)[:count]

    def _cumulative(self, items: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return items, np.cumsum(weight / max(weight.sum(), 1e-9))

    def _draw(self, drawer: tuple[np.ndarray, np.ndarray], count: int) -> np.ndarray:
        items, cumulative = drawer
        if not len(items):
            return items
        return items[np.searchsorted(cumulative, self.rng.random(count)).clip(max=len(items) - 1)]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def sorted_by(score: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Positions as a production ranker that knows something gives them."""
    return np.argsort(-(score + rng.normal(0, 1.5, len(score))))


def rows_of(parts: list[Columns]) -> Columns:
    return {name: np.concatenate([np.atleast_1d(part[name]) for part in parts]) for name in parts[0]}


def some_missing(values: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    return np.where(rng.random(len(values)) < share, np.nan, values)


def shop(impressions: int, rng: np.random.Generator) -> dict[str, Columns]:
    genres, brands, days = 24, 150, 60
    people = Population(rng, max(impressions // 80, 40), days, genres)
    count = max(impressions // 100, 60)
    genre, brand = rng.integers(genres, size=count), (rng.zipf(1.4, count) - 1) % brands
    born = START + np.where(rng.random(count) < 0.6, -rng.random(count) * 300, rng.random(count) * days) * DAY
    quality, factor = rng.normal(size=count), rng.normal(size=(count, people.hidden))
    price_level = rng.normal(size=count)
    brand_of_country, thrift = rng.normal(size=(6, brands)), rng.normal(size=people.users)
    goes_with = rng.permutation(genres)
    shelf = Shelf(rng, (rng.permutation(count) + 5.0) ** -0.7 * np.exp(0.3 * quality), genre, born)
    mood, last_seen = rng.integers(genres, size=people.users), np.zeros(people.users)
    bought = np.full(people.users, -1)
    clicked: list[deque[int]] = [deque(maxlen=30) for _ in range(people.users)]
    device = rng.integers(3, size=people.users)
    parts: list[Columns] = []
    for number, (user, time) in enumerate(zip(*people.requests(impressions // 12), strict=True)):
        if rng.random() > np.exp((last_seen[user] - time) / (4 * DAY)):
            mood[user] = rng.choice(genres, p=(liking := np.exp(people.taste[user])) / liking.sum())
        last_seen[user] = time
        items = shelf.draw(rng.integers(6, 19), np.append(mood[user], rng.integers(genres, size=2)), time)
        own = people.taste[user, genre[items]]
        items = items[sorted_by(quality[items] + own, rng)]
        position = np.arange(len(items))
        age = (time - born[items]) / DAY
        base = (
            0.9 * people.taste[user, genre[items]]
            + 1.3 * (genre[items] == mood[user])
            + 1.0 * factor[items] @ people.factor[user]
            + 0.8 * quality[items]
            + 0.6 * np.exp(-age / 4)
            - 0.5 * thrift[user] * price_level[items]
            + 0.5 * brand_of_country[people.country[user], brand[items]]
            + (0.9 * (genre[items] == goes_with[bought[user]]) if bought[user] >= 0 else 0)
            - 0.7 * np.isin(items, clicked[user])
        )
        p_click = sigmoid(base - 3.0 - 0.1 * position)
        p_cart = p_click * sigmoid(0.5 * base - 0.3 * price_level[items] - 1.4)
        p_purchase = p_cart * sigmoid(0.3 * base - 0.4 * price_level[items] + 0.4 * (device[user] == 0) - 0.4)
        click = rng.random(len(items)) < p_click
        cart = click & (rng.random(len(items)) < p_cart / p_click)
        purchase = cart & (rng.random(len(items)) < p_purchase / p_cart)
        carted_at = time + 1 + np.floor(rng.exponential(300, len(items)))
        purchased_at = carted_at + 1 + np.floor(rng.exponential(1.2 * DAY, len(items)))
        clicked[user].extend(items[click].tolist())
        if purchase.any():
            bought[user] = genre[items[purchase][0]]
        purchase &= purchased_at - time < MATURE
        parts.append(
            {
                "request": np.full(len(items), number),
                "user": np.full(len(items), user),
                "item": items,
                "time": np.full(len(items), time),
                "position": position,
                "hour": np.full(len(items), time % DAY // HOUR),
                "click": click.astype(np.int8),
                "cart": cart.astype(np.int8),
                "purchase": purchase.astype(np.int8),
                "carted_at": np.where(cart, carted_at, np.nan),
                "purchased_at": np.where(purchase, purchased_at, np.nan),
                "days_out": np.round(age, 2),
                "p_click": p_click,
                "p_cart": p_cart,
                "p_purchase": p_purchase,
            }
        )
    users = {
        "user": np.arange(people.users),
        "country": people.country,
        "device": device,
        "age": some_missing(np.round(40 - 8 * thrift + rng.normal(0, 8, people.users)), 0.2, rng),
    }
    items_table = {
        "item": np.arange(count),
        "genre": genre,
        "brand": brand,
        "price": np.round(np.exp(3 + 0.8 * price_level), 2),
    }
    log = rows_of(parts)
    tables = {"log": log, "users": users, "items": items_table}
    for name, time_of in (("carts", "carted_at"), ("purchases", "purchased_at")):
        chosen = ~np.isnan(log[time_of])
        tables[name] = {"user": log["user"][chosen], "time": log[time_of][chosen].astype(np.int64)}
        tables[name] |= {key: items_table[key][log["item"][chosen]] for key in ("item", "genre", "brand")}
    return tables


def news(impressions: int, rng: np.random.Generator) -> dict[str, Columns]:
    topics, publishers, days, life, width = 20, 30, 20, 30 * HOUR, 8
    people = Population(rng, max(impressions // 50, 40), days, topics)
    count = max(impressions // 70, 60)
    topic, publisher = rng.integers(topics, size=count), rng.integers(publishers, size=count)
    born = np.floor(START - life / 2 + rng.random(count) * (days * DAY + life / 2))
    interest, bait = rng.normal(size=count), rng.normal(size=count)
    factor, trust = rng.normal(size=(count, people.hidden)), rng.normal(size=(people.users, publishers)) * 0.5
    # how much is talked about a topic: each hour's level remembers the last one's
    talk = np.zeros((days * 24 + 1, topics))
    for hour in range(1, len(talk)):
        talk[hour] = 0.97 * talk[hour - 1] + rng.normal(0, 0.25, topics)
    of_topic = rng.normal(size=(topics, width))
    seen_in_text = rng.normal(size=(2 + people.hidden, width))
    text = of_topic[topic] + np.column_stack([interest, bait, factor]) @ seen_in_text * 0.35
    text += rng.normal(0, 0.6, text.shape)
    shelf = Shelf(rng, np.ones(count), topic, born)
    device, read_before = rng.integers(3, size=people.users), np.zeros((people.users, topics))
    parts: list[Columns] = []
    for number, (user, time) in enumerate(zip(*people.requests(impressions // 10), strict=True)):
        level, read_before[user] = talk[int((time - START) // HOUR)], 0.95 * read_before[user]
        items = _live(rng, shelf, born, time, life)
        items = items[sorted_by(interest[items] - (time - born[items]) / (8 * HOUR), rng)]
        position = np.arange(len(items))
        group = topic[items]
        base = (
            0.9 * people.taste[user, group]
            + 0.9 * factor[items] @ people.factor[user]
            + 0.9 * interest[items]
            + 0.6 * level[group]
            + trust[user, publisher[items]]
            - 1.2 * (time - born[items]) / (12 * HOUR)
            + 0.4 * np.tanh(read_before[user, group])
        )
        p_click = sigmoid(base + 0.6 * bait[items] - 1.6 - 0.12 * position)
        p_read = p_click * sigmoid(0.6 * base - 0.9 * bait[items] + 0.3 * (device[user] == 0))
        click = rng.random(len(items)) < p_click
        read = click & (rng.random(len(items)) < p_read / p_click)
        np.add.at(read_before[user], group[read], 1.0)
        parts.append(
            {
                "request": np.full(len(items), number),
                "user": np.full(len(items), user),
                "item": items,
                "time": np.full(len(items), time),
                "position": position,
                "hour": np.full(len(items), time % DAY // HOUR),
                "age": np.round((time - born[items]) / HOUR, 2),
                "click": click.astype(np.int8),
                "read": read.astype(np.int8),
                "p_click": p_click,
                "p_read": p_read,
            }
        )
    users = {"user": np.arange(people.users), "country": people.country, "device": device}
    articles = {
        "item": np.arange(count), "topic": topic, "publisher": publisher, "text": list(text.astype(np.float32))
    }  # fmt: skip
    return {"log": rows_of(parts), "users": users, "items": articles}


def _live(rng: np.random.Generator, shelf: Shelf, born: np.ndarray, time: int, life: float) -> np.ndarray:
    """Articles of a page: of those that are out, newer ones more often."""
    live = np.flatnonzero((born <= time) & (time - born < life))
    weight = np.exp(-(time - born[live]) / (10 * HOUR))
    size = min(int(rng.integers(6, 15)), len(live))
    return rng.choice(live, size, replace=False, p=weight / weight.sum()) if size else live


def video(impressions: int, rng: np.random.Generator) -> dict[str, Columns]:
    categories, creators, days = 30, 300, 30
    people = Population(rng, max(impressions // 250, 20), days, categories)
    count = max(impressions // 50, 60)
    creator = (rng.zipf(1.3, count) - 1) % creators
    home = rng.integers(categories, size=creators)
    category = np.where(rng.random(count) < 0.7, home[creator], rng.integers(categories, size=count))
    born = START + np.where(rng.random(count) < 0.5, -rng.random(count) * 100, rng.random(count) * days) * DAY
    quality, factor = rng.normal(size=count), rng.normal(size=(count, people.hidden))
    duration = np.round(np.exp(rng.normal(3.3, 0.8, count)) + 3)
    charm, patience = rng.normal(size=creators), rng.normal(size=people.users)
    shelf = Shelf(rng, (rng.permutation(count) + 5.0) ** -0.5 * np.exp(0.3 * quality), category, born)
    interest = people.taste.copy()
    follows: list[dict[int, float]] = [{} for _ in range(people.users)]
    last: list[deque[int]] = [deque(maxlen=8) for _ in range(people.users)]
    parts: list[Columns] = []
    for number, (user, time) in enumerate(zip(*people.requests(impressions // 8), strict=True)):
        interest[user] += rng.normal(0, 0.12, categories) - 0.01 * (interest[user] - people.taste[user])
        liked = np.argsort(-interest[user])[:4]
        items = shelf.draw(8, liked[rng.integers(4, size=3)], time)
        tired = np.array([last[user].count(one) for one in category[items].tolist()])
        base = (
            0.8 * interest[user, category[items]]
            + 0.9 * factor[items] @ people.factor[user]
            + 0.7 * quality[items]
            + 0.5 * charm[creator[items]]
            + 1.2 * np.array([follows[user].get(one, 0.0) for one in creator[items].tolist()])
            - 0.25 * tired
        )
        hard = np.log(duration[items]) - 3.3
        p_finish = sigmoid(base - 1.0 * hard + 0.4 * patience[user] - 1.1 - 0.03 * np.arange(len(items)))
        p_like = p_finish * sigmoid(0.8 * base - 3.0)
        finish = rng.random(len(items)) < p_finish
        like = finish & (rng.random(len(items)) < p_like / p_finish)
        # who stops does so early: a share of mean 1 / 4
        watched = np.where(finish, 1.0, rng.beta(1, 3, len(items)))
        for one, love in zip(creator[items].tolist(), like.tolist(), strict=True):
            follows[user][one] = min(0.98 * follows[user].get(one, 0.0) + love, 2.0)
        last[user].extend(category[items[watched > 0.3]].tolist())
        parts.append(
            {
                "request": np.full(len(items), number),
                "user": np.full(len(items), user),
                "item": items,
                "time": np.full(len(items), time),
                "position": np.arange(len(items)),
                "hour": np.full(len(items), time % DAY // HOUR),
                "finish": finish.astype(np.int8),
                "like": like.astype(np.int8),
                "watch": np.log1p(watched * duration[items]).astype(np.float32),
                "p_finish": p_finish,
                "p_like": p_like,
            }
        )
    users = {"user": np.arange(people.users), "country": people.country}
    videos = {"item": np.arange(count), "creator": creator, "category": category, "duration": duration}
    return {"log": rows_of(parts), "users": users, "items": videos}


KINDS: dict[str, Callable[[int, np.random.Generator], dict[str, Columns]]] = {
    "shop": shop,
    "news": news,
    "video": video,
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.datasets.business_logs", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--to", type=Path, help="folder of the result; default: prepared/KIND_log")
    parser.add_argument("--impressions", type=int, default=200_000, help="about how many rows")
    parser.add_argument("--seed", type=int, default=0, help="another seed is another business")
    options = parser.parse_args(arguments)
    if options.impressions < 1_000:
        parser.error(f"--impressions {options.impressions} is too few for a business; use at least 1000")
    out = options.to or Path("prepared") / f"{options.kind}_log"
    tables = KINDS[options.kind](options.impressions, np.random.default_rng(options.seed))
    for name, columns in tables.items():
        write(out, name, columns)
        print(f"{out / name}.parquet: {len(next(iter(columns.values()))):,} rows of {', '.join(columns)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
