"""Hugging Face models: embedding, blocks of mixer and SwiGLU, norm, head.

Both models are one code path; what differs is the mixer and the peers' parameter names
(``backbone.layers.N.mixer`` for Mamba-2, ``model.layers.N.attn`` for Gated DeltaNet).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from fenwick_attention.cache import Cache, require_cache
from fenwick_attention.layers import LogLinearGatedDeltaNet, LogLinearMamba2
from fenwick_attention.layers.common import Packing, inverse_softplus_uniform
from fenwick_attention.models.configuration import (
    LogLinearGatedDeltaNetConfig,
    LogLinearMamba2Config,
    swiglu_size,
)

# transformers 5.2x renamed `past_key_values` to `cache`; both names are understood everywhere.
_CACHE_FIELD = next(
    f.name
    for f in dataclasses.fields(CausalLMOutputWithPast)
    if f.name in ("cache", "past_key_values")
)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x**2) + eps) * weight``, computed in float32."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden_size: int, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, size, bias=False)
        self.up_proj = nn.Linear(hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _mamba2_mixer(config: LogLinearMamba2Config, layer_idx: int) -> LogLinearMamba2:
    names = (
        "num_heads head_dim hidden_size state_size expand n_groups conv_kernel conv_init "
        "use_conv_bias hidden_act rmsnorm D_has_hdim norm_before_gate dt_limit dt_min dt_max "
        "dt_init_floor use_bias norm_eps max_num_levels level_policy"
    ).split()
    return LogLinearMamba2(layer_idx=layer_idx, **{n: getattr(config, n) for n in names})


def _gated_deltanet_mixer(
    config: LogLinearGatedDeltaNetConfig, layer_idx: int
) -> LogLinearGatedDeltaNet:
    names = (
        "hidden_size expand_v head_dim num_heads num_v_heads use_gate use_short_conv "
        "allow_neg_eigval conv_size conv_bias norm_eps max_num_levels level_policy"
    ).split()
    return LogLinearGatedDeltaNet(layer_idx=layer_idx, **{n: getattr(config, n) for n in names})


class Block(GradientCheckpointingLayer):
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``; ``names`` are the peers' for the mixer
    and its norm."""

    def __init__(self, config: PretrainedConfig, mixer: nn.Module, names: tuple[str, str]) -> None:
        super().__init__()
        self._norm_name, self._mixer_name = names
        self.add_module(self._norm_name, RMSNorm(config.hidden_size, config.norm_eps))
        self.add_module(self._mixer_name, mixer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        size = getattr(config, "intermediate_size", None)
        ratio = getattr(config, "hidden_ratio", None)
        self.mlp = SwiGLU(config.hidden_size, size or swiglu_size(config.hidden_size, ratio))

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        norm, mixer = getattr(self, self._norm_name), getattr(self, self._mixer_name)
        x = x + mixer(norm(x), **kwargs)[0]
        return x + self.mlp(self.mlp_norm(x))


class _PreTrainedModel(PreTrainedModel):
    supports_gradient_checkpointing = True
    _is_stateful = True  # no assisted decoding: convolution states cannot be rolled back
    _no_split_modules = ["Block"]
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias", "mixer.D", "mixer.L", "attn.L"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Conv1d)):
            init.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, LogLinearMamba2):
            config = self.config
            dt = (config.dt_min, config.dt_max, config.dt_init_floor)
            init.copy_(module.dt_bias, inverse_softplus_uniform(module.num_heads, *dt))
            init.copy_(module.A_log, torch.arange(1, module.num_heads + 1).float().log())
            init.ones_(module.L)
            init.ones_(module.D)
            if config.conv_init is not None:
                init.uniform_(module.conv1d.weight, -config.conv_init, config.conv_init)
        elif isinstance(module, LogLinearGatedDeltaNet):
            heads = module.num_v_heads
            init.copy_(module.dt_bias, inverse_softplus_uniform(heads))
            init.copy_(module.A_log, torch.empty(heads).uniform_(1e-4, 16).log())
            init.ones_(module.L)
        elif hasattr(module, "weight") and module.weight is not None and module.weight.dim() == 1:
            init.ones_(module.weight)
        if self.config.rescale_prenorm_residual:
            # GPT-2's scheme: the two residual projections of each block, by 1/sqrt(2 layers).
            for name in ("out_proj", "o_proj", "down_proj"):
                if isinstance(projection := getattr(module, name, None), nn.Linear):
                    bound = 1 / math.sqrt(projection.in_features)
                    bound /= math.sqrt(2 * self.config.num_hidden_layers)
                    init.uniform_(projection.weight, -bound, bound)


