"""Mixer layers with the peers' constructor arguments and parameter names."""

from fenwick_attention.layers.log_linear_gated_deltanet import LogLinearGatedDeltaNet
from fenwick_attention.layers.log_linear_mamba2 import LogLinearMamba2

__all__ = ["LogLinearGatedDeltaNet", "LogLinearMamba2"]
