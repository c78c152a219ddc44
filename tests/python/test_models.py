"""Hugging Face models: golden logits, saving, generation, training."""

import copy
import json
import pickle

import pytest
import torch
from helpers import load_golden, relative_error
from safetensors.torch import save_file

transformers = pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402

from fenwick_attention import models  # noqa: E402


def tiny(kind, **kwargs):
    common = dict(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, head_dim=16, pad_token_id=0,
        eos_token_id=None, bos_token_id=1, **kwargs,
    )  # fmt: skip
    if kind == "mamba2":
        config = models.LogLinearMamba2Config(state_size=16, **common)
        model = models.LogLinearMamba2ForCausalLM(config)
    else:
        config = models.LogLinearGatedDeltaNetConfig(num_heads=2, expand_v=1.0, **common)
        model = models.LogLinearGatedDeltaNetForCausalLM(config)
    with torch.no_grad():  # larger weights, so that greedy choices differ between prompts
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(8)
    return model.eval()


KINDS = ["mamba2", "gated_deltanet"]


def test_golden_logits():
    tensors, config = load_golden("log_linear_mamba2_model.safetensors")
    model = models.LogLinearMamba2ForCausalLM(models.LogLinearMamba2Config(**config)).eval()
    weights = {k: v for k, v in tensors.items() if not k.startswith("golden.")}
    model.load_state_dict(weights, strict=True)
    with torch.no_grad():
        logits = model(tensors["golden.input_ids"]).logits
    assert relative_error(logits, tensors["golden.logits"]) <= 1e-5


def test_a_folder_of_the_peers_loads(tmp_path):
    """As flash-linear-attention 0.6.0 writes it."""
    tensors, config = load_golden("log_linear_mamba2_model.safetensors")
    unused = {
        "attnres_block_size": None, "fuse_norm": True, "fuse_cross_entropy": True,
        "fuse_linear_cross_entropy": False, "use_l2warp": False, "chunk_size": 64,
        "dt_limit": [0.0, float("inf")], "architectures": ["LogLinearMamba2ForCausalLM"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**config, **unused}))
    weights = {k: v for k, v in tensors.items() if not k.startswith("golden.")}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        logits = model.eval()(tensors["golden.input_ids"]).logits
    assert relative_error(logits, tensors["golden.logits"]) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_save_load_auto(kind, tmp_path):
    model = tiny(kind)
    ids = torch.randint(1, 50, (2, 70))
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model)
    assert AutoConfig.from_pretrained(tmp_path).model_type == model.config.model_type
    assert torch.equal(loaded(ids).logits, expected)
    # The first generate re-initialises nothing.
    loaded.generate(ids, max_new_tokens=2, do_sample=False)
    assert torch.equal(loaded(ids).logits, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_keeps_the_decays_in_float32(kind, tmp_path):
    model = tiny(kind)
    model.save_pretrained(tmp_path)
    low = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    cast = copy.deepcopy(model).to(torch.bfloat16)
    for name, p in low.named_parameters():
        wide = name.endswith(("A_log", "dt_bias", ".D", ".L"))
        assert p.dtype == (torch.float32 if wide else torch.bfloat16), name
        assert torch.equal(p, cast.get_parameter(name)), name
    ids = torch.randint(1, 50, (2, 70))
    assert torch.equal(low(ids).logits, cast(ids).logits)
    assert low.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 73)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_recomputation(kind):
    model = tiny(kind)
    ids = torch.randint(1, 50, (2, 61))
    out = model.generate(ids, max_new_tokens=8, do_sample=False)
    slow = ids
    for _ in range(8):
        with torch.no_grad():
            slow = torch.cat([slow, model(slow).logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(out, slow)


@pytest.mark.parametrize("kind", KINDS)
def test_unequal_prompts_generate_as_alone(kind):
    model = tiny(kind)
    prompts = [torch.randint(1, 50, (n,)) for n in (70, 3, 20)]
    width = max(len(p) for p in prompts)
    ids = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0)) for p in prompts])
    mask = torch.stack(
        [torch.nn.functional.pad(torch.ones(len(p)), (width - len(p), 0)) for p in prompts]
    ).long()
    batch = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    for row, prompt in zip(batch, prompts, strict=True):
        alone = model.generate(prompt[None], max_new_tokens=6, do_sample=False)
        assert torch.equal(row[-6:], alone[0, -6:])


