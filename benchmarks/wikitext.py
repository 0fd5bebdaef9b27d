"""WikiText-2 as it was written: the marks of its tokens undone, and sentences with <unk> left out (for corpus.py)."""

import re
from collections.abc import Iterator, Sequence

SENTENCE_ENDS = (".", "?", "!")
INNER_MARKS = {"@-@": "-", "@,@": ",", "@.@": "."}
CLOSING = (",", ".", ";", ":", "?", "!", ")", "]", "%", "...", "…", "”", "’", "″", "′")
OPENING = ("(", "[", "$", "£", "€", "₹", "“", "‘", "#")
CLITIC = re.compile(r"'(s|t|re|m|ve|ll|d)|'(S|T|RE|M|VE|LL|D)|n't")


def articles(text: str) -> Iterator[str]:
    """Articles of more than 400 characters; one whose last paragraphs are left out does not end with their heading."""
    for article in re.split(r"(?m)^(?= = [^=\n]+ = $)", text):
        lines = [tokens for line in article.split("\n") if (tokens := line.split())]
        parts = [(is_heading(tokens), known(tokens)) for tokens in lines]
        parts = [(heading, detokenized(tokens)) for heading, tokens in parts if tokens]
        if len(parts) > 1 and parts[-1][0]:
            parts.pop()
        if sum(len(part) for _, part in parts) > 400:
            yield "\n\n".join(part for _, part in parts if part) + "\n\n"


def is_heading(tokens: Sequence[str]) -> bool:
    return tokens[0] == tokens[-1] == "="


def known(tokens: Sequence[str]) -> Sequence[str]:
    """Tokens of a heading, or of the sentences of a paragraph, without <unk>; none if little is left of it."""
    if is_heading(tokens):
        return [] if "<unk>" in tokens else [token for token in tokens if token != "="]
    n_unknown = tokens.count("<unk>")
    found = sentences(tokens)
    left = [sentence for sentence in found if "<unk>" not in sentence]
    if 2 * len(left) < len(found) or (n_unknown > 2 and len(left) < 2):
        return []
    return [token for sentence in left for token in sentence]


def sentences(tokens: Sequence[str]) -> list[list[str]]:
    """Sentences end with . ? or ! outside parentheses, and with the quotation mark after it."""
    found, sentence = [], []
    for token, following in zip(tokens, [*tokens[1:], ""], strict=True):
        sentence.append(token)
        if token in SENTENCE_ENDS:
            in_parentheses = sentence.count("(") > sentence.count(")") and len(sentence) < 80
            in_quotes = following in ("'", '"') and sentence.count(following) % 2 == 1
            ends = not in_parentheses and not in_quotes
        else:
            ends = token == '"' and len(sentence) > 1 and sentence[-2] in SENTENCE_ENDS and sentence.count('"') % 2 == 0
        if ends:
            found.append(sentence)
            sentence = []
    return [*found, sentence] if sentence else found


def quotation_marks(tokens: Sequence[str]) -> dict[int, bool]:
    """Position of each quotation mark or apostrophe to whether it begins a quotation."""
    begins, in_double, in_single = {}, False, False
    for i, token in enumerate(tokens):
        if token == '"':
            begins[i] = in_double = not in_double
        elif token == "'":
            is_possessive = not in_single and i > 0 and tokens[i - 1][-1] in "sz"
            in_single = not in_single and not is_possessive and "'" in tokens[i + 1 : i + 13]
            begins[i] = in_single
    return begins


def attachment(token: str, previous: str, following: str) -> tuple[bool, bool]:
    """Whether a token other than a quotation mark is written without a blank before it, and after it."""
    is_time = token == ":" and previous.isdigit() and following[:1].isdigit() and len(following) == 2
    if token in INNER_MARKS or token == "/" or is_time:
        return True, True
    if token == "°":
        return following in tuple("CFNSEW"), following in ("C", "F")
    return token in CLOSING or bool(CLITIC.fullmatch(token)), token in OPENING


def detokenized(tokens: Sequence[str]) -> str:
    begins = quotation_marks(tokens)
    text, attached = "", True
    for i, (previous, token, following) in enumerate(zip(["", *tokens[:-1]], tokens, [*tokens[1:], ""], strict=True)):
        if i in begins:
            before, after = not begins[i], begins[i]
        else:
            before, after = attachment(token, previous, following)
        text += ("" if attached or before else " ") + INNER_MARKS.get(token, token)
        attached = after
    text = text.strip().replace("] [", "][")
    return re.sub(r"\(\s*[,;]?\s*\)", "", text).replace("  ", " ")
