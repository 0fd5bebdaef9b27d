"""The model `xlcli` of lm-evaluation-harness. `make test-integrations` installs the harness, `make test` does not."""

import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from toys import PROSE, RUNTIME, slow_bits, toy

import xlcli
from xlcli import Model, config
from xlcli.config import EvalConfig, GenerateConfig
from xlcli.evaluation import evaluate
from xlcli.events import Generated, Score
from xlcli.generation import generate
from xlcli.model.build import build_model
from xlcli.store.folder import save_model
from xlcli.text.tokenizers import TOKENIZERS

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore:::lm_eval", "ignore:::datasets", "ignore:::dill")
LN2 = math.log(2)
TEXTS = [PROSE, PROSE[:1], PROSE[3:90], "", " a b\n", "\n\n\n", PROSE[100:400], "naïve 世界", PROSE[17:60]]


def lm(model, **options):
    """The model of the harness around a model in memory."""
    from xlcli.lm_eval import XlcliLM

    return XlcliLM(Model(model, RUNTIME), **options)


def requests(*arguments):
    """Requests as the harness makes them."""
    return [types.SimpleNamespace(args=each) for each in arguments]


def nats(model, text, mem_len=None):
    """Sum of the surprisal of a text by `eval`."""
    Path("text.txt").write_text(text)
    scores = [
        event for event in evaluate(model, ["text.txt"], EvalConfig(mem_len=mem_len), RUNTIME)
        if isinstance(event, Score)
    ]  # fmt: skip
    return scores[0].nats


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("mem_len", [None, 0, 40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_rolling_log_likelihoods_are_those_of_eval(kind, mem_len, dtype, tolerance):
    model = toy(kind, dtype=dtype)
    found = lm(model, mem_len=mem_len).loglikelihood_rolling(requests(*((text,) for text in TEXTS)), disable_tqdm=True)
    for text, value in zip(TEXTS, found, strict=True):
        assert value == (pytest.approx(-nats(model, text, mem_len), rel=tolerance) if text else 0.0)


@pytest.mark.parametrize("variant", [None, "local", "linear", "lsh", "axial", "universal", "adaptive", "reversible"])
def test_batches_change_nothing(variant):
    model = toy(variant=variant)
    one, many = (
        lm(model, batch_size=size).loglikelihood_rolling(requests(*((text,) for text in TEXTS)), disable_tqdm=True)
        for size in (1, 8)
    )
    assert many == pytest.approx(one, rel=1e-12)
    slow = [-LN2 * math.fsum(slow_bits(model, text.encode())) for text in TEXTS[2:]]
    assert one[2:] == pytest.approx(slow, rel=1e-9)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_memory_is_rounded(dtype):
    model = toy()
    rounded = lm(model, memory_dtype=dtype)
    (found,) = rounded.loglikelihood_rolling(requests((PROSE[3:90],)), disable_tqdm=True)
    bits = slow_bits(model, PROSE[3:90].encode(), memory_dtype=dtype)
    assert found == pytest.approx(-LN2 * math.fsum(bits), rel=1e-9)
    settings = {"max_gen_toks": 9, "do_sample": False, "until": []}
    (text,) = rounded.generate_until(requests(("The ", settings)), disable_tqdm=True)
    options = GenerateConfig(max_new_tokens=9, temperature=0.0, memory_dtype=dtype)
    assert [text] == [e.text for e in generate(model, b"The ", options, RUNTIME) if isinstance(e, Generated)]
    with pytest.raises(xlcli.ConfigError, match="weight_dtype"):
        lm(model, weight_dtype=dtype).loglikelihood_rolling(requests(("a",)), disable_tqdm=True)


CONTEXTS = ["The quick brown fox", "", "She said that the fox and", "The quick", PROSE]
CONTINUATIONS = [" jumps over", " was", "", "es", "\nThe dog", " jumps over the lazy dog."]


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "words"])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("mem_len", [0, 9])
def test_log_likelihoods_are_sums_over_the_tokens_of_the_continuation(kind, batch_size, mem_len):
    model = toy(kind)
    pairs = [(context, continuation) for context in CONTEXTS for continuation in CONTINUATIONS]
    pairs += pairs[3:7]
    found = lm(model, batch_size=batch_size, mem_len=mem_len).loglikelihood(requests(*pairs), disable_tqdm=True)
    shared = Path("text.txt")
    for (context, continuation), (value, _) in zip(pairs, found, strict=True):
        text = (context + continuation).encode()
        if not text:
            assert value == 0.0
            continue
        shared.write_bytes(text)
        options = EvalConfig(mem_len=mem_len)
        tokens = [
            event for event in evaluate(model, [shared], options, RUNTIME, per_token=True) if hasattr(event, "byte")
        ]
        counted = [token.bits for token in tokens if token.byte + len(token.text) > len(context.encode())]
        # `evaluate` keeps the scores of single tokens in float32.
        assert value == pytest.approx(-LN2 * math.fsum(counted), rel=1e-6), (context, continuation)


