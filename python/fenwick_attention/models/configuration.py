"""Model configurations; keys and defaults are the peers' (flash-linear-attention, the authors).

Keys that change nothing here (``fuse_*``, ``chunk_size``, ``A_init_range``, ``fenwick_run`` of the
program's run folders, ...) are kept and written back; one that asks for something that this package
has not raises ``ValueError``.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from fenwick_attention.layers.common import MAX_LEVELS, require_positive


def swiglu_size(hidden_size: int, hidden_ratio: float | None = None) -> int:
    """Intermediate size of the MLP: ``ceil((8/3 d) / 256) * 256``; the 8/3 is two
    thirds of ``hidden_ratio``, 4 by default."""
    return -(-int(hidden_size * (hidden_ratio or 4) * 2 / 3) // 256) * 256


def _require(key: str, value: Any, *allowed: Any) -> None:
    if value not in allowed:
        expected = " or ".join(map(repr, allowed))
        raise ValueError(f"{key}: expected {expected} (nothing else is implemented), got {value!r}")


class _Config(PretrainedConfig):
    """What both configurations read beside their own keys."""

    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    def _read_levels(self, max_num_levels: int, level_policy: str, kwargs: dict[str, Any]) -> None:
        """Sets both attributes; the program's older spellings ``num_levels`` and ``saturate`` are
        taken out of ``kwargs``."""
        self.max_num_levels = kwargs.pop("num_levels", max_num_levels)
        saturate = kwargs.pop("saturate", level_policy == "saturate")
        self.level_policy = "saturate" if saturate else level_policy
        _require("level_policy", self.level_policy, "error", "saturate")
        _require("attnres_block_size", kwargs.get("attnres_block_size"), None)
        _require("residual_in_fp32", kwargs.get("residual_in_fp32", False), False)


class LogLinearMamba2Config(_Config):
    """Configuration of :class:`LogLinearMamba2ForCausalLM`; flash-linear-attention's keys.

    Args:
        num_heads: ``H``; by default ``expand * hidden_size / head_dim``.
        rescale_prenorm_residual: ``out_proj`` and ``down_proj`` start smaller with depth (GPT-2).
        max_num_levels: ``L``. flash-linear-attention has no such key and always 15.
        level_policy: past ``2 ** (L - 1)`` tokens, ``"error"`` raises and ``"saturate"`` reads what
            is older through the last level.

    The other keys are :class:`fenwick_attention.LogLinearMamba2`'s and ``transformers``'. The MLP
    has ``ceil(8/3 hidden_size / 256) * 256`` units, or ``intermediate_size``.

    Raises:
        ValueError: a key asks for something that is not implemented.
    """

    model_type = "log_linear_mamba2"

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 2048,
        state_size: int = 128,
        num_hidden_layers: int = 48,
        head_dim: int = 64,
        num_heads: int | None = None,
        expand: float = 2,
        n_groups: int = 1,
        conv_kernel: int = 4,
        conv_init: float | None = None,
        use_bias: bool = False,
        use_conv_bias: bool = True,
        hidden_act: str = "silu",
        norm_eps: float = 1e-5,
        rmsnorm: bool = True,
        D_has_hdim: bool = False,
        norm_before_gate: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        initializer_range: float = 0.02,
        rescale_prenorm_residual: bool = True,
        max_num_levels: int = MAX_LEVELS,
        level_policy: str = "error",
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        pad_token_id: int | None = 0,
        bos_token_id: int | None = 1,
        eos_token_id: int | None = 2,
        **kwargs: Any,
    ) -> None:
        require_positive(hidden_size=hidden_size, head_dim=head_dim)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.state_size = state_size
        self.num_hidden_layers = num_hidden_layers
        self.head_dim = head_dim
        self.num_heads = round(expand * hidden_size) // head_dim if num_heads is None else num_heads
        self.expand = expand
        self.n_groups = n_groups
        self.conv_kernel = conv_kernel
        self.conv_init = conv_init
        self.use_bias = use_bias
        self.use_conv_bias = use_conv_bias
        self.hidden_act = hidden_act
        self.norm_eps = norm_eps
        self.rmsnorm = rmsnorm
        self.D_has_hdim = D_has_hdim
        self.norm_before_gate = norm_before_gate
        self.dt_limit = tuple(dt_limit)
        self.dt_min = dt_min
        self.dt_max = dt_max
        self.dt_init_floor = dt_init_floor
        self.initializer_range = initializer_range
        self.rescale_prenorm_residual = rescale_prenorm_residual
        self._read_levels(max_num_levels, level_policy, kwargs)
        self.use_cache = use_cache
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )


class LogLinearGatedDeltaNetConfig(_Config):
    """Configuration of :class:`LogLinearGatedDeltaNetForCausalLM`; flash-linear-attention's keys
    for Gated DeltaNet and those of the levels.

    Args:
        hidden_ratio: the MLP has ``ceil(2/3 hidden_ratio hidden_size / 256) * 256`` units.
        intermediate_size: units of the MLP, in place of ``hidden_ratio``.
        max_num_levels: ``L``.
        level_policy: past ``2 ** (L - 1)`` tokens, ``"error"`` raises and ``"saturate"`` reads what
            is older through the last level.

    The other keys are :class:`fenwick_attention.LogLinearGatedDeltaNet`'s and ``transformers``'.

    Raises:
        ValueError: a key asks for something that is not implemented.
    """

    model_type = "log_linear_gated_deltanet"

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 2048,
        expand_v: float = 2.0,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        num_hidden_layers: int = 21,
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        hidden_ratio: float | None = 4,
        intermediate_size: int | None = None,
        hidden_act: str = "swish",
        norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        rescale_prenorm_residual: bool = False,
        max_num_levels: int = MAX_LEVELS,
        level_policy: str = "error",
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        pad_token_id: int | None = None,
        bos_token_id: int | None = 1,
        eos_token_id: int | None = 2,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.expand_v = expand_v
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.num_v_heads = num_v_heads
        self.num_hidden_layers = num_hidden_layers
        self.use_gate = use_gate
        self.use_short_conv = use_short_conv
        self.allow_neg_eigval = allow_neg_eigval
        self.conv_size = conv_size
        self.conv_bias = conv_bias
        self.hidden_ratio = hidden_ratio
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.norm_eps = norm_eps
        self.initializer_range = initializer_range
        self.rescale_prenorm_residual = rescale_prenorm_residual
        self._read_levels(max_num_levels, level_policy, kwargs)
        _require("hidden_act", hidden_act, "swish", "silu")
        gate = kwargs.get("output_gate_activation", "swish")
        _require("output_gate_activation", gate, "swish", "silu")
        _require("attn", kwargs.get("attn"), None)
        self.use_cache = use_cache
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )
