"""What the engine kept of a finished request: its scores, or why it had to be ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf_ebft.rad.engine.trace import token_rewards, trace_of

_UNFINISHED = "\ufffd"  # what a decoder writes for the first bytes of a character


class TraceReader:
    """Fetches what the RAD processor kept of a traced request.

    Args:
        client: vLLM's AsyncLLM.
        tokenizer: the language model's.
    """

    def __init__(self, client: Any, tokenizer: Any) -> None:
        self._client = client
        self._tokenizer = tokenizer

    async def error(self, report_id: str) -> str | None:
        """Why the engine had to end a request, None if it did not."""
        return next((reason for reason in await self._client.collective_rpc("rad_take_error", args=(report_id,))), None)

    async def take(self, trace_id: str, choices: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """The scores of a request; the engine forgets them.

        Args:
            trace_id: the request's.
            choices: token ids of every choice, in the order of the response.

        Returns:
            For each choice `{"index", "tokens", "error"}`; a token is `{"id", "text", "rewards"}`, rewards by reward
            model before any inversion, null where there is none (the token was not chosen by RAD).
        """
        # Every tensor-parallel rank keeps the same traces: all must forget, one is read.
        traces = (await self._client.collective_rpc("rad_take_trace", args=(trace_id,)))[0]
        return [self._choice(index, traces, ids) for index, ids in enumerate(choices)]

    def _choice(self, index: int, traces: Sequence[dict[str, Any]], ids: Sequence[int]) -> dict[str, Any]:
        trace = trace_of(traces, ids)
        rewards = token_rewards(trace, ids) if trace is not None else [None] * len(ids)
        texts = token_texts(self._tokenizer, ids)
        tokens = [
            {"id": token, "text": text, "rewards": reward}
            for token, text, reward in zip(ids, texts, rewards, strict=True)
        ]
        missing = "the engine kept no scores of this choice" if trace is None and ids else None
        return {"index": index, "tokens": tokens, "error": trace["error"] if trace is not None else missing}


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; a character of several tokens belongs to its last one.

    Joined they are the whole text, but for half a character at the end.
    """
    texts: list[str] = []
    start = 0  # first token of the character that is being read
    for end in range(1, len(ids) + 1):
        before = max(start - 1, 0)  # a token more: some tokenizers write a leading space only behind another token
        known = tokenizer.decode(list(ids[before:start])) if start else ""
        text = tokenizer.decode(list(ids[before:end]))[len(known) :]
        if text.endswith(_UNFINISHED) and end < len(ids):
            texts.append("")
            continue
        texts.append(text)
        start = end
    return texts