class _Model(_PreTrainedModel):
    """Embedding, blocks and final norm; subclasses name the parts."""

    _block_names: tuple[str, str]
    _final_norm_name: str
    _make_mixer: Any
    _pads_embedding = False  # whether the embedding of pad_token_id is never trained

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        padding = config.pad_token_id if self._pads_embedding else None
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding)
        make_mixer = type(self)._make_mixer
        self.layers = nn.ModuleList(
            Block(config, make_mixer(config, i), self._block_names)
            for i in range(config.num_hidden_layers)
        )
        self.add_module(self._final_norm_name, RMSNorm(config.hidden_size, config.norm_eps))
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of all tokens.

        Args:
            input_ids: ``[B, T]``.
            attention_mask: ``[B, T]``, 1 for a token and 0 for padding, which may stand anywhere;
                when decoding, also of the tokens so far, as ``generate`` passes it. Not read where
                ``cu_seqlens`` is given.
            inputs_embeds: ``[B, T, hidden_size]``, in place of ``input_ids``.
            past_key_values: what an earlier call returned, to go on from there.
            use_cache: return a cache; the configuration's ``use_cache`` unless training.
            output_hidden_states: also the input of every block.
            cu_seqlens: ``[N + 1]`` offsets of packed sequences (``B = 1``); keep it on the CPU.
            cache: another name for ``past_key_values``.

        Returns:
            ``last_hidden_state`` ``[B, T, hidden_size]``, ``past_key_values`` and, if asked for,
            ``hidden_states``.

        Raises:
            ValueError: both or none of ``input_ids`` and ``inputs_embeds``; a mask of another
                shape or with other values; the cache of another class or number of layers.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected exactly one of input_ids and inputs_embeds")
        past = past_key_values if past_key_values is not None else cache
        if past is not None:
            require_cache(past)
            if len(past) not in (0, len(self.layers)):
                raise ValueError(
                    f"past_key_values: expected the states of {len(self.layers)} layers, got those "
                    f"of {len(past)}"
                )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if self.gradient_checkpointing and self.training:
            use_cache = False
        if use_cache and past is None:
            past = Cache()
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        packing = None
        if attention_mask is not None and cu_seqlens is None:
            packing = Packing.from_mask(attention_mask, x)
        if packing is not None:
            x, cu_seqlens = packing.pack(x), packing.cu_seqlens

        def unpacked(h: Tensor) -> Tensor:
            return h if packing is None else packing.unpack(h)

        hidden_states = [unpacked(x)] if output_hidden_states else None
        for layer in self.layers:
            x = layer(x, past_key_values=past, use_cache=use_cache, cu_seqlens=cu_seqlens)
            if hidden_states is not None:
                hidden_states.append(unpacked(x))
        x = unpacked(getattr(self, self._final_norm_name)(x))
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=tuple(hidden_states) if hidden_states is not None else None,
            **{_CACHE_FIELD: past if use_cache else None},
        )


class _ForCausalLM(_PreTrainedModel, GenerationMixin):
    """A model with a language-model head; the base model stands under ``base_model_prefix``."""

    _model_class: type[_Model]

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.add_module(self.base_model_prefix, self._model_class(config))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first forward makes a fenwick_attention.Cache

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base_model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm_head = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits and, with labels, the loss.

        Args:
            labels: ``[B, T]``, the same tokens: they are shifted here; -100 is ignored.
            logits_to_keep: only the last so many tokens' logits (0: all), or indices.

        The other arguments are the base model's.

        Returns:
            ``logits`` ``[B, T, vocab_size]``, ``loss``, ``past_key_values`` and, if asked for,
            ``hidden_states``.
        """
        out = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values if past_key_values is not None else cache,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            cu_seqlens=cu_seqlens,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=out.hidden_states,
            **{_CACHE_FIELD: getattr(out, _CACHE_FIELD)},
        )


class LogLinearMamba2Model(_Model):
    """Log-linear Mamba-2 without a head; parameter names of flash-linear-attention."""

    config_class = LogLinearMamba2Config
    base_model_prefix = "backbone"
    _block_names = ("mixer_norm", "mixer")
    _final_norm_name = "norm_f"
    _make_mixer = staticmethod(_mamba2_mixer)


class LogLinearMamba2ForCausalLM(_ForCausalLM):
    """Log-linear Mamba-2 language model; loads flash-linear-attention's checkpoints."""

    config_class = LogLinearMamba2Config
    base_model_prefix = "backbone"
    _model_class = LogLinearMamba2Model
    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}


class LogLinearGatedDeltaNetModel(_Model):
    """Log-linear Gated DeltaNet without a head; parameter names of the authors' code."""

    config_class = LogLinearGatedDeltaNetConfig
    base_model_prefix = "model"
    _block_names = ("attn_norm", "attn")
    _pads_embedding = True
    _final_norm_name = "norm"
    _make_mixer = staticmethod(_gated_deltanet_mixer)


class LogLinearGatedDeltaNetForCausalLM(_ForCausalLM):
    """Log-linear Gated DeltaNet language model; loads the authors' checkpoints."""

    config_class = LogLinearGatedDeltaNetConfig
    base_model_prefix = "model"
    _model_class = LogLinearGatedDeltaNetModel
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}
