"""Causal convolution and norms against torch's own functions, gradients included."""

import pytest
import torch
from torch.library import opcheck

import reference
from reference import relative_error

ops = torch.ops.fenwick

# dtype -> bounds of the relative error, outputs and gradients.
TOLERANCE = {
    torch.float64: (1e-13, 1e-12),
    torch.float32: (1e-6, 2e-6),
    torch.bfloat16: (5e-3, 1e-2),
    torch.float16: (1e-3, 2e-3),
}


def compare(op, ref, tensors, *options):
    """Runs `op` on tensors and `ref` on their float64 values; compares outputs and gradients."""
    dtype = tensors[0].dtype
    mine = [None if t is None else t.detach().requires_grad_() for t in tensors]
    wide = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    out, expected = op(*mine, *options), ref(*wide, *options)
    assert out.dtype == dtype and out.shape == expected.shape
    forward, backward = TOLERANCE[dtype]
    assert relative_error(out, expected) <= forward
    d_out = torch.randn_like(expected).to(dtype)
    given = [i for i, t in enumerate(tensors) if t is not None]
    grads = torch.autograd.grad(out, [mine[i] for i in given], d_out)
    wanted = torch.autograd.grad(expected, [wide[i] for i in given], d_out.double())
    for i, grad, want in zip(given, grads, wanted):
        assert grad.dtype == tensors[i].dtype
        assert relative_error(grad, want) <= backward, f"gradient of argument {i}"


def conv_tensors(batch, tokens, channels, width, dtype, state=True, bias=True, sequences=None):
    make = lambda *shape: torch.randn(*shape, dtype=dtype)  # noqa: E731
    return (
        make(batch, tokens, channels),
        make(channels, width) / width,
        make(channels) if bias else None,
        make(sequences or batch, channels, width - 1) if state else None,
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 2, 33, 600])
def test_conv(dtype, tokens):
    tensors = conv_tensors(2, tokens, 261, 4, dtype)
    compare(ops.causal_conv1d, reference.causal_conv1d, tensors)


@pytest.mark.parametrize("width", [1, 2, 5, 32])
@pytest.mark.parametrize("silu", [True, False])
def test_conv_widths(width, silu):
    tensors = conv_tensors(1, 50, 7, width, torch.float64, state=width > 1, bias=silu)
    compare(ops.causal_conv1d, reference.causal_conv1d, tensors, None, silu)


@pytest.mark.parametrize("offset_type", [torch.int32, torch.int64])
def test_conv_packed(offset_type):
    offsets = torch.tensor([0, 0, 3, 40, 40, 41, 700, 700], dtype=offset_type)
    tensors = conv_tensors(1, 700, 33, 4, torch.float64, sequences=7)
    compare(ops.causal_conv1d, reference.causal_conv1d, tensors, offsets)


def test_conv_without_tokens_keeps_the_state():
    x, weight, bias, state = conv_tensors(2, 0, 5, 4, torch.float64)
    state.requires_grad_()
    ops.causal_conv1d(x, weight, bias, state).sum().backward()
    assert torch.equal(state.grad, torch.zeros_like(state))


def test_conv_weight_in_float32_beside_bfloat16():
    x, weight, bias, state = conv_tensors(2, 70, 40, 4, torch.bfloat16)
    out = ops.causal_conv1d(x, weight.float(), bias.float(), state)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, ops.causal_conv1d(x, weight, bias, state))


def test_conv_reads_strided_tokens():
    x, weight, bias, state = conv_tensors(2, 20, 12, 4, torch.float64)
    wide = torch.full((2, 20, 30), torch.nan, dtype=torch.float64)
    wide[..., 9:21] = x
    out = ops.causal_conv1d(wide[..., 9:21], weight, bias, state)
    assert torch.equal(out, ops.causal_conv1d(x, weight, bias, state))
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(out, ops.causal_conv1d(turned, weight, bias, state))


