"""The spec of MLA that attends to the tokens that an indexer selects."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.errors import SpecError
from headwise.models.specs.base import check_positive, check_sizes
from headwise.models.specs.latent import LatentSpec


@dataclass(frozen=True, kw_only=True)
class IndexedLatentSpec(LatentSpec):
    """DeepSeek Sparse Attention of one layer: MLA whose queries attend to ``index_topk`` tokens each.

    An indexer scores all tokens with heads and a cached key of its own; a layer may take over the selection of the
    layer before it, and then has no indexer.

    For example ``read_spec("deepseek-v3.2").layers[0].label`` is ``"MLA 512 + 64, top 2048"``.

    Source: DeepSeek-V3.2-Exp, section 1 of its report; transformers' ``deepseek_v32`` and ``glm_moe_dsa``.

    Attributes:
        index_topk: the most tokens that a query attends to.
        index_n_heads: the number of the indexer's heads; 0 without an indexer.
        index_head_dim: the width of the indexer's heads and of its cached key; 0 without an indexer.
    """

    index_topk: int
    index_n_heads: int = 0
    index_head_dim: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("index_topk", self.index_topk)
        check_sizes(self, "index_n_heads", "index_head_dim", least=0)
        if bool(self.index_n_heads) != bool(self.index_head_dim):
            rule = f"must be 0 exactly where index_n_heads = {self.index_n_heads} is"
            raise SpecError("index_head_dim", self.index_head_dim, rule)
        if self.index_n_heads and self.q_lora_rank is None:
            raise SpecError("q_lora_rank", None, "is required: the indexer reads the query's latent")

    @property
    def label(self) -> str:
        """A label such as ``MLA 512 + 64, top 2048``."""
        return f"{super().label}, top {self.index_topk}"
