"""Log-linear attention for PyTorch: operators, layers and, in :mod:`fenwick_attention.models`,
Hugging Face models. Thin over the C++ operators of ``torch.ops.fenwick``.
"""

from fenwick_attention import _ops
from fenwick_attention.cache import Cache
from fenwick_attention.functional import (
    chunk_log_linear_attn,
    l2_norm,
    log_linear_attention,
    log_linear_attention_step,
    log_linear_gated_delta_rule,
    log_linear_gated_delta_rule_step,
    num_levels,
)
from fenwick_attention.layers import LogLinearGatedDeltaNet, LogLinearMamba2
from fenwick_attention.state import LogLinearState

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "LogLinearGatedDeltaNet",
    "LogLinearMamba2",
    "LogLinearState",
    "chunk_log_linear_attn",
    "l2_norm",
    "log_linear_attention",
    "log_linear_attention_step",
    "log_linear_gated_delta_rule",
    "log_linear_gated_delta_rule_step",
    "num_levels",
]

_ops.load()