def test_greedy_means_what_greedy_decoding_generates():
    model, options = toy(), GenerateConfig(max_new_tokens=3, temperature=0.0)
    for n in range(1, 60):
        events = generate(model, PROSE[:n].encode(), options, RUNTIME, seed=0)
        (greedy,) = (event.text for event in events if isinstance(event, Generated))
        if greedy.isascii():
            break
    assert len(greedy) == 3
    texts = [greedy, greedy[:2] + "#", "#" + greedy[1:], greedy[:2], ""]
    found = lm(model).loglikelihood(requests(*((PROSE[:n], text) for text in texts)), disable_tqdm=True)
    assert [is_greedy for _, is_greedy in found] == [True, False, False, True, True]


def test_continuations_end_before_the_first_stop_text():
    model, settings = toy("words"), {"max_gen_toks": 30, "do_sample": False}
    (whole,) = lm(model).generate_until(requests(("The ", {**settings, "until": []})), disable_tqdm=True)
    assert len(whole) > 5
    stop = whole[4]
    cases = [{**settings, "until": [stop]}, {**settings, "until": stop}, {"max_gen_toks": 2, "until": ["never"]}]
    found = lm(model).generate_until(requests(*(("The ", case) for case in cases)), disable_tqdm=True)
    assert found[0] == found[1] == whole[: whole.index(stop)]
    assert whole.startswith(found[2])
    sampled = {"until": [], "do_sample": True, "temperature": 2.0, "top_k": 50, "max_gen_toks": 20}
    first = lm(model).generate_until(requests(("The ", sampled), ("The ", sampled)), disable_tqdm=True)
    assert first[0] != first[1]
    assert first == lm(model).generate_until(requests(("The ", sampled), ("The ", sampled)), disable_tqdm=True)
    with pytest.raises(xlcli.ConfigError, match="num_beams"):
        lm(model).generate_until(requests(("The ", {"until": [], "num_beams": 4})), disable_tqdm=True)


TASKS = {
    "choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{context}}", "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}", "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "continue": {
        "output_type": "generate_until", "doc_to_text": "{{context}}", "doc_to_target": "{{context}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip
DOCUMENTS = [
    {"context": "The quick brown", "choices": ["fox", "dog", "foxes of the world"], "answer": 0, "text": PROSE},
    {"context": "The lazy", "choices": ["fox", "dog", "friends"], "answer": 1, "text": PROSE[::-1]},
]


def harness(*arguments):
    """The program of the harness with the model of xlcli, in a process of its own."""
    source = str(Path(xlcli.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "xlcli.lm_eval", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def test_tasks_of_the_harness():
    tree = {"model": {"dim": 16, "n_layers": 2, "attention": {"n_heads": 2}}, "train": {"mem_len": 16}}
    tokenizer = TOKENIZERS["bytes"].train([PROSE.encode()], 256)
    made = config.make(tree, {"model": {"vocab_size": tokenizer.vocab_size}})
    save_model(
        Path("tiny"), made, build_model(made.model, torch.Generator().manual_seed(0)).state_dict(), tokenizer, {}
    )
    Path("documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    Path("tasks").mkdir()
    for name, settings in TASKS.items():
        files = {"data_files": {"test": str(Path("documents.jsonl").absolute())}}
        task = {"task": f"tiny_{name}", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        Path(f"tasks/{name}.yaml").write_text(json.dumps(task | settings))  # JSON is YAML
    names = ",".join(f"tiny_{name}" for name in TASKS)
    done = harness(
        "--model", "xlcli", "--model_args", "model=tiny,mem_len=24,threads=1", "--tasks", names,
        "--include_path", "tasks", "--output_path", "out", "--log_samples",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = Path("out").rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    model = xlcli.load("tiny")
    n_bytes = sum(len(document["text"].encode()) for document in DOCUMENTS)
    total = sum(model.score(document["text"], mem_len=24).nats for document in DOCUMENTS)
    assert results["tiny_rolling"]["bits_per_byte,none"] == pytest.approx(total / LN2 / n_bytes, rel=1e-6)
    right = 0
    for document in DOCUMENTS:
        after = model.read(document["context"], mem_len=24)
        scores = [-model.score(f" {choice}", state=after).nats for choice in document["choices"]]
        right += scores.index(max(scores)) == document["answer"]
    assert results["tiny_choice"]["acc,none"] == right / len(DOCUMENTS)
    (samples,) = Path("out").rglob("samples_tiny_continue_*.jsonl")
    found = [json.loads(line)["resps"][0][0] for line in samples.read_text().splitlines()]
    options = {"mem_len": 24, "max_new_tokens": 8, "temperature": 0.0, "stop": ["\n"]}
    assert found == [model.generate(document["context"], **options) for document in DOCUMENTS]


def test_an_error_is_one_sentence():
    done = harness("--model", "xlcli", "--model_args", "model=nowhere", "--tasks", "lambada_openai")
    assert done.returncode == 3
    assert done.stderr.strip().splitlines()[-1].startswith("xlcli: ")
    assert "Traceback" not in done.stderr
