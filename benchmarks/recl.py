"""Relative effective context length (Dai et al. 2019, section 4.3 and appendix C) of models of equal size.

    python benchmarks/recl.py BOOKS [--tokens 2000000] [--seeds 0 1 2] [--targets 1000]
    python benchmarks/recl.py BOOKS --lstm-rates 1e-3 2e-3 4e-3        # validation loss of the LSTM by learning rate
    python benchmarks/recl.py --table benchmarks/results/recl.json     # prints the table

BOOKS has folders train and valid of text files; the beginning of each file is used. Every model is one `xlcli train`
with the same vocabulary, budget and shape. Then the loss of the same tokens of validation text is computed with each
context length: each token is predicted from exactly that many tokens before it, read from an empty memory of the length
of training; a model of absolute positions reads at most its segment, since it has learned no later ones. The gain of a
longer context counts only where the loss falls below the lowest one that any model of the group has with the shorter
context. The relative effective context length is the length after which STEP further tokens reduce the relative
perplexity by less than 1 %, on the tokens that are hardest with the shorter context (a share of 0.1, 0.5 or 1 of them).

Tokens whose loss rises do not offset the gain of others, so lengths grow with any change of the predictions, and they
depend on the models of the group: the table also has ratios of two models alone, and the plain reduction of perplexity.
Intervals are those of a bootstrap over seeds and tokens.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import positions
import torch
from positions import TEXT, part
from runs import save, saved, train
from torch import Tensor, nn
from torch.nn import functional as F

from xlcli.config import TrainConfig
from xlcli.optim import lr_factor
from xlcli.store.folder import load
from xlcli.text.loaders import TrainLoader
from xlcli.text.tokenizers import Tokenizer

STEP, LONGEST, LEAST_GAIN = 64, 512, 0.01
CONTEXTS = range(STEP, LONGEST + 1, STEP)
SHARES = (0.1, 0.5, 1.0)
"""Shares of the tokens, those with the largest losses of the group first: r of the paper."""
BATCH = 10
N_SAMPLES = 1000
"""Samples of the bootstrap."""
GAIN = f"reduction of perplexity from {STEP} to {LONGEST}, %"
SHAPE = positions.SHAPE | {"model.dim": 256, "model.n_layers": 6}
SEGMENT = SHAPE["train.segment_len"]
NO_MEMORY = {"train.mem_len": 0, "train.segment_len": 2 * SEGMENT, "train.batch_size": 4}
VARIANTS = {
    "Transformer-XL, memory 128": {"train.mem_len": 128},
    "Transformer-XL, without recurrence": NO_MEMORY,
    "vanilla: sinusoids on queries and keys": NO_MEMORY | {
        "model.position.kind": "sinusoidal", "model.position.placement": "qk",
    },
    "LSTM": {},
}  # fmt: skip
LSTM_SHAPE = {"dim": 512, "n_layers": 2}
"""About as many parameters as the other models."""
LSTM_RATE = 2e-3
States = tuple[Tensor, Tensor] | None
Losses = dict[int, np.ndarray]
"""Context length to the losses of the same tokens in nats."""
Group = dict[str, Losses]
"""Losses of each model that is compared."""


class LSTM(nn.Module):
    """Language model of LSTM layers, whose head is the table of token vectors (Merity et al. 2018, without dropout)."""

    def __init__(self, vocab_size: int, dim: int, n_layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, dim)
        self.layers = nn.LSTM(dim, dim, n_layers, batch_first=True)
        nn.init.normal_(self.table.weight, std=0.05)

    def nll(self, tokens: Tensor, targets: Tensor, state: States = None) -> tuple[Tensor, States]:
        """Loss (b t) of each target in nats, and the new state."""
        x, state = self.layers(self.table(tokens), state)
        return F.cross_entropy((x @ self.table.weight.T).mT, targets, reduction="none"), state


def train_lstm(
    ids: np.ndarray, tokenizer: Tokenizer, tokens: int, *, seed: int, lr: float = LSTM_RATE
) -> tuple[LSTM, float]:
    """An LSTM trained on as many tokens in the order of the model with memory, and its tokens per second."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = LSTM(tokenizer.vocab_size, **LSTM_SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    loader, state, began = TrainLoader(ids, 8, tokenizer.start_id), None, time.monotonic()
    n_steps = -(-tokens // (8 * SEGMENT))
    for step in range(n_steps):
        optimizer.param_groups[0]["lr"] = lr * lr_factor(TrainConfig(), step / n_steps, step)
        inputs, targets, _ = loader.batch(step * SEGMENT, SEGMENT)
        nll, (h, c) = model.nll(torch.from_numpy(inputs), torch.from_numpy(targets), state)
        state = h.detach(), c.detach()
        optimizer.zero_grad()
        nll.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, n_steps * 8 * SEGMENT / (time.monotonic() - began)


@torch.inference_mode()
def losses(ids: Tensor, n: int, last_nll: Callable[[Tensor], Tensor]) -> Losses:
    """Losses of n evenly spaced tokens."""
    places = torch.linspace(LONGEST, len(ids) - 1, n).long()
    found = {}
    for context in CONTEXTS:
        parts = [last_nll(ids[at[:, None] + torch.arange(-context, 1)]) for at in places.split(BATCH)]
        found[context] = torch.cat(parts).double().numpy()
    return found


def lengths(group: Group, share: float) -> dict[str, int]:
    """Relative effective context length of each model of the group."""
    found = {}
    for name, own in group.items():
        context = STEP
        while context + STEP <= LONGEST and gain(group, own, context, context + STEP, share) >= LEAST_GAIN:
            context += STEP
        found[name] = context
    return found


def gain(group: Group, own: Losses, short: int, long: int, share: float) -> float:
    """Relative reduction of the perplexity from context `short` to `long` (appendix C)."""
    baseline = np.min([losses[short] for losses in group.values()], axis=0)
    hardest = np.argsort(-baseline)[: max(1, round(share * len(baseline)))]
    before, after = (np.exp(np.minimum(baseline, own[c])[hardest].mean()) for c in (short, long))
    return float((before - after) / before)


def one(home: Path, name: str, seed: int, tokens: int, n_targets: int) -> dict[str, object]:
    """Trains one variant and computes its losses."""
    is_lstm = name == "LSTM"
    settings = SHAPE | VARIANTS[name]
    budget = 8 * SEGMENT if is_lstm else tokens  # for an LSTM one step, which gives the vocabulary
    run = train(home, *TEXT, settings=settings, tokens=budget, seed=seed)
    model = load(home / "model")
    ids, valid = (model.tokenizer.encode((home / f"{part}.txt").read_bytes()) for part in ("train", "valid"))
    if is_lstm:
        lstm, speed = train_lstm(ids, model.tokenizer, tokens, seed=seed)
        n_parameters = sum(p.numel() for p in lstm.parameters())
        run = {"seed": seed, "parameters": n_parameters, "train_tokens_per_second": speed}

    is_absolute = settings.get("model.position.kind") == "sinusoidal"
    longest = settings["train.segment_len"] if is_absolute else LONGEST  # it has learned no later positions

    def last_nll(windows: Tensor) -> Tensor:
        """Loss (b) of the last token of windows (b t), read from an empty memory."""
        windows = windows[:, -longest - 1 :]
        if is_lstm:
            return lstm.nll(windows[:, :-1], windows[:, 1:])[0][:, -1]
        mem_len, segment_len = model.config.train.mem_len, max(windows.shape[1] - 1, LONGEST)
        state = model.network.init_state(len(windows), mem_len=mem_len, segment_len=segment_len)
        return model.network.score(windows[:, :-1], windows[:, 1:], state).nll[:, -1]

    by_context = losses(torch.from_numpy(valid.astype(np.int64)), n_targets, last_nll)
    return run | {"nats": {str(context): np.round(values, 4).tolist() for context, values in by_context.items()}}


def lstm_rates(home: Path, rates: list[float], tokens: int) -> None:
    """Prints the mean loss of the validation text, read in order, after training with each learning rate."""
    train(home, *TEXT, settings=SHAPE, tokens=8 * SEGMENT)  # one step, which gives the vocabulary
    tokenizer = load(home / "model").tokenizer
    ids, valid = (tokenizer.encode((home / f"{part}.txt").read_bytes()) for part in ("train", "valid"))
    for rate in rates:
        lstm, speed = train_lstm(ids, tokenizer, tokens, seed=0, lr=rate)
        with torch.inference_mode():
            rows = torch.from_numpy(valid[None].astype(np.int64))
            nll, _ = lstm.nll(rows[:, :-1], rows[:, 1:])
        print(f"{rate}: {nll.mean():.4f} nats per token, {speed:.0f} tokens/s", flush=True)


def own_gains(group: Group) -> dict[str, float]:
    """Reduction of each model's perplexity on all tokens from the shortest to the longest context, in per cent."""
    return {name: float(100 * (1 - np.exp(own[LONGEST].mean() - own[STEP].mean()))) for name, own in group.items()}


def bootstrap(groups: list[Group], measure: Callable[[Group], dict[str, float]]) -> dict[str, np.ndarray]:
    """Mean of a measure of each model over seeds, in N_SAMPLES samples of the seeds and of the tokens."""
    rng = np.random.default_rng(0)
    n = len(next(iter(next(iter(groups[0].values())).values())))
    found: dict[str, list[float]] = {name: [] for name in groups[0]}
    for _ in range(N_SAMPLES):
        at = rng.integers(n, size=n)  # all seeds predict the same tokens
        chosen = [groups[seed] for seed in rng.integers(len(groups), size=len(groups))]
        drawn = [measure({name: {c: x[at] for c, x in own.items()} for name, own in group.items()}) for group in chosen]
        for name, values in found.items():
            values.append(np.mean([each[name] for each in drawn]))
    return {name: np.array(values) for name, values in found.items()}


def interval(values: np.ndarray) -> str:
    """The middle 95 %."""
    return "{:.3g} to {:.3g}".format(*np.quantile(values, (0.025, 0.975)))


def table(runs: dict[str, list[dict]]) -> str:
    """Lengths, own gain and losses of each model; then intervals of the first one's length over that of each other."""
    seeds = range(min(map(len, runs.values())))
    groups = [
        {name: {int(c): np.array(x) for c, x in found[seed]["nats"].items()} for name, found in runs.items()}
        for seed in seeds
    ]
    by_share = {f"r = {share}": partial(lengths, share=share) for share in SHARES}
    measures = by_share | {GAIN: own_gains}
    shown = (STEP, LONGEST)
    heads = [*measures, *(f"nats per token, context {context}" for context in shown)]
    lines = [f"| model | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    found = {head: [measure(group) for group in groups] for head, measure in measures.items()}
    samples = {head: bootstrap(groups, measure) for head, measure in measures.items()}
    for name in runs:
        means = {head: np.mean([each[name] for each in by_seed]) for head, by_seed in found.items()}
        cells = [f"{mean:.3g} ({interval(samples[head][name])})" for head, mean in means.items()]
        cells += [f"{np.mean([group[name][context].mean() for group in groups]):.3f}" for context in shown]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    first, *others = runs
    heads = [*by_share, *(f"{head}, of the two alone" for head in by_share), f"{GAIN}, difference"]
    lines += ["", f"| of the first over | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name in others:
        pairs = [{first: group[first], name: group[name]} for group in groups]
        alone = [bootstrap(pairs, measure) for measure in by_share.values()]
        ratios = [drawn[first] / drawn[name] for drawn in (*(samples[head] for head in by_share), *alone)]
        cells = [interval(x) for x in (*ratios, samples[GAIN][first] - samples[GAIN][name])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="", help="part of the names of the models to train")
    parser.add_argument("--lstm-rates", type=float, nargs="+")
    parser.add_argument("--targets", type=int, default=1000, help="tokens of validation text whose loss is computed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "recl.json")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())["runs"]))
        return
    found = saved(options.out, options.tokens)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for name in ("train", "valid"):
            part(options.books, name, home / f"{name}.txt")
        if options.lstm_rates:
            lstm_rates(home, options.lstm_rates, options.tokens)
            return
        for seed in options.seeds:
            for name in VARIANTS:
                done = [run["seed"] for run in found["runs"].get(name, [])]
                if options.only in name and seed not in done:
                    run = one(home, name, seed, options.tokens, options.targets)
                    found = saved(options.out, options.tokens)  # another process may have added other seeds
                    runs = [*found["runs"].get(name, []), run]
                    found["runs"][name] = sorted(runs, key=lambda run: run["seed"])
                    save(options.out, found, indent=None)
                    print(name, seed, flush=True)
    print(table(found["runs"]))


if __name__ == "__main__":
    main()
