"""Hydra 1.3's argument parser under Python 3.14."""

from __future__ import annotations

import argparse


def accept_late_help() -> None:
    """Let a parser have a help text that is no string until it is printed, such as Hydra's.

    Python 3.14 looks into help texts as soon as an argument is added, and stops at one that is no string.
    """
    check = getattr(argparse.ArgumentParser, "_check_help", None)
    if check is None:
        return

    def check_text(parser: argparse.ArgumentParser, action: argparse.Action) -> None:
        if isinstance(action.help, str):
            check(parser, action)

    argparse.ArgumentParser._check_help = check_text  # type: ignore[attr-defined]
