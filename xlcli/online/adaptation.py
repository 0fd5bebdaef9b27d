"""Adaptation while reading: dynamic evaluation (Krause et al. 2018, "Dynamic Evaluation of Neural Sequence Models").

The text is divided into blocks of a fixed number of tokens, counted from its beginning and from every reset. A block is
predicted with the weights at its start; then the optimizer makes one step on its surprisal. So every token is scored
before anything is learned from it. Gradients reach back to the beginning of the block: memory has none, and keeps the
keys and values that were computed with earlier weights.

A block that lies in one call is read once, with gradients. A block whose tokens arrive in several calls is read once
more with gradients when it is complete, from a copy of the memory before it, and the memory of this reading is kept.

The optimizer divides gradients by their root mean square, with decay toward the trained weights. Krause et al.
(section 3.2) take the mean over training text. Here it runs over the blocks that were read, and the mean of a matrix is
factored into rows and columns (Shazeer and Stern 2018, algorithm 4): two vectors in place of a matrix, so a step reads
and writes little more than weights and gradients. Each matrix has its own rate, which is learned, too.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from xlcli.config.inference import AdaptedWeights
from xlcli.errors import ConfigError
from xlcli.memory import KeyValue
from xlcli.memory.online import UNKNOWN, Adaptation
from xlcli.model.decoder import Decoder, make_decoder
from xlcli.model.head import Readout, SoftmaxHead
from xlcli.model.lm import LanguageModel, ScoreOutput
from xlcli.model.stack import FeedForward, Ponder
from xlcli.ops.layers import Linear, has_bfloat16_units
from xlcli.ops.stored import widened
from xlcli.state import State

Tensors = Mapping[str, Tensor]  # values of weights by their names


class AdaptiveModel:
    """Scorer of one sequence whose weights follow the text.

    The network of this scorer has the weights of the state that it reads, which `score` changes in place: it consumes
    the old state. The given network is never changed.

    A saved state must be continued with the same `settings`, such as `adapt_block`, the number of tokens of a block.
    With `decodes`, `logits` of one token may use compiled kernels, for which weights are packed after each step.
    """

    def __init__(
        self, network: LanguageModel, optimizer: Optimizer, settings: Mapping[str, Any], *, decodes: bool
    ) -> None:
        self.trained = network
        self.optimizer = optimizer
        self.block = settings["adapt_block"]
        self.settings = settings
        self.decodes = decodes
        self.network = _sharing_memory(network)
        self.parameters = _named(self.network, optimizer.names)
        self.origin = _named(network, optimizer.names)
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(name in self.parameters)
        _round_gradients(self.network)
        self._loaded: tuple[Mapping[str, Tensor], int] | None = None
        self._decoder: Decoder | LanguageModel | None = None

    def init_state(self, batch: int, **options: Any) -> State:
        if batch != 1:
            raise ConfigError(f"a model that adapts reads one text, not {batch}.", "Use a batch size of 1.")
        with torch.inference_mode(False):
            weights = {name: widened(p.detach()).clone() for name, p in self.origin.items()}
            no_tokens = torch.empty(0, dtype=torch.int64, device=next(iter(weights.values())).device)
            value = Adaptation(
                settings=self.settings,
                weights=weights,
                moments=self.optimizer.init_moments(weights),
                n_steps=0,
                inputs=no_tokens,
                targets=no_tokens,
                last=no_tokens[None],
            )
        return replace(self.trained.init_state(batch, **options), adaptation=value)

    def score(self, tokens: Tensor, targets: Tensor, state: State, *, readout: Readout | None = None) -> ScoreOutput:
        # The first tokens have no targets to score, but what follows them is learned, too.
        n_unscored = tokens.shape[1] - targets.shape[1]
        followers = torch.cat((tokens[:, 1 : n_unscored + 1], targets), dim=1)
        out = ScoreOutput.join(self._score_parts(tokens, followers, state, readout))
        features = None if out.readout is None else out.readout[:, n_unscored:]
        return out._replace(nll=out.nll[:, n_unscored:], readout=features)

    def logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Logits (b v) of the next token after tokens (b t), and a state in which these wait to be learned."""
        self._load(state)
        if len(tokens) != 1:
            return self._fast(tokens, state)
        n_tokens = tokens.shape[1]
        start = 0
        while True:
            # Parts end with blocks. A block that is complete here has targets that are not known, so it is dropped.
            state = self._drop_unlearned(state)
            n_missing = self.block - len(_value(state).inputs)
            end = min(start + n_missing, n_tokens)
            part = tokens[:, start:end]
            noted = self._begin(state, part, torch.full_like(part, UNKNOWN))
            logits, state = self._fast(part, noted)
            start = end
            if start == n_tokens:
                return logits, state

    def reset(self, state: State) -> State:
        """State with empty memory and the adapted weights. The unfinished block ends here."""
        value = _value(state)
        if len(value.inputs) and int(value.targets[-1]) != UNKNOWN:
            state = self._learn(state)
        self._load(state)
        return self.network.reset(replace(state, adaptation=_value(state).without_block()))

    def network_of(self, state: State) -> LanguageModel:
        """The network with the adapted weights of a state, until this scorer reads on."""
        self._load(state)
        return self.network

    def _score_parts(
        self, tokens: Tensor, targets: Tensor, state: State, readout: Readout | None
    ) -> Iterator[ScoreOutput]:
        """Scores tokens (1 t) in parts that end with blocks, and learns from each block as soon as it is complete."""
        n_tokens = tokens.shape[1]
        state = self._drop_unlearned(state)
        start = 0
        while start < n_tokens:
            n_missing = self.block - len(_value(state).inputs)
            end = min(start + n_missing, n_tokens)
            part, part_targets = tokens[:, start:end], targets[:, start:end]
            self._load(state)
            is_whole_block = end - start == self.block
            if is_whole_block and _is_exact(state):
                # One pass through the network gives the scores and the gradients.
                out = self._score_and_learn(part, part_targets, state, readout)
            else:
                begun = self._begin(state, part, part_targets)
                out = self.network.score(part, part_targets, begun, readout=readout)
                if len(_value(out.state).inputs) == self.block:
                    out = out._replace(state=self._learn(out.state))
            yield out
            state = out.state
            start = end

    def _score_and_learn(self, tokens: Tensor, targets: Tensor, state: State, readout: Readout | None) -> ScoreOutput:
        """`score` of a whole block, and the step that follows it, in one reading."""
        with _gradients():
            out = self.network.score(tokens.clone(), targets.clone(), _ordinary(state), readout=readout)
            value = self._stepped(_value(state), out.nll.sum())
        ponder = out.ponder
        if ponder is not None:
            ponder = Ponder(ponder.cost.detach(), ponder.steps.detach())
        return ScoreOutput(out.nll.detach(), replace(out.state, adaptation=value), ponder, out.readout)

    def _begin(self, state: State, inputs: Tensor, targets: Tensor) -> State:
        """State with tokens (1 n) added to the unfinished block; the first ones begin it, with a copy of the memory."""
        value = _value(state)
        if len(value.inputs):
            return replace(state, adaptation=value.extended(inputs[0], targets[0]))
        with torch.inference_mode(False):  # a copy that nobody writes into, in tensors that autograd accepts
            before = state.map(torch.clone)
        begun = value.extended(inputs[0], targets[0], start=before.layers, last=before.last)
        return replace(state, adaptation=begun)

    def _drop_unlearned(self, state: State) -> State:
        """State without a complete block whose last target is not known."""
        value = _value(state)
        if len(value.inputs) < self.block:
            return state
        return replace(state, adaptation=value.without_block())

    def _learn(self, state: State) -> State:
        """Takes a step of the optimizer on the unfinished block, which is read again, and returns the state after it.

        The memory of this reading is kept, because differences in rounding would grow with every step.
        """
        self._load(state)
        value = _value(state)
        before = before_block(state)
        with _gradients():
            inputs, targets = value.inputs[None].clone(), value.targets[None].clone()
            out = self.network.score(inputs, targets.clamp(min=0), _ordinary(before))  # any token for unknown ones
            value = self._stepped(value, out.nll[targets != UNKNOWN].sum())
        layers = out.state.layers if _is_exact(state) else state.layers
        return replace(state, layers=layers, adaptation=value)

    def _stepped(self, value: Adaptation, nats: Tensor) -> Adaptation:
        """Value after a step on the sum () of the surprisal of a block, at the beginning of the next one."""
        gradients_in_order = torch.autograd.grad(nats / self.block, list(self.parameters.values()))
        gradients = dict(zip(self.parameters, gradients_in_order, strict=True))
        with torch.no_grad():
            self.optimizer.step(value.weights, gradients, value.moments, self.origin, value.n_steps)
        return replace(value.without_block(), n_steps=value.n_steps + 1)

    def _fast(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """`LanguageModel.logits` with the adapted weights, by kernels if there are any."""
        if tokens.shape[1] != 1 or not self.decodes:
            return self.network.logits(tokens, state)
        if self._decoder is None:
            self._decoder = make_decoder(self.network, "float32") or self.network
        return self._decoder.logits(tokens, state)

    def _load(self, state: State) -> None:
        """Makes the adapted weights of a state those of the network, unless they are; drops packed ones."""
        value = _value(state)
        if self._loaded is not None:
            loaded_weights, loaded_steps = self._loaded
            if loaded_weights is value.weights and loaded_steps == value.n_steps:
                return
        for name, parameter in self.parameters.items():
            parameter.data = value.weights[name]
        self._loaded = value.weights, value.n_steps  # a step changes the weights in place, and the number
        self._decoder = None


def _named(network: LanguageModel, names: Collection[str]) -> dict[str, nn.Parameter]:
    return {name: p for name, p in network.named_parameters() if name in names}


def _names_of(network: nn.Module, parameters: Iterable[Tensor]) -> tuple[str, ...]:
    """Names of parameters of a network, in its order."""
    ids = {id(p) for p in parameters}
    return tuple(name for name, p in network.named_parameters() if id(p) in ids)


def adapted_weights(network: LanguageModel, part: AdaptedWeights) -> tuple[str, ...]:
    """Names of the weights that change.

    All; those of the blocks without token vectors; or feed-forward matrices, token vectors and the table of a softmax.
    The rates that fit a book best are about those of the latter (benchmarks/log).
    """
    if part == "all":
        return tuple(name for name, _ in network.named_parameters())
    if part == "feedforward":
        weights: list[Tensor] = [table.weight for table in _token_tables(network)]
        for module in network.modules():
            if isinstance(module, FeedForward):
                weights += [p for p in module.parameters() if p.ndim == 2]
        if isinstance(network.head, SoftmaxHead):
            weights.append(network.head.weight)
        return _names_of(network, weights)
    tables = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    return tuple(f"stack.{name}" for name, p in network.stack.named_parameters() if id(p) not in tables)


def head_tables(network: LanguageModel) -> tuple[str, ...]:
    """Names of the tables that the head multiplies by hidden states."""
    return _names_of(network, [part.weight for part in network.head.modules() if isinstance(part, SoftmaxHead)])


def is_compatible(network: LanguageModel, optimizer: Optimizer, block: int, state: State) -> bool:
    """True if weights, unfinished block and its memory in a loaded state fit the model."""
    value = _value(state)
    weights = _named(network, optimizer.names)
    if _shapes(value.weights) != _shapes(weights):
        return False
    if _shapes(value.moments) != _shapes(optimizer.init_moments(weights)):
        return False
    if not len(value.inputs):
        return True
    before = before_block(state)
    if len(value.inputs) > block or before.seen < 0:
        return False
    tokens = torch.cat((value.inputs, value.targets[value.targets != UNKNOWN]))
    is_in_vocabulary = int(tokens.min()) >= 0 and int(tokens.max()) < network.config.vocab_size
    return is_in_vocabulary and network.is_compatible(before)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (t.shape, t.dtype) for name, t in tensors.items()}


