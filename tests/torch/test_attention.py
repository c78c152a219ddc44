"""Log-linear attention and the log-linear gated delta rule against the recurrence of reference.py,
and the identities that hold between calls. Gradients too."""

import pytest
import torch
from problems import OPERATORS, Operator, num_levels, num_slots

import reference
from reference import relative_error

# dtype -> bounds of the relative error, outputs and gradients. In low precision the reference has
# the same rounded inputs.
TOLERANCE = {
    torch.float64: (1e-12, 1e-11),
    torch.float32: (5e-6, 2e-5),
    torch.bfloat16: (5e-3, 1e-2),
    torch.float16: (5e-3, 1e-2),
}


@pytest.fixture(params=OPERATORS, ids=lambda op: op.name)
def op(request) -> Operator:
    return request.param


def run_reference(op: Operator, inputs, cu_seqlens=None, scale=1.0):
    q, k, v, g, *beta, level_scales = inputs
    return reference.attention(
        q, k, v, g, beta[0] if op.has_beta else None, level_scales, cu_seqlens, scale
    )


def compare(op: Operator, inputs, cu_seqlens=None, scale=1.0, saturate=False):
    """Output and every gradient of a call against the reference in float64."""
    mine = [t.detach().requires_grad_() for t in inputs]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    out = op.call("", *mine, cu_seqlens=cu_seqlens, scale=scale, saturate=saturate)
    expected = run_reference(op, wide, cu_seqlens, scale)
    assert out.dtype == inputs[2].dtype and out.shape == expected.shape
    forward, backward = TOLERANCE[inputs[0].dtype]
    assert relative_error(out, expected) <= forward
    d_out = torch.randn_like(expected).to(out.dtype)
    grads = torch.autograd.grad(out, mine, d_out)
    wanted = torch.autograd.grad(expected, wide, d_out.double())
    for i, (grad, want) in enumerate(zip(grads, wanted)):
        assert grad.dtype == inputs[i].dtype and grad.shape == inputs[i].shape
        assert relative_error(grad, want) <= backward, f"gradient of argument {i}"


@pytest.mark.parametrize("tokens", [1, 2, 63, 65, 150])
def test_matches_the_recurrence(op, tokens):
    compare(op, op.inputs(2, tokens, groups=2, heads=4), scale=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_storage_types(op, dtype):
    compare(op, op.inputs(1, 140, key=24, value=16, dtype=dtype))


def test_more_levels_than_needed_get_no_gradient(op):
    *inputs, level_scales = op.inputs(1, 70)
    wide = torch.full((*level_scales.shape[:-1], 15), torch.nan, dtype=torch.float64)
    wide[..., : level_scales.shape[-1]] = level_scales
    wide.requires_grad_()
    out = op.call("", *inputs, wide)
    assert torch.equal(out, op.call("", *inputs, level_scales))
    (grad,) = torch.autograd.grad(out.sum(), wide)
    assert torch.equal(grad[..., 8:], torch.zeros_like(grad[..., 8:]))


@pytest.mark.parametrize("levels", [1, 2, 5, 8])
def test_saturation(op, levels):
    compare(op, op.inputs(1, 200, levels=levels), saturate=True)


@pytest.mark.parametrize("gate", [-1e-6, -90.0, -torch.inf])
def test_gates_that_reset(op, gate):
    inputs = op.inputs(1, 140)
    inputs[3][:, [0, 3, 64, 100]] = gate
    mine = [t.detach().requires_grad_() for t in inputs]
    wide = [t.detach().requires_grad_() for t in inputs]
    out, expected = op.call("", *mine), run_reference(op, wide)
    assert relative_error(out, expected) <= 1e-12
    d_out = torch.randn_like(out)
    grads, wanted = (torch.autograd.grad(o, i, d_out) for o, i in ((out, mine), (expected, wide)))
    for i, (grad, want) in enumerate(zip(grads, wanted)):
        assert relative_error(grad, want) <= 1e-11, f"gradient of argument {i}"


@pytest.mark.parametrize("offset_type", [torch.int32, torch.int64])
def test_packed_sequences(op, offset_type):
    offsets = torch.tensor([0, 0, 5, 75, 75, 76, 140, 140], dtype=offset_type)
    compare(op, op.inputs(1, 140), cu_seqlens=offsets)


def test_strided_inputs(op):
    inputs = op.inputs(2, 40, groups=2, heads=4)
    expected = op.call("", *inputs)
    padded = []
    for t in inputs:
        wide = torch.full(
            (*t.shape[:1], t.shape[1] + 3, *t.shape[2:-1], t.shape[-1] + 4), torch.nan
        )
        wide = wide.to(t.dtype)
        view = wide[:, 1 : 1 + t.shape[1], ..., 2 : 2 + t.shape[-1]]
        view.copy_(t)
        padded.append(view)
    assert torch.equal(op.call("", *padded), expected)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs]
    assert torch.equal(op.call("", *turned), expected)
    last_first = [t.movedim(-1, 0).contiguous().movedim(0, -1) for t in inputs]
    assert torch.equal(op.call("", *last_first), expected)


def test_no_tokens(op):
    inputs = [t.requires_grad_() for t in op.inputs(2, 0)]
    out = op.call("", *inputs)
    assert out.shape == (2, 0, 2, 5)
    assert all(g.shape == t.shape for g, t in zip(torch.autograd.grad(out.sum(), inputs), inputs))


