"""The operators on a GPU against the same calls on the CPU in float64; streams, graphs, offsets on
the device. ``FENWICK_TEST_DEVICE=cpu`` runs what does not need a GPU on the CPU."""

import os

import pytest
import torch
from problems import OPERATORS, Operator, num_levels, num_slots

from reference import relative_error

DEVICE = os.environ.get("FENWICK_TEST_DEVICE", "cuda")
ops = torch.ops.fenwick

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda"
    and not (
        torch.cuda.is_available()
        and torch._C._dispatch_has_kernel_for_dispatch_key("fenwick::l2_norm", "CUDA")
    ),
    reason="needs a GPU and a build with CUDA",
)
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")

# dtype -> bounds of the relative error, outputs and gradients.
TOLERANCE = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (5e-3, 1e-2)}


@pytest.fixture(params=OPERATORS, ids=lambda op: op.name)
def op(request) -> Operator:
    return request.param


def to_device(tensors):
    return [None if t is None else t.detach().to(DEVICE) for t in tensors]


def compare(call, tensors, dtype):
    """`call(*tensors)` -> tensors, on the device and in float64 on the CPU; gradients of all."""
    mine = [t.requires_grad_(t.is_floating_point()) for t in to_device(tensors)]
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    wide = [t.detach().requires_grad_(t.is_floating_point()) for t in wide]
    outputs, expected = call(*mine), call(*wide)
    forward, backward = TOLERANCE[dtype]
    for i, (out, want) in enumerate(zip(outputs, expected)):
        assert out.device == mine[0].device
        assert relative_error(out.cpu(), want) <= forward, f"output {i}"
    d_outputs = [torch.randn_like(want) for want in expected]
    grads = torch.autograd.grad(
        outputs,
        [t for t in mine if t.requires_grad],
        [d.to(out) for d, out in zip(d_outputs, outputs)],
    )
    wanted = torch.autograd.grad(expected, [t for t in wide if t.requires_grad], d_outputs)
    for i, (grad, want) in enumerate(zip(grads, wanted)):
        assert relative_error(grad.cpu(), want) <= backward, f"gradient {i}"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "key", "value"), [(1, 16, 16), (70, 24, 40), (300, 128, 64)])
