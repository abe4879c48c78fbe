"""Requests of an engine that names them by slot and tells which slots a step serves, but not when one is given up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from openrlhf_ebft.rad.engine.core import RADEngine
from openrlhf_ebft.rad.engine.engine_row import EngineRow
from openrlhf_ebft.rad.engine.request import RADRequest

# (slot, start, end) -> the token ids of a slot's sequence from start to end-1.
ReadTokens = Callable[[int, int, int], list[int]]


class SlotRows:
    """Keeps an :class:`EngineRow` for every steered slot and fills in its tokens from the engine's own buffers."""

    def __init__(self, engine: RADEngine) -> None:
        self._engine = engine
        self._waiting: dict[int, tuple[RADRequest, list[int], bool]] = {}
        self._rows: dict[int, EngineRow] = {}
        self._outputs: dict[int, list[int]] = {}

    def occupy(self, slot: int, request: RADRequest | None, stop_ids: list[int], *, is_greedy: bool = False) -> bool:
        """A request takes a slot, whoever had it before; returns whether it is to be steered."""
        self._waiting.pop(slot, None)
        self._give_up(slot)
        if request is not None:
            self._waiting[slot] = (request, stop_ids, is_greedy)
        return request is not None

    def serve(
        self, slots: Sequence[int], lengths: Sequence[int], prompt_lengths: Sequence[int], read: ReadTokens
    ) -> dict[int, EngineRow]:
        """The steered rows of a step by place in the batch.

        Slots that are not part of the step give their blocks back: their requests have ended or wait, and one that
        goes on finds most of its prefix again.

        Args:
            slots: the slot of every place.
            lengths: tokens of each place's sequence.
            prompt_lengths: of them, tokens of the prompt.
            read: gives token ids of a slot.
        """
        for slot in set(self._rows) - set(slots):
            self._engine.pause(self._rows[slot])
        rows = {}
        for place, (slot, length, prompt_length) in enumerate(zip(slots, lengths, prompt_lengths, strict=True)):
            if slot in self._waiting:
                request, stop_ids, is_greedy = self._waiting.pop(slot)
                outputs = read(slot, prompt_length, length)
                self._outputs[slot] = outputs
                prompt = read(slot, 0, prompt_length)
                self._rows[slot] = self._engine.add(request, prompt, outputs, stop_ids, is_greedy=is_greedy)
            elif slot in self._rows:
                outputs = self._outputs[slot]
                del outputs[max(length - prompt_length, 0) :]
                outputs += read(slot, prompt_length + len(outputs), length)
            if slot in self._rows:
                rows[place] = self._rows[slot]
        return rows

    def _give_up(self, slot: int) -> None:
        row = self._rows.pop(slot, None)
        if row is not None:
            self._engine.remove(row)
            del self._outputs[slot]
