"""What all sections of the configuration share: their base class and the value types."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Precision = Literal["float32", "bfloat16", "float16"]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
EmbedMethod = Literal["last_token", "mean_pooling", "completion_mean", "concat", "concat_tokens"]
DecayRate = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are checked again when they are assigned."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, validate_default=True, allow_inf_nan=False)
