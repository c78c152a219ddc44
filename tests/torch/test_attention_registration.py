"""What torch asks of the attention operators: schemas, fake kernels, tracing, errors, devices."""

import pytest
import torch
from problems import OPERATORS, Operator, num_levels, num_slots
from torch.library import opcheck

ops = torch.ops.fenwick


@pytest.fixture(params=OPERATORS, ids=lambda op: op.name)
def op(request) -> Operator:
    return request.param


def overload(op: Operator, suffix: str):
    return getattr(ops, op.name + suffix).default


def test_opcheck(op):
    inputs = op.inputs(1, 7, dtype=torch.float32)
    offsets = torch.tensor([0, 3, 7])
    opcheck(overload(op, ""), tuple(t.clone().requires_grad_() for t in inputs))
    opcheck(overload(op, ""), (*inputs, offsets))
    opcheck(overload(op, "_backward"), (inputs[2], *inputs, None, 1.0, False))


def test_opcheck_with_state(op):
    inputs = op.inputs(2, 7, dtype=torch.float32, levels=num_levels(140))
    state = op.after(130, 2, inputs)
    tensors = [t.clone().requires_grad_(t.is_floating_point()) for t in (*inputs, *state)]
    opcheck(overload(op, "_with_state"), (*tensors, 130, num_slots(137)))
    o, *final = op.call("_with_state", *inputs, *state, 130, num_slots(137))
    gradients = [torch.randn_like(t) for t in (o, *final[:-2])]
    opcheck(
        overload(op, "_with_state_backward"),
        (*gradients, *inputs, *state, 130, None, 1.0, False),
    )
    opcheck(overload(op, "_step"), (*inputs, *state, 130))


def test_compile_with_dynamic_tokens(op):
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def layer(*tensors):
        return op.call("", *tensors) * 2

    for tokens in (5, 33, 70):
        inputs = [t.requires_grad_() for t in op.inputs(1, tokens, levels=9)]
        out, eager = layer(*inputs), op.call("", *inputs) * 2
        assert torch.equal(out, eager)
        d_out = torch.randn_like(out)
        grads, wanted = (torch.autograd.grad(o, inputs, d_out) for o in (out, eager))
        assert all(torch.equal(a, b) for a, b in zip(grads, wanted))


def test_compile_of_a_step(op):
    inputs = op.inputs(2, 1, levels=9)
    state = op.after(200, 2, inputs)
    eager = [t.clone() for t in state]
    step = torch.compile(
        lambda *arguments: op.call("_step", *arguments), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(step(*inputs, *state, 200), op.call("_step", *inputs, *eager, 200))
    assert all(torch.equal(a, b) for a, b in zip(state, eager))


def test_steps_at_other_positions_are_not_compiled_again(op):
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(
        lambda position, *tensors: op.call("_step", *tensors, position),
        fullgraph=True, backend=count, dynamic=True,
    )  # fmt: skip
    state = op.after(30, 2, op.inputs(2, 1))
    for position in range(30, 34):
        step(position, *op.inputs(2, 1, levels=9), *state)
    assert state[-2].tolist() == [34, 34]
    assert len(graphs) == 1


def test_meta_tensors_have_shapes_alone(op):
    inputs = [t.to("meta") for t in op.inputs(2, 70)]
    state = [t.to("meta") for t in op.empty_state(2, inputs)]
    o, *final = op.call("_with_state", *inputs, *state, 0, 3)
    assert o.is_meta and o.shape == inputs[2].shape
    assert final[-3].shape == (2, 2, 3, 6, 5)
    assert [t.shape for t in final[:-3]] == [t.shape for t in state[:-3]]


# Argument, its replacement (a function of the tensor), what the message says. "q" and so on are
# the names in the schemas.
ERRORS = [
    ("k", lambda t: t[:, :3], r"k: expected shape \[B, T, G, K\]"),
    ("v", lambda t: t.float(), "v: expected float64, got float32"),
    ("v", lambda t: t[0], r"v: expected shape \[B, T, H, V\]"),
    ("g", lambda t: t.int(), "g: expected float32, .* got Int"),
    ("level_scales", lambda t: t[..., :2], "level_scales: expected at least 4 levels .* got 2"),
    ("q", lambda t: t.to_sparse(), "SparseCPU"),
]


@pytest.mark.parametrize(("name", "change", "message"), ERRORS)
def test_errors_name_the_argument(op, name, change, message):
    names = ["q", "k", "v", "g", *(["beta"] if op.has_beta else []), "level_scales"]
    arguments = dict(zip(names, op.inputs(1, 6)))
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match=message):
        op.call("", **arguments)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 6], r"cu_seqlens\[0\]: expected 0, got 1"),
        ([0, 5], r"cu_seqlens\[1\]: expected T = 6, got 5"),
        ([0, 4, 3, 6], r"cu_seqlens\[2\]: expected at least .* 4, got 3"),
        ([], r"cu_seqlens: expected N \+ 1 int32 or int64 offsets, got .* 0 elements"),
    ],
)
def test_offsets_are_checked(op, offsets, message):
    with pytest.raises(RuntimeError, match=message):
        op.call("", *op.inputs(1, 6), torch.tensor(offsets, dtype=torch.int64))


def test_states_are_checked(op):
    inputs = op.inputs(2, 5, levels=10)
    state = op.after(300, 2, inputs)
    with pytest.raises(RuntimeError, match="num_slots: expected a number >= 0, got -1"):
        op.call("_with_state", *inputs, *state, 300, -1)
    with pytest.raises(RuntimeError, match="nodes: expected .*"):
        op.call("_with_state", *inputs, *state, 300, 0)
    flat = [*state[:-3], state[-3][0], *state[-2:]]
    with pytest.raises(RuntimeError, match=r"state_nodes: expected 5 axes .* got 4"):
        op.call("_with_state", *inputs, *flat, 300, 2)
    with pytest.raises(RuntimeError, match="position"):
        op.call("_with_state", *inputs, *state, 200, 3)
    before = [t.clone() for t in state]
    with pytest.raises(RuntimeError, match="q: expected"):
        op.call("_step", *op.inputs(2, 65, levels=10), *state, 300)
    assert all(torch.equal(a, b) for a, b in zip(state, before))


def test_device_without_a_kernel_raises(op):
    registered = torch._C._dispatch_has_kernel_for_dispatch_key
    name = f"fenwick::{op.name}"
    assert registered(name, "CPU")
    if not registered(name, "CUDA"):
        assert not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CUDA")
    inputs = op.inputs(1, 6)
    inputs[0] = inputs[0].to_sparse()
    with pytest.raises(NotImplementedError, match=f"fenwick::{op.name}.*SparseCPU"):
        op.call("", *inputs)
