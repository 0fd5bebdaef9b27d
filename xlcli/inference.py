"""Inference session: a model with its state and last token.

The model reads a token when it predicts the next one. The last token, scored or sampled, is therefore always unread. At
the start of a text it is the tokenizer's `start_id`, a line end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xlcli.config import InferenceConfig, MemoryDtype
from xlcli.config.inference import ContextSettings
from xlcli.errors import ConfigError
from xlcli.events import Notice
from xlcli.machine import available_bytes, fitting, require_memory
from xlcli.model.decoder import Decoder, may_decode
from xlcli.model.head import Readout
from xlcli.online import Scorer, continued, make_scorer, not_finite
from xlcli.online.frozen import FrozenModel
from xlcli.ops.span import Span
from xlcli.runtime import Runtime
from xlcli.state import State
from xlcli.store.folder import LoadedModel
from xlcli.store.state_files import SessionState

TOKENS_PER_CALL = 512  # maximum number of tokens per call: bounds the RAM and the response time to a signal

MAX_ROWS = 16  # maximum number of texts per call of the model
MAX_ROWS_BYTES = 2**29  # maximum size of their memory tensors
COMPILING = "compiling the kernels of {}, once on this machine: 10 to 40 seconds of processor time"
NOT_KEPT = "the compiled kernels of {} cannot be kept, so each run compiles them again: {}"

Scored = tuple[NDArray[np.float64], NDArray[np.float64] | None]  # surprisal (t) in nats; features (t f) if read out
SaveState = Callable[[SessionState], None]  # must not keep the value: the session may overwrite its memory in place


def check_settings(model: LoadedModel, options: InferenceConfig, runtime: Runtime) -> None:
    """Checks settings that are given anew for each text.

    `ConfigError` if one does not apply to the model or the number type of matrix products, or differs from the one that
    the model was loaded with.
    """
    model.check_settings(options)
    if options.learning.adapt and runtime.dtype == torch.float16:
        raise ConfigError("--adapt has no gradients in float16.", "Set runtime.dtype to float32 or bfloat16.")


@dataclass
class InferenceSession:
    """A model, its state, and the last token of each row."""

    model: LoadedModel
    runtime: Runtime
    options: InferenceConfig
    scorer: Scorer  # the model with these options
    state: State  # state of the scorer after all tokens before the last one
    last_tokens: list[int]  # token of each row that has been scored or sampled but not read
    is_first: bool = True  # Nothing was predicted yet. The first prediction of a text does not wait until kernels load.
    start_token: int | None = None  # the token that is unread after `reset`; None is `start_id`
    decoding_scorer: Scorer | None = None  # the scorer with the kernels of `decoder`, once they have predicted

    @classmethod
    def open(
        cls,
        model: LoadedModel,
        runtime: Runtime,
        options: InferenceConfig,
        resume: SessionState | None,
        n_tokens: int | None = None,
        *,
        predicts: bool = True,
    ) -> InferenceSession:
        """A session of one row, at the start of a text or continuing `resume`.

        Options that are open are decided by `resume`, else by `InferenceConfig.reading`. `n_tokens` is the maximum
        number of tokens that the session will read, None if unlimited; `predicts`: it will call `predict`.

        `ConfigError` as `check_settings`, `ResourceError` if the memory does not fit the machine, `StateError` if
        `resume` was saved with other values than `options` gives, or holds several rows.
        """
        check_settings(model, options, runtime)
        if resume is not None:
            state = resume.model_state
            options = continued(model.network, options, state, runtime.dtype)
            check_settings(model, options, runtime)
            longest = longest_memory(model, state.span, n_tokens)
            # A state keeps its lengths, so there is none that the user may lower.
            check_memory(model, runtime, longest, memory_dtype=state.memory_dtype, changeable=(), predicts=predicts)
            scorer = make_scorer(model.network, model.tokenizer, model.learning(options))
            return cls(model, runtime, options, scorer, state, [resume.last_token], is_first=False)
        reading = options.reading(model.config.model, model.config.train.reading)
        longest = longest_memory(model, reading, n_tokens)
        check_memory(model, runtime, longest, memory_dtype=reading.memory_dtype, predicts=predicts)
        scorer = make_scorer(model.network, model.tokenizer, model.learning(options))
        state = scorer.init_state(1, **reading.init_arguments)
        return cls(model, runtime, options, scorer, state, [model.tokenizer.start_id])

    def score(self, ids: NDArray[np.integer], readout: Readout | None = None) -> Scored:
        """Surprisal (t) in nats of the next tokens `ids` (t, at least one) of one row, and features (t f) if read out.

        `CheckpointError` or `DivergedError` if a score is not finite.
        """
        tokens, targets = self._next(ids)
        with torch.inference_mode(), self.runtime.autocast():
            out = self.scorer.score(tokens, targets, self.state, readout=readout)
        self.state = out.state
        return self._as_arrays(out.nll, out.readout)

    def score_each(self, texts: Sequence[NDArray[np.integer]], readout: Readout | None = None) -> list[Scored]:
        """What `reset` and `score` give for each text of a session that is frozen, in one call of the model.

        The session is then as after `reset`. Raises the errors of `score`.
        """
        assert isinstance(self.scorer, FrozenModel)
        self.reset()
        tokens = [torch.tensor(ids.tolist(), device=self.runtime.device) for ids in texts]
        with torch.inference_mode(), self.runtime.autocast():
            scores = self.scorer.score_each(tokens, self.last_tokens[0], readout=readout)
        return [self._as_arrays(nats, features) for nats, features in scores]

    def _as_arrays(self, nats: Tensor, features: Tensor | None) -> Scored:
        """Surprisal (1 t) and features (1 t f) of the one row."""
        surprisal: NDArray[np.float64] = nats[0].double().cpu().numpy()
        if not np.isfinite(surprisal).all():
            raise not_finite(self.model.name, self.options)
        return surprisal, None if features is None else features[0].double().cpu().numpy()

    def read(self, ids: NDArray[np.integer], stop: Callable[[], bool]) -> int:
        """Reads `ids` (t, may be empty), until `stop`; returns the number read. One row only."""
        for start in range(0, len(ids), TOKENS_PER_CALL):
            if stop():
                return start
            part = ids[start : start + TOKENS_PER_CALL]
            if self.state.online:  # what follows each token is learned
                self.score(part)
                continue
            with torch.inference_mode(), self.runtime.autocast():
                _, self.state = self.scorer.logits(self._next(part)[0], self.state)
        return len(ids)

    def _next(self, ids: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Inputs and targets (1 t) of a call that reads up to the last of the next tokens (t), which remains unread."""
        text = torch.tensor([[*self.last_tokens, *ids.tolist()]], device=self.runtime.device)
        self.last_tokens = [int(ids[-1])]
        return text[:, :-1], text[:, 1:]

    @property
    def decoder(self) -> Decoder | None:
        return None if self.is_first else find_decoder(self.model, self.runtime)

    def compile(self, n: int, stop: Callable[[], bool]) -> Iterator[Notice]:
        """Compiles the kernels that the next `n` predictions lack, which takes seconds each, until `stop`."""
        n_by_kernels = n - int(self.is_first)  # the first one is made without them
        if stop() or n_by_kernels <= 0:
            return
        decoder = find_decoder(self.model, self.runtime)
        if decoder is None:
            return
        weights, weight_type = self.model.encoding, decoder.weight_type
        if self.state.adaptation is not None:  # weights that change are not rounded
            weights, weight_type = "float32", torch.float32
        for types in decoder.uncompiled(self.state, weight_type):
            yield Notice(COMPILING.format(f"generation for {weights} weights and {self.state.memory_dtype} memory"))
            problem = decoder.kernels.compile_kernel(*types, stop)
            if problem is not None:
                yield Notice(NOT_KEPT.format("generation", problem))

    def predict(self) -> Tensor:
        """Logits (b v) of the next token of each row; `DivergedError` if adapted weights give no finite ones."""
        tokens = torch.tensor(self.last_tokens, device=self.runtime.device)[:, None]
        if self.decoding_scorer is None:
            decoder = self.decoder
            if decoder is not None:
                model, learning = self.model, self.model.learning(self.options)
                self.decoding_scorer = make_scorer(model.network, model.tokenizer, learning, decoder)
        self.is_first = False
        scorer = self.decoding_scorer or self.scorer
        with torch.inference_mode(), self.runtime.autocast():
            logits, self.state = scorer.logits(tokens, self.state)
        if self.state.adaptation is not None and not logits.isfinite().all():
            raise not_finite(self.model.name, self.options)
        return logits

    def append(self, tokens: list[int]) -> None:
        """Appends a sampled token to each row, of which nothing is learned."""
        self.last_tokens = tokens

    def reset(self) -> None:
        with torch.inference_mode(), self.runtime.autocast():
            self.state = self.scorer.reset(self.state)
        start_token = self.model.tokenizer.start_id if self.start_token is None else self.start_token
        self.last_tokens = [start_token] * len(self.last_tokens)

    def freeze(self) -> None:
        """Lets `reset` return to the present state of one row, from which texts are then scored one by one."""
        self.scorer = FrozenModel(self.scorer, self.state)
        self.start_token = self.last_tokens[0]
        self.reset()

    @property
    def resumable(self) -> tuple[State, int]:
        """The state to save of one row, and its unread token: those from which a frozen session began."""
        if isinstance(self.scorer, FrozenModel):
            assert self.start_token is not None
            return self.scorer.baseline, self.start_token
        return self.state, self.last_tokens[0]

    def select(self, rows: Sequence[int]) -> InferenceSession:
        """A session of copies of the given rows, in that order; `select([0] * 8)` continues row 0 in eight ways."""
        with torch.inference_mode():
            state = self.state.select(list(rows))
        return replace(self, state=state, last_tokens=[self.last_tokens[row] for row in rows])

    @staticmethod
    def join(sessions: Sequence[InferenceSession]) -> InferenceSession:
        """Copies of the rows of all sessions, whose states can be joined, as the rows of one session."""
        last_tokens = [token for session in sessions for token in session.last_tokens]
        with torch.inference_mode():
            state = State.join([session.state for session in sessions])
        return replace(sessions[0], state=state, last_tokens=last_tokens)

    def max_rows(self, n_tokens: int | None) -> int:
        """Number of texts of `n_tokens` tokens (None: any number) per call of the model."""
        longest = longest_memory(self.model, self.state.span, n_tokens)
        bytes_per_text = self.model.config.model.memory_bytes(longest, self.state.memory_dtype)
        n_that_fit = MAX_ROWS_BYTES // max(1, bytes_per_text)
        return max(1, min(MAX_ROWS, n_that_fit))


