"""The spec of attention to a sliding window and to entries that each stand for several tokens."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.errors import SpecError
from headwise.models.specs.base import MAX_HEADS, AttentionSpec, check_positive, check_sizes


@dataclass(frozen=True, kw_only=True)
class CompressedSpec(AttentionSpec):
    """DeepSeek-V4's attention of one layer: to a window of tokens, and to entries of ``rate`` tokens each.

    All heads share one key, which is also the value. A learned weighted mean makes an entry of ``rate`` tokens; with
    an indexer, entries overlap, and a query attends to ``index_topk`` of them.

    For example ``read_spec("deepseek-v4-flash").layers[2].label`` is ``"CSA 64 × 512, top 512 of T/4"``.

    Source: DeepSeek-V4's report, sections 2.3.1 and 2.3.2; transformers' ``deepseek_v4``.

    Attributes:
        num_heads: H, query heads.
        head_dim: D, width of a head, and of the shared key.
        q_lora_rank: Q, the width of the query's latent.
        output_groups: the number of groups of heads; each group's outputs are projected on their own.
        o_lora_rank: the width that each group's outputs are projected to.
        window: the number of latest tokens that are attended to one by one.
        rate: the number of tokens that make an entry; None for a layer without entries.
        index_topk: the most entries that a query attends to; None for all, without an indexer.
        index_n_heads: the number of the indexer's heads; 0 without an indexer.
        index_head_dim: the width of the indexer's heads and of its entries; 0 without an indexer.
    """

    num_heads: int
    head_dim: int
    q_lora_rank: int
    output_groups: int
    o_lora_rank: int
    window: int
    rate: int | None = None
    index_topk: int | None = None
    index_n_heads: int = 0
    index_head_dim: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("num_heads", self.num_heads, most=MAX_HEADS)
        check_sizes(self, "head_dim", "q_lora_rank", "output_groups", "o_lora_rank", "window")
        if self.num_heads % self.output_groups:
            raise SpecError("output_groups", self.output_groups, f"must divide num_heads = {self.num_heads}")
        if self.sliding_window is not None:
            raise SpecError("sliding_window", self.sliding_window, "must be None: the field of this layer is window")
        if self.has_indexer:
            check_sizes(self, "index_topk", "index_n_heads", "index_head_dim")
        if self.rate is None:
            if self.has_indexer:
                raise SpecError("rate", None, "is required where an indexer chooses among entries")
        else:
            check_positive("rate", self.rate)
            if (self.head_dim + self.index_head_dim) % self.rate:
                # Otherwise a token's share of an entry would not be a whole number of bytes.
                rule = f"must divide head_dim + index_head_dim = {self.head_dim + self.index_head_dim}"
                raise SpecError("rate", self.rate, rule)

    @property
    def has_indexer(self) -> bool:
        """Whether an indexer chooses the entries that a query attends to."""
        return self.index_topk is not None or bool(self.index_n_heads or self.index_head_dim)

    @property
    def mechanism(self) -> str:
        """``csa``, ``hca`` or ``window``."""
        return "window" if self.rate is None else "csa" if self.has_indexer else "hca"

    @property
    def label(self) -> str:
        """Its kind by the report's names, its heads, and which of the entries of T tokens it attends to.

        For example ``CSA 64 × 512, top 512 of T/4``, ``HCA 64 × 512, T/128``, or ``window 64 × 512, 128``.
        """
        heads = f"{self.num_heads} × {self.head_dim}"
        if self.rate is None:
            return f"{self.mechanism} {heads}, {self.window}"
        chosen = "" if self.index_topk is None else f"top {self.index_topk} of "
        return f"{self.mechanism.upper()} {heads}, {chosen}T/{self.rate}"