@pytest.mark.parametrize("splits", [[100, 50], [1, 64, 85], [150, 0], [0, 130, 20]])
def test_calls_that_carry_a_state_equal_one_call(op, splits):
    tokens = sum(splits)
    inputs = [t.requires_grad_() for t in op.inputs(2, tokens, groups=2, heads=4)]
    expected = op.call("", *inputs, scale=0.5)
    state, position, outputs = op.empty_state(2, inputs), 0, []
    for parts in zip(*(t.split(splits, dim=1) for t in inputs)):
        slots = num_slots(position + parts[0].shape[1])
        o, *state = op.call("_with_state", *parts, *state, position, slots, scale=0.5)
        outputs.append(o)
        position += parts[0].shape[1]
    out = torch.cat(outputs, dim=1)
    assert relative_error(out, expected) <= 1e-12
    assert state[-2].tolist() == [tokens, tokens]
    d_out = torch.randn_like(out)
    grads, wanted = (torch.autograd.grad(o, inputs, d_out) for o in (out, expected))
    for i, (grad, want) in enumerate(zip(grads, wanted)):
        assert relative_error(grad, want) <= 1e-11, f"gradient of argument {i}"


def test_packed_sequences_carry_their_own_states(op):
    lengths = [0, 30, 100, 1]
    offsets = torch.tensor([0, 0, 30, 130, 131])
    inputs = op.inputs(1, 131, levels=10)
    states = op.after(200, 4, inputs)
    o, *final = op.call("_with_state", *inputs, *states, 200, num_slots(300), offsets)
    for n, length in enumerate(lengths):
        rows = [t[:, offsets[n] : offsets[n + 1]] for t in inputs]
        alone = [t[n : n + 1] for t in states]
        o_alone, *final_alone = op.call("_with_state", *rows, *alone, 200, num_slots(200 + length))
        assert torch.equal(o[:, offsets[n] : offsets[n + 1]], o_alone)
        for packed, single in zip(final[:-3] + final[-2:], final_alone[:-3] + final_alone[-2:]):
            assert torch.equal(packed[n : n + 1], single)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 60, 128, 191])
def test_steps_equal_one_call(op, dtype, start):
    counts = [1, 1, 64, 3, 1, 40, 21]
    tokens = sum(counts)
    inputs = op.inputs(2, start + tokens, groups=2, heads=4, dtype=dtype)
    expected = op.call("", *inputs)[:, start:]
    state = op.empty_state(2, inputs)
    levels = [t[:, :start] for t in inputs]
    _, *state = op.call("_with_state", *levels, *state, 0, num_slots(start + tokens))
    position, outputs = start, []
    for parts in zip(*(t[:, start:].split(counts, dim=1) for t in inputs)):
        outputs.append(op.call("_step", *parts, *state, position))
        position += parts[0].shape[1]
        assert state[-2].tolist() == [position, position]
    tolerance = 1e-12 if dtype == torch.float64 else 5e-3
    assert relative_error(torch.cat(outputs, dim=1), expected) <= tolerance


def test_golden_file(op):
    from pathlib import Path

    from safetensors.torch import load_file

    tensors = load_file(Path(__file__).parents[1] / "golden" / "ops.safetensors")
    family = "gated_delta/" if op.has_beta else "mamba2/"
    cases = sorted({key.rsplit("/", 1)[0] for key in tensors if key.startswith(family)})
    assert cases
    names = ["q", "k", "v", "g", *(["beta"] if op.has_beta else []), "level_scales"]
    for case in cases:
        inputs = [tensors[f"{case}/{name}"].double().requires_grad_() for name in names]
        out = op.call("", *inputs)
        assert relative_error(out, tensors[f"{case}/o"]) <= 3e-7, case
        grads = torch.autograd.grad(out, inputs, tensors[f"{case}/do"].double())
        for name, grad in zip(names, grads):
            assert relative_error(grad, tensors[f"{case}/d{name}"]) <= 3e-7, f"{case} d{name}"


@pytest.mark.parametrize("tokens", [6, 70])
def test_gradcheck(op, tokens):
    inputs = [t.requires_grad_() for t in op.inputs(1, tokens, heads=2, key=3, value=2)]
    run = lambda *t: op.call("", *t, None, 0.7)  # noqa: E731
    assert torch.autograd.gradcheck(run, inputs, fast_mode=tokens > 10)


def test_gradcheck_packed(op):
    inputs = [t.requires_grad_() for t in op.inputs(1, 9, heads=2, key=3, value=2)]
    offsets = torch.tensor([0, 4, 4, 9])
    assert torch.autograd.gradcheck(lambda *t: op.call("", *t, offsets), inputs)


# 70: tokens in the ring alone; 200: two nodes' chunks are folded.
@pytest.mark.parametrize("start", [0, 70, 200])
@pytest.mark.parametrize("tokens", [3, 75])
def test_gradcheck_through_states(op, start, tokens):
    inputs = op.inputs(2, tokens, heads=2, key=3, value=2, levels=num_levels(start + tokens))
    *state, position, base = op.after(start, 2, inputs)
    slots = num_slots(start + tokens)
    differentiable = [t.requires_grad_() for t in (*inputs, *state)]

    def run(*tensors):
        results = op.call("_with_state", *tensors, position, base, start, slots)
        return results[:-2]  # without position and base, which are integers

    assert torch.autograd.gradcheck(run, differentiable, fast_mode=True)


def test_gradcheck_through_states_packed(op):
    inputs = op.inputs(1, 9, heads=2, key=3, value=2, levels=num_levels(140))
    *state, position, base = op.after(130, 3, inputs)
    offsets = torch.tensor([0, 3, 3, 9])
    differentiable = [t.requires_grad_() for t in (*inputs, *state)]

    def run(*tensors):
        results = op.call("_with_state", *tensors, position, base, 130, num_slots(139), offsets)
        return results[:-2]

    assert torch.autograd.gradcheck(run, differentiable, fast_mode=True)