def find_decoder(model: LoadedModel, runtime: Runtime) -> Decoder | None:
    """Compiled kernels of the predictions of a model, if it has some for this device and number type."""
    if runtime.dtype != torch.float32 or not may_decode(model.network):  # it may have been moved since
        return None
    return model.decoder if isinstance(model.decoder, Decoder) else None


def describe_decoding(model: LoadedModel, runtime: Runtime) -> Notice:
    """Notice that tokens after the first one are generated by compiled kernels, or not."""
    means = "PyTorch" if find_decoder(model, runtime) is None else "compiled kernels"
    return Notice(f"tokens are generated by {means}", "detail")


def check_memory(
    model: LoadedModel,
    runtime: Runtime,
    mem_len: int,
    *,
    batch_size: int | None = None,
    segment_len: int | None = None,
    memory_dtype: MemoryDtype = "float32",
    changeable: Sequence[str] = ("batch_size", "segment_len", "mem_len"),
    predicts: bool = False,
) -> None:
    """Compares the memory that calls of the model need with the machine, before it is allocated.

    `mem_len` is the maximum number of tokens in the memory of a sequence, `segment_len` per call. By default one
    sequence is read, `TOKENS_PER_CALL` tokens at a time. `changeable` are the settings that the user may lower, if they
    are given. `predicts`: tokens are predicted one by one, by kernels where there are any. `ResourceError` if the
    memory does not fit the machine.
    """
    arguments = {"batch_size": batch_size, "segment_len": segment_len, "mem_len": mem_len}
    given = {name: size for name, size in arguments.items() if size is not None}
    defaults = {"batch_size": 1, "segment_len": TOKENS_PER_CALL}
    has_kernels = predicts and runtime.dtype == torch.float32

    def needed_bytes(changes: Mapping[str, int]) -> int:
        """Memory of the calls with some of the given sizes changed."""
        sizes = {**defaults, **given, **changes}
        mem_len = sizes["mem_len"]
        n_bytes = model.config.model.inference_bytes(sizes["batch_size"], sizes["segment_len"], mem_len, memory_dtype)
        if has_kernels:
            n_bytes += model.decoder_bytes(mem_len)
        return n_bytes

    device = str(runtime.device)
    available = available_bytes(device)
    n_bytes = needed_bytes({})
    if n_bytes <= available:
        return
    may_be_lowered = {name: given[name] for name in changeable if name in given}
    remedy = fitting(may_be_lowered, needed_bytes, available, "Use a smaller model.")
    require_memory(f"the memory of model {model.name}", n_bytes, remedy, device)


