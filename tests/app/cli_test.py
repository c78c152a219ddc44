"""The fenwick program: exit statuses, one-line errors, runs that resume, generation, verification.

FENWICK_BIN names the program; ctest sets it.
"""

import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
BIN = os.environ.get("FENWICK_BIN", str(ROOT / "build/bin/fenwick"))
GOLDEN = ROOT / "tests/golden"

SIZES = "--dim 16 --layers 1 --state 8 --head-dim 16 --batch 4 --warmup 4 --eval-rows 8 --quiet"
MQAR = f"{SIZES} --length 16 --vocab 32 --pairs 2,4 --steps 12 --log-every 1 --seed 3 --lr 1e-2"
TEXT = f"{SIZES} --length 32 --steps 6 --levels 9"


def run(arguments, **kwargs):
    words = arguments.split() if isinstance(arguments, str) else [str(a) for a in arguments]
    return subprocess.run([BIN, *words], capture_output=True, timeout=120, **kwargs)


def succeed(arguments):
    result = run(arguments)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout


def train(task, out, options):
    return succeed(["train", task, "--out", out, *options.split()])


def records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out):
    return {r["step"]: (r["loss"], r["lr"], r["grad_norm"]) for r in records(out) if "loss" in r}


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(6):
        (folder / f"{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 20)
    out = folder / "run"
    train("text", out, f"{TEXT} --data {folder} --ext .py --held-out 0.2")
    return out


@pytest.fixture(scope="module")
def mqar_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("mqar") / "run"
    train("mqar", out, f"{MQAR} --min-lr 0.2")
    return out


@pytest.mark.parametrize(
    "command",
    ["", "info", "verify", "train", "train mqar", "train text", "eval", "generate", "bench"],
)
def test_help(command):
    out = succeed(f"{command} --help").decode()
    assert "fenwick" in out
    if command != "train":
        assert "Example" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("", "subcommand"),
        ("train", "subcommand"),
        ("nonsense", "nonsense"),
        ("train mqar --out {tmp}/x --no-such-option 3", "--no-such-option"),
        ("train mqar --out {tmp}/x --lr fast", "fast"),
        ("train mqar --out {tmp}/x --lr -1", "--lr"),
        (
            "train mqar --out {tmp}/x --lr nan",
            "--lr: expected a finite number of at least 0, got nan",
        ),
        (
            "train mqar --out {tmp}/x --lr inf",
            "--lr: expected a finite number of at least 0, got inf",
        ),
        ("train mqar --out {tmp}/x --beta2 1", "--beta2: expected at least 0 and below 1, got 1"),
        ("train mqar --out {tmp}/x --levels 63", "--levels: expected 1 to 62, got 63"),
        (
            "train mqar --out {tmp}/x --steps 99999999999999999999",
            "--steps: expected less than 2^63",
        ),
        (
            "train mqar --out {tmp}/x --log-every 0",
            "--log-every: expected a whole number of at least 1",
        ),
        ("train mqar --out {tmp}/x --save-every -1", "--save-every"),
        ("train mqar --out {tmp}/x --stop-at -1", "--stop-at"),
        ("train mqar --out {tmp}/x --max-minutes nan", "--max-minutes"),
        ("train mqar --out {tmp}/x --device cuda:99999999999999999999", "--device"),
        ("train mqar --out {tmp}/foreign", "{tmp}/foreign"),
        ("train mqar --out {tmp}/foreign/x", "{tmp}/foreign/x"),
        ("train mqar --out {tmp}/x --model rnn", "--model"),
        ("train mqar --out {tmp}/x --dtype int8", "--dtype"),
        ("train mqar --out {tmp}/x --device tpu", "--device"),
        ("train mqar --out {tmp}/x --pairs 99", "pairs"),
        ("train mqar --out {tmp}/x --levels 3", "--length"),
        ("train mqar --out {tmp}/x --resume", "{tmp}/x"),
        ("train mqar", "--out"),
        ("train text --out {tmp}/x", "--data"),
        ("train text --out {tmp}/x --data {tmp}/nothing", "{tmp}/nothing"),
        ("train text --out {tmp}/x --data /dev/zero", "/dev/zero: expected a file"),
        ("train text --out {tmp}/x --data {tmp}/pipe", "{tmp}/pipe: expected a file"),
        ("train text --out {tmp}/x --data {tmp}/empty", "{tmp}/empty: no text found"),
        ("train text --out {tmp}/x --data {tmp}/words --length 512", "text to train on"),
        ("train text --out {tmp}/x --data {tmp}/words --held-out 0", "--held-out"),
        ("eval {tmp}/nothing", "{tmp}/nothing"),
        ("eval {tmp}", "{tmp}/config.json"),
        ("eval {tmp} --rows -1", "--rows"),
        ("eval {tmp} --length 0", "--length"),
        ("info {tmp}/array", "{tmp}/array/config.json"),
        ("eval {tmp}/folder", "{tmp}/folder/config.json"),
        ("generate {tmp}/nothing", "{tmp}/nothing"),
        ("info {tmp}/nothing.safetensors", "{tmp}/nothing.safetensors"),
        ("verify {tmp}/nothing.safetensors", "{tmp}/nothing.safetensors"),
        ("verify {tmp}/foreign", "{tmp}/foreign"),
        ("verify {tmp}/other.safetensors", "{tmp}/other.safetensors"),
        ("verify --device tpu", "--device"),
        ("train mqar --out {tmp}/x --state 513", "state_size: expected 1 to 512, got 513"),
        (
            "train mqar --out {tmp}/x --dim 520 --head-dim 520 --heads 2",
            "head_dim: expected 1 to 512",
        ),
        ("verify --threads 100000", "--threads: expected a whole number of at least 0 and at most"),
        ("verify --cases 0", "--cases"),
        ("verify --seed -2", "--seed"),
        ("bench --lengths 0", "--lengths"),
        ("bench --seconds -1", "--seconds"),
    ],
)
def test_bad_calls_name_the_thing_in_one_line(tmp_path, arguments, named):
    (tmp_path / "foreign").write_text("not a safetensors file")
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    (tmp_path / "words").write_text("word " * 80)
    (tmp_path / "array").mkdir()
    (tmp_path / "array/config.json").write_text("[1]")
    (tmp_path / "folder/config.json").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/loop").symlink_to("loop")
    (tmp_path / "empty/a").write_text("")
    result = run(arguments.format(tmp=tmp_path))
    message = result.stderr.decode()
    assert result.returncode == 2, message
    assert message.count("\n") == 1, message
    assert len(message) < 200 + 2 * len(str(tmp_path)), message
    assert named.format(tmp=tmp_path) in message
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("model", ["log_linear_mamba2", "gated_deltanet"])
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, model):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = f"{MQAR} --model {model}"
    train("mqar", whole, options)
    train("mqar", parts, f"{options} --stop-at 5")
    assert max(losses(parts)) == 5
    train("mqar", parts, "--resume --quiet --log-every 1")
    assert len(losses(whole)) == 12
    assert losses(parts) == losses(whole)
    first, second = (load_file(folder / "model.safetensors") for folder in (whole, parts))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert records(parts)[-1]["eval"] == records(whole)[-1]["eval"]
    assert {path.name for path in parts.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
        "training.safetensors",
    }


