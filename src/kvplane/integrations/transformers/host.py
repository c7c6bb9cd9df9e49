"""The side of the cache that transformers sees: its whole protocol, forwarded to the chart.

Every member that `generate` touches is here; what people call is in `cache.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvplane.errors import ArgumentError
from kvplane.integrations.transformers import positions
from kvplane.integrations.transformers.chart import Chart, Opened
from kvplane.integrations.transformers.kinds import LayerKind
from kvplane.integrations.transformers.layer import StoreLayer
from kvplane.integrations.transformers.running import RunningStates
from kvplane.session import Session


class HostCache(Cache):
    """One layer object a model layer, all of them on one chart.

    Args:
        kinds: of every layer.
        opened: makes the session at the first update.
        remembers: whether token ids become known with every call.
    """

    def __init__(self, kinds: Sequence[LayerKind], opened: Opened, *, remembers: bool) -> None:
        super().__init__(
            layers=[
                StoreLayer(self, layer, kind.sliding_window) if kind.in_store else kind.own_layer()
                for layer, kind in enumerate(kinds)
            ]
        )
        self._kinds = tuple(kinds)
        self._owned = [layer for layer, kind in enumerate(kinds) if kind.in_store]
        self._stateful = [layer for layer, kind in enumerate(kinds) if kind.has_state]
        self._opened = opened
        self._remembers = remembers
        self._chart = self._made_chart()

    def _made_chart(self) -> Chart:
        running = RunningStates({layer: self.layers[layer] for layer in self._stateful})
        return Chart(self._owned, running, self._opened, remembers=self._remembers)

    def write(
        self, layer: int, key: Tensor, value: Tensor, *, position_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rows in, `[batch, kv_heads, tokens, dim]`; what the queries see out, likewise."""
        raise NotImplementedError

    # a token whose rows work queued on the device writes

    def begin_token(self, ids: Tensor) -> None:
        """Begin a step of one token a sequence, `[batch, 1]`; `take_back_token` undoes it.

        Raises:
            ArgumentError: nothing was read yet, layers beside the store's, or recorded rows.
            KVPlaneError: as in `Chart.write`. The cache is as it was.
        """
        session = self._chart.session
        if session is None or not self.is_plain:
            expected = (
                "one that has read a prompt, of store layers alone, not recording, no cut next"
            )
            raise ArgumentError(argument="cache", expected=expected, got="another")
        sizes = (session.num_sequences, 0, 1, 0)
        like = torch.empty(sizes, dtype=session.plan.dtype, device=session.plan.device)
        places = torch.full((session.num_sequences, 1), self.seen)
        step = self._chart.begin(like, places, ids)
        step.written_on_device()

    @property
    def is_plain(self) -> bool:
        """Whether the next token leaves nothing but its rows: no states, journals or captures."""
        chart = self._chart
        return not (self._stateful or chart.recording or self.seen + 1 in chart.wished)

    def take_back_token(self) -> None:
        """Take the step back, as if its call had never been."""
        self._chart.abort()

    def numbers_follow(self, position_ids: Tensor) -> bool:
        """Whether position ids, `[1 or batch, 1]`, are the next position's for every sequence."""
        last = self._chart.last
        if position_ids.ndim != 2 or last is None or set(last) != {(self.seen - 1,)}:  # noqa: PLR2004 - batch, tokens
            return False
        return all(row == [self.seen] for row in position_ids.tolist())

    @property
    def seen(self) -> int:
        """Tokens seen, those of the last call included."""
        return self._chart.seen

    @property
    def batch_size(self) -> int:
        """Sequences held; -1 before the first token."""
        session = self._chart.session
        return -1 if session is None else session.num_sequences

    @property
    def session(self) -> Session | None:
        """The store's session, with the last call committed; None before the first token."""
        self.settle()
        return self._chart.session

    def settle(self) -> None:
        """Commit the last call, or take it back when it died between two layers."""
        self._chart.settle()

    def rows(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """A layer's live rows in logical order, `[batch, kv_heads, rows, dim]`."""
        session = self.session
        if session is None or not len(session.live(layer)):
            return None, None
        live = session.live(layer)
        spans = session.spans(layer, live.start, live.stop)
        axis = 0 if session.batch is None else 1
        keys = torch.cat([key for key, _ in spans], dim=axis).transpose(axis, axis + 1)
        values = torch.cat([value for _, value in spans], dim=axis).transpose(axis, axis + 1)
        return (keys[None], values[None]) if session.batch is None else (keys, values)

    # asked as a call begins, and by layers beside the store

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, not rows held."""
        del layer_idx
        self._chart.begin_call()
        return self.seen

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether a layer beside the store has a state."""
        if layer_idx is not None:
            self._chart.begin_layer(layer_idx)
        return super().has_previous_state(layer_idx, state_idx)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        *args: Any,  # noqa: ANN401 - the host's signature
        **kwargs: Any,  # noqa: ANN401
    ) -> Tensor:
        """The convolution state of a layer beside the store."""
        self._chart.begin_layer(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(
        self,
        recurrent_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        **kwargs: Any,  # noqa: ANN401 - the host's signature
    ) -> Tensor:
        """The recurrent state of a layer beside the store."""
        self._chart.begin_layer(layer_idx)
        self._chart.running.before_recurrent(layer_idx, state_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    # going back, for assisted decoding

    @property
    def is_recording(self) -> bool:
        """Whether overwritten rows are kept for `crop`."""
        return self._chart.recording

    def record(self, *, on: bool) -> None:
        """Keep overwritten rows (at most a window a layer) so that `crop` can go back further."""
        self._chart.record(on=on)

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs, in every layer."""
        self.record(on=True)
        self._chart.running.each("activate_past_recording")

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, in all layers or in none.

        Args:
            tokens_to_remove: at most 0: the number of tokens, negated. 0 only settles.

        Raises:
            ArgumentError: above 0, or more tokens than there are. Nothing was changed.
            WindowLost: a ring no longer holds what the position before needs. Nothing was changed.
            PositionError: a layer beside the store cannot go back. Nothing was changed.
        """
        self._chart.take_back(-int(tokens_to_remove))
        session = self.session
        if session is not None:
            session.forget_recorded()

    # the whole of it, and its batch

    def reset(self) -> None:
        """Empty, in every layer; the next call may have another batch."""
        self._chart.reset()
        # transformers' own reset keeps the shape of a state
        fresh = {layer: self._kinds[layer].own_layer() for layer in self._stateful}
        self.go_on(self._chart.session, self._chart.last, fresh)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each beam the rows of the one it goes on from."""
        self._chart.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times."""
        places = [place for place in range(self.batch_size) for _ in range(repeats)]
        self._chart.select(places)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these sequences: their places, or a mask over all."""
        chosen = indices.nonzero()[:, 0] if indices.dtype is torch.bool else indices
        self._chart.select(chosen.tolist())

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._chart.close()

    def go_on(
        self,
        session: Session | None,
        last: list[positions.Last] | None,
        others: dict[int, Any] | None = None,
    ) -> None:
        """Go on from a session, and from states beside it, made elsewhere.

        Args:
            session: None before the first token.
            last: each sequence's last position id, None when not known.
            others: layers that are not the store's, by index; None keeps those there are.
        """
        for layer, held in (others or {}).items():
            self.layers[layer] = held
        recording = self._chart.recording
        self._chart = self._made_chart()
        self._chart.recording = recording
        if recording:
            self._chart.running.each("activate_past_recording")
        if session is not None:
            self._chart.adopt(session, last)