def test_attention(op, dtype, tokens, key, value):
    inputs = op.inputs(2, tokens, 1, 2, key, value, dtype=dtype)
    compare(lambda *t: [op.call("", *t, None, key**-0.5)], inputs, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_packed_with_offsets_on_the_device(op, dtype):
    inputs = op.inputs(1, 200, key=32, value=32, dtype=dtype)
    offsets = torch.tensor([0, 0, 65, 70, 200], dtype=torch.int32)
    compare(lambda *t: [op.call("", *t[:-1], t[-1], 0.2)], [*inputs, offsets], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("start", [0, 70, 200])
def test_attention_through_states(op, dtype, start):
    tokens = 150
    levels = num_levels(start + tokens)
    inputs = op.inputs(2, tokens, key=32, value=16, levels=levels, dtype=dtype)
    *state, position, base = op.after(start, 2, inputs)

    def call(*tensors):
        *tensors, position, base = tensors
        # The float64 call on the CPU needs a state of its own type.
        slots = num_slots(start + tokens)
        results = op.call("_with_state", *tensors, position, base, start, slots, None, 0.2)
        assert results[-2].tolist() == [start + tokens] * 2
        return [r for r in results[:-2] if r.requires_grad]

    compare(call, [*inputs, *state, position, base], dtype)


def test_steps_continue_a_prefill(op):
    inputs = to_device(op.inputs(2, 160, key=32, value=16, dtype=torch.float32))
    expected = op.call("", *[t.cpu().double() for t in inputs])
    state = [t.to(DEVICE) for t in op.empty_state(2, inputs)]
    prefix = [t[:, :100] for t in inputs]
    o, *state = op.call("_with_state", *prefix, *state, 0, num_slots(160))
    outputs, position = [o], 100
    for count in (1, 1, 30, 28):
        rows = [t[:, position : position + count] for t in inputs]
        outputs.append(op.call("_step", *rows, *state, position))
        position += count
    assert relative_error(torch.cat(outputs, 1).cpu(), expected) <= 1e-4
    assert state[-2].tolist() == [160, 160]


@needs_gpu
def test_steps_in_a_cuda_graph(op):
    inputs = to_device(op.inputs(2, 40, key=32, value=16, dtype=torch.float32, levels=9))
    expected = op.call("", *[t.cpu().double() for t in inputs])
    empty = [t.to(DEVICE) for t in op.empty_state(2, inputs)]
    capacity = 200  # an upper bound of the positions: the graph is captured once
    empty[-3] = empty[-3].new_zeros(2, 2, num_slots(capacity), 32, 16)
    state = [t.clone() for t in empty]
    token = [t[:, :1].clone() for t in inputs]
    op.call("_step", *token, *state, capacity - 1)  # not captured: loads the kernels
    for t, fresh in zip(state, empty):
        t.copy_(fresh)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = op.call("_step", *token, *state, capacity - 1)
    outputs = []
    for position in range(40):
        for t, source in zip(token, inputs):
            t.copy_(source[:, position : position + 1])
        graph.replay()
        outputs.append(o.clone())
    assert relative_error(torch.cat(outputs, 1).cpu(), expected) <= 1e-4


def slow_gates(inputs):
    """Gates that let old tokens through, so that every level matters."""
    inputs[3] = inputs[3] * 0.02
    return inputs


@pytest.mark.parametrize("size", [16, 64])
def test_thousands_of_packed_documents(op, size):
    lengths = torch.randint(0, 4, (2050,))
    lengths[700] = 333
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    inputs = op.inputs(1, int(offsets[-1]), heads=32, key=size, value=size, dtype=torch.bfloat16)
    inputs = slow_gates(inputs)
    compare(lambda *t: [op.call("", *t[:-1], t[-1], 0.2)], [*inputs, offsets], torch.bfloat16)


@needs_gpu
def test_backward_repeats_bitwise(op):
    inputs = slow_gates(op.inputs(2, 4001, heads=6, key=128, value=64, dtype=torch.bfloat16))
    leaves = [t.requires_grad_() for t in to_device(inputs)]
    o = op.call("", *leaves)
    d_o = torch.randn_like(o)
    first = torch.autograd.grad(o, leaves, d_o, retain_graph=True)
    for _ in range(20):
        again = torch.autograd.grad(o, leaves, d_o, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again))
        assert torch.equal(op.call("", *leaves), o)


@needs_gpu
def test_the_current_stream_is_used():
    x = torch.randn(64, 512, device=DEVICE)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = x * 2
        out = ops.l2_norm(late, 1e-6)
    stream.synchronize()
    assert relative_error(out, ops.l2_norm(x * 2, 1e-6)) == 0


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_layers(dtype):
    x = torch.randn(2, 300, 130, dtype=dtype)
    weight, bias = torch.randn(130, 4, dtype=dtype), torch.randn(130, dtype=dtype)
    state = torch.randn(2, 130, 3, dtype=dtype)
    compare(lambda *t: [ops.causal_conv1d(*t)], [x, weight, bias, state], dtype)
    gate = torch.randn_like(x)
    for before in (True, False):
        norm = lambda *t: [ops.gated_rms_norm(*t, 1e-5, before)]  # noqa: B023, E731
        compare(norm, [x, gate, bias], dtype)
    compare(lambda t: [ops.l2_norm(t, 1e-6)], [x], dtype)


def test_conv_step():
    x, weight = torch.randn(3, 7, 130), torch.randn(130, 4)
    state = torch.randn(3, 130, 3)
    expected = ops.causal_conv1d(x.double(), weight.double(), None, state.double())
    x, weight, state = to_device([x, weight, state])
    outputs = [ops.causal_conv1d_step(p, weight, None, state) for p in x.split([1, 4, 2], 1)]
    assert relative_error(torch.cat(outputs, 1).cpu(), expected) <= 1e-5
    assert torch.equal(state, x.transpose(1, 2)[..., -3:])
