r"""Untrusted text made safe for a terminal.

A terminal executes control characters: text could repaint the screen, set the title or fill the clipboard. C0 (except
newline and tab), ESC, DEL, C1 and bidirectional control characters are therefore replaced by escapes such as `\x1b`.
Each character is replaced independently, so a sequence split over two calls is harmless too. Output to a pipe is exact.
"""

from __future__ import annotations

import codecs
import os

QUOTATION = 200
"""Maximum length of a quotation in characters."""
_BIDI_CONTROLS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SEPARATORS = (0x2028, 0x2029)
_ESCAPES = {
    **{code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t\r"},
    **{code: f"\\u{code:04x}" for code in (*_BIDI_CONTROLS, *_SEPARATORS)},
    **{code: f"\\x{code - 0xDC00:02x}" for code in range(0xDC80, 0xDD00)},
    ord("\r"): "\\r",
}
_JSON_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), *_BIDI_CONTROLS, *_SEPARATORS)}


def visible(text: str) -> str:
    """`text` with control characters escaped, except newline and tab."""
    return text.translate(_ESCAPES)


def visible_json(text: str) -> str:
    """JSON with control characters escaped as in JSON, so that its value does not change."""
    return text.translate(_JSON_ESCAPES)


def one_line(text: str) -> str:
    """At most `QUOTATION` characters of `text`, control characters escaped: for a quotation inside a sentence."""
    if len(text) > QUOTATION:
        text = text[:QUOTATION] + "..."
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def discard_stdout() -> None:
    """Redirects stdout to the null device, after its reader has closed it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


class Visible:
    """Incremental decoder from bytes to safe text. Holds back incomplete UTF-8 characters, escapes invalid bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def feed(self, data: bytes, *, final: bool = False) -> str:
        """Safe text of the characters that `data` completes; `final` includes an incomplete last one."""
        return visible(self._decoder.decode(data, final))
