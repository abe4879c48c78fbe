"""Plain-data answers of the steering-control protocol: what a control needs from the model and from the engine.

Code written against that protocol asks a control for its access to the model while it is prepared, for the engine
capabilities it needs while it generates or scores, and for what it has fitted. Reward-augmented decoding fits nothing
and runs beside the model in one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class ModelAccess(IntEnum):
    """How much of the model a control touches while it is prepared, weakest first."""

    FACTS = 0  # layout and tokenizer only
    ROLLOUTS = 1  # generations or scores through an engine
    CAPTURE = 2  # hidden states
    MODULE = 3  # the live torch module


class Capability(StrEnum):
    """What an engine must offer."""

    IN_PROCESS_TORCH = "in_process_torch"


@dataclass(frozen=True)
class Requirements:
    """Capabilities needed while generating and while scoring a given text."""

    generate: tuple[Capability, ...] = ()
    score: tuple[Capability, ...] = ()
