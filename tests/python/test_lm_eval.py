"""lm-evaluation-harness runs on the causal LM, with a task made here (nothing is downloaded)."""

import json

import pytest

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from fenwick_attention.models import (  # noqa: E402
    LogLinearMamba2Config,
    LogLinearMamba2ForCausalLM,
)

TASK = """
task: fenwick_local
dataset_path: json
dataset_kwargs:
  data_files: {test: %s}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
"""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, after the end-of-text token 0."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", bos_token="<eos>"
    )


def test_harness_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    questions = [
        {"question": f"{i} plus {i} is", "choices": [f" {2 * i}", f" {2 * i + 1}"], "answer": 0}
        for i in range(6)
    ]
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "fenwick_local.yaml").write_text(TASK % data)
    config = LogLinearMamba2Config(
        vocab_size=257, hidden_size=32, head_dim=16, state_size=16, num_hidden_layers=1,
        pad_token_id=0, eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    model = HFLM(
        pretrained=LogLinearMamba2ForCausalLM(config).eval(),
        tokenizer=byte_tokenizer(),
        backend="causal",
        batch_size=4,
        max_length=256,
        device="cpu",
    )
    results = lm_eval.simple_evaluate(
        model=model,
        tasks=["fenwick_local"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    accuracy = results["results"]["fenwick_local"]["acc,none"]
    assert 0 <= accuracy <= 1
    assert len(results["samples"]["fenwick_local"]) == 6
