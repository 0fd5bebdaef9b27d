"""Model `xlcli` of lm-evaluation-harness. Needs the extra `lm-eval`.

    python -m xlcli.lm_eval --model xlcli --model_args model=books,mem_len=512 --tasks wikitext

The harness finds models of other packages only if they are imported, so this module is also the program `lm_eval`. In
Python: `import xlcli.lm_eval`, then `lm_eval.simple_evaluate(model="xlcli", ...)`.

Every request is a text of its own, and a text is never cut: memory carries over from call to call, so the scores are
those of `xlcli eval`. Context and continuation are tokenized as one text; a token that begins in the context and ends
in the continuation counts as continuation.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from xlcli.api import Model, load
from xlcli.config import GenerateConfig, InferenceConfig, validate
from xlcli.config.inference import Dtype
from xlcli.errors import XLError
from xlcli.evaluation.lengths import DEFAULT_SEGMENT_LEN, tokens_per_call
from xlcli.events import Generated
from xlcli.generation import generate
from xlcli.inference import InferenceSession, check_memory, longest_memory
from xlcli.text.pretokenize import whole_words

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from tqdm import tqdm
except ImportError:
    MISSING = "xlcli.lm_eval needs lm-evaluation-harness. Install it: pip install 'xlcli[lm-eval]'"
    if __name__ == "__main__":
        sys.exit(f"xlcli: {MISSING}")
    raise ImportError(MISSING) from None

DEFAULT_BATCH_SIZE = 16


@dataclass(frozen=True)
class _Row:
    """A text to score.

    Attributes:
        index: Index of its request.
        ids: Tokens (t).
        first: Number of tokens that are context, which are not scored.
    """

    index: int
    ids: NDArray[np.int32]
    first: int


class XlcliLM(LM):
    """A model of xlcli with the interface of the harness.

    Args:
        model: Name, folder or loaded model; None is the default model.
        mem_len: Memory length in tokens; None uses that of training, 0 disables recurrence.
        batch_size: Texts per batch, which does not change the results; None or `auto` is 16.
        device: `cpu`, `cuda` or `cuda:N`; None is `auto`, and so is the default `cuda:0` of the harness where there is
            no CUDA device.
        dtype: Number type of matrix products; `auto` is float32.
        memory_dtype: Number type of past keys and values; `auto` is float32.
        threads: Number of CPU threads of the process; None keeps the current number.
        seed: Seed of the first continuation of a task that samples; that of continuation i is `seed + i`.
        max_batch_size: Ignored; the harness gives it to every model.
        settings: As of `xlcli.load`.

    Raises:
        CheckpointError: There is no such model, or it is damaged.
        ConfigError: A setting is illegal.
    """

    def __init__(
        self,
        model: str | Path | Model | None = None,
        *,
        mem_len: int | None = None,
        batch_size: int | str | None = None,
        device: str | None = None,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        memory_dtype: Dtype = "auto",
        threads: int | None = None,
        seed: int = 0,
        max_batch_size: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if not isinstance(model, Model):
            name = None if model is None else str(model)
            device = "auto" if device is None or not torch.cuda.is_available() else device
            model = load(name, device=device, dtype=dtype, threads=threads, **settings)
        self.model, self.runtime = model.loaded, model.runtime
        self.options = validate(
            InferenceConfig,
            {"mem_len": mem_len, "weight_dtype": settings.get("weight_dtype", "auto"), "memory_dtype": memory_dtype},
        )
        self.seed = seed
        self.batch_size = DEFAULT_BATCH_SIZE if batch_size in (None, "auto") else int(batch_size)
        self._device = self.runtime.device

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation after its context, and whether greedy decoding generates it.

        Continuations of one context share its state. All other texts are scored in batches.
        """
        by_context: dict[bytes, list[_Row]] = defaultdict(list)
        for index, request in enumerate(requests):
            context, continuation = (text.encode() for text in request.args)
            row = self._row(index, context + continuation, len(context))
            by_context[row.ids[: row.first].tobytes()].append(row)
        singles = [row for rows in by_context.values() for row in rows if len(rows) == 1 or row.first == 0]
        results: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm) as progress:
            self._score_all(singles, 0, results, progress)
            for rows in by_context.values():
                if len(rows) > 1 and rows[0].first > 0:
                    self._score_all(rows, rows[0].first, results, progress)
        for index, request in enumerate(requests):
            self.cache_hook.add_partial("loglikelihood", request.args, results[index])
        return [results[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text, as `xlcli eval` scores it."""
        rows = [self._row(index, request.args[0].encode(), 0) for index, request in enumerate(requests)]
        results: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), desc="log-likelihoods of texts", disable=disable_tqdm) as progress:
            self._score_all(rows, 0, results, progress)
        for index, request in enumerate(requests):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[index][0])
        return [results[index][0] for index in range(len(requests))]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuation of each context up to the first of its stop texts, which is not part of it."""
        texts = []
        for index, request in enumerate(tqdm(requests, desc="continuations", disable=disable_tqdm)):
            context, given = request.args
            settings = normalize_gen_kwargs(given)
            is_sampled = settings.pop("do_sample")
            settings.setdefault("temperature", 1.0 if is_sampled else 0.0)
            lengths = {"max_new_tokens": settings.pop("max_gen_toks"), "stop": settings.pop("until")}
            own = {"mem_len": self.options.mem_len, "memory_dtype": self.options.memory_dtype}
            options = validate(GenerateConfig, {**settings, **lengths, **own})
            events = generate(self.model, context.encode(), options, self.runtime, seed=self.seed + index)
            texts += [event.text for event in events if isinstance(event, Generated)]
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _row(self, index: int, text: bytes, n_context: int) -> _Row:
        """The tokens of a text, of which the first `n_context` bytes are context."""
        tokenizer = self.model.tokenizer
        ids = np.concatenate([np.empty(0, np.int32), *map(tokenizer.encode, whole_words([text]))])
        first = np.searchsorted(np.cumsum(tokenizer.sizes(ids, text)), n_context, side="right") if n_context else 0
        return _Row(index, ids, int(first))

    def _score_all(
        self, rows: Sequence[_Row], n_shared: int, results: dict[int, tuple[float, bool]], progress: Any
    ) -> None:
        """Scores texts whose first `n_shared` tokens are the same, and read once; without any, by length."""
        if not rows:
            return
        if not n_shared:
            rows = sorted(rows, key=lambda row: len(row.ids), reverse=True)
        session = self._open(max(len(row.ids) for row in rows), min(len(rows), self.batch_size))
        session.read(rows[0].ids[:n_shared], lambda: False)
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            self._score(session.select([0] * len(batch)), batch, n_shared, results)
            progress.update(len(batch))

    def _open(self, n_tokens: int, batch_size: int) -> InferenceSession:
        """A session of one row at the start of a text, whose memory fits the machine `batch_size` times."""
        n_tokens = max(n_tokens, 1)
        session = InferenceSession.open(self.model, self.runtime, self.options, None, n_tokens, predicts=False)
        check_memory(
            self.model,
            self.runtime,
            longest_memory(self.model, session.state.span, n_tokens),
            batch_size=batch_size,
            segment_len=self._call_len(batch_size),
            memory_dtype=session.state.memory_dtype,
            changeable=("batch_size", "mem_len"),
        )
        return session

    def _call_len(self, batch_size: int) -> int:
        """Tokens of each text per call of the model, which do not change the result."""
        return max(1, min(DEFAULT_SEGMENT_LEN, tokens_per_call(self.model, self.runtime) // batch_size))

    def _score(
        self, session: InferenceSession, rows: Sequence[_Row], n_read: int, results: dict[int, tuple[float, bool]]
    ) -> None:
        """Scores a batch of texts; `session` has read their first `n_read` tokens.

        Shorter texts are padded at their end, where padding changes no score, and their rows are dropped at the next
        call.
        """
        network, device = self.model.network, self.runtime.device
        call_len = self._call_len(len(rows))
        nats, greedy = np.zeros(len(rows)), np.ones(len(rows), bool)
        active = np.arange(len(rows))
        lengths, firsts = np.array([len(row.ids) for row in rows]), np.array([row.first for row in rows])
        for start in range(n_read, int(lengths.max()), call_len):
            if (running := np.flatnonzero(lengths[active] > start)).size < active.size:
                session, active = session.select(running.tolist()), active[running]
            positions = np.arange(start, min(start + call_len, int(lengths.max())))
            targets = np.zeros((len(active), len(positions)), np.int64)
            for index, target in zip(active.tolist(), targets, strict=True):
                ids = rows[index].ids[start : start + call_len]
                target[: len(ids)] = ids
            counted = (positions >= firsts[active, None]) & (positions < lengths[active, None])
            inputs = np.column_stack((session.last_tokens, targets[:, :-1]))
            x, y = (torch.from_numpy(array).to(device) for array in (inputs, targets))
            with torch.inference_mode(), self.runtime.autocast():
                hidden, session.state = network(x, session.state)
                nll = network.head.nll(hidden, y).double().cpu().numpy()
                best = network.head.logits(hidden[torch.from_numpy(counted).to(device)]).argmax(-1).cpu().numpy()
            nats[active] += np.where(counted, nll, 0.0).sum(1)
            np.logical_and.at(greedy, active[np.nonzero(counted)[0]], best == targets[counted])
            session.last_tokens = targets[:, -1].tolist()
        for row, total, is_greedy in zip(rows, nats, greedy, strict=True):
            results[row.index] = (-float(total), bool(is_greedy))


register_model("xlcli")(XlcliLM)


def main() -> None:
    """The program `lm_eval`, which knows the model `xlcli`."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except XLError as error:
        sys.stderr.write(f"xlcli: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
