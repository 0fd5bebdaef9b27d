"""Model `xlcli` of lm-evaluation-harness. Needs the extra `lm-eval`.

    python -m xlcli.lm_eval --model xlcli --model_args model=books,dtype=bfloat16 --tasks wikitext

The harness finds models of other packages only if they are imported, so this module is also the program `lm_eval`. In
Python: `import xlcli.lm_eval`, then `lm_eval.simple_evaluate(model="xlcli", ...)`.

Every request is one text, and a text is never cut: memory carries over from call to call, so the scores equal
`xlcli eval`. Context and continuation are tokenized as one text; a token that begins in the context and ends
in the continuation counts as continuation.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xlcli.api import Model, load
from xlcli.api.arguments import LOAD_SETTINGS
from xlcli.config import GenerateConfig, InferenceConfig, validate
from xlcli.errors import XLError
from xlcli.evaluation.text import DEFAULT_SEGMENT_LEN, tokens_per_call
from xlcli.events import Generated
from xlcli.generation import generate
from xlcli.inference import InferenceSession, check_memory, longest_memory

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
    """A text to score: index of its request, tokens (t), and how many of them are context, which are not scored."""

    index: int
    ids: NDArray[np.int32]
    n_context: int


class XlcliLM(LM):
    """A model of xlcli with the interface of the harness.

    Args:
        model: Name, folder or loaded model; None is the default model.
        batch_size: Texts per batch, which does not change the results; None or `auto` is 16.
        device: `cpu`, `cuda` or `cuda:N`; None is `auto`, and so is the default `cuda:0` of the harness where there is
            no CUDA device.
        seed: Seed of the first continuation of a task that samples; continuation i has `seed + i`.
        max_batch_size: Ignored; the harness gives it to every model.
        settings: Of `InferenceConfig`, such as the memory length, and of `xlcli.load`.

    Raises:
        CheckpointError: There is no such model, or it is damaged.
        ConfigError: A setting is illegal.
    """

    def __init__(
        self,
        model: str | Path | Model | None = None,
        *,
        batch_size: int | str | None = None,
        device: str | None = None,
        seed: int = 0,
        max_batch_size: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        fields = InferenceConfig.model_fields.keys()
        self.options = validate(InferenceConfig, {key: value for key, value in settings.items() if key in fields})
        if not isinstance(model, Model):
            if device is None or not torch.cuda.is_available():
                device = "auto"
            load_settings = {key: value for key, value in settings.items() if key not in fields - LOAD_SETTINGS}
            model = load(model, device=device, **load_settings)
        self.model, self.runtime = model.loaded, model.runtime
        self.seed = seed
        if batch_size is None or batch_size == "auto":
            batch_size = DEFAULT_BATCH_SIZE
        self.batch_size = int(batch_size)
        self._device = self.runtime.device

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        results = self._score_all(requests, disable_tqdm)
        self._cache("loglikelihood", requests, results)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        results = [total for total, _ in self._score_all(requests, disable_tqdm)]
        self._cache("loglikelihood_rolling", requests, results)
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts = []
        for index, request in enumerate(tqdm(requests, desc="continuations", disable=disable_tqdm)):
            context, harness_settings = request.args
            settings = normalize_gen_kwargs(harness_settings)
            is_sampled = settings.pop("do_sample")
            settings.setdefault("temperature", 1.0 if is_sampled else 0.0)
            lengths = {"max_new_tokens": settings.pop("max_gen_toks"), "stop": settings.pop("until")}
            options = validate(GenerateConfig, self.options.model_dump() | settings | lengths)
            events = generate(self.model, context.encode(), options, self.runtime, seed=self.seed + index)
            texts += [event.text for event in events if isinstance(event, Generated)]
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _cache(self, method: str, requests: Sequence[Any], results: Sequence[Any]) -> None:
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial(method, request.args, result)

    def _score_all(self, requests: Sequence[Any], disable_tqdm: bool) -> list[tuple[float, bool]]:
        """Log-likelihood of the last text of each request after its context, if any, and whether it is greedy.

        A context that several requests share is read once. All other texts are scored in batches, by length.
        """
        by_context = defaultdict[bytes, list[_Row]](list)
        for index, request in enumerate(requests):
            row = self._tokenize(index, [text.encode() for text in request.args])
            by_context[row.ids[: row.n_context].tobytes()].append(row)
        alone, groups = list[_Row](), list[list[_Row]]()
        for context, rows in by_context.items():
            if context and len(rows) > 1:
                groups.append(rows)
            else:
                alone += rows
        results: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm) as progress:
            if alone:
                self._score_group(alone, 0, results, progress)
            for rows in groups:
                self._score_group(rows, rows[0].n_context, results, progress)
        return [results[index] for index in range(len(requests))]

    def _tokenize(self, index: int, texts: Sequence[bytes]) -> _Row:
        """The texts of a request as one; tokens that end within the context, all texts but the last, are its own."""
        whole = b"".join(texts)
        ids, sizes = self.model.tokenizer.tokens(whole)
        context_bytes = len(whole) - len(texts[-1])
        token_ends = np.cumsum(sizes)
        return _Row(index, ids, int(np.searchsorted(token_ends, context_bytes, side="right")))

    def _score_group(
        self, rows: list[_Row], n_shared: int, results: dict[int, tuple[float, bool]], progress: Any
    ) -> None:
        """Scores texts with the same first `n_shared` tokens, read once; enters `results` by index of the request."""
        rows = sorted(rows, key=lambda row: len(row.ids), reverse=True)
        shared = self._open(max(1, len(rows[0].ids)), min(len(rows), self.batch_size))
        shared.read(rows[0].ids[:n_shared], lambda: False)
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            self._score(shared.select([0] * len(batch)), batch, n_shared, results)
            progress.update(len(batch))

    def _open(self, n_tokens: int, batch_size: int) -> InferenceSession:
        """A session of one row at the start of a text, whose memory fits the machine `batch_size` times."""
        session = InferenceSession.open(self.model, self.runtime, self.options, None, n_tokens, predicts=False)
        check_memory(
            self.model,
            self.runtime,
            longest_memory(self.model, session.state.span, n_tokens),
            batch_size=batch_size,
            segment_len=self._call_len(batch_size),
            memory_dtype=session.state.memory_dtype,
            changeable=("batch_size",),
        )
        return session

    def _call_len(self, batch_size: int) -> int:
        """Tokens of each text per call of the model, which do not change the result."""
        return max(1, min(DEFAULT_SEGMENT_LEN, tokens_per_call(self.model, self.runtime) // batch_size))

    def _score(
        self, session: InferenceSession, rows: Sequence[_Row], n_read: int, results: dict[int, tuple[float, bool]]
    ) -> None:
        """Scores a batch of texts; `session` has read their first `n_read` tokens. Enters `results`.

        Shorter texts are padded at their end, where padding changes no score, and their rows are dropped at the next
        call. Arrays have the axes rows (n), or active rows and positions of a call (a, t).
        """
        network, device = self.model.network, self.runtime.device
        call_len = self._call_len(len(rows))
        nats, greedy = np.zeros(len(rows)), np.ones(len(rows), bool)
        lengths = np.array([len(row.ids) for row in rows])
        context_lengths = np.array([row.n_context for row in rows])
        longest = int(lengths.max())
        active = np.arange(len(rows))  # the texts that have not ended, which are the rows of the session
        for start in range(n_read, longest, call_len):
            still_active = np.flatnonzero(lengths[active] > start)
            if still_active.size < active.size:
                session = session.select(still_active.tolist())
                active = active[still_active]
            positions = np.arange(start, min(start + call_len, longest))
            targets = np.zeros((len(active), len(positions)), np.int64)
            for index, target in zip(active.tolist(), targets, strict=True):
                ids = rows[index].ids[start : start + call_len]
                target[: len(ids)] = ids  # the others are padded
            is_scored = (positions >= context_lengths[active, None]) & (positions < lengths[active, None])
            inputs = np.column_stack((session.last_tokens, targets[:, :-1]))
            x, y = (torch.from_numpy(array).to(device) for array in (inputs, targets))
            with torch.inference_mode(), self.runtime.autocast():
                hidden, state = network(x, session.state)
                nll = network.head.nll(hidden, y).double().cpu().numpy()
                # Logits of scored tokens only: those of all would take much memory.
                best = network.head.logits(hidden[torch.from_numpy(is_scored).to(device)]).argmax(-1).cpu().numpy()
            nats[active] += np.where(is_scored, nll, 0.0).sum(1)
            np.logical_and.at(greedy, active[np.nonzero(is_scored)[0]], best == targets[is_scored])
            session = replace(session, state=state, last_tokens=targets[:, -1].tolist())
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
