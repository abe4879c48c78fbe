"""The section for low-rank adapters: what is trained, and how it reaches the rollout engines."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from openrlhf_ebft.config.section import Section

TargetName = Annotated[str, Field(min_length=1)]

ALL_LINEAR = "all-linear"


class LoRAConfig(Section):
    """Low-rank adapters (LoRA) on frozen weights; off at rank 0, which trains all weights."""

    rank: int = Field(0, ge=0, description="rank of the adapters; 0: off, all weights train")
    alpha: int = Field(16, ge=1, description="adapters are scaled by alpha / rank, or alpha / sqrt(rank) with rslora")
    dropout: float = Field(
        0.0, ge=0.0, lt=1.0, description="dropout before the adapters in training; the sampler has none"
    )
    targets: tuple[TargetName, ...] = Field(
        (ALL_LINEAR,),
        min_length=1,
        description="names of the linear modules that get adapters, such as [q_proj, v_proj]; all-linear: every one "
        "but the output head",
    )
    rslora: bool = Field(False, description="rank-stabilised scaling, alpha / sqrt(rank)")
    sync: Literal["merged", "adapter"] = Field(
        "merged",
        description="what the rollout engines get: merged, whole weights with the adapters added; adapter, the "
        "adapters alone, which an engine puts on its own copy of model.path",
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _take_one_name(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained instead of all weights."""
        return self.rank > 0

    @property
    def sends_adapters(self) -> bool:
        """Whether weight updates carry adapters alone."""
        return self.is_on and self.sync == "adapter"

    @property
    def scaling(self) -> float:
        """Factor of B A in the adapted weight W + scaling B A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
