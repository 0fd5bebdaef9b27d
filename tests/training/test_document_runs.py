"""Training on separate documents: resumed exactly, recorded with the model, scored as trained."""

import json
from pathlib import Path

import pytest
import torch
from short_runs import After, corpus, go, of_kind, remains, small

from xlcli.errors import CheckpointError, ConfigError
from xlcli.events import Notice, Trained, Validation
from xlcli.store.folder import load
from xlcli.store.layout import read_config

TEXTS = [f"{'lazy ' * (i % 5)}fox {i}\nsaw dog {i % 7}\n" * (1 + i % 9) for i in range(60)]


def json_lines(texts=TEXTS, name="corpus.jsonl"):
    return corpus(text="".join(json.dumps({"text": text}) + "\n" for text in texts), name=name)


def settings(**train):
    return small(train={"reset_on_document": True, **train}, text={"valid": 0.2})


@pytest.mark.parametrize(("memory", "mem_len"), [("hidden", 16), ("keyvalue", 16), ("hidden", 0)])
def test_a_resumed_run_is_the_uninterrupted_one(memory, mem_len):
    path, tree = json_lines(), settings(memory=memory, mem_len=mem_len)
    go(tree, path, "whole")
    stop = After(3)
    stop.run(tree, path, "parts")
    go(tree, path, "parts", resume=True)
    assert remains("parts") == remains("whole")
    assert read_config(Path("whole")).train.reset_on_document


def test_documents_change_the_run_and_its_identity():
    path = json_lines()
    go(settings(), path, "apart")
    go(small(text={"valid": 0.2}), path, "together")
    assert remains("apart")["tensors"] != remains("together")["tensors"]
    with pytest.raises(ConfigError, match=r"train\.reset_on_document"):
        go(small(train={"reset_on_document": True}), path, "together", resume=True)


def test_the_same_text_in_other_documents_is_another_text():
    texts = [text for text in TEXTS if text.count("\n") > 2]
    first, rest = texts[20].split("\n", 1)
    stop = After(3)
    stop.run(settings(), json_lines(texts), "run")
    again = json_lines([*texts[:20], first, rest, *texts[21:]], "again.jsonl")
    with pytest.raises(CheckpointError, match="changed"):
        go(settings(), again, "run", resume=True)
    # Without the setting, only the bytes count.
    stop = After(3)
    tree = small(text={"valid": 0.2})
    stop.run(tree, json_lines(texts), "joined")
    go(tree, again, "joined", resume=True)


def test_held_out_documents_are_scored_apart_as_in_training():
    [trained] = of_kind(go(settings(), json_lines(), "run"), Trained)
    model = load(Path("run"))
    starts, text = model.held_out_documents("valid"), Path("run/valid.txt").read_text()
    documents = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    assert len(documents) > 3
    assert set(documents) <= set(TEXTS)
    nats = 0.0
    for document in documents:
        ids = [10, *document.encode()]
        state = model.network.init_state(1, mem_len=16, segment_len=16)
        with torch.inference_mode():
            nats += model.network.score(torch.tensor([ids[:-1]]), torch.tensor([ids[1:]]), state)[0].sum().item()
    assert trained.bits_per_byte == pytest.approx(nats / torch.tensor(2.0).log().item() / len(text), rel=1e-5)
    assert model.held_out_documents("test") is not None
    Path("run/valid.documents").write_text("0\n")
    with pytest.raises(CheckpointError, match=r"valid\.documents"):
        model.held_out_documents("valid")


def test_validation_during_training_is_that_of_documents():
    events = go(settings(max_steps=6, eval_every=6), json_lines(), "run")
    [validation], [trained] = of_kind(events, Validation), of_kind(events, Trained)
    assert validation.bits_per_byte == pytest.approx(trained.bits_per_byte, rel=1e-4)


def test_one_document_is_reported():
    notices = [event.text for event in of_kind(go(settings(max_steps=1), corpus(), "run"), Notice)]
    assert any("train.reset_on_document" in text for text in notices)
    several = [corpus(text=text, name=f"{i}.txt") for i, text in enumerate(TEXTS)]
    notices = [event.text for event in of_kind(go(settings(max_steps=1), several, "b"), Notice)]
    assert not any("train.reset_on_document" in text for text in notices)


def test_a_model_of_an_older_run_joins_documents():
    go(small(text={"valid": 0.2}), json_lines(), "run")
    assert load(Path("run")).held_out_documents("valid") is None
    assert not Path("run/valid.documents").exists()


def test_lines_that_are_read_apart_change_the_run():
    path = corpus()
    for name, share in (("together", 0), ("apart", 1)):
        go(small(train={"shuffle": True, "line_share": share}), path, name)
    assert remains("apart")["tensors"] != remains("together")["tensors"]