@pytest.mark.parametrize("kind", KINDS)
def test_beams_and_sampling(kind):
    model = tiny(kind)
    ids = torch.randint(1, 50, (2, 10))
    with_cache = model.generate(ids, num_beams=3, max_new_tokens=5, do_sample=False)
    without = model.generate(ids, num_beams=3, max_new_tokens=5, do_sample=False, use_cache=False)
    assert torch.equal(with_cache, without)
    torch.manual_seed(3)
    a = model.generate(ids, do_sample=True, max_new_tokens=5)
    torch.manual_seed(3)
    assert torch.equal(a, model.generate(ids, do_sample=True, max_new_tokens=5))


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_checkpointing(kind):
    model = tiny(kind).train()
    ids = torch.randint(1, 50, (2, 40))
    loss = model(ids, labels=ids).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    assert all(torch.isfinite(g).all() for g in grads.values())
    model.zero_grad()
    model.gradient_checkpointing_enable()
    again = model(ids, labels=ids).loss
    again.backward()
    assert torch.equal(loss, again)
    for n, p in model.named_parameters():
        assert relative_error(p.grad, grads[n]) <= 1e-6, n


def test_peer_config_keys_are_understood():
    _, config = load_golden("log_linear_mamba2_model.safetensors")
    understood = models.LogLinearMamba2Config(**config)
    for key in ("vocab_size", "hidden_size", "state_size", "num_heads", "norm_eps"):
        assert getattr(understood, key) == config[key]


def test_every_spelling_of_the_levels_is_understood():
    for kind in (models.LogLinearMamba2Config, models.LogLinearGatedDeltaNetConfig):
        for keys in (
            {"max_num_levels": 9, "level_policy": "saturate"},
            {"num_levels": 9, "saturate": True},
        ):
            config = kind(**keys)
            assert (config.max_num_levels, config.level_policy) == (9, "saturate")
            assert not hasattr(config, "num_levels") and not hasattr(config, "saturate")
        assert kind(saturate=False).level_policy == "error"


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("Mamba2", "attnres_block_size", 4),
        ("Mamba2", "residual_in_fp32", True),
        ("Mamba2", "level_policy", "wrap"),
        ("GatedDeltaNet", "attn", {"layers": [1]}),
        ("GatedDeltaNet", "output_gate_activation", "sigmoid"),
        ("GatedDeltaNet", "hidden_act", "gelu"),
    ],
)
def test_configurations_refuse_what_is_not_implemented(kind, key, value):
    with pytest.raises(ValueError, match=f"{key}: expected"):
        getattr(models, f"LogLinear{kind}Config")(**{key: value})


