"""Language model: a function (tokens, state) -> (prediction, state').

tokens b t ─▶ embedding ─▶ stack ─▶ x b t d ─▶ head ─▶ nll b t      surprisal of each target
                                                    └▶ logits b v   prediction of the next token
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from xlcli.config import MemoryDtype, ModelConfig
from xlcli.machine import return_memory
from xlcli.memory import Buckets, Memory
from xlcli.model.embedding import BigramEmbedding
from xlcli.model.head import Head, Readout
from xlcli.model.position import Position
from xlcli.model.stack import Ponder, Stack, joined
from xlcli.ops.context import AttentionContext, Rows
from xlcli.ops.positions import DocumentPositions
from xlcli.ops.span import Span
from xlcli.state import State

NO_TOKEN = -1  # in place of a token before the beginning of a text


class ScoreOutput(NamedTuple):
    """Result of `LanguageModel.score`."""

    nll: Tensor  # (b n) surprisal of the targets in nats
    state: State  # the new state
    ponder: Ponder | None  # ponder cost of adaptive computation, if any
    readout: Tensor | None = None  # (b n f) what was kept of the prediction of each target, if asked for

    @staticmethod
    def join(outs: Iterable[ScoreOutput]) -> ScoreOutput:
        """Result of successive calls as that of one. Of the states only the last is kept."""
        nll, ponders, readouts = list[Tensor](), list[Ponder | None](), list[Tensor]()
        for out in outs:
            nll.append(out.nll)
            ponders.append(out.ponder)
            if out.readout is not None:
                readouts.append(out.readout)
        return ScoreOutput(joined(nll), out.state, Ponder.join(ponders), joined(readouts) if readouts else None)


class LanguageModel(nn.Module):
    """Embedding, stack and head."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        embedding: nn.Module,
        embedding_norm: nn.Module,
        bigrams: BigramEmbedding | None,
        position: Position,
        stack: Stack,
        head: Head,
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.embedding_norm = embedding_norm
        self.bigrams = bigrams
        self.position = position
        self.stack = stack
        self.head = head
        self.limit_distances(config.clamp_len, None)

    def limit_distances(self, clamp_len: int | None, full_len: int | None) -> None:
        """Sets `Span.clamp_len` and `Span.full_len` of new states; loading a model sets those for inference."""
        self.clamp_len, self.full_len = clamp_len, full_len

    @property
    def n_parameters(self) -> int:
        """Number of parameters; shared ones count once."""
        return sum(p.numel() for p in self.parameters())

    def receptive_field(self, mem_len: int) -> int | None:
        """Number of earlier tokens that a prediction may depend on, the current token excluded; None if unbounded."""
        if self.config.n_sinks and mem_len:
            return None
        total = 1 if self.bigrams is not None and mem_len else 0  # a pair needs the token before
        for block in self.stack.unrolled():
            field = block.attention.receptive_field(mem_len)
            if field is None:
                return None
            total += field
        return total

    def init_state(
        self,
        batch: int,
        *,
        mem_len: int,
        segment_len: int,
        span: Literal["uniform", "growing"] = "uniform",
        memory: Literal["keyvalue", "hidden"] = "keyvalue",
        offsets: Sequence[int] = (0,),
        memory_dtype: MemoryDtype = "float32",
        stride: int | None = None,
    ) -> State:
        """State before a text: with empty memory, or as `ModelConfig.zero_memory` says.

        Lengths and `stride` are in tokens. With `mem_len` 0 segments are independent; with a `stride`, too, they are
        overlapping windows that begin that far apart. `ops/span.py` explains `span`. Softmax attention remembers keys
        and values, for inference, or layer inputs, for training; `memory_dtype` is the number type of past keys and
        values at inference. `offsets` are the positions in their texts at which the sequences begin, or one for all.
        """
        layers = tuple(block.attention.init_memory(batch, memory, memory_dtype) for block in self.stack.unrolled())
        starts = torch.as_tensor(offsets, dtype=torch.int64).expand(batch).contiguous()
        device = next(self.parameters()).device
        rule = Span(
            kind=span,
            mem_len=mem_len,
            segment_len=segment_len,
            clamp_len=self.clamp_len,
            full_len=self.full_len,
            stride=stride,
            zero_memory=self.config.zero_memory,
        )
        last = torch.full((batch, self._n_last(rule)), NO_TOKEN, device=device)
        return self._with_zeros(State(layers, 0, rule, starts.to(device), last))

    def _n_last(self, span: Span) -> int:
        """Number of latest tokens that a state keeps, for a pair or for the window that begins next."""
        n_for_pairs = 0 if self.bigrams is None else 1
        return max(n_for_pairs, span.overlap)

    def reset(self, state: State) -> State:
        """State before the beginning of the text; batch size and span are kept."""
        empty = self.reset_layers(state, range(self.config.n_layers))
        return self._with_zeros(replace(empty, seen=0, offsets=torch.zeros_like(state.offsets), lag=0))

    @torch.no_grad()
    def _with_zeros(self, state: State) -> State:
        """Returns a state with memories of zero layer inputs instead of empty ones, if its span begins with such zeros.

        The model reads the zeros (b m d) as if they were tokens before the text, whose outputs nobody needs.
        """
        span, offsets, batch = state.span, state.offsets, len(state.offsets)
        if not span.zero_memory:
            return state
        have_equal_offsets = batch > 1 and bool((offsets == offsets[0]).all())
        if have_equal_offsets:  # then the memory of one sequence is that of all
            one_sequence = self._with_zeros(state.select([0]))
            return one_sequence.select([0] * batch)
        n = span.mem_len
        context = AttentionContext(span, n_memory=0, n_new=n, keep=n, device=offsets.device, start=-n, offsets=offsets)
        context = context.for_rows(Rows(torch.zeros(batch, n, dtype=torch.bool, device=offsets.device)))
        zeros = next(self.parameters()).new_zeros(batch, n, self.config.dim)
        layers = []
        for block, empty in zip(itertools.cycle(self.stack.blocks), state.layers, strict=False):
            _, memory = block.attention(block.attention_residual.pre(zeros), empty, context)
            # Outside inference mode rows are not rounded yet.
            rounded = {name: t.to(empty.tensors()[name].dtype) for name, t in memory.tensors().items()}
            layers.append(empty.from_tensors(rounded))
        return replace(state, layers=tuple(layers))

    def reset_layers(self, state: State, layers: Collection[int]) -> State:
        """State in which these layers have an empty memory, for linear and LSH attention after `redraw`."""
        memories = list(state.layers)
        for i, memory in enumerate(memories):
            if i % self.config.n_layers in layers:  # a universal stack has memories for each step
                memories[i] = memory.empty()
        return replace(state, layers=tuple(memories))

    def is_compatible(self, state: State) -> bool:
        """True if layers, shapes and lengths of a loaded state fit the model."""
        has_zeros = self.config.zero_memory and state.span.mem_len > 0
        if state.last.shape[1] != self._n_last(state.span) or state.span.zero_memory != has_zeros:
            return False
        if not bool(((state.last >= NO_TOKEN) & (state.last < self.config.vocab_size)).all()):
            return False
        if not self.stack.accepts_depth(len(state.layers)):
            return False
        for block, memory in zip(itertools.cycle(self.stack.blocks), state.layers, strict=False):
            if not block.attention.accepts(memory, state.span, state.seen):
                return False
        return True

    def inference_settings(self, state: State) -> dict[str, int | str]:
        """Lengths and settings of memories that the state was made with; they may differ from the model's."""
        span = state.span
        settings: dict[str, int | str] = {
            "mem_len": span.mem_len,
            "n_steps": len(state.layers) // self.config.n_layers,
            "clamp_len": span.clamp_len or span.full_len or "none",
            "memory_dtype": state.memory_dtype,
            "stride": span.stride or "none",
        }
        for memory in state.layers:
            if isinstance(memory, Buckets):
                settings["n_hashes"] = memory.n_rounds
        return settings

    def forward(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Last hidden states (b t d) of tokens (b t), and the new state."""
        [x], state, _ = self._read(tokens, state)
        return x, state

    def _read(
        self, tokens: Tensor, state: State, documents: Tensor | None = None, layers: Sequence[int] = ()
    ) -> tuple[list[Tensor], State, Ponder | None]:
        """Runs the stack on tokens (b t); returns normed outputs (b t d), the new state, and the ponder cost.

        The outputs are those of the blocks `layers`, numbered as in `Readout.layers`, and, last, that of the stack.
        `documents` are as in `embed`. Where the state is reset, at the end of a segment, the stack is called anew.
        """
        token_parts = self._split_at_resets(tokens, state)
        document_parts: Sequence[Tensor | None] = [None] * len(token_parts)
        if documents is not None:
            document_parts = self._split_at_resets(documents, state)
        outputs_of_parts: list[list[Tensor]] = []
        ponders: list[Ponder | None] = []
        for part, document_part in zip(token_parts, document_parts, strict=True):
            embedded, context = self.embed(part, state, document_part)
            block_outputs: list[Tensor] = []  # to which each block appends while it is watched
            with self.stack.watched(block_outputs) if layers else nullcontext():
                stack_output, memories, ponder = self.stack(embedded, state.layers, context)
            state = self.advance(state, part, memories)
            asked_outputs = [block_outputs[number - 1] for number in layers]
            outputs_of_parts.append([self.stack.final(output) for output in (*asked_outputs, stack_output)])
            ponders.append(ponder)
        outputs = [joined(parts) for parts in zip(*outputs_of_parts, strict=True)]
        return outputs, state, Ponder.join(ponders)

    def score(
        self,
        tokens: Tensor,
        targets: Tensor,
        state: State,
        documents: Tensor | None = None,
        *,
        readout: Readout | None = None,
    ) -> ScoreOutput:
        """Surprisal in nats of each target (b n) after its token, the new state, and the ponder cost.

        `tokens` are (b t), `targets` (b n) the next tokens of the last n. `documents` are positions (b t) of the tokens
        in their documents, on the CPU: no token attends to an earlier document, and absolute positions are these; None:
        one document. Full and local attention only. `readout` is what to keep of each prediction, by its layers first.
        """
        outputs, state, ponder = self._read(tokens, state, documents, () if readout is None else readout.layers)
        return self._score_outputs(outputs, targets, state, ponder, readout)

    def _score_outputs(
        self,
        outputs: Sequence[Tensor],
        targets: Tensor,
        state: State,
        ponder: Ponder | None = None,
        readout: Readout | None = None,
    ) -> ScoreOutput:
        """Surprisal of targets (b n) by the stack, with the state and ponder cost after it.

        `outputs` (b t d) are those of the blocks `readout.layers` and, last, of the stack, all normed. `readout` is the
        function of predictions whose values are kept: of those that each output makes.
        """
        first_scored = outputs[-1].shape[1] - targets.shape[1]
        scored_outputs = [output[:, first_scored:] for output in outputs]
        if readout is None:
            return ScoreOutput(self.head.nll(scored_outputs[-1], targets), state, ponder)
        features = []
        for output in scored_outputs:
            nll, features_of_output = self.head.read_out(output, targets, readout)
            features.append(features_of_output)
        # `nll` is now that of the stack. It has no gradient, as nothing that `read_out` returns.
        if torch.is_grad_enabled():
            nll = self.head.nll(scored_outputs[-1], targets)
        return ScoreOutput(nll, state, ponder, torch.cat(features, dim=-1))

    def reads_by_layer(self, state: State, readout: Readout | None) -> bool:
        """True if `score_by_layer` takes such arguments, and no call has a large table of distances of its own."""
        has_small_tables = self.config.position.kind in ("none", "rope", "xl")
        is_plain = type(self.stack) is Stack and state.span.kind == "uniform"
        return is_plain and has_small_tables and (readout is None or not readout.layers)

    def score_by_layer(
        self,
        calls: Sequence[tuple[Tensor, Tensor]],
        state: State,
        *,
        readout: Readout | None = None,
        continues: bool = True,
    ) -> list[ScoreOutput]:
        """Computes `score` for the tokens and targets of successive calls, in which each layer reads all calls in turn.

        The stack must be one that `reads_by_layer`. Unless something `continues` the states that are returned, they
        lack the memories, so only the memory of one layer at a time is in RAM.
        """
        hidden: list[Tensor] = []  # the stream of each call: input, and in the end output, of the stack
        contexts: list[AttentionContext] = []
        for tokens, _ in calls:
            x, context = self.embed(tokens, state)
            hidden.append(x)
            contexts.append(context)
            state = self.advance(state, tokens, state.layers)
        stack_inputs = hidden
        if self.stack.input_residual:  # the only stack that reads its inputs again
            stack_inputs = [*hidden]
        layers = []
        for i, (block, memory) in enumerate(zip(self.stack.blocks, state.layers, strict=True)):
            for call, context in enumerate(contexts):
                block_input = self.stack.block_input(i, hidden[call], stack_inputs[call])
                hidden[call], memory = block(block_input, memory, context)
            if continues:
                layers.append(memory)
        if continues:
            state = replace(state, layers=tuple(layers))
        if len(calls) > 1:
            return_memory()  # of the layers, before logits are computed
        scores = []
        for x, (_, targets) in zip(hidden, calls, strict=True):
            scores.append(self._score_outputs([self.stack.final(x)], targets, state, readout=readout))
        return scores

    def logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Logits (b v) of the next token after tokens (b t), and the new state."""
        x, state = self(tokens, state)
        return self.head.logits(x[:, -1]), state

    def embed(self, tokens: Tensor, state: State, documents: Tensor | None = None) -> tuple[Tensor, AttentionContext]:
        """Makes the input (b t d) of the stack from tokens (b t) of one segment, and the context of this call.

        `documents` are positions (b t) of the tokens in their documents, on the CPU; None: one document.
        """
        span, n_new = state.span, tokens.shape[1]
        document_positions = self._document_positions(tokens, state, documents)
        context = AttentionContext(
            span,
            n_memory=span.n_kept(state.seen),
            n_new=n_new,
            keep=span.n_kept(state.seen + n_new),
            device=tokens.device,
            start=state.seen,
            offsets=state.offsets,
            tokens=tokens,
            documents=document_positions,
        )
        x = self.embedding_norm(self.embedding(tokens))
        if self.bigrams is not None:
            previous = state.last[:, -1]
            begins_text_or_segment = not state.seen or not context.n_memory
            if begins_text_or_segment:  # the token before it does not count
                previous = torch.full_like(previous, NO_TOKEN)
            begins_document = None if document_positions is None else document_positions.positions == 0
            x = x + self.bigrams(tokens, previous, begins_document)
        return self.position.embed(x, context), context

    @staticmethod
    def _document_positions(tokens: Tensor, state: State, documents: Tensor | None) -> DocumentPositions | None:
        """Finds the positions of the tokens (b t) in their documents, and whether some of the memory is to be hidden.

        Arguments as for `embed`. None if there are no documents, and no padding, which is hidden like one.
        """
        span, n_new = state.span, tokens.shape[1]
        n_memory = span.n_kept(state.seen)
        # Joined states may have read fewer tokens than others: shorter ones have padding in memory before their texts.
        n_read_by_shortest = state.seen - state.lag
        has_padding = state.lag > 0 and n_memory > n_read_by_shortest
        if has_padding and not span.zero_memory:
            positions = state.offsets[:, None] + torch.arange(state.seen, state.seen + n_new, device=tokens.device)
            return DocumentPositions(positions, masked=True)
        if documents is None:
            return None
        new = torch.arange(n_new)
        if span.kind == "segment":  # a segment begins anew even within a document
            documents = documents.minimum(span.next_position(state.seen) + new)
        # Of the memory a token sees the part of its own document. On the CPU no device has to be waited for.
        n_of_document_in_memory = documents - new
        hides_memory = bool((n_of_document_in_memory < n_memory).any())
        return DocumentPositions(documents.to(tokens.device, non_blocking=True), hides_memory)

    def advance(self, state: State, tokens: Tensor, layers: tuple[Memory, ...]) -> State:
        """Returns the state after tokens (b t), of which the layers have made these memories.

        At the end of an overlapping window it also reads the overlap again, with which the next window begins.
        """
        last_tokens, n_last = state.last, state.last.shape[1]
        if n_last:
            last_tokens = torch.cat((last_tokens, tokens), dim=1)[:, -n_last:].clone()
        state = replace(state, layers=layers, seen=state.seen + tokens.shape[1], last=last_tokens)
        span, overlap = state.span, state.span.overlap
        is_window_over = overlap > 0 and state.seen >= span.segment_len and span.n_kept(state.seen) == overlap
        if not is_window_over:
            return state
        with torch.no_grad():
            empty = self.reset(state)
            embedded, context = self.embed(last_tokens[:, -overlap:], empty)
            return replace(state, layers=self.stack(embedded, empty.layers, context).memories)

    @staticmethod
    def _split_at_resets(tokens: Tensor, state: State) -> list[Tensor]:
        """Tokens, or others (b t), split at the ends of independent segments, where memory is reset."""
        first = state.span.n_until_reset(state.seen)
        if first is None or tokens.shape[1] <= first:
            return [tokens]
        n_new_of_window = state.span.segment_len - state.span.overlap
        return [tokens[:, :first], *torch.split(tokens[:, first:], n_new_of_window, dim=1)]
