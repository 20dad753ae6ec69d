"""What a forward pass gives: logits of chosen rows, worked out when they are asked for."""

from collections.abc import Callable, Sequence

import torch

LogitsOf = Callable[[Sequence[int]], torch.Tensor]
"""Rows of the batch, each among those that the pass was told to have logits -> [num_rows, vocab_size] float32."""
