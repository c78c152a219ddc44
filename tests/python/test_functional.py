"""The functional API: states, packing, policies, autocast, compile, checkpointing."""

import copy
import pickle

import pytest
import torch
from helpers import load_golden, relative_error

import fenwick_attention as fa
from fenwick_attention import LogLinearState
from fenwick_attention.state import capacity, num_slots

RULES = ["scalar_gate", "gated_delta"]


def inputs(rule, B=2, T=150, G=1, H=2, K=16, V=8, L=None, dtype=torch.float64):
    """Random inputs in the order of the operator of `rule`."""
    L = fa.num_levels(T) if L is None else L
    q = torch.randn(B, T, G, K, dtype=dtype)
    k = torch.nn.functional.normalize(torch.randn(B, T, G, K, dtype=dtype), dim=-1)
    v = torch.randn(B, T, H, V, dtype=dtype)
    g = -torch.rand(B, T, H, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    level_scales = torch.rand(B, T, H, L, dtype=dtype)
    beta = [torch.rand(B, T, H, dtype=dtype)] if rule == "gated_delta" else []
    return [q, k, v, g, *beta, level_scales]


def call(rule, args, **kwargs):
    op = fa.log_linear_attention if rule == "scalar_gate" else fa.log_linear_gated_delta_rule
    return op(*args, **kwargs)


def step(rule, args, state, **kwargs):
    if rule == "scalar_gate":
        return fa.log_linear_attention_step(*args, state, **kwargs)
    return fa.log_linear_gated_delta_rule_step(*args, state, **kwargs)


def cut(args, begin, end):
    return [a[:, begin:end] for a in args]


@pytest.mark.parametrize("case", ["B2_T65_H2_K8_V24", "B1_T130_H2_K16_V8", "B2_T7_H3_K16_V8"])
@pytest.mark.parametrize("rule", RULES)
def test_golden(rule, case):
    tensors, _ = load_golden("ops.safetensors")
    prefix = f"{'mamba2' if rule == 'scalar_gate' else 'gated_delta'}/{case}/"
    names = ["q", "k", "v", "g", *(["beta"] if rule == "gated_delta" else []), "level_scales"]
    args = [tensors[prefix + n].double().requires_grad_() for n in names]
    o, state = call(rule, args)
    assert state is None
    assert relative_error(o, tensors[prefix + "o"]) <= 3e-7
    grads = torch.autograd.grad(o, args, tensors[prefix + "do"].double())
    for name, grad in zip(names, grads, strict=True):
        assert relative_error(grad, tensors[prefix + "d" + name]) <= 3e-7, name


@pytest.mark.parametrize("split", [1, 63, 64, 65, 129, 200])
@pytest.mark.parametrize("rule", RULES)
def test_split_calls_and_steps_equal_one_call(rule, split):
    args = inputs(rule, T=260)
    whole, whole_state = call(rule, args, output_final_state=True)
    head, state = call(rule, cut(args, 0, split), output_final_state=True)
    tail, tail_state = call(
        rule, cut(args, split, 260), initial_state=state, output_final_state=True
    )
    assert relative_error(torch.cat([head, tail], 1), whole) <= 1e-12
    # Steps of 1 to 64 tokens from the same prefill.
    at, pieces = split, []
    for n in [1, 2, 64, 5, 1]:
        if at + n > 260:
            break
        pieces.append(step(rule, cut(args, at, at + n), state))
        at += n
    if pieces:
        assert relative_error(torch.cat(pieces, 1), whole[:, split:at]) <= 1e-12
    for a, b in zip(whole_state._tensors().values(), tail_state._tensors().values(), strict=True):
        if a.dtype == torch.int64:
            assert torch.equal(a, b)


@pytest.mark.parametrize("rule", RULES)
def test_packed_equals_separate_with_gradients(rule):
    lengths = [70, 0, 1, 64, 129]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    args = [a.requires_grad_() for a in inputs(rule, B=1, T=sum(lengths))]
    packed, state = call(rule, args, cu_seqlens=cu, output_final_state=True)
    weights = torch.randn_like(packed)
    grads = torch.autograd.grad((packed * weights).sum(), args)
    outs = [call(rule, cut(args, a, b))[0] for a, b in zip(cu[:-1], cu[1:], strict=True) if b > a]
    separate = torch.cat(outs, 1)
    assert relative_error(packed, separate) <= 1e-12
    for x, y in zip(grads, torch.autograd.grad((separate * weights).sum(), args), strict=True):
        assert relative_error(x, y) <= 1e-12
    assert state.position.tolist() == lengths


@pytest.mark.parametrize("rule", RULES)
def test_gradients_flow_through_states(rule):
    args = [a.requires_grad_() for a in inputs(rule, B=1, T=200, K=4, V=3)]
    whole, _ = call(rule, args)
    head, state = call(rule, cut(args, 0, 150), output_final_state=True)
    tail, _ = call(rule, cut(args, 150, 200), initial_state=state)
    weights = torch.randn_like(whole)
    expected = torch.autograd.grad((whole * weights).sum(), args)
    got = torch.autograd.grad((torch.cat([head, tail], 1) * weights).sum(), args)
    for x, y in zip(got, expected, strict=True):
        assert relative_error(x, y) <= 1e-11


@pytest.mark.parametrize("rule", RULES)
def test_state_object(rule, tmp_path):
    args = inputs(rule, B=3, T=300, L=10)
    _, state = call(rule, args, output_final_state=True)
    assert state.position.tolist() == [300] * 3
    # truncate, then replay
    again = inputs(rule, B=3, T=20, L=10)
    expected = step(rule, again, (before := state.clone()))
    assert before.position.tolist() == [320] * 3
    undone = before.truncate(20)
    assert relative_error(step(rule, again, undone), expected) <= 1e-13
    with pytest.raises(ValueError, match="tokens: expected"):
        state.truncate(129)
    with pytest.raises(TypeError, match="device: expected"):
        state.to(torch.bfloat16)
    # beams, device, files
    picked = state.index_select(torch.tensor([2, 0]))
    assert torch.equal(picked.k, state.k[[2, 0]])
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert relative_error(step(rule, again, loaded), expected) <= 1e-13
    torch.save(state.state_dict(), tmp_path / "dict.pt")
    loaded = LogLinearState.from_state_dict(torch.load(tmp_path / "dict.pt", weights_only=True))
    assert relative_error(step(rule, again, loaded), expected) <= 1e-13
    with pytest.raises(ValueError, match="expected the keys"):
        LogLinearState.from_state_dict({"k": state.k})


@pytest.mark.parametrize("rule", RULES)
def test_states_copy_and_pickle(rule):
    _, state = call(rule, inputs(rule, T=200, L=10), output_final_state=True)
    more = inputs(rule, T=5, L=10)
    copies = [copy.deepcopy(state), pickle.loads(pickle.dumps(state)), state.clone()]
    expected = step(rule, more, state)
    for other in copies:
        assert other.max_position == 200
        assert torch.equal(step(rule, more, other), expected)


@pytest.mark.parametrize("rule", RULES)
def test_reserved_steps_stay_in_place(rule, monkeypatch):
    """What a CUDA graph needs: fixed tensors, and a bound of the positions that holds throughout."""
    args = inputs(rule, T=400, L=10)
    expected, _ = call(rule, args)
    _, state = call(rule, cut(args, 0, 60), output_final_state=True)
    state = state.reserve(340)
    tensors = list(state._tensors().values())
    monkeypatch.setattr(fa.functional, "_capturing", lambda q: True)
    for t in range(60, 400):
        o = step(rule, cut(args, t, t + 1), state)
        if t == 60:
            bound = state.max_position
        state.max_position = bound - 1  # as the captured step has it
        assert relative_error(o, expected[:, t : t + 1]) <= 1e-12
    assert all(a is b for a, b in zip(state._tensors().values(), tensors, strict=True))


@pytest.mark.parametrize(("levels", "saturate"), [(30, False), (12, False), (12, True)])
def test_capacity_is_what_the_slots_hold(levels, saturate):
    bounded = levels if saturate else None
    for slots in range(0, 9):
        reachable = capacity(slots, levels, saturate)
        assert num_slots(reachable, bounded) <= slots
        limit = 2**30 if saturate else 2 ** (levels - 1)
        assert reachable == limit or num_slots(reachable + 1, bounded) > slots


@pytest.mark.parametrize("rule", RULES)
def test_vmap_folds_into_the_batch(rule):
    args = [torch.stack(same) for same in zip(*(inputs(rule, T=70, L=8) for _ in range(3)))]
    shared, *mapped = args[0][0], *(a.movedim(0, 2).requires_grad_() for a in args[1:])

    def one(q, *rest):
        whole = call(rule, (q, *rest))[0]
        head, state = call(rule, cut((q, *rest), 0, 40), output_final_state=True)
        return whole, call(rule, cut((q, *rest), 40, 70), initial_state=state)[0]

    outputs = torch.func.vmap(one, in_dims=(None, *[2] * len(mapped)))(shared, *mapped)
    each = [one(shared, *(a.select(2, i) for a in mapped)) for i in range(3)]
    expected = [torch.stack(same) for same in zip(*each)]
    weights = [torch.randn_like(o) for o in outputs]
    for o, e in zip(outputs, expected, strict=True):
        assert relative_error(o, e) <= 1e-14
    for x, y in zip(
        torch.autograd.grad(outputs, mapped, weights),
        torch.autograd.grad(expected, mapped, weights),
        strict=True,
    ):
        assert relative_error(x, y) <= 1e-14


@pytest.mark.parametrize("rule", RULES)
def test_vmap_refuses_steps_and_packing(rule):
    args = [a[None] for a in inputs(rule, B=1, T=1)]
    _, state = call(rule, inputs(rule, B=1), output_final_state=True)
    with pytest.raises(RuntimeError, match="_step: expected a call outside torch.func.vmap"):
        torch.func.vmap(lambda *a: step(rule, a, state))(*args)
    cu = torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match="cu_seqlens: expected None under torch.func.vmap"):
        torch.func.vmap(lambda *a: call(rule, a, cu_seqlens=cu)[0])(*args)


