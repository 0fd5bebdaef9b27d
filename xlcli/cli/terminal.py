r"""Text of models and of strangers, made safe to show on a terminal.

A terminal obeys control characters: text could repaint the screen, set the title or fill the clipboard. Here C0
(except newline and tab), ESC, DEL, C1 and the marks that turn the direction of writing become visible escapes such as
`\x1b`. Each character is judged alone, so a sequence split over two calls is as harmless as a whole one. A pipe gets
exact bytes and never comes here.
"""

from __future__ import annotations

import codecs

_DIRECTION_MARKS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SEPARATORS = (0x2028, 0x2029)
_SHOWN = {
    **{code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t\r"},
    **{code: f"\\u{code:04x}" for code in (*_DIRECTION_MARKS, *_SEPARATORS)},
    **{code: f"\\x{code - 0xDC00:02x}" for code in range(0xDC80, 0xDD00)},
    ord("\r"): "\\r",
}


def visible(text: str) -> str:
    """`text` with everything a terminal would obey shown as an escape; newline and tab stay."""
    return text.translate(_SHOWN)


def one_line(text: str) -> str:
    """`visible`, with newline and tab shown too: for names and quotations inside a sentence."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


class Visible:
    """Bytes in portions to safe text: holds back an unfinished UTF-8 character, shows bytes that are none."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def feed(self, data: bytes, *, final: bool = False) -> str:
        """Safe text of the characters that `data` completes; with `final` also what is left of a broken one."""
        return visible(self._decoder.decode(data, final))
