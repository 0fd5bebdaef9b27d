"""Evaluation on several ranks: the first one reads the text and adds up scores, all score their sequences.

The sequences of each batch are divided among the ranks, and their scores return to the first rank, which goes on as a
single process does. Results therefore differ from a single process by no more than with another batch size. The first
rank alone reads a batch of one sequence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from xlcli.model.head import Readout
from xlcli.model.lm import ScoreOutput
from xlcli.model.stack import Ponder
from xlcli.online import Reader
from xlcli.ranks import Ranks
from xlcli.runtime import Runtime
from xlcli.state import State

_END = "end"


class Division(AbstractContextManager["Division"]):
    """The ranks of an evaluation, on the first of them; in a single process it does nothing."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.name = ranks.broadcast(os.urandom(8).hex())
        self.n_passes = 0
        self.is_open = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Ends the evaluation on the other ranks, unless one may be lost."""
        if self.ranks.size > 1 and not isinstance(error, RuntimeError):
            self.pause()
            self.ranks.publish(f"{self.name}-{self.n_passes + 1}", _END)
            self.ranks.barrier()  # the first rank may hold the values that are published

    def reader(self, number: int, reader: Reader) -> Reader:
        """Wraps a per-rank reader to score the full batch; `number` is its index in `worker_loop`."""
        return reader if self.ranks.size == 1 else _DividedReader(self, number, reader)

    def send(self, command: Mapping[str, Any]) -> None:
        """Sends a command of the first rank to the others."""
        if not self.ranks.is_first:
            return
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


def worker_loop(readers: Sequence[Reader], runtime: Runtime, readout: Readout | None) -> None:
    """Scores the sequences of this rank, not the first one, until the first one ends the evaluation.

    All ranks have their `readers` in the same order; `readout` is what the first rank keeps of predictions, if it asks.
    """
    ranks, divided, n_passes = runtime.ranks, Division(runtime.ranks), 1
    while ranks.published(f"{divided.name}-{n_passes}") != _END:
        while not (command := ranks.broadcast(None)).get(_END):
            if "reader" in command:
                reader = divided.reader(command["reader"], readers[command["reader"]])
                state = reader.init_state(**command["arguments"])
                continue
            x, y = (torch.zeros(shape, dtype=torch.int64, device=runtime.device) for shape in command["shapes"])
            with torch.inference_mode(), runtime.autocast():
                state = reader.score(x, y, state, readout=readout if command["reads_out"] else None).state
        n_passes += 1
    ranks.barrier()


class _DividedReader:
    """Reader of all sequences, of which each rank reads equally many; the last one fills up.

    A state holds the sequences of this rank. The first rank has the tokens, the others zeros, and the first rank gets
    the result of all.
    """

    def __init__(self, divided: Division, number: int, reader: Reader) -> None:
        self.divided, self.number, self.own = divided, number, reader
        self.logits, self.observe, self.reset = reader.logits, reader.observe, reader.reset

    def init_state(self, batch: int, *, offsets: Sequence[int] | None = None, **options: Any) -> State:
        """State of the sequences of this rank, before the first token; arguments as for `LanguageModel.init_state`."""
        if batch == 1:
            self.divided.pause()
            return self.own.init_state(1, offsets=offsets, **options)
        self.divided.send({"reader": self.number, "arguments": {"batch": batch, "offsets": offsets, **options}})
        rows = self._rows(batch).tolist()
        own = None if offsets is None else [offsets[row] for row in rows]
        return self.own.init_state(len(rows), offsets=own, **options)

    def score(self, tokens: Tensor, targets: Tensor, state: State, *, readout: Readout | None = None) -> ScoreOutput:
        """Surprisal (b n) and readout of the targets of all sequences, and the state of this rank."""
        batch, ranks = len(tokens), self.divided.ranks
        if batch == 1:
            return self.own.score(tokens, targets, state, readout=readout)
        self.divided.send({"shapes": [tokens.shape, targets.shape], "reads_out": readout is not None})
        own = ranks.sum(torch.cat((tokens, targets), 1).cpu())[self._rows(batch)].to(tokens.device)
        inputs, followers = own[:, : tokens.shape[1]], own[:, tokens.shape[1] :]
        nll, state, ponder, kept = self.own.score(inputs, followers, state, readout=readout)
        whole = ranks.gather_rows(nll.cpu())[:batch]
        if ponder is not None:
            steps = ranks.gather_rows(ponder.steps.cpu())[:batch]
            ponder = Ponder(steps, steps)
        features = None if kept is None else ranks.gather_rows(kept.cpu())[:batch]
        return ScoreOutput(whole, state, ponder, features)

    def _rows(self, batch: int) -> Tensor:
        """Sequences of this rank."""
        ranks = self.divided.ranks
        n = -(-batch // ranks.size)
        return torch.arange(ranks.rank * n, (ranks.rank + 1) * n).clamp(max=batch - 1)