def before_block(state: State) -> State:
    """State before the unfinished block, without learned values."""
    value = _value(state)
    seen = state.seen - len(value.inputs)
    return replace(state, layers=value.start, last=value.last, seen=seen, adaptation=None, cache=None)


def _is_exact(state: State) -> bool:
    """True if the memory has the same values with gradients: rounded ones are not, and sums have none of the call."""
    return all(isinstance(layer, KeyValue) for layer in state.layers) and state.memory_dtype == "float32"


def _value(state: State) -> Adaptation:
    assert isinstance(state.adaptation, Adaptation)
    return state.adaptation


def _sharing_memory(network: LanguageModel) -> LanguageModel:
    """Copy of a network whose float32 parameters share memory with the original, until they are replaced.

    Gradients of tables of token vectors that the head does not share are sparse.
    """
    # What `deepcopy` finds here is already copied.
    memo: dict[int, Any] = {id(p): nn.Parameter(widened(p.detach()), requires_grad=False) for p in network.parameters()}
    memo |= {id(buffer): buffer for buffer in network.buffers()}
    for table in _token_tables(network):
        n, dim = table.weight.shape
        memo[id(table)] = nn.Embedding(n, dim, sparse=True, _weight=memo[id(table.weight)], _freeze=True)
    return copy.deepcopy(network, memo)


