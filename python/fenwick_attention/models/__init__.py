"""Hugging Face configurations and models; importing this module registers them with ``Auto*``."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from fenwick_attention.models.configuration import (
    LogLinearGatedDeltaNetConfig,
    LogLinearMamba2Config,
)
from fenwick_attention.models.modeling import (
    LogLinearGatedDeltaNetForCausalLM,
    LogLinearGatedDeltaNetModel,
    LogLinearMamba2ForCausalLM,
    LogLinearMamba2Model,
)

__all__ = [
    "LogLinearGatedDeltaNetConfig",
    "LogLinearGatedDeltaNetForCausalLM",
    "LogLinearGatedDeltaNetModel",
    "LogLinearMamba2Config",
    "LogLinearMamba2ForCausalLM",
    "LogLinearMamba2Model",
]

for _config, _model, _causal_lm in (
    (LogLinearMamba2Config, LogLinearMamba2Model, LogLinearMamba2ForCausalLM),
    (LogLinearGatedDeltaNetConfig, LogLinearGatedDeltaNetModel, LogLinearGatedDeltaNetForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal_lm, exist_ok=True)
