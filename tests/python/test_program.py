"""Models cross between Python and the fenwick program, both ways, with the same logits."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402

import fenwick_attention as fa  # noqa: E402
from fenwick_attention import models  # noqa: E402

BIN = Path(os.environ.get("FENWICK_BIN", fa._ops.library_path().parents[1] / "bin" / "fenwick"))
pytestmark = pytest.mark.skipif(not BIN.is_file(), reason="needs the fenwick program")

PROMPT = b"def f(x):\n    return x"
TRAIN = (
    "--dim 32 --layers 2 --state 16 --head-dim 16 --batch 4 --length 32 --steps 6 --warmup 2 "
    "--lr 1e-2 --eval-rows 8 --levels 9 --quiet"
)


def fenwick(*arguments) -> bytes:
    done = subprocess.run([BIN, *map(str, arguments)], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def load(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def assert_same_logits(folder, model, tmp_path):
    """The program computes the logits of `model` from the files in `folder`, to 1e-5; so does its
    generation choose the same bytes."""
    ids = torch.randint(0, 256, (2, 150))
    with torch.no_grad():
        logits = model(ids).logits
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"golden.input_ids": ids, "golden.logits": logits.contiguous()}
    golden = tmp_path / "golden.safetensors"
    save_file(tensors, golden, {"config": (folder / "config.json").read_text()})
    out = fenwick("verify", golden, "--device", "cpu").decode()
    assert "golden.logits, prefill and steps" in out and "FAILED" not in out, out

    prompt = torch.tensor([list(PROMPT)])
    words = model.generate(prompt, max_new_tokens=12, do_sample=False)[0].tolist()
    command = ["generate", folder, "--prompt", PROMPT.decode(), "--tokens", 12, "--temperature", 0]
    assert fenwick(*command) == bytes(words) + b"\n"


@pytest.mark.parametrize("options", ["", "--tie", "--saturate"])
@pytest.mark.parametrize("kind", ["log_linear_mamba2", "log_linear_gated_deltanet"])
def test_run_folders_load_in_python(kind, options, tmp_path):
    (tmp_path / "text").write_text("def f(x):\n    return x + 1\n" * 60)
    run = tmp_path / "run"
    command = ["train", "text", "--data", tmp_path / "text", "--out", run, "--model", kind]
    fenwick(*command, *TRAIN.split(), *options.split())
    model = load(run)
    assert model.config.level_policy == ("saturate" if options == "--saturate" else "error")
    assert model.config.max_num_levels == 9
    assert_same_logits(run, model, tmp_path)
    # Saved again it is still a run, with the same figures.
    again = tmp_path / "again"
    model.save_pretrained(again)
    figures = [json.loads(fenwick("eval", folder, "--json")) for folder in (run, again)]
    assert figures[0] == figures[1]


@pytest.mark.parametrize("kind", ["log_linear_mamba2", "log_linear_gated_deltanet"])
def test_run_folders_in_bfloat16(kind, tmp_path):
    (tmp_path / "text").write_text("def f(x):\n    return x + 1\n" * 60)
    run = tmp_path / "run"
    command = ["train", "text", "--data", tmp_path / "text", "--out", run, "--model", kind]
    fenwick(*command, *TRAIN.split(), "--dtype", "bfloat16")
    model = load(run)
    assert model.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "again")
    files = [load_file(folder / "model.safetensors") for folder in (run, tmp_path / "again")]
    for name, tensor in files[0].items():
        wide = name.endswith(("A_log", "dt_bias", ".D", ".L"))
        assert tensor.dtype == (torch.float32 if wide else torch.bfloat16), name
        assert files[1][name].dtype == tensor.dtype and torch.equal(files[1][name], tensor), name


SAVED = {
    "mamba2": ("Mamba2", dict(state_size=16, num_heads=4)),
    "mamba2 groups, biases": (
        "Mamba2",
        dict(state_size=16, n_groups=2, use_bias=True, use_conv_bias=False),
    ),
    "mamba2 tied, few levels": (
        "Mamba2",
        dict(
            state_size=8, expand=1.5, tie_word_embeddings=True, max_num_levels=6,
            level_policy="saturate",
        ),
    ),
    "gated_deltanet": ("GatedDeltaNet", dict(num_heads=2, expand_v=1.0)),
    "gated_deltanet value heads, conv bias": (
        "GatedDeltaNet",
        dict(
            num_heads=2, num_v_heads=4, expand_v=0.5, conv_bias=True, allow_neg_eigval=True,
            hidden_ratio=2, conv_size=3,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAVED)
def test_saved_models_load_in_the_program(name, tmp_path):
    kind, sizes = SAVED[name]
    config = getattr(models, f"LogLinear{kind}Config")(
        vocab_size=256, hidden_size=32, head_dim=16, num_hidden_layers=2, pad_token_id=None,
        bos_token_id=None, eos_token_id=None, **sizes,
    )  # fmt: skip
    model = getattr(models, f"LogLinear{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():  # no parameter at its symmetric start
            p.add_(torch.randn_like(p), alpha=0.2)
    model.save_pretrained(tmp_path / "model")
    assert_same_logits(tmp_path / "model", model, tmp_path)
    assert_same_logits(tmp_path / "model", load(tmp_path / "model"), tmp_path)
    (tmp_path / "text").write_text("any text " * 100)
    figures = json.loads(
        fenwick("eval", tmp_path / "model", "--data", tmp_path / "text", "--json", "--rows", 4)
    )
    # Four windows of 64 predictions, spread evenly.
    text = torch.tensor(list((tmp_path / "text").read_bytes()))
    ids = torch.stack([text[(len(text) - 65) * i // 4 :][:65] for i in range(4)])
    assert figures["loss"] == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)
    assert b'"model_type"' in fenwick("info", tmp_path / "model")


def test_the_program_names_what_it_cannot_run(tmp_path):
    config = models.LogLinearMamba2Config(
        vocab_size=99, hidden_size=32, head_dim=16, num_hidden_layers=1
    )
    models.LogLinearMamba2ForCausalLM(config).save_pretrained(tmp_path)
    done = subprocess.run([BIN, "generate", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and "vocab_size 99" in done.stderr
    config.norm_before_gate = True
    config.save_pretrained(tmp_path)
    done = subprocess.run([BIN, "generate", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and "norm_before_gate" in done.stderr
