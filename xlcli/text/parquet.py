"""Texts of Parquet files. Needs pyarrow, the extra `parquet`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from xlcli.errors import DataError
from xlcli.text.formats import DEFAULT_FIELD, PARQUET, Document, as_document

ROWS = 256
"""Rows per batch."""


def is_parquet(descriptor: int) -> bool:
    """Whether an open file is a Parquet file; False for a pipe."""
    try:
        return os.pread(descriptor, len(PARQUET), 0) == PARQUET
    except OSError:
        return False


def texts(descriptor: int, name: str, text_field: str | None) -> Iterator[Document]:
    """Each text of the column `text_field` (None: `text`), ended by a line end.

    Args:
        descriptor: Open file.
        name: Name of the file in errors.
        text_field: Name of a column of strings.

    Raises:
        DataError: pyarrow is missing, the file is damaged, or there is no such column.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{name} is a Parquet file, which needs pyarrow.", "Install it: pip install 'xlcli[parquet]'"
        ) from None
    field = DEFAULT_FIELD if text_field is None else text_field
    with os.fdopen(os.dup(descriptor), "rb") as file:
        try:
            table = parquet.ParquetFile(file)
            schema = table.schema_arrow
            types = (pyarrow.string(), pyarrow.large_string())
            strings = [column for column, kind in zip(schema.names, schema.types, strict=True) if kind in types]
            if field not in strings:
                listed = ", ".join(strings) or "none"
                raise DataError(
                    f"{name} has no column '{field}' of texts.", f"Name one with --text-field; columns: {listed}."
                )
            for batch in table.iter_batches(batch_size=ROWS, columns=[field]):
                for text in batch.column(0).to_pylist():
                    yield from as_document((text or "").encode())
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{name} is a damaged Parquet file: {error}.", "Get it again.") from None
