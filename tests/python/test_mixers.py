"""The mixers: golden layer, padding, caches, dtypes."""

import copy
import pickle

import pytest
import torch
from helpers import load_golden, relative_error

from fenwick_attention import Cache, LogLinearGatedDeltaNet, LogLinearMamba2
from fenwick_attention.layers.log_linear_mamba2 import GatedRMSNorm


def make(kind):
    if kind == "mamba2":
        layer = LogLinearMamba2(
            num_heads=4, head_dim=16, hidden_size=32, state_size=16, n_groups=2, layer_idx=0
        )
    else:
        layer = LogLinearGatedDeltaNet(
            hidden_size=32, head_dim=16, num_heads=2, num_v_heads=4, expand_v=0.5, layer_idx=0
        )
    for p in layer.parameters():  # gates and levels away from their symmetric start
        if p.dim() > 0:
            torch.nn.init.normal_(p, std=0.3)
    return layer.double()


KINDS = ["mamba2", "gated_deltanet"]


def test_golden_gated_deltanet_layer():
    tensors, config = load_golden("log_linear_gated_deltanet_layer.safetensors")
    layer = LogLinearGatedDeltaNet(**config)
    weights = {k: v for k, v in tensors.items() if not k.startswith("golden.")}
    layer.load_state_dict(weights, strict=True)
    y = layer(tensors["golden.x"])[0]
    assert relative_error(y, tensors["golden.y"]) <= 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_padded_batch_equals_rows_alone(kind):
    layer = make(kind)
    lengths, T = [70, 5, 0, 33], 70
    x = torch.randn(4, T, 32, dtype=torch.float64)
    for left in (True, False):
        mask = torch.zeros(4, T, dtype=torch.int64)
        for i, n in enumerate(lengths):
            mask[i, T - n if left else 0 : T if left else n] = 1
        x_in = x.clone().requires_grad_()
        y = layer(x_in, attention_mask=mask)[0]
        weights = torch.randn_like(y) * mask[..., None]
        (grad,) = torch.autograd.grad((y * weights).sum(), x_in)
        assert torch.equal(grad[mask == 0], torch.zeros_like(grad[mask == 0]))
        for i, n in enumerate(lengths):
            if n == 0:
                continue
            row = x[i : i + 1, mask[i] == 1].clone().requires_grad_()
            alone = layer(row)[0]
            assert relative_error(y[i, mask[i] == 1], alone[0]) <= 1e-12
            (row_grad,) = torch.autograd.grad((alone[0] * weights[i, mask[i] == 1]).sum(), row)
            assert relative_error(grad[i, mask[i] == 1], row_grad[0]) <= 1e-11


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [1, 2, 64, 100])
def test_prefill_then_steps_equal_one_call(kind, split):
    layer = make(kind).eval()
    x = torch.randn(2, 140, 32, dtype=torch.float64)
    with torch.no_grad():
        expected = layer(x)[0]
        cache = Cache()
        outs = [layer(x[:, :split], past_key_values=cache, use_cache=True)[0]]
        at = split
        for n in [1, 1, 3, 30, 2]:
            piece = layer(x[:, at : at + n], past_key_values=cache, use_cache=True)[0]
            outs.append(piece)
            at += n
        assert relative_error(torch.cat(outs, 1), expected[:, :at]) <= 1e-12
        assert cache.get_seq_length() == at


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_updates_the_cache_in_place(kind):
    layer, cache = make(kind).eval(), Cache()
    with torch.no_grad():
        x = torch.randn(2, 70, 32, dtype=torch.float64)
        layer(x, past_key_values=cache, use_cache=True)
        before = [*cache[0].conv, *cache[0].recurrent._tensors().values()]
        for _ in range(3):
            layer(x[:, :1], past_key_values=cache, use_cache=True)
        after = [*cache[0].conv, *cache[0].recurrent._tensors().values()]
    assert all(a is b for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_and_gradients_by_sample(kind):
    layer = make(kind)
    x = torch.randn(3, 1, 70, 32, dtype=torch.float64)
    y = torch.func.vmap(lambda row: layer(row)[0])(x)
    assert relative_error(y, torch.stack([layer(row)[0] for row in x])) <= 1e-13
    losses = layer(x[:, 0])[0].square().sum((1, 2))
    parameters = list(layer.parameters())
    eye = torch.eye(3, dtype=torch.float64)
    grads = torch.autograd.grad(losses, parameters, eye, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        alone = torch.autograd.grad(losses[i], parameters, retain_graph=True)
        for a, b in zip(grads, alone, strict=True):
            assert relative_error(a[i], b) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_layers_copy_and_save(kind, tmp_path):
    layer = make(kind)
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    loaded = make(kind)
    loaded.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True), strict=True)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(other(x)[0], layer(x)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_layers_under_activation_checkpointing(kind):
    layer = make(kind)
    x = torch.randn(2, 70, 32, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    y = torch.utils.checkpoint.checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)
    grads = torch.autograd.grad(y.square().sum(), leaves)
    expected = torch.autograd.grad(layer(x)[0].square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize("before_gate", [False, True])
def test_groups_are_normalised_one_by_one(before_gate):
    """As the peers' RMSNormGated with group_size = hidden_size / groups."""
    norm = GatedRMSNorm(24, 1e-5, before_gate, groups=3).double()
    torch.nn.init.normal_(norm.weight)
    y, z = torch.randn(2, 5, 24, dtype=torch.float64), torch.randn(2, 5, 24, dtype=torch.float64)
    gate = torch.nn.functional.silu(z)
    x = y if before_gate else y * gate
    parts = x.unflatten(-1, (3, 8))
    expected = (parts * (parts.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(-2)
    expected = expected * norm.weight * (gate if before_gate else 1)
    assert relative_error(norm(y, z), expected) <= 1e-14


@pytest.mark.parametrize("kind", KINDS)
def test_decay_parameters_stay_float32(kind):
    layer = make(kind).float().to(torch.bfloat16)
    for name, p in layer.named_parameters():
        wide = name in layer.float32_parameters
        assert p.dtype == (torch.float32 if wide else torch.bfloat16), name
        assert isinstance(p, torch.nn.Parameter)
    y = layer(torch.randn(1, 10, 32, dtype=torch.bfloat16))[0]
    assert y.dtype == torch.bfloat16 and torch.isfinite(y).all()
    y.float().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_bad_sizes_name_the_argument():
    with pytest.raises(ValueError, match="num_heads"):
        LogLinearMamba2(num_heads=3, head_dim=64, hidden_size=64)
    with pytest.raises(ValueError, match="num_v_heads"):
        LogLinearGatedDeltaNet(hidden_size=32, head_dim=16, num_heads=2, num_v_heads=3)
    with pytest.raises(ValueError, match="output_gate_activation"):
        LogLinearGatedDeltaNet(hidden_size=32, head_dim=16, output_gate_activation="sigmoid")
    with pytest.raises(ValueError, match="attention_mask"):
        layer = make("mamba2")
        layer(torch.randn(1, 4, 32).double(), attention_mask=torch.ones(1, 1, 4, 4))
    with pytest.raises(ValueError, match=r"attention_mask: expected \[1, 4\]"):
        layer(torch.randn(1, 4, 32).double(), attention_mask=torch.ones(1, 3))
    layer.layer_idx = None
    with pytest.raises(ValueError, match="layer_idx"):
        layer(torch.randn(1, 4, 32).double(), past_key_values=Cache(), use_cache=True)
    layer.layer_idx = 0
    for foreign in ([1], {}):
        with pytest.raises(ValueError, match="past_key_values: expected a fenwick_attention.Cache"):
            layer(torch.randn(1, 4, 32).double(), past_key_values=foreign, use_cache=True)
    for name in ("head_dim", "hidden_size", "state_size", "n_groups", "conv_kernel"):
        sizes = {"num_heads": 4, "head_dim": 16, "hidden_size": 32, name: 0}
        with pytest.raises(ValueError, match=f"{name}: expected a whole number of at least 1"):
            LogLinearMamba2(**sizes)
    for name in ("head_dim", "hidden_size", "num_heads", "num_v_heads", "max_num_levels"):
        with pytest.raises(ValueError, match=f"{name}: expected a whole number of at least 1"):
            LogLinearGatedDeltaNet(**{"hidden_size": 32, "head_dim": 16, "num_heads": 2, name: -1})


@pytest.mark.parametrize("value", [-1e9, float("-inf"), 2])
def test_masks_of_other_conventions_are_refused(value):
    """An additive mask has 0 where a token is: read as 0 and 1, it would keep the padding."""
    layer, mask = make("mamba2"), torch.zeros(2, 4)
    mask[0, :2] = value
    with pytest.raises(ValueError, match="attention_mask: expected 1 for tokens"):
        layer(torch.randn(2, 4, 32).double(), attention_mask=mask)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_nothing_but_padding(kind):
    layer, cache = make(kind), Cache()
    x, mask = torch.randn(2, 4, 32).double(), torch.zeros(2, 4)
    with torch.no_grad():
        for _ in range(2):
            y = layer(x, attention_mask=mask, past_key_values=cache, use_cache=True)[0]
            assert torch.equal(y, torch.zeros_like(y))
        y = layer(x, past_key_values=cache, use_cache=True)[0]
        assert relative_error(y, layer(x)[0]) <= 1e-13


@pytest.mark.parametrize("kind", KINDS)
def test_forward_mode_derivatives_raise(kind):
    layer = make(kind)
    x = torch.randn(1, 4, 32).double()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: layer(x)[0], (x,), (x,))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_past_the_levels_leaves_the_cache_as_it_was(kind):
    layer, cache = make(kind), Cache()
    most = 2 ** (layer.max_num_levels - 1)
    x = torch.randn(2, 20, 32).double()
    with torch.no_grad():
        layer(x, past_key_values=cache, use_cache=True)
        state = cache[0].recurrent
        state.max_position = most  # a bound: the step below is within the levels
        layer(x[:, :1], past_key_values=cache, use_cache=True)
        for t in (state.position, state.base):
            t += most - 64  # base stays a multiple of 64
        state.max_position = int(state.position.max())
        before = copy.deepcopy(cache)
        with pytest.raises(ValueError, match="max_num_levels: expected at least 16 for"):
            layer(x.repeat(1, 3, 1), past_key_values=cache, use_cache=True)
        assert torch.equal(cache[0].conv[0], before[0].conv[0])
        assert cache.get_seq_length() == before.get_seq_length()
