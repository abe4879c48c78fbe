"""A reward function of the user's own: a Python function over texts, named FILE.py:NAME in the configuration.

It is called with keyword arguments, once for all completions of a step, and returns one finite number for each:

    def exact_match(prompts: list[str], completions: list[str], ground_truths: list[str]) -> list[float]: ...

Any other parameter without a default is a column of the data: `answer` gets the value in column `answer` of each
completion's row. A function with a parameter `example_ids`, or with `**others`, also gets the ids of the examples.
Texts are decoded without special tokens, completions without the stop token at their end. The file is run as it
stands: only a path in the configuration makes that happen.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.core.experience import Reference
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.data.tokenizers import plain_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ARGUMENTS = ("prompts", "completions", "ground_truths")
_IDS = "example_ids"
LARGEST_VALUE = 1e30
"""Size of a value: advantages are float32, which ends at 3e38."""


class RewardFunctionError(ValueError):
    """The function raised, or returned something that is not one finite number for each completion."""


@dataclass(frozen=True)
class SampledText:
    """One completion as the function sees it."""

    example_id: str
    prompt: str
    completion: str
    ground_truth: str
    columns: Mapping[str, Any] = field(default_factory=dict)  # of its row, those that the function asks for


class RewardFunction:
    """The user's function with its name, called on texts and checked.

    `columns` are the columns of the data that it asks for.
    """

    def __init__(self, name: str) -> None:
        """Runs the file of `name`, which is FILE.py:NAME.

        Raises UserError when there is no such file or function, the file fails, or the arguments do not fit.
        """
        self.name = name
        self._function = _load(name)
        self._wants_ids, self.columns = _wishes(name, self._function)

    def __call__(self, texts: Sequence[SampledText]) -> list[float]:
        """One value for each text.

        Raises RewardFunctionError naming the function and, where one example is to blame, its id.
        """
        try:
            values = self._call(texts)
        except Exception as error:
            raise RewardFunctionError(self._blame(texts, error)) from error
        try:
            if isinstance(values, str | Mapping | Set):  # their entries are not one number for each, in order
                raise TypeError
            values = list(values)
        except TypeError:
            raise RewardFunctionError(
                f"reward function {self.name} must return a list of {len(texts)} numbers, one for each completion, "
                f"not {values!r}"
            ) from None
        if len(values) != len(texts):
            raise RewardFunctionError(
                f"reward function {self.name} must return one number for each completion: expected {len(texts)}, "
                f"got {len(values)}"
            )
        return [self._number(text, value) for text, value in zip(texts, values, strict=True)]

    def _call(self, texts: Sequence[SampledText]) -> Any:
        arguments: dict[str, list[Any]] = {
            "prompts": [text.prompt for text in texts],
            "completions": [text.completion for text in texts],
            "ground_truths": [text.ground_truth for text in texts],
        }
        arguments |= {column: [text.columns[column] for text in texts] for column in self.columns}
        if self._wants_ids:
            arguments[_IDS] = [text.example_id for text in texts]
        values = self._function(**arguments)
        return list(values) if isinstance(values, Iterator) else values  # a generator fails only when it is read

    def _blame(self, texts: Sequence[SampledText], error: Exception) -> str:
        """Finds the example by calling the function on one at a time."""
        what = f"reward function {self.name} raised {type(error).__name__}: {error}"
        for text in texts:
            try:
                self._call([text])
            except Exception as alone:
                return f"example {text.example_id}: reward function {self.name} raised {type(alone).__name__}: {alone}"
        return f"{what}; on all {len(texts)} completions together, though on none of them alone"

    def _number(self, text: SampledText, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= LARGEST_VALUE:  # NaN is not, either
            raise RewardFunctionError(
                f"example {text.example_id}: reward function {self.name} returned {value!r}, not a finite number "
                f"of at most {LARGEST_VALUE:g}, for the completion {text.completion[:200]!r}"
            )
        return number


class TreeRewards:
    """The user's function over rollout trees."""

    def __init__(
        self, function: RewardFunction, tokenizer: PreTrainedTokenizerBase, stops: Collection[int] = ()
    ) -> None:
        """`stops`: ids that end a completion, which are no part of its text."""
        self._function = function
        self._tokenizer = tokenizer
        self._stops = stops

    def values(self, trees: Sequence[RolloutTree]) -> dict[tuple[str, int], Tensor]:
        """(n,) float64 values of the completions of every group (example id, anchor number).

        Raises RewardFunctionError, see `RewardFunction`.
        """
        values = iter(self._function([text for tree in trees for text in self._texts(tree)]))
        return {
            (tree.example_id, anchor): torch.tensor(
                [next(values) for _ in range(tree.num_samples)], dtype=torch.float64
            )
            for tree in trees
            for anchor in range(tree.num_anchors)
        }

    def _texts(self, tree: RolloutTree) -> list[SampledText]:
        """The completions of a tree, anchor by anchor and sample by sample."""
        reference = tree.reference
        windows = zip(reference.anchors.tolist(), reference.window_lengths.tolist(), strict=True)
        texts = []
        for (start, length), group in zip(windows, tree.completions(), strict=True):
            prompt = plain_text(_context(reference, start).tolist(), self._tokenizer, ())
            ground_truth = self._decode(reference.token_ids[start : start + length])
            columns = reference.columns_at(start)
            texts += [SampledText(tree.example_id, prompt, self._decode(ids), ground_truth, columns) for ids in group]
        return texts

    def _decode(self, token_ids: Tensor) -> str:
        return plain_text(token_ids.tolist(), self._tokenizer, self._stops)


def _context(reference: Reference, anchor: int) -> Tensor:
    """Tokens before `anchor`; of a packed reference only those of the anchor's own document."""
    tokens, documents = reference.token_ids[:anchor], reference.document_ids
    return tokens if documents is None else tokens[documents[:anchor] == documents[anchor]]


def _load(name: str) -> Callable[..., Any]:
    file, _, attribute = name.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise UserError(f"reward.function = {name}: no such file: {path}")
    module_name = f"reward_function_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"reward.function = {name}: {path} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickles in the file look themselves up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"reward.function = {name}: {path} cannot be run: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        known = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise UserError(f"reward.function = {name}: {path} has no function {attribute!r}; it has {known}")
    return function


def _wishes(name: str, function: Callable[..., Any]) -> tuple[bool, tuple[str, ...]]:
    """Whether `function` takes example ids, and the columns it asks for: its further parameters without a default.

    Raises UserError when it cannot be called as we do.
    """
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise UserError(f"reward.function = {name}: it must be a function written in Python: {error}") from None
    named = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    wants_ids = takes_any or any(p.name == _IDS for p in named)
    columns = tuple(p.name for p in named if p.default is p.empty and p.name not in (*ARGUMENTS, _IDS))
    try:
        signature.bind(**dict.fromkeys((*ARGUMENTS, *columns, *([_IDS] if wants_ids else []))))
    except TypeError as error:
        raise UserError(
            f"reward.function = {name}: it is called with {', '.join(ARGUMENTS)} (and example_ids, if it has that "
            f"parameter, and the columns that its other parameters name), which does not fit {signature}: {error}"
        ) from None
    return wants_ids, columns
