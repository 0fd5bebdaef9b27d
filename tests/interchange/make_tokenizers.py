"""Make tiny `tokenizer.json` files of the kinds that models bring, with the ids that the `tokenizers` library gives.

    PYTHON tests/interchange/make_tokenizers.py

PYTHON has `tokenizers` 0.23. Each folder `tokenizers/NAME` has `tokenizer.json` and `expected.json`: a list of texts,
each with its ids without the template of the beginning of a text, and with control tokens read as the text they are.
Training gives the same file each time, but for unigram.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

FOLDER = Path(__file__).parent / "tokenizers"

TEXT = """The old ship lay in the harbour. It's a ship of 1,234 tons, they said; nobody'd weighed it since 1987.
She'll sail again, said the captain. She won't, said the sea.

    for i in range(100):
        print("rope", i)

Naïve sailors ask: où est l'île? Über dem Wasser liegt der Nebel.\r
The harbour, the old harbour, was there in the morning.  The ship was not...
"""

TEXTS = [
    "",
    "a",
    " ",
    "The old ship",
    " The old ship",
    "The ship  sails   at 12345 o'clock, they'll say.\n",
    "line one.\nline two.\n\nline three\r\n\r\n\tindented  \n",
    "trailing space ",
    "trailing spaces   ",
    "\n",
    "\n\n\n  x",
    "for i in range(100):\n        print(i)\n",
    "Naïve île, nai\u0308ve i\u0302le: \u00c5ngstro\u0308m \u212b",
    "日本語のテキスト。漢字",
    "emoji 👩\u200d🚀🚀 and ½ ² \u0663\u0664\u0665",
    "1234567 7654321.50 a1b2c3 (100)",
    "'S 'll 'VE don't DON'T",
    "<|endoftext|> <s> </s> <unk> <|begin_of_text|> <0x41>",
    "▁under▁score _ ▁ ",
    "NUL \x00 BEL \x07 nbsp \xa0 ideographic\u3000space \u2028 separator",
    "word" * 30,
    "." * 20 + "\n" * 5 + "!?\n",
]

GPT2_END = "<|endoftext|>"
LLAMA3 = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CONTROL = ["<unk>", "<s>", "</s>"]


def byte_level(pre_tokenizer: Any, control: list[str], *, normalizer: Any = None, whole_words: bool = False) -> Any:
    """Return a trained byte-level BPE.

    Args:
        pre_tokenizer: Splits the text before its bytes are merged.
        control: Control tokens.
        normalizer: Of the text.
        whole_words: Words that are tokens are taken without merges.
    """
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole_words))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=316, special_tokens=control, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def split_by(pattern: str) -> Any:
    """Return a pre-tokenizer of a pattern's matches, as bytes."""
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def gpt2() -> Any:
    """Return GPT-2's kind."""
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), [GPT2_END])


def smollm() -> Any:
    """Return SmolLM2's kind: GPT-2's pattern after single digits."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return byte_level(
        pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        [GPT2_END, "<|im_start|>", "<|im_end|>"],
    )


def llama3() -> Any:
    """Return Llama 3's kind, with a template that begins every text."""
    tokenizer = byte_level(split_by(LLAMA3), ["<|begin_of_text|>", "<|end_of_text|>"], whole_words=True)
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        special_tokens=[("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))],
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def qwen2() -> Any:
    """Return Qwen2's and Qwen3's kind: composed characters (NFC), single digits."""
    return byte_level(split_by(QWEN2), [GPT2_END, "<|im_start|>", "<|im_end|>"], normalizer=normalizers.NFC())


def gpt_neox() -> Any:
    """Return GPT-NeoX's and Pythia's kind: composed characters, and tokens of several blanks that are not special."""
    ends = [GPT2_END, "<|padding|>"]
    tokenizer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), ends, normalizer=normalizers.NFC())
    tokenizer.add_tokens([AddedToken(" " * n, normalized=True) for n in range(8, 1, -1)])
    return tokenizer


def bloom() -> Any:
    """Return BLOOM's kind: words, and what is no white space or punctuation with the blank before it."""
    return byte_level(split_by(r" ?[^(\s|[.,!?…。，、।۔،])]+"), ["<unk>", "<s>", "</s>", "<pad>"])


def with_byte_fallback(tokenizer: Any) -> Any:
    """Train a BPE whose unknown characters become bytes: 256 tokens that are not control tokens."""
    trainer = trainers.BpeTrainer(vocab_size=370, special_tokens=CONTROL + BYTES, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in CONTROL]
    return Tokenizer.from_str(json.dumps(content))


GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>"]
FOUND = ["\n", "\n\n", "\n\n\n", "▁▁", "▁▁▁", "<table>"]
"""Tokens of Gemma that are found in a text, or read as text."""


def gemma() -> Any:
    """Return Gemma's kind: "▁" for each space, and a pre-tokenizer that finds no space any more."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=376, special_tokens=GEMMA + FOUND + BYTES, show_progress=False)
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    restored = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(restored)
    content = json.loads(tokenizer.to_str())
    content["model"]["merges"] = [["▁", "▁"], ["▁▁", "▁"], *content["model"]["merges"]]
    kept = [token for token in content["added_tokens"] if token["content"] not in BYTES]
    content["added_tokens"] = [token | {"special": token["content"] in GEMMA} for token in kept]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return tokenizer


def llama2() -> Any:
    """Return Llama 2's kind: "▁" before the text and for each space, in a normalizer."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    restored = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(restored)
    return with_byte_fallback(tokenizer)


def mistral() -> Any:
    """Return the kind of later Mistral models: "▁" in a pre-tokenizer that does not split."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    restored = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(restored)
    return with_byte_fallback(tokenizer)


def unigram() -> Any:
    """Return a unigram tokenizer, as sentencepiece's, whose unknown characters become bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=CONTROL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"] += [[byte, 0.0] for byte in BYTES]
    content["model"]["byte_fallback"] = True
    return Tokenizer.from_str(json.dumps(content))


KINDS: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (gpt2, smollm, llama3, qwen2, gpt_neox, bloom, gemma, llama2, mistral, unigram)
}


def main() -> None:
    """Write the folders."""
    for name, make in KINDS.items():
        folder = FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(make().to_str(), encoding="utf-8")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.encode_special_tokens = True
        rows = [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False).ids} for text in TEXTS]
        lines = ",\n".join(json.dumps(row) for row in rows)
        (folder / "expected.json").write_text(f"[\n{lines}\n]\n")
        print(f"{name}: {tokenizer.get_vocab_size()} tokens, {sum(len(row['ids']) for row in rows)} ids")


if __name__ == "__main__":
    main()
