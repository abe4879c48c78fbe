"""RAD arguments of one request: the flat `rad_*` names that an engine's extra arguments carry, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openrlhf_ebft.rad.values import MOST_STRENGTH, SCORE_TRANSFORMS

PREFIX = "rad_"
DEFAULT_TOP_K = 20
_MOST_TRACE_ID = 256


@dataclass(frozen=True)
class Term:
    """One reward of a request: `factor * reward` is added to a candidate's logit, reward in [0, 1].

    Attributes:
        model: name of a reward model; None = the engine's default one.
        factor: logit units per unit of reward, >= 0.
        invert: use 1 - reward.
    """

    model: str | None
    factor: float
    invert: bool


@dataclass(frozen=True)
class RADRequest:
    """Checked RAD arguments. Names in `extra_args` are those of the attributes behind `rad_`.

    Attributes:
        beta: strength, logit units per unit of reward; with `weights` a factor of all of them.
        top_k: candidates per step.
        invert: use 1 - reward.
        score_index: output column that is the reward; None = as the engine is configured for the model.
        score_transform: `none`, `sigmoid`, `softmax`; None = as configured.
        reward_model: name of the reward model; None = the engine's default one.
        weights: (name, weight) of several reward models instead of one; a negative weight steers away:
            |weight| * (1 - reward). In `extra_args` a list of "name=weight" strings.
        trace: id under which the candidates' rewards of every step are kept until they are fetched.
        report: id under which the reason is kept, until it is fetched, if the request has to be ended.
    """

    beta: float
    top_k: int = DEFAULT_TOP_K
    invert: bool = False
    score_index: int | None = None
    score_transform: str | None = None
    reward_model: str | None = None
    weights: tuple[tuple[str, float], ...] = ()
    trace: str | None = None
    report: str | None = None

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> RADRequest | None:
        """The RAD arguments among an engine's extra arguments, or None when there are none.

        Raises:
            ValueError: an unknown `rad_*` name or a wrong value; the message names the argument.
        """
        given = {
            name: value
            for name, value in (extra_args or {}).items()
            if isinstance(name, str) and name.startswith(PREFIX)
        }
        if not given:
            return None
        unknown = sorted(set(given) - set(_READERS))
        if unknown:
            raise ValueError(f"unknown RAD argument {unknown[0]!r}; known are {', '.join(_READERS)}")
        values = {name.removeprefix(PREFIX): _READERS[name](name, value) for name, value in given.items()}
        if values.get("weights"):
            values.setdefault("beta", 1.0)
            for name in ("reward_model", "invert", "score_index", "score_transform"):
                if values.get(name) is not None and values[name] is not False:
                    raise ValueError(
                        f"rad_{name} cannot be combined with rad_weights: the names and signs in rad_weights say it all"
                    )
        elif "beta" not in values:
            raise ValueError(f"rad_beta is missing (got {', '.join(sorted(given))}); give rad_beta or rad_weights")
        request = cls(**values)
        if sum(term.factor for term in request.terms()) > MOST_STRENGTH:
            raise ValueError(
                f"rad_beta, or rad_beta times the sizes of all rad_weights, must be at most {MOST_STRENGTH:g}: "
                "larger shifts are inf or NaN in float32"
            )
        return request

    def terms(self) -> tuple[Term, ...]:
        """The rewards to be summed."""
        if not self.weights:
            return (Term(self.reward_model, self.beta, self.invert),)
        return tuple(Term(name, self.beta * abs(weight), weight < 0) for name, weight in self.weights)


def to_extra_args(rad: Mapping[str, Any]) -> dict[str, Any]:
    """The flat `rad_*` arguments of the nested form `{"beta": 10, "weights": {"sentiment": 10}, ...}`.

    Args:
        rad: keys are the attributes of :class:`RADRequest`; `weights` is an object from names to numbers.

    Raises:
        ValueError: not an object, an unknown key or a wrong value; the message names it.
    """
    if not isinstance(rad, Mapping):
        raise ValueError(f"rad must be an object with keys such as beta and top_k, got {type(rad).__name__}")
    unknown = sorted(str(key) for key in rad if f"{PREFIX}{key}" not in _READERS)
    if unknown:
        known = ", ".join(name.removeprefix(PREFIX) for name in _READERS)
        raise ValueError(f"unknown key {unknown[0]!r} in rad; known are {known}")
    flat = {f"{PREFIX}{key}": value for key, value in rad.items() if value is not None}
    if "rad_weights" in flat:
        weights = flat["rad_weights"]
        if not isinstance(weights, Mapping):
            raise ValueError(f"rad weights must be an object from names to numbers, got {type(weights).__name__}")
        flat["rad_weights"] = [f"{name}={_number(f'rad weights {name!r}', value)!r}" for name, value in weights.items()]
    if RADRequest.from_extra_args(flat) is None:
        raise ValueError("rad is empty; give at least beta or weights")
    return flat


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {_short(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {_short(value)}")
    return number


def _strength(name: str, value: object) -> float:
    number = _number(name, value)
    if number < 0:
        raise ValueError(f"{name} must be >= 0, got {_short(value)}; use rad_invert to steer the other way")
    return number


def _count(least: int) -> Any:
    def read(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number >= {least}, got {_short(value)}")
        return value

    return read


def _flag(name: str, value: object) -> bool:
    # Engines' request schemas turn JSON's true and false into 1 and 0.
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    raise ValueError(f"{name} must be true or false, got {_short(value)}")


def _transform(name: str, value: object) -> str:
    if not isinstance(value, str) or value not in SCORE_TRANSFORMS:
        raise ValueError(f"{name} must be one of {', '.join(SCORE_TRANSFORMS)}, got {_short(value)}")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value or len(value) > _MOST_TRACE_ID:
        raise ValueError(f"{name} must be a text of 1 to {_MOST_TRACE_ID} characters, got {_short(value)}")
    return value


def _weights(name: str, value: object) -> tuple[tuple[str, float], ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f'{name} must be a list of "name=weight" texts, got {_short(value)}')
    weights: dict[str, float] = {}
    for entry in value:
        model, equals, number = entry.rpartition("=") if isinstance(entry, str) else ("", "", "")
        if not model or not equals:
            raise ValueError(f'{name} holds {_short(entry)}; write "name=weight", such as "toxicity=-20"')
        if model in weights:
            raise ValueError(f"{name} names the reward model {model!r} twice")
        try:
            weight = float(number)
        except ValueError:
            raise ValueError(f"{name}: the weight of {model!r} must be a number, got {_short(number)}") from None
        weights[model] = _number(f"{name}: the weight of {model!r}", weight)
    return tuple(weights.items())


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a huge whole number"
    return text if len(text) <= 80 else text[:77] + "..."


_READERS = {
    "rad_beta": _strength,
    "rad_top_k": _count(1),
    "rad_invert": _flag,
    "rad_score_index": _count(0),
    "rad_score_transform": _transform,
    "rad_reward_model": _text,
    "rad_weights": _weights,
    "rad_trace": _text,
    "rad_report": _text,
}