def test_level_policies():
    args = inputs("scalar_gate", T=100, L=4)
    with pytest.raises(RuntimeError, match="level_scales"):
        call("scalar_gate", args)
    saturated, _ = call("scalar_gate", args, level_policy="saturate")
    # The last level absorbs what is older: repeat its weight for the missing levels.
    missing = fa.num_levels(100) - 4
    full = torch.cat([args[-1], args[-1][..., -1:].expand(-1, -1, -1, missing)], -1)
    expected, _ = call("scalar_gate", [*args[:-1], full])
    assert relative_error(saturated, expected) <= 1e-13
    with pytest.raises(ValueError, match="level_policy"):
        call("scalar_gate", args, level_policy="wrap")


@pytest.mark.parametrize("keep_state", [False, True])
@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        ("q", lambda x: x.numpy(), "q: expected a tensor, got ndarray"),
        ("v", lambda x: None, "v: expected a tensor, got NoneType"),
        ("beta", lambda x: None, "beta: expected a tensor, got NoneType"),
        ("k", lambda x: x[0], r"k: expected shape \[B, T, G, K\], got \[150, 1, 16\]"),
        ("v", lambda x: x[0], r"v: expected shape \[B, T, H, V\], got \[150, 2, 8\]"),
        ("g", lambda x: x * 1j, "g: expected real numbers, got torch.complex128"),
        ("level_scales", lambda x: x * 1j, "level_scales: expected real numbers"),
        ("level_scales", lambda x: x[..., :3], "level_scales: expected at least 9 levels"),
    ],
)
def test_wrong_arguments_are_named(argument, change, message, keep_state):
    names = ["q", "k", "v", "g", "beta", "level_scales"]
    args = dict(zip(names, inputs("gated_delta"), strict=True))
    args[argument] = change(args[argument])
    with pytest.raises((RuntimeError, TypeError, ValueError), match=f"^{message}"):
        fa.log_linear_gated_delta_rule(**args, output_final_state=keep_state)


