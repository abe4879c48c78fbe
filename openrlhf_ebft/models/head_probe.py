"""Whether a model makes its logits as is done apart from it, from its last hidden states; found without weights.

Backbone and output embeddings are replaced for one call: what lies between and behind them is all that runs, so the
check costs nothing, and works on weights that are sharded or not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

_TOKENS = 3


class _Output:
    """What a backbone returns, with nothing in it but the hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, item: int | slice) -> Any:
        return (self.last_hidden_state,)[item]


@torch.no_grad()
def check_head(model: PreTrainedModel, head: Callable[[Tensor], Tensor]) -> None:
    """Compares `head`, which takes hidden states (P, H), with the model's own way to its logits.

    A model whose forward pass cannot be run in this way is not judged.

    Raises:
        ValueError: the two differ.
    """
    embeddings = model.get_output_embeddings()
    size, vocabulary = getattr(embeddings, "in_features", None), getattr(embeddings, "out_features", None)
    if size is None or vocabulary is None:
        return
    columns = torch.arange(vocabulary) % size
    generator = torch.Generator().manual_seed(0)
    hidden = (8 * torch.randn(1, _TOKENS, size, generator=generator)).to(model.device, model.dtype)
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device=model.device)
    calls: list[bool] = []

    def backbone(*_: Any, **__: Any) -> _Output:
        calls.append(True)
        return _Output(hidden)

    with _replaced(model.base_model, backbone), _replaced(embeddings, lambda states: states[..., columns]):
        try:
            wanted = model(input_ids=ids).logits[0]
        except Exception:  # whatever it wants besides the hidden states
            return
        got = head(hidden[0])
    if not calls:
        return  # some go around their own base model, such as OPT
    if wanted.shape != got.shape or not torch.allclose(wanted.float(), got.float(), rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"{type(model).__name__} makes its logits in a way that is not known here (scaled, capped or cut): its "
            "log-probabilities cannot be computed piece by piece, so it cannot be a policy"
        )


@contextmanager
def _replaced(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`module` with another `forward`, also where one was set on the object itself."""
    own = module.__dict__.get("forward")
    module.forward = forward  # type: ignore[assignment]
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
