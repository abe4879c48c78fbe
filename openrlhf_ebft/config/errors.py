"""Errors that a user can put right: commands print their message without a traceback."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(ValueError):
    """Wrong input of a user; the message names what is wrong, where, and what would be right."""


class ConfigError(UserError):
    """A configuration that cannot run. `problems` holds one sentence for each fault found."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{source}: {count}\n" + "\n".join(f"  - {problem}" for problem in self.problems))


def one_line(error: Exception) -> str:
    """A library's message without line breaks: the last line of a failed job's log is what a user sees of it."""
    return " ".join(str(error).split())