@pytest.mark.parametrize("keep_state", [False, True])
@pytest.mark.parametrize("offsets", [[0, 150], torch.tensor([], dtype=torch.int64)])
def test_wrong_offsets_are_named(offsets, keep_state):
    args = inputs("scalar_gate", B=1)
    with pytest.raises((RuntimeError, TypeError), match="^cu_seqlens: expected"):
        call("scalar_gate", args, cu_seqlens=offsets, output_final_state=keep_state)


@pytest.mark.parametrize("rule", RULES)
def test_a_state_of_another_kind_is_refused(rule):
    args = inputs(rule, T=1, L=9)
    other = "gated_delta" if rule == "scalar_gate" else "scalar_gate"
    _, foreign = call(other, inputs(other, L=9), output_final_state=True)
    for state in (foreign, foreign.k, None):
        with pytest.raises((TypeError, ValueError), match="^state: expected a"):
            step(rule, args, state)
    for state in (foreign, foreign.k):
        with pytest.raises((TypeError, ValueError), match="^initial_state: expected a"):
            call(rule, args, initial_state=state)


def test_wrong_calls_of_a_state():
    _, state = call("scalar_gate", inputs("scalar_gate"), output_final_state=True)
    for tokens in (1.5, torch.tensor([[1], [2]]), torch.tensor([1, 2, 3])):
        with pytest.raises(ValueError, match="^tokens: expected an int or 2 ints"):
            state.truncate(tokens)
    assert state.index_select([1, 1, 0]).num_sequences == 3
    assert state != state.clone() and state in [state]