def test_learning_rate_warms_up_and_decays(mqar_run):
    rates = [lr for _, (_, lr, _) in sorted(losses(mqar_run).items())]
    expected = [2.5e-3, 5e-3, 7.5e-3]  # of 4 steps of warm-up; then half a cosine over 8 more
    expected += [1e-2 * (0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * i / 8))) for i in range(9)]
    assert rates == pytest.approx(expected)


def test_resume_refuses_other_options_and_a_second_start(tmp_path):
    out = tmp_path / "run"
    train("mqar", out, f"{MQAR} --stop-at 2")
    before = (out / "training.safetensors").read_bytes()
    for options, named in [
        (f"--resume {MQAR} --lr 0.5", "--lr"),
        (MQAR, "--resume"),
    ]:
        result = run(["train", "mqar", "--out", out, *options.split()])
        assert result.returncode == 2
        assert named in result.stderr.decode()
    assert run(["train", "text", "--out", out, "--resume"]).returncode == 2
    (out / "training.safetensors").unlink()
    train("mqar", out, "--resume --quiet --stop-at 2")
    assert (out / "training.safetensors").read_bytes() == before
    with open(out / "training.safetensors", "r+b") as file:
        file.truncate(len(before) // 2)
    result = run(["train", "mqar", "--out", out, "--resume"])
    assert result.returncode == 2
    assert "training.safetensors" in result.stderr.decode()


def test_a_changed_run_folder_is_named(tmp_path):
    out = tmp_path / "run"
    train("mqar", out, f"{MQAR} --stop-at 2")
    config = json.loads((out / "config.json").read_text())
    metrics = (out / "metrics.jsonl").read_text()

    def failure():
        result = run(["train", "mqar", "--out", out, "--resume", "--quiet"])
        message = result.stderr.decode()
        assert result.returncode == 2 and message.count("\n") == 1, message
        return message

    for key, value in [("dim", "wide"), ("pairs", 3), ("lr", None), ("of_a_later_version", 1)]:
        changed = {**config, "fenwick_run": {**config["fenwick_run"], key: value}}
        (out / "config.json").write_text(json.dumps(changed))
        assert f"{out}/config.json: fenwick_run: {key}" in failure()
    (out / "config.json").write_text(json.dumps({**config, "fenwick_run": None}))
    assert f"{out}/config.json: fenwick_run" in failure()
    (out / "config.json").write_text(json.dumps(config))
    (out / "metrics.jsonl").write_text(metrics + '{"step": "two"}\n')
    assert f"{out}/metrics.jsonl" in failure()


def test_interrupted_run_saves_what_it_has(tmp_path):
    out = tmp_path / "run"
    options = MQAR.replace("--steps 12", "--steps 100000").split()
    process = subprocess.Popen(
        [BIN, "train", "mqar", "--out", out, *options], stdout=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (out / "metrics.jsonl").exists() and records(out):
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"--resume" in stdout
    with safe_open(out / "training.safetensors", "pt") as file:
        step = int(file.metadata()["step"])
    assert step == max(losses(out)) > 0
    assert not list(out.glob("*.tmp*"))


def test_training_lowers_the_loss_and_eval_repeats_its_figures(text_run):
    history = [r["loss"] for r in records(text_run) if "loss" in r]
    assert history[-1] < 5.6  # log 256 = 5.545
    figures = json.loads(succeed(f"eval {text_run} --json"))
    assert figures == records(text_run)[-1]["eval"]
    assert figures["bits_per_byte"] == pytest.approx(figures["loss"] / 0.6931471805599453)
    assert run(f"eval {text_run} --length 100000").returncode == 2


def test_generation_repeats_by_seed(text_run):
    call = ["generate", text_run, "--prompt", "def f", "--tokens", 40, "--seed"]
    first = succeed([*call, 1])
    assert first == succeed([*call, 1])
    assert first != succeed([*call, 2])
    assert first.startswith(b"def f")
    assert len(first) == len("def f") + 40 + 1
    greedy = [*call, 1, "--temperature", 0]
    assert succeed(greedy) == succeed([*greedy[:-3], 5, "--temperature", 0])
    assert run([*call, 1, "--top-p", 0]).returncode == 2
    assert run(["generate", text_run, "--tokens", 100000]).returncode == 2


@pytest.mark.parametrize("model", ["mamba2", "log_linear_gated_deltanet", "transformer"])
def test_every_model_trains_and_generates(tmp_path, model):
    (tmp_path / "text").write_text("abcd" * 300)
    out = tmp_path / "run"
    train("text", out, f"{TEXT} --model {model} --data {tmp_path}/text --dtype bfloat16")
    assert len(succeed(["generate", out, "--prompt", "ab", "--tokens", 5])) == 8


def test_generate_refuses_a_run_of_another_task(mqar_run):
    result = run(f"generate {mqar_run} --prompt a")
    assert result.returncode == 2
    assert "train text" in result.stderr.decode()


def test_golden_files_agree():
    out = succeed(["verify", *sorted(GOLDEN.glob("*.safetensors"))]).decode()
    for tensor in ("golden.logits", "golden.y", "gated_delta/B1_T130_H2_K16_V8/dbeta"):
        assert tensor in out
    assert "FAILED" not in out


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("ops.safetensors", "mamba2/B2_T65_H2_K8_V24/dk"),
        ("log_linear_mamba2_model.safetensors", "backbone.layers.1.mixer.L"),
        ("log_linear_gated_deltanet_layer.safetensors", "golden.y"),
    ],
)
def test_a_changed_golden_file_fails(tmp_path, name, tensor):
    with safe_open(GOLDEN / name, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
        metadata = file.metadata()
    tensors[tensor] = tensors[tensor] * 1.05
    save_file(tensors, tmp_path / name, metadata)
    result = run(f"verify {tmp_path}/{name}")
    assert result.returncode == 1, result.stderr.decode()
    assert b"FAILED" in result.stdout

    del tensors[tensor]
    save_file(tensors, tmp_path / name, metadata)
    result = run(f"verify {tmp_path}/{name}")
    assert result.returncode == 2
    assert result.stderr.count(b"\n") == 1


def test_kernels_agree_with_the_reference():
    out = succeed("verify --cases 4 --device cpu --dtype float32,bfloat16").decode()
    for word in ("scalar_gate", "gated_delta", "bfloat16", "dlevel_scales", "step: o", "seed"):
        assert word in out


def test_bench_reports_figures():
    arguments = "bench --json --lengths 64 --contexts 256 --heads 1 --key-size 16 --value-size 16"
    result = json.loads(succeed(f"{arguments} --seconds 0.01"))
    operators = {row["operator"] for row in result["decode"]}
    assert operators == {"scalar_gate", "gated_delta", "kv_cache"}
    # 2 x 64 tokens of k, v, g and two nodes: base 128 of 256 tokens, one more slot for the fold.
    state = next(row for row in result["decode"] if row["operator"] == "scalar_gate")
    assert state["state_bytes"] == 4 * (128 * (16 + 16 + 1) + 2 * 16 * 16)
    assert all(row["seconds"] > 0 for row in result["forward"])
    assert len(result["forward"]) == 4
