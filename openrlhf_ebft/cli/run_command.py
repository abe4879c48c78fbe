"""Runs a command so that a user's mistake ends in one message and exit code 2, not in a traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

from openrlhf_ebft.config.errors import UserError

Command = Callable[[Sequence[str]], int]

_FILE_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


def run_command(command: Command, argv: Sequence[str] | None = None) -> int:
    """Calls `command` with `argv` (default: the process's own) and returns its exit code.

    Only errors that the user can put right lose their traceback; every other exception passes through. SIGTERM ends a
    command as Ctrl-C does.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return command(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except _FILE_ERRORS as error:
        name = f"{error.filename}: " if error.filename is not None else ""
        print(f"error: {name}{error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 2
