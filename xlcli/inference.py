"""A model reading one text: its state and the token it has yet to read, moved on together; what a saved state carries.

A token is read when the next one is to be predicted, so that one token, `last`, has always been scored or drawn but not
read. At the very start it is the tokenizer's `start_id`: a text is assumed to begin after a line end.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from xlcli.errors import StateError

if TYPE_CHECKING:
    from torch import Tensor

    from xlcli.config import InferenceConfig
    from xlcli.runtime import Runtime
    from xlcli.state import State
    from xlcli.store.folder import LoadedModel

CALL = 512
"""Most tokens read in one call of the model: bounds memory, and the time until a signal is heeded."""

Carry = Mapping[str, str]
"""Texts saved with a state: unread text, counters, dice."""
Save = Callable[["State", Carry], None]
"""Writes a state and the texts that go with it."""


class InferenceSession:
    """A model, its state and the token of each row that it has yet to read."""

    def __init__(self, model: LoadedModel, runtime: Runtime, state: State, last: list[int]) -> None:
        self.model = model
        self.runtime = runtime
        self.state = state
        self.last = last

    @staticmethod
    def open(
        model: LoadedModel, runtime: Runtime, options: InferenceConfig, resume: tuple[State, Carry] | None
    ) -> InferenceSession:
        """A reader of nothing yet, or of what `resume` holds; None is as saved, or else as trained.

        Raises:
            ConfigError: The model was loaded with other values of `n_steps` or `n_hashes` than the options name.
            StateError: The state remembers by another rule than the one asked for, or holds several texts.
        """
        model.check_settings(options.n_steps, options.n_hashes)
        if resume is None:
            train, mem_len = model.config.train, options.mem_len
            state = model.network.init_state(
                1,
                mem_len=train.mem_len if mem_len is None else mem_len,
                segment_len=train.segment_len,
            )
            return InferenceSession(model, runtime, state, [model.tokenizer.start_id])
        state, carry = resume
        if options.mem_len is not None and options.mem_len != state.span.mem_len:
            raise StateError(
                f"the state has a memory of {state.span.mem_len} tokens, but --mem-len is {options.mem_len}.",
                f"Leave out --mem-len, or give {state.span.mem_len}.",
            )
        settings = model.network.inference_settings(state)
        for name, value in (("n_steps", options.n_steps), ("n_hashes", options.n_hashes)):
            if value is not None and value != settings[name]:
                flag = f"--{name.replace('_', '-')}"
                raise StateError(
                    f"the state was saved with {flag} {settings[name]}, but {flag} is {value}.", f"Leave out {flag}."
                )
        if state.batch_size != 1:
            raise StateError(
                f"the state holds {state.batch_size} texts side by side, not one.", "Start without --state-in."
            )
        return InferenceSession(model, runtime, state, [_token(carry, model)])

    def nats(self, ids: NDArray[np.integer]) -> NDArray[np.float64]:
        """How surprising each of `ids` (t, at least one) is after all before it; they become what was read. One row."""
        tokens = torch.tensor([[*self.last, *ids[:-1].tolist()]], device=self.runtime.device)
        targets = torch.tensor([ids.tolist()], device=self.runtime.device)
        with torch.inference_mode(), self.runtime.autocast():
            nats, self.state = self.model.network.nll(tokens, targets, self.state)
        self.last = [int(ids[-1])]
        return nats[0].double().cpu().numpy()

    def read(self, ids: NDArray[np.integer], stop: Callable[[], bool]) -> int:
        """Reads `ids` (any number) in large calls without scoring them; how many before `stop` was true. One row."""
        for at in range(0, len(ids), CALL):
            if stop():
                return at
            piece = ids[at : at + CALL].tolist()
            tokens = torch.tensor([[*self.last, *piece[:-1]]], device=self.runtime.device)
            with torch.inference_mode(), self.runtime.autocast():
                _, self.state = self.model.network.logits(tokens, self.state)
            self.last = [piece[-1]]
        return len(ids)

    def predict(self) -> Tensor:
        """Reads the last token of each row: logits (b v) of the next ones, which the caller puts into `last`."""
        tokens = torch.tensor(self.last, device=self.runtime.device)[:, None]
        with torch.inference_mode(), self.runtime.autocast():
            logits, self.state = self.model.network.logits(tokens, self.state)
        return logits

    def reset(self) -> None:
        """Forgets everything read."""
        self.state = self.model.network.reset(self.state)
        self.last = [self.model.tokenizer.start_id] * len(self.last)

    def select(self, index: Sequence[int]) -> InferenceSession:
        """A reader of the rows named, in that order, which shares nothing with this one."""
        with torch.inference_mode():
            state = self.state.select(list(index))
        return InferenceSession(self.model, self.runtime, state, [self.last[i] for i in index])


@dataclass(frozen=True)
class PendingText:
    """Text that has arrived and that the model has not read: tokens, and the bytes of those tokens and of what follows.

    The tokens are kept because text cut between tokens need not give the same tokens again.
    """

    ids: NDArray[np.int32]
    covered: int
    data: bytes

    def save(self) -> dict[str, str]:
        """Texts to save with a state."""
        return {"ids": pack(self.ids.astype("<i4").tobytes()), "covered": str(self.covered), "text": pack(self.data)}

    @staticmethod
    def restore(carry: Carry, vocab_size: int) -> PendingText:
        """What `save` gave; nothing when the state carries no text.

        Raises:
            StateError: It is damaged.
        """
        try:
            ids = np.frombuffer(unpack(carry.get("ids", "")), dtype="<i4").astype(np.int32)
            data = unpack(carry.get("text", ""))
            covered = int(carry.get("covered", "0"))
        except ValueError as error:
            raise damaged(error) from None
        if not 0 <= covered <= len(data) or (len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size):
            raise damaged("its unread text does not fit together")
        return PendingText(ids, covered, data)


def pack(data: bytes) -> str:
    """Bytes as a text that JSON can hold."""
    return base64.b64encode(data).decode("ascii")


def unpack(text: str) -> bytes:
    """The bytes that `pack` was given; `ValueError` for any other text."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


def damaged(reason: object) -> StateError:
    """The error of a state whose texts make no sense."""
    return StateError(f"what the state carries is damaged: {reason}.", "Start without --state-in.")


def _token(carry: Carry, model: LoadedModel) -> int:
    try:
        token = int(carry["last"])
    except (KeyError, ValueError):
        raise damaged("it does not say which token came last") from None
    if not 0 <= token < model.tokenizer.vocab_size:
        raise damaged(f"token {token} is not in the vocabulary")
    return token
