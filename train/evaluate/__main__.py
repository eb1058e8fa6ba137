"""`python -m train.evaluate`."""

from __future__ import annotations

from train.process.imports import lasting

with lasting():
    from train.evaluate import main
    from train.process import errors

if __name__ == "__main__":
    errors.run(main)
