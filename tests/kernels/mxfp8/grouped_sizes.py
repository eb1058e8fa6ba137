"""Sizes of groups that tests of grouped products share; rows behind them have no group."""

ALIGNED = {
    "many tiles": [1664, 0, 128, 5120, 2944, 2432],
    "one group": [384],
    "huge among empties": [0, 0, 4096, 0, 128, 0],
    "short among empties": [0, 0, 128, 0, 0, 0, 128, 0],
    "no rows": [0, 0],
}
RAGGED = {"ragged": [1600, 0, 77, 5121, 1, 2490], "one row": [1], "short": [63, 65, 64]}
