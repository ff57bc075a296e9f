"""A small Llama of the transformers library, with its ``StaticCache``; random weights."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

#: Positions of the cache.
POSITIONS = 64


class Llama(nn.Module):
    """Two layers over a static cache; ``forward`` gives the logits of the last token.

    Raises:
        ModuleNotFoundError: if transformers is not installed.
    """

    def __init__(self) -> None:
        super().__init__()
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the library is imported
        from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

        config = LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=POSITIONS,
        )
        self.model: Any = LlamaForCausalLM(config).eval()
        self.cache: Any = StaticCache(config=config, max_cache_len=POSITIONS)
        # Otherwise the first call makes the cache, and there is nothing to mutate.
        self.cache.early_initialization(
            batch_size=1, num_heads=2, head_dim=16, dtype=torch.float32, device=torch.device("cpu")
        )

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits ``(1, vocabulary)`` of the last token.

        Args:
            tokens: int64 ``(1, n)``; the cache counts what it holds, and they are written behind.
            positions: int64 ``(n,)``, theirs.
        """
        out = self.model(
            input_ids=tokens,
            position_ids=positions[None],
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]