def _round_gradients(network: LanguageModel) -> None:
    """Computes gradients in bfloat16 where that is faster. No fourth digit of a result changes (benchmarks/log)."""
    weight = next(network.parameters())
    if weight.dtype == torch.float32 and has_bfloat16_units(weight.device):
        for module in network.modules():
            if isinstance(module, Linear | SoftmaxHead):
                module.gradient_dtype = torch.bfloat16


def _token_tables(network: LanguageModel) -> list[nn.Embedding]:
    """Tables of token vectors that nothing else uses, as a tied head does."""
    n_uses = Counter(id(p) for _, p in network.named_parameters(remove_duplicate=False))
    parts = [network.embedding, network.bigrams, *(block.vectors for block in network.stack.blocks)]
    tables = []
    for part in parts:
        modules = () if part is None else part.modules()
        tables += [m for m in modules if isinstance(m, nn.Embedding) and n_uses[id(m.weight)] == 1]
    return tables


@contextlib.contextmanager
def _gradients() -> Iterator[None]:
    """Context with gradients. Autocast keeps no copy of a weight that was made without them or before a step."""
    torch.clear_autocast_cache()
    with torch.inference_mode(False), torch.enable_grad():
        yield
    torch.clear_autocast_cache()


def _ordinary(state: State) -> State:
    """The state in tensors that autograd accepts: copies of those that were made under inference mode."""
    return state.map(lambda t: t.clone() if t.is_inference() else t)