@pytest.mark.parametrize("split", [[1] * 9, [2, 7], [5, 1, 3], [9]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_conv_steps_equal_one_call(split, dtype):
    x, weight, bias, state = conv_tensors(3, 9, 130, 4, dtype)
    expected = ops.causal_conv1d(x, weight, bias, state)
    end = torch.cat([state, x.transpose(1, 2)], dim=2)[..., -3:]
    outputs = [ops.causal_conv1d_step(p, weight, bias, state) for p in x.split(split, dim=1)]
    assert torch.equal(torch.cat(outputs, dim=1), expected)
    assert torch.equal(state, end)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("has_gate", [True, False])
def test_gated_rms_norm(dtype, norm_before_gate, has_gate):
    x = torch.randn(2, 70, 3, 129, dtype=dtype)
    gate = torch.randn_like(x) if has_gate else None
    weight = torch.randn(129, dtype=dtype)
    options = (1e-5, norm_before_gate)
    compare(ops.gated_rms_norm, reference.gated_rms_norm, (x, gate, weight), *options)


def test_gated_rms_norm_with_large_gates():
    x = torch.randn(4, 64, dtype=torch.float32)
    gate = torch.tensor([-1e30, -200.0, 200.0, 90.0])[:, None].expand(4, 64)
    weight = torch.randn(64)
    out = ops.gated_rms_norm(x, gate, weight, 1e-5, True)
    assert out.isfinite().all()
    expected = reference.gated_rms_norm(*(t.double() for t in (x, gate, weight)), 1e-5, True)
    assert relative_error(out, expected) <= 1e-6


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_l2_norm(dtype):
    x = torch.randn(2, 70, 3, 100, dtype=dtype)
    compare(ops.l2_norm, reference.l2_norm, (x,), 1e-6)


def test_norms_read_strided_rows():
    wide = torch.full((2, 9, 5, 40), torch.nan, dtype=torch.float64)
    x = torch.randn(2, 9, 3, 16, dtype=torch.float64)
    wide[:, :, 1:4, 8:24] = x
    assert torch.equal(ops.l2_norm(wide[:, :, 1:4, 8:24], 1e-6), ops.l2_norm(x, 1e-6))
    turned = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.equal(ops.l2_norm(turned, 1e-6), ops.l2_norm(x, 1e-6))


def test_results_do_not_depend_on_the_number_of_threads():
    tensors = conv_tensors(2, 1500, 300, 4, torch.float32)
    d_y = torch.randn_like(tensors[0])
    x = torch.randn(700, 96)
    gate, weight = torch.randn_like(x), torch.randn(96)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(
                [
                    ops.causal_conv1d(*tensors),
                    *ops.causal_conv1d_backward(d_y, *tensors, None, True),
                    ops.gated_rms_norm(x, gate, weight, 1e-5, False),
                    *ops.gated_rms_norm_backward(x, x, gate, weight, 1e-5, False),
                ]
            )
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_gradcheck():
    tensors = conv_tensors(1, 9, 3, 4, torch.float64, sequences=3)
    inputs = [t.requires_grad_() for t in tensors]
    offsets = torch.tensor([0, 2, 2, 9])
    assert torch.autograd.gradcheck(lambda *t: ops.causal_conv1d(*t, offsets), inputs)
    x, gate = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    for before in (True, False):
        assert torch.autograd.gradcheck(
            lambda *t: ops.gated_rms_norm(*t, 1e-5, before), (x, gate, weight)
        )
    assert torch.autograd.gradcheck(lambda t: ops.l2_norm(t, 1e-6), (x,))


def test_opcheck():
    x, weight, bias, state = conv_tensors(2, 6, 5, 4, torch.float32)
    grad = [t.detach().requires_grad_() for t in (x, weight, bias, state)]
    opcheck(ops.causal_conv1d.default, tuple(grad))
    opcheck(ops.causal_conv1d.default, (grad[0], grad[1], None, None))
    opcheck(ops.causal_conv1d_backward.default, (x, x, weight, None, state, None, True))
    opcheck(ops.causal_conv1d_step.default, (x, weight, bias, state))
    opcheck(ops.gated_rms_norm.default, (grad[0], x, bias, 1e-5, True))
    opcheck(ops.gated_rms_norm_backward.default, (x, x, None, bias, 1e-5, True))
    opcheck(ops.l2_norm.default, (grad[0], 1e-6))
    opcheck(ops.l2_norm_backward.default, (x, x, 1e-6))


def test_compile_with_dynamic_tokens():
    _, weight, bias, _ = conv_tensors(1, 1, 8, 4, torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def layer(x, weight, bias):
        y = ops.causal_conv1d(x, weight, bias, None)
        return ops.l2_norm(ops.gated_rms_norm(y, x, bias, 1e-5, True))

    for tokens in (3, 17, 64):
        x = torch.randn(2, tokens, 8, requires_grad=True)
        out = layer(x, weight, bias)
        eager = ops.causal_conv1d(x, weight, bias, None)
        eager = ops.l2_norm(ops.gated_rms_norm(eager, x, bias, 1e-5, True))
        assert torch.equal(out, eager)
        d_out = torch.randn_like(out)
        mine, want = (torch.autograd.grad(o, x, d_out)[0] for o in (out, eager))
        assert relative_error(mine, want) <= 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight": torch.randn(6, 4)},
            r"weight: expected shape \[D, W\] = \[5, \*\], got \[6, 4\]",
        ),
        ({"weight": torch.randn(5, 33)}, r"weight: expected width W in 1\.\.32, got 33"),
        ({"weight": torch.randn(5, 4).double()}, "weight: expected float32, got float64"),
        ({"x": torch.zeros(2, 6, 5, dtype=torch.int32)}, "x: expected float32, .* got Int"),
        ({"bias": torch.randn(4)}, r"bias: expected shape \[D\] = \[5\], got \[4\]"),
        (
            {"initial_state": torch.randn(1, 5, 3)},
            r"initial_state: expected shape .* got \[1, 5, 3\]",
        ),
        ({"cu_seqlens": torch.tensor([0, 6])}, "cu_seqlens: expected none unless B = 1, got B = 2"),
        ({"cu_seqlens": torch.tensor([0.0])}, "cu_seqlens: expected N . 1 int32 or int64 offsets"),
    ],
)
def test_conv_errors_name_the_argument(change, message):
    x, weight, bias, state = conv_tensors(2, 6, 5, 4, torch.float32)
    arguments = {"x": x, "weight": weight, "bias": bias, "initial_state": state} | change
    with pytest.raises(RuntimeError, match=message):
        ops.causal_conv1d(**arguments)