def window_notice(span: Span | ContextSettings, options: InferenceConfig, n_tokens: int) -> list[Notice]:
    """Notice that a text of `n_tokens` is read in overlapping windows, if it is, and no option asks for them."""
    has_overlapping_windows = span.stride is not None and n_tokens > span.segment_len
    if not has_overlapping_windows or options.asks_for_windows:
        return []
    windows = f"overlapping windows of {span.segment_len:,} tokens, which begin every {span.stride:,} tokens"
    return [Notice(f"the text is longer than the window of this model: it is read in {windows}")]


def compile_cache(
    options: InferenceConfig, stop: Callable[[], bool], resume: SessionState | None = None
) -> Iterator[Notice]:
    """Compiles the kernels of the context cache, if it is used and they are not compiled yet, until `stop`."""
    if options.learning.context_cache is None and (resume is None or resume.model_state.cache is None):
        return
    from xlcli.kernels import mixture

    if not mixture.is_compiled():
        yield Notice(COMPILING.format("the context cache"))
        problem = mixture.compile_kernels(stop)
        if problem is not None:
            yield Notice(NOT_KEPT.format("the context cache", problem))


def longest_memory(model: LoadedModel, span: Span | ContextSettings, n_tokens: int | None) -> int:
    """Maximum number of tokens in memory with this span or reading after `n_tokens` tokens (None: any number)."""
    if span.mem_len == 0:  # segments or windows are read from empty memory
        return span.segment_len if n_tokens is None else min(span.segment_len, n_tokens)
    if n_tokens is None:
        return span.mem_len
    return model.config.model.tokens_in_memory(span.mem_len, n_tokens)