EPSILON = 1e-16  # added to mean squares: gradients below its root count as zero
RATES = -5.0, 3.0  # limits of the logarithm of the factor on the rate of a matrix


@dataclass(frozen=True)
class Optimizer:
    """Settings, and the names of the weights that change."""

    names: Collection[str]  # the weights that change
    lr: float  # learning rate
    decay: float  # share of the distance to the trained weights that a step takes back
    slow: Collection[str] = ()  # matrices that begin with `slow_rate` times the learning rate; others with all of it
    slow_rate: float = 0.3
    beta: float = 0.99  # share of the mean squares that a step keeps
    table_rate: float = 10.0  # factor on the learning rate of rows of an embedding table: few tokens change each
    rate_change: float = 1.0  # largest change of the logarithm of the rate of a matrix in a step

    def init_moments(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What `step` keeps of the gradients of each weight, before the first one; states are saved with these names.

        Of a matrix (n m): `NAME.rows` (n) and `NAME.columns` (m), mean squares of the gradient, and `NAME.rate` (), the
        logarithm of the factor on its learning rate. Of other weights: `NAME`, the mean square of each number.
        """
        moments = {}
        for name, weight in weights.items():
            if weight.ndim != 2:
                moments[name] = torch.zeros_like(weight)
                continue
            n_rows, n_columns = weight.shape
            rate = self.slow_rate if name in self.slow else 1.0
            moments[f"{name}.rows"] = weight.new_zeros(n_rows)
            moments[f"{name}.columns"] = weight.new_zeros(n_columns)
            moments[f"{name}.rate"] = weight.new_full((), math.log(rate))
        return moments

    def step(self, weights: Tensors, gradients: Tensors, moments: Tensors, trained: Tensors, n_steps: int) -> None:
        """Changes weights and mean squares in place, after `n_steps` earlier steps; gradients are overwritten.

        The rate of a matrix grows while the gradient says that what was learned so far should have gone further, and
        falls if it went too far: the derivative of the loss by the logarithm of the rate, with the distance to the
        trained weights in place of its sum over all steps (as in Sutton 1992, "Adapting bias by gradient descent").

        Of an embedding table, whose gradient is sparse, only the rows of the tokens change, each scaled by its own mean
        square.
        """
        # Running means begin at 0 (Kingma and Ba 2015, section 3).
        correction = 1 / (1 - self.beta ** (n_steps + 1))
        for name, gradient in gradients.items():
            weight = weights[name]
            origin = trained[name]
            if gradient.is_sparse:
                self._step_rows(weight, gradient.coalesce(), moments[f"{name}.rows"], origin)
                continue
            if weight.ndim == 2:
                # Mean squares of rows and columns, and those that the step divides by.
                rows = moments[f"{name}.rows"]
                columns = moments[f"{name}.columns"]
                squares = gradient.square()
                rows.lerp_(squares.mean(1), 1 - self.beta)
                columns.lerp_(squares.mean(0), 1 - self.beta)
                row_divisors = rows * correction + EPSILON
                column_divisors = columns * correction + EPSILON
                # The cosine between gradient and distance moves the rate.
                log_rate = moments[f"{name}.rate"]
                distance = (weight - origin).flatten()
                direction = gradient.flatten()
                norms = (direction.dot(direction) * distance.dot(distance)).sqrt_() + EPSILON
                log_rate.sub_(direction.dot(distance) / norms * self.rate_change).clamp_(*RATES)
                # The gradient is no longer needed, and serves as memory.
                row_factors = (row_divisors.mean() / row_divisors).sqrt_() * log_rate.exp()
                gradient.mul_(row_factors[:, None])
                weight.addcmul_(gradient, column_divisors.rsqrt_(), value=-self.lr)
            else:
                mean = moments[name].mul_(self.beta).addcmul_(gradient, gradient, value=1 - self.beta)
                weight.addcmul_(gradient, (mean * correction + EPSILON).rsqrt(), value=-self.lr)
            if self.decay:
                weight.lerp_(origin, self.decay)

    def _step_rows(self, weight: Tensor, gradient: Tensor, means: Tensor, origin: Tensor) -> None:
        """Changes the rows of a table (n d) that a sparse gradient has, and their mean squares, `means` (n)."""
        rows = gradient.indices()[0]
        values = gradient.values()
        squares = values.square().mean(1)
        means_before = means[rows]
        # The first step of a row has its own square alone.
        new_means = torch.where(means_before > 0, means_before.lerp(squares, 1 - self.beta), squares)
        means[rows] = new_means
        factors = (new_means + EPSILON).rsqrt_()[:, None]
        stepped = weight[rows].addcmul_(values, factors, value=-self.lr * self.table_rate)
        weight[rows] = stepped.lerp_(origin[rows], self.decay)