def test_norm_errors_name_the_argument():
    x = torch.randn(3, 5)
    with pytest.raises(RuntimeError, match=r"gate: expected the shape of x, \[3, 5\], got \[5\]"):
        ops.gated_rms_norm(x, x[0], x[0], 1e-5, True)
    with pytest.raises(RuntimeError, match="eps: expected a number >= 0, got -1"):
        ops.l2_norm(x, -1.0)
    with pytest.raises(RuntimeError, match="x: expected at least 1 axis, got none"):
        ops.l2_norm(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="x: expected at most 5 axes, got 6"):
        ops.l2_norm(torch.randn(1, 1, 1, 1, 3, 5))


def test_meta_tensors_have_shapes_alone():
    x = torch.randn(2, 6, 5, device="meta")
    out = ops.causal_conv1d(x, torch.randn(5, 4, device="meta"), None, None)
    assert out.is_meta and out.shape == x.shape
    assert ops.l2_norm(x).shape == x.shape


def test_device_without_a_kernel_raises():
    sparse = torch.randn(3, 5).to_sparse()
    with pytest.raises(NotImplementedError, match="SparseCPU"):
        ops.l2_norm(sparse)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs two devices")
def test_tensors_on_another_device_are_rejected():
    x = torch.randn(2, 6, 5, device="cuda")
    with pytest.raises(
        RuntimeError, match="weight: expected a tensor on cuda:0 like x, got .* cpu"
    ):
        ops.causal_conv1d(x, torch.randn(5, 4), None, None)
