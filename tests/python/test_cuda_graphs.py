"""Decode steps of a layer and of a model, captured once in a CUDA graph and replayed."""

import pytest
import torch
from helpers import relative_error
from test_functional import RULES, call, cut, inputs, step
from test_mixers import KINDS, make

from fenwick_attention import Cache

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or not torch._C._dispatch_has_kernel_for_dispatch_key("fenwick::l2_norm", "CUDA"),
    reason="needs a GPU and a build with CUDA",
)

PREFILL, TOKENS = 100, 230  # past two folds of the ring


def replay(run, static: list[torch.Tensor], rows: list[list[torch.Tensor]], kept):
    """Captures ``run()``, which reads ``static`` and updates the tensors ``kept``, then replays it
    for each of ``rows``. The warm-up and the capture leave ``kept`` as it was."""
    before = [t.clone() for t in kept]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # loads the kernels, fills the libraries' caches
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for t, value in zip(kept, before, strict=True):
        t.copy_(value)
    outputs = []
    for row in rows:
        for t, value in zip(static, row, strict=True):
            t.copy_(value)
        graph.replay()
        outputs.append(out.clone())
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("rule", RULES)
def test_steps(rule):
    args = [a.cuda() for a in inputs(rule, T=TOKENS, L=10, dtype=torch.float32)]
    expected, _ = call(rule, [a.double().cpu() for a in args])
    _, state = call(rule, cut(args, 0, PREFILL), output_final_state=True)
    state = state.reserve(TOKENS - PREFILL + 1)
    static = [a.clone() for a in cut(args, 0, 1)]

    rows = [cut(args, t, t + 1) for t in range(PREFILL, TOKENS)]
    out = replay(lambda: step(rule, static, state), static, rows, list(state._tensors().values()))
    assert relative_error(out.cpu(), expected[:, PREFILL:]) <= 1e-4
    assert state.position.tolist() == [TOKENS] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer(kind):
    layer = make(kind).float().eval()
    x = torch.randn(2, TOKENS, 32)
    with torch.no_grad():
        expected = layer(x)[0]
        layer, x, cache = layer.cuda(), x.cuda(), Cache()
        layer(x[:, :PREFILL], past_key_values=cache, use_cache=True)
        cache.reserve(TOKENS - PREFILL + 1)
        static = x[:, :1].clone()

        def run():
            return layer(static, past_key_values=cache, use_cache=True)[0]

        rows = [[x[:, t : t + 1]] for t in range(PREFILL, TOKENS)]
        kept = [*cache[0].conv, *cache[0].recurrent._tensors().values()]
        out = replay(run, [static], rows, kept)
    assert relative_error(out.cpu(), expected[:, PREFILL:]) <= 1e-3


def test_a_model_through_its_graph():
    models = pytest.importorskip("fenwick_attention.models")
    config = models.LogLinearMamba2Config(
        vocab_size=64, hidden_size=32, head_dim=16, state_size=16, num_hidden_layers=2
    )
    model = models.LogLinearMamba2ForCausalLM(config).eval()
    ids = torch.randint(0, 64, (2, TOKENS))
    with torch.no_grad():
        expected = model(ids).logits
        model, ids, cache = model.cuda(), ids.cuda(), Cache()
        model(ids[:, :PREFILL], past_key_values=cache, use_cache=True)
        cache.reserve(TOKENS - PREFILL + 1)
        static = ids[:, :1].clone()

        def run():
            return model(static, past_key_values=cache, use_cache=True).logits

        rows = [[ids[:, t : t + 1]] for t in range(PREFILL, TOKENS)]
        kept = [
            t for i in range(2) for t in (*cache[i].conv, *cache[i].recurrent._tensors().values())
        ]
        out = replay(run, [static], rows, kept)
    assert relative_error(out.cpu(), expected[:, PREFILL:]) <= 1e-3
