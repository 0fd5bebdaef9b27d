"""transformers loads exported models, and gives the ids and logits of xlcli. `make test-integrations` installs it."""

import pytest
import torch
from odd_texts import VOCABULARIES, texts, vocabulary
from toys import RUNTIME

from xlcli import config
from xlcli.config import GenerateConfig
from xlcli.generation import generate
from xlcli.interchange import export_model, import_model
from xlcli.model.build import build_model
from xlcli.store.folder import load, save_model
from xlcli.store.layout import write_record

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SHAPE = {"dim": 32, "n_layers": 2, "attention": {"n_heads": 4, "n_kv_heads": 2}, "position": {"kind": "rope"}}


@pytest.mark.parametrize("name", VOCABULARIES)
@torch.inference_mode()
def test_ids_and_logits_of_odd_texts_are_those_of_xlcli(name, tmp_path):
    tokenizer = vocabulary(name)
    made = config.make({"model": SHAPE | {"vocab_size": tokenizer.vocab_size}, "train": {"mem_len": 1500}})
    torch.manual_seed(0)
    weights = {key: each.normal_(0, 0.3) for key, each in build_model(made.model).state_dict().items()}
    save_model(tmp_path / "made", made, weights | {"head.bias": torch.zeros(tokenizer.vocab_size)}, tokenizer, {})
    export_model(tmp_path / "made", tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours = load(tmp_path / "made")
    for text in texts(600):
        ids = tokenizer.encode(text.encode()).tolist()
        assert theirs(text)["input_ids"] == ids, text
        tokens = torch.tensor([[network.config.bos_token_id, *ids]])
        logits = network(tokens).logits
        state = ours.network.init_state(1, mem_len=1500, segment_len=256)
        torch.testing.assert_close(ours.network.logits(tokens, state)[0], logits[:, -1], rtol=0, atol=1e-5)
        nll = ours.network.score(tokens[:, :-1], tokens[:, 1:], state).nll if ids else torch.zeros(1, 0)
        found = logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
        torch.testing.assert_close(-nll, found, rtol=0, atol=1e-5)


def test_a_saved_copy_of_transformers_is_imported_again(tmp_path):
    tokenizer = vocabulary("sentencepiece")
    made = config.make({"model": SHAPE | {"vocab_size": tokenizer.vocab_size}, "train": {"mem_len": 64}})
    save_model(tmp_path / "made", made, build_model(made.model).state_dict(), tokenizer, {})
    export_model(tmp_path / "made", tmp_path / "out")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "saved")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "saved")
    import_model(tmp_path / "saved", tmp_path / "back")
    before, after = load(tmp_path / "made"), load(tmp_path / "back")
    assert before.config.train == after.config.train
    assert all(each.equal(after.network.state_dict()[key]) for key, each in before.network.state_dict().items())
    for text in texts(50):
        assert after.tokenizer.encode(text.encode()).tolist() == tokenizer.encode(text.encode()).tolist()


@torch.inference_mode()
def test_a_text_ends_where_transformers_ends_it(tmp_path):
    tokenizer = vocabulary("sentencepiece")
    made = config.make({"model": SHAPE | {"vocab_size": tokenizer.vocab_size}, "train": {"mem_len": 64}})
    torch.manual_seed(1)
    weights = {key: each.normal_(0, 0.3) for key, each in build_model(made.model).state_dict().items()}
    save_model(tmp_path / "made", made, weights | {"head.bias": torch.zeros(tokenizer.vocab_size)}, tokenizer, {})
    model, options = load(tmp_path / "made"), GenerateConfig(max_new_tokens=40, temperature=0.0, logprobs=0)
    *_, whole = generate(model, b"the", options, RUNTIME, seed=0)
    ids = [each.token for each in whole.logprobs]
    ends = [ids[20], ids[9]]
    write_record(tmp_path / "made", {"imported": {"eos_token_id": ends, "chat_templates": {"default": "{{ 7 }}"}}})
    *_, result = generate(load(tmp_path / "made"), b"the", options, RUNTIME, seed=0)
    export_model(tmp_path / "made", tmp_path / "out")
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    prompt = torch.tensor([[tokenizer.start_id, *tokenizer.encode(b"the").tolist()]])
    theirs = network.generate(prompt, do_sample=False, max_new_tokens=40, pad_token_id=0)[0, prompt.shape[1] :]
    assert network.generation_config.eos_token_id == ends
    assert [each.token for each in result.logprobs] == theirs.tolist()
    assert result.tokens <= 10
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert other.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "7"
