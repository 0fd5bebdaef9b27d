"""Small tokenizers like those of published models, made with the package `tokenizers`."""

import json

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from xlcli.text.foreign import TokenizersTokenizer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SLASHES = LLAMA3.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}]+[\r\n/]*")
TEXT = (
    "The dog, the dogs and the fox.\n\nThe fox's den isn't far: 12345 steps, 3,000 dogs.\nThe end.\n\n\n"
    '  the "lazy" dog\r\nthe\tfox  jumped ...\n/usr/the\n.\n/usr/the\n漢字の漢字 naïve café résumé\nthe 🙂 dog\n'
) * 4
SPECIAL = ["<|end|>"]


def trained(name: str) -> tokenizers.Tokenizer:
    """A small tokenizer as those of published models."""
    split = {"llama3": LLAMA3, "qwen": QWEN, "slashes": SLASHES}
    if name in split or name in ("gpt2", "smollm2", "pythia"):
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if name in split:
            by_pattern = pre_tokenizers.Split(Regex(split[name]), "isolated")
            by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            made.pre_tokenizer = pre_tokenizers.Sequence([by_pattern, by_byte])
        if name == "smollm2":
            digits = pre_tokenizers.Digits(individual_digits=True)
            made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        if name in ("qwen", "pythia"):
            made.normalizer = normalizers.NFC()
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
        )
        made.train_from_iterator([TEXT], trainer)
        if name == "pythia":
            made.add_tokens([tokenizers.AddedToken(" " * n, normalized=True) for n in range(24, 1, -1)])
        return made
    if name == "llama2":  # as converted from sentencepiece: the whole text is one word
        bytes_of = [f"<0x{value:02X}>" for value in range(256)]
        learned = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
        learned.pre_tokenizer = pre_tokenizers.Metaspace()
        special = ["<unk>", "<s>", "</s>", *bytes_of]
        learned.train_from_iterator(
            TEXT.split("\n"), trainers.BpeTrainer(vocab_size=450, special_tokens=special, show_progress=False)
        )
        content = json.loads(learned.to_str())
        content["added_tokens"] = content["added_tokens"][:3]
        content["model"] |= {"byte_fallback": True, "fuse_unk": True}
        content["pre_tokenizer"] = None
        steps = [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]
        content["normalizer"] = {"type": "Sequence", "normalizers": steps}
        return tokenizers.Tokenizer.from_str(json.dumps(content))
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    if name == "lowercase":
        made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    special = ["<unk>", "</s>", *([] if name == "lowercase" else [f"<0x{value:02X}>" for value in range(256)])]
    trainer = trainers.UnigramTrainer(vocab_size=450, special_tokens=special, unk_token="<unk>", show_progress=False)
    made.train_from_iterator([TEXT], trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][:2]
    content["model"]["byte_fallback"] = name == "unigram"
    return tokenizers.Tokenizer.from_str(json.dumps(content))


LOSSLESS = ["gpt2", "smollm2", "pythia", "llama3", "qwen", "slashes", "llama2", "unigram"]


def ours(package: tokenizers.Tokenizer) -> TokenizersTokenizer:
    size = package.get_vocab_size() + 7
    return TokenizersTokenizer(package.to_str().encode(), vocab_size=size, start_id=0)


MISSING = (0x04, 0x1D, 0xC0, 0xF1, 0xF5, 0xFF, 0xB8)


def lacking(values: tuple[int, ...]) -> tuple[TokenizersTokenizer, tokenizers.Tokenizer]:
    """A tokenizer of bytes without those of some values."""
    content = json.loads(trained("smollm2").to_str())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    names = {value: chr(value) for value in printable} | {value: chr(256 + i) for i, value in enumerate(others)}
    missing = {names[value] for value in values}
    model = content["model"]
    model["vocab"] = {text: i for text, i in model["vocab"].items() if not missing & {*text}}
    model["merges"] = [pair for pair in model["merges"] if not missing & {*"".join(pair)}]
    data = json.dumps(content)
    return TokenizersTokenizer(data.encode(), vocab_size=500, start_id=0), tokenizers.Tokenizer.from_str(data)