@pytest.mark.parametrize("kind", KINDS)
def test_generation_goes_on_from_a_returned_cache(kind):
    model = tiny(kind)
    first = model.generate(
        torch.randint(1, 50, (2, 70)), max_new_tokens=5, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    cache = first[models.modeling._CACHE_FIELD]
    assert cache.get_seq_length() == 74  # the last token was not read yet
    more = torch.cat([first.sequences, torch.randint(1, 50, (2, 4))], 1)
    expected = model.generate(more, max_new_tokens=5, do_sample=False)
    going_on = {models.modeling._CACHE_FIELD: cache}
    again = model.generate(more, **going_on, max_new_tokens=5, do_sample=False)
    assert torch.equal(again, expected)
    assert cache.get_seq_length() == 83


@pytest.mark.parametrize("kind", KINDS)
def test_what_users_of_transformers_expect(kind, tmp_path):
    model = tiny(kind)
    ids = torch.randint(1, 50, (2, 20))
    logits, cache = model(ids, return_dict=False)
    assert torch.equal(logits, model(ids).logits) and len(cache) == 2
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path).eval()
    out = base(ids, output_hidden_states=True)
    assert torch.equal(model.lm_head(out.last_hidden_state), logits)
    assert len(out.hidden_states) == 3
    embeds = model.get_input_embeddings()(ids)
    from_embeds = model.generate(inputs_embeds=embeds, max_new_tokens=5, do_sample=False)
    assert torch.equal(from_embeds, model.generate(ids, max_new_tokens=5, do_sample=False)[:, 20:])
    model.resize_token_embeddings(60)
    assert torch.equal(model(ids).logits[..., :50], logits)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_models_compile_as_one_graph(kind):
    model = tiny(kind).train()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for T in (40, 33, 70):
        ids = torch.randint(1, 50, (2, T))
        leaves = list(model.parameters())
        loss, expected = compiled(ids, labels=ids).loss, model(ids, labels=ids).loss
        assert torch.allclose(loss, expected)
        grads = torch.autograd.grad(loss, leaves)
        for a, b in zip(grads, torch.autograd.grad(expected, leaves), strict=True):
            assert relative_error(a, b) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_decoding(kind):
    model = tiny(kind)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids = torch.randint(1, 50, (2, 76))
    with torch.no_grad():
        expected = model(ids).logits
        cache = model(ids[:, :70], use_cache=True)[models.modeling._CACHE_FIELD]
        for t in range(70, 76):
            logits = compiled(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits
            assert relative_error(logits[:, 0], expected[:, t]) <= 1e-5


def test_a_foreign_cache_is_refused():
    model, ids = tiny("mamba2"), torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="past_key_values: expected a fenwick_attention.Cache"):
        model(ids, past_key_values=transformers.DynamicCache())
    deeper = tiny("mamba2").base_model
    deeper.layers.append(copy.deepcopy(deeper.layers[0]))
    with pytest.raises(ValueError, match="expected the states of 3 layers, got those of 2"):
        deeper(ids, past_key_values=model(ids, use_cache=True)[models.modeling._CACHE_FIELD])


def test_padding_token_of_mamba2_is_trained_as_in_the_peers():
    model = tiny("mamba2")
    model(torch.zeros(1, 8, dtype=torch.int64)).logits.square().sum().backward()
    assert model.backbone.embeddings.weight.grad[0].abs().sum() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_models_copy(kind):
    model = tiny(kind)
    ids = torch.randint(1, 50, (2, 30))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(ids).logits, model(ids).logits)


def test_initialisation():
    model = models.LogLinearMamba2ForCausalLM(
        models.LogLinearMamba2Config(
            vocab_size=50, hidden_size=64, num_hidden_layers=2, state_size=16, head_dim=16
        )
    )
    mixer = model.backbone.layers[0].mixer
    assert torch.equal(mixer.L, torch.ones_like(mixer.L))
    assert torch.allclose(mixer.A_log.exp(), torch.arange(1.0, 9.0))
    dt = torch.nn.functional.softplus(mixer.dt_bias)
    assert (dt >= 0.9e-4).all() and (dt <= 0.11).all()
    assert abs(model.backbone.embeddings.weight.std() - 0.02) < 2e-3
    config = model.config
    config.conv_init = 0.5
    weight = models.LogLinearMamba2Model(config).layers[1].mixer.conv1d.weight
    assert 0.45 < weight.abs().max() <= 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_trainer_runs(kind, tmp_path):
    pytest.importorskip("accelerate")
    model = tiny(kind).train()
    rows = [{"input_ids": torch.arange(1, 33), "labels": torch.arange(1, 33)}] * 8
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=4, logging_steps=1,
        learning_rate=3e-3, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=args, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6 and losses[-1] < losses[0]
