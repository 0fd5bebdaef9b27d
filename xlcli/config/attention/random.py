"""Kinds of attention with random features: linear, and by hashing."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from xlcli.config.attention.base import AttentionConfig, MemoryDtype, counted, tokens
from xlcli.config.base import Count, InvalidSettingError, Positive

MAX_BUCKETS = 2**16
"""Largest number of hash buckets."""
MAX_SLOTS = 2**20
"""Largest number of tokens in the buckets of one head and hash round."""
MAX_SINGLE_FACTOR = 64
"""Largest number of automatic buckets that are hashed by one set of directions; more are a product of two numbers."""
MAX_HASHES = 8
"""Largest number of hash rounds. Directions for all rounds are stored, so inference may use more than training."""


class RandomAttentionConfig(AttentionConfig):
    """Base of attention with random features. A draw every `redraw_every` training steps clears the layer's memory."""

    redraw_every: Count | None = None

    @property
    def redraw_interval(self) -> int | None:
        """`redraw_every`."""
        return self.redraw_every


class LinearAttentionConfig(RandomAttentionConfig):
    """Performer (Choromanski et al. 2021): softmax kernel estimated with `n_features` random features.

    Memory is a running sum over all tokens read: constant size, no span.
    """

    supports_dropout: ClassVar[bool] = False

    kind: Literal["linear"] = "linear"
    n_features: Annotated[int, Field(ge=1, le=2**16)] = 128
    orthogonal: bool = True

    @property
    def offers(self) -> frozenset[str]:
        """Rotation of queries and keys before their features are computed."""
        return frozenset({"place"})

    def effective_mem_len(self, mem_len: int) -> int | None:
        """None: unbounded, unless `mem_len` is 0."""
        return None if mem_len else 0

    def memory_bytes(self, mem_len: int, head_dim: int, dtype: MemoryDtype = "float32") -> int:
        """Two sums in float64 for each feature."""
        return 8 * self.n_heads * self.n_features * (head_dim + 1)

    def describe_memory(self, mem_len: int, segment_len: int) -> str:
        """Running sums."""
        return f"running sums over {'all tokens read' if mem_len else tokens(0, segment_len)}"


class LSHAttentionConfig(RandomAttentionConfig):
    """LSH attention with shared queries and keys (Kitaev et al. 2020, Reformer); cost is linear in the length.

    In each of `n_hashes` rounds a token attends to the last `bucket_size` earlier tokens of its hash bucket, within the
    memory length; to itself only if there are none. `n_buckets` is an even number, a list of even numbers whose
    product is the number of buckets, or `auto`: each round has a place for every token of the memory of training. The
    memory is the table of buckets: its size and the cost of a look-up do not depend on the memory length.
    `query_scale` is the initial value of a learned factor of each head on the queries; None: no factor.
    """

    inference_settings: ClassVar[frozenset[str]] = frozenset({"n_hashes"})
    supports_recall: ClassVar[bool] = True

    kind: Literal["lsh"] = "lsh"
    n_buckets: int | tuple[int, ...] | Literal["auto"] = 64
    bucket_size: Annotated[int, Field(ge=1, le=2**16)] = 32
    n_hashes: Annotated[int, Field(ge=1, le=MAX_HASHES)] = 4
    query_scale: Positive | None = None

    @property
    def offers(self) -> frozenset[str]:
        """Rotation of queries and keys after they are hashed."""
        return frozenset({"place"})

    @property
    def factors(self) -> tuple[int, ...]:
        """Even factors of the number of buckets; empty for a single bucket."""
        assert self.n_buckets != "auto", "config.make replaces it"
        if self.n_buckets == 1:
            return ()
        return (self.n_buckets,) if isinstance(self.n_buckets, int) else self.n_buckets

    def sized_for(self, mem_len: int) -> Self:
        """`auto` replaced by the power of two for which `n_buckets` times `bucket_size` is at least `mem_len`."""
        if self.n_buckets != "auto":
            return self
        limit = min(MAX_BUCKETS, MAX_SLOTS // self.bucket_size)
        bits = max(1, min((-(-mem_len // self.bucket_size) - 1).bit_length(), limit.bit_length() - 1))
        factors = (2**bits,) if 2**bits <= MAX_SINGLE_FACTOR else (2 ** (bits // 2), 2 ** (bits - bits // 2))
        return self.model_copy(update={"n_buckets": factors[0] if len(factors) == 1 else factors})

    def memory_bytes(self, mem_len: int, head_dim: int, dtype: MemoryDtype = "float32") -> int:
        """A key, a value, and int64 position and ranks for each slot; an int64 count for each bucket."""
        slot = 8 * head_dim + 8 * (1 + self.n_hashes)
        return self.n_heads * self.n_hashes * math.prod(self.factors) * (self.bucket_size * slot + 8)

    def n_weights(self, dim: int, head_dim: int) -> int:
        """Queries, which are also keys, values and output."""
        return 3 * dim * self.n_heads * head_dim

    def describe_memory(self, mem_len: int, segment_len: int) -> str:
        """Tokens in the table of buckets."""
        n_buckets = math.prod(self.factors)
        return f"the last {counted(self.bucket_size)} of {self.n_hashes} x {n_buckets} buckets"

    @field_validator("n_buckets")
    @classmethod
    def _check_n_buckets(
        cls, n_buckets: int | tuple[int, ...] | Literal["auto"]
    ) -> int | tuple[int, ...] | Literal["auto"]:
        if n_buckets == "auto":
            return n_buckets
        factors = (n_buckets,) if isinstance(n_buckets, int) else n_buckets
        if n_buckets != 1 and (not factors or any(n < 2 or n % 2 for n in factors)):
            raise InvalidSettingError(
                "model.attention.n_buckets",
                f"is {n_buckets}, but buckets are pairs of opposite directions",
                "Make it even, a list of even numbers, 1 or auto.",
            )
        if math.prod(factors) > MAX_BUCKETS:
            raise InvalidSettingError(
                "model.attention.n_buckets", f"{n_buckets} is more than {MAX_BUCKETS}", "Use fewer buckets."
            )
        return n_buckets

    @model_validator(mode="after")
    def _check_slots(self) -> LSHAttentionConfig:
        if self.n_buckets == "auto":
            return self
        n_buckets = math.prod(self.factors)
        if n_buckets * self.bucket_size > MAX_SLOTS:
            raise InvalidSettingError(
                "model.attention.bucket_size",
                f"{self.bucket_size} is too large for {n_buckets:,} buckets, which may hold {MAX_SLOTS:,} tokens",
                f"Use at most {MAX_SLOTS // n_buckets}, or fewer buckets.",
            )
        return self
