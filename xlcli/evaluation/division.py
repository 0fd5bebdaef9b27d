"""Evaluation on several ranks: the first one reads the text and adds up scores, all compute those of their sequences.

The sequences of each batch are divided among the ranks, and their scores return to the first rank, which goes on as a
single process does. Results therefore differ from those of a single process by no more than those of another batch
size do. A batch of one sequence is read by the first rank alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from xlcli.model.lm import ScoreOutput
from xlcli.model.stack import Ponder
from xlcli.online import Reader
from xlcli.ranks import Ranks
from xlcli.runtime import Runtime
from xlcli.state import State

_END = "end"


class Division:
    """The other ranks, as the first one uses them; in a single process there are none.

    Args:
        ranks: Processes of the evaluation.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.name = ranks.broadcast(os.urandom(8).hex())
        self.n_passes = 0
        self.is_open = False

    def reader(self, name: str, reader: Reader) -> Reader:
        """A reader that scores all sequences, of one that scores those of this rank; `name` is that of `assist`."""
        return reader if self.ranks.size == 1 else _DividedReader(self, name, reader)

    def send(self, command: Mapping[str, Any]) -> None:
        """Sends a command to the other ranks."""
        if not self.is_open:
            self.n_passes += 1
            self.ranks.publish(f"{self.name}-{self.n_passes}", "pass")
            self.is_open = True
        self.ranks.broadcast(dict(command))

    def pause(self) -> None:
        """Ends a pass: the other ranks wait for the next one without a time limit."""
        if self.is_open:
            self.ranks.broadcast({_END: True})
            self.is_open = False

    def close(self) -> None:
        """Ends the evaluation on the other ranks."""
        if self.ranks.size > 1:
            self.pause()
            self.ranks.publish(f"{self.name}-{self.n_passes + 1}", _END)
            self.ranks.barrier()  # the first rank may hold the values that are published


@contextmanager
def division(ranks: Ranks) -> Iterator[Division]:
    """The division of an evaluation, on the first rank; the other ranks are in `assist`."""
    divided = Division(ranks)
    try:
        yield divided
    except RuntimeError:  # another rank may be lost
        raise
    except BaseException:
        divided.close()
        raise
    divided.close()


def assist(readers: Mapping[str, Callable[[], Reader]], runtime: Runtime) -> None:
    """Scores the sequences of this rank, not the first one, until the first one ends the evaluation.

    Args:
        readers: Reader by name, made when it is first used.
        runtime: Device, number type and ranks.
    """
    ranks, made, n_passes = runtime.ranks, dict[str, Reader](), 1
    name = ranks.broadcast(None)
    while ranks.published(f"{name}-{n_passes}") != _END:
        state = None
        while not (command := ranks.broadcast(None)).get(_END):
            if "reader" in command:
                key = command["reader"]
                reader = made[key] if key in made else readers[key]()
                made[key] = reader
                state = _init_state(ranks, reader, **command["arguments"])
                continue
            assert state is not None
            sizes = command["sizes"]
            text = torch.zeros((command["batch"], sum(sizes)), dtype=torch.int64)
            with torch.inference_mode(), runtime.autocast():
                state = _score(ranks, reader, text, sizes, state, runtime.device).state
        n_passes += 1
    ranks.barrier()


class _DividedReader:
    """Reader of all sequences on the first rank; its states hold those of this rank."""

    def __init__(self, divided: Division, name: str, reader: Reader) -> None:
        self.divided, self.name, self.own = divided, name, reader
        self.logits, self.observe, self.reset = reader.logits, reader.observe, reader.reset

    def init_state(self, batch: int, **options: Any) -> State:
        """State of the sequences of this rank, before the first token; arguments as for `LanguageModel.init_state`."""
        if batch == 1:
            return self.own.init_state(1, **options)
        self.divided.send({"reader": self.name, "arguments": {"batch": batch, **options}})
        return _init_state(self.divided.ranks, self.own, batch, **options)

    def score(self, tokens: Tensor, targets: Tensor, state: State) -> ScoreOutput:
        """Surprisal (b n) of the targets of all sequences, and the state of those of this rank."""
        if len(tokens) == 1:
            return self.own.score(tokens, targets, state)
        text, sizes = torch.cat((tokens, targets), 1).cpu(), [tokens.shape[1], targets.shape[1]]
        self.divided.send({"batch": len(tokens), "sizes": sizes})
        return _score(self.divided.ranks, self.own, text, sizes, state, tokens.device)


def _rows(ranks: Ranks, batch: int) -> Tensor:
    """Sequences of this rank, equally many on each; the last one fills up."""
    n = -(-batch // ranks.size)
    return torch.arange(ranks.rank * n, (ranks.rank + 1) * n).clamp(max=batch - 1)


def _init_state(
    ranks: Ranks, reader: Reader, batch: int, *, offsets: Sequence[int] | None = None, **arguments: Any
) -> State:
    rows = _rows(ranks, batch).tolist()
    own = None if offsets is None else [offsets[row] for row in rows]
    return reader.init_state(len(rows), offsets=own, **arguments)


def _score(
    ranks: Ranks, reader: Reader, text: Tensor, sizes: Sequence[int], state: State, device: torch.device
) -> ScoreOutput:
    """Scores the sequences of this rank; on the first one, the result has those of all ranks.

    Args:
        ranks: Processes of the evaluation.
        reader: Reader of this rank.
        text: Tokens and targets (b t+n) on the first rank, zeros on others.
        sizes: Numbers t and n.
        state: State of the sequences of this rank.
        device: Device of the reader.
    """
    own = ranks.sum(text)[_rows(ranks, len(text))].to(device)
    nll, state, ponder, _ = reader.score(own[:, : sizes[0]], own[:, sizes[0] :], state)
    whole = ranks.gather_rows(nll.cpu())[: len(text)]
    if ponder is not None:
        steps = ranks.gather_rows(ponder.steps.cpu())[: len(text)]
        ponder = Ponder(steps, steps)
    return ScoreOutput(whole, state, ponder, None)