@pytest.mark.parametrize("rule", RULES)
def test_a_step_is_noticed_by_a_backward_pass_that_needs_the_old_state(rule):
    args = [a.requires_grad_() for a in inputs(rule, T=20, L=10)]
    _, state = call(rule, inputs(rule, T=150, L=10), output_final_state=True)
    o, _ = call(rule, args, initial_state=state)
    with torch.no_grad():
        step(rule, inputs(rule, T=1, L=10), state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("rule", RULES)
def test_steps_take_states_of_inference_mode(rule):
    with torch.inference_mode():
        _, state = call(rule, inputs(rule, L=10), output_final_state=True)
        step(rule, inputs(rule, T=1, L=10), state)
    step(rule, inputs(rule, T=1, L=10), state)
    assert state.position.tolist() == [152, 152]


@pytest.mark.parametrize("rule", RULES)
def test_derivatives_that_do_not_exist_raise(rule):
    args = inputs(rule, T=20)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: call(rule, (q, *args[1:]))[0], (args[0],), (args[0],))
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(fa.l2_norm, (args[0],), (args[0],))
    q = args[0].requires_grad_()
    for y in (call(rule, args)[0], call(rule, args, output_final_state=True)[0], fa.l2_norm(q)):
        (grad,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            grad.sum().backward()


def test_num_levels_takes_whole_numbers():
    assert [fa.num_levels(n) for n in (-1, 0, 1, 2, 3, 64, torch.tensor(65))] == [
        0, 0, 1, 2, 3, 7, 8,
    ]  # fmt: skip
    with pytest.raises(TypeError):
        fa.num_levels(64.0)


def test_drop_in_signature():
    args = inputs("scalar_gate")
    o, state = fa.chunk_log_linear_attn(*args, None, True, None, None)
    expected, _ = fa.log_linear_attention(*args, scale=16**-0.5)
    assert relative_error(o, expected) <= 1e-13
    assert state.position.tolist() == [150, 150]


def test_l2norm_in_kernel():
    args = inputs("gated_delta")
    normed = [fa.l2_norm(args[0]), fa.l2_norm(args[1]), *args[2:]]
    fused, _ = fa.log_linear_gated_delta_rule(*args, use_qk_l2norm_in_kernel=True)
    assert relative_error(fused, call("gated_delta", normed)[0]) <= 1e-13


@pytest.mark.parametrize("rule", RULES)
def test_autocast_runs_in_bfloat16(rule):
    args = inputs(rule, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = call(rule, args)
    assert o.dtype == torch.bfloat16
    assert relative_error(o, call(rule, args)[0]) <= 2e-2


@pytest.mark.parametrize("rule", RULES)
def test_activation_checkpointing(rule):
    args = [a.requires_grad_() for a in inputs(rule)]

    def forward(*args):
        return call(rule, args)[0]

    o = torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False)
    grads = torch.autograd.grad(o.sum(), args)
    for x, y in zip(grads, torch.autograd.grad(forward(*args).sum(), args), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("rule", RULES)
def test_compile_with_dynamic_length(rule):
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(*args):
        return call(rule, args)[0] * 2

    for T in (70, 91, 128):
        args = [a.requires_grad_() for a in inputs(rule, T=T, L=8)]
        o = compiled(*args)
        expected = call(rule, args)[0] * 2
        assert torch.equal(o, expected)
        for x, y in zip(
            torch.autograd.grad(o.sum(), args),
            torch.autograd.grad(expected.sum(), args),
            strict=True,
        ):
            assert torch.equal(x, y)


@pytest.mark.parametrize("rule", RULES)
def test_export(rule):
    class Module(torch.nn.Module):
        def forward(self, *args):
            return call(rule, args)[0]

    args = tuple(inputs(rule, T=100, L=9))
    length = torch.export.Dim("T", min=2, max=256)
    shapes = ({1: length},) * len(args)
    exported = torch.export.export(Module(), args, dynamic_shapes={"args": shapes}).module()
    for T in (100, 131):
        other = inputs(rule, T=T, L=9)
        assert torch.equal(exported(*other), call(rule, other)[0])


@pytest.mark.parametrize("rule", RULES)
def test_compiled_steps(rule):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(*args):
        return step(rule, args[:-1], args[-1])

    args = inputs(rule, T=170, L=9)
    _, state = call(rule, cut(args, 0, 100), output_final_state=True)
    other = state.clone()
    for t in range(100, 170):  # past a fold of the ring
        token = cut(args, t, t + 1)
        assert torch.equal(compiled(*token, state), step(rule, token, other))
    for a, b in zip(state._tensors().values(), other._tensors().values(), strict=True):
        assert torch.equal(a, b)


def test_meta_device():
    args = [a.to("meta") for a in inputs("scalar_gate")]
    o, _ = call("scalar_gate", args)
    assert o.shape == args[2].shape and o.device.type == "meta"
