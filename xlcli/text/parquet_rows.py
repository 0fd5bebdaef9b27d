"""Rows of Parquet files, which are read from their end. They need pyarrow, the extra `parquet`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xlcli.errors import DataError
from xlcli.text.documents import Place, Rows
from xlcli.text.table_rows import require_columns

if TYPE_CHECKING:
    import pyarrow

PARQUET = b"PAR1"  # first bytes of Parquet files
PARQUET_ROWS = 256  # rows per batch
_TEXT_KIND = re.compile(r"(dictionary<values=)?(large_)?string(_view)?\b")  # types of Arrow that are texts


def parquet_rows(descriptor: int, name: str, text_fields: Sequence[str]) -> Rows:
    """Rows of an open file, without columns of bytes; `DataError` if it cannot be read, or a text column is missing."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        problem = f"{name} is a Parquet file, which needs pyarrow."
        raise DataError(problem, "Install it: pip install 'xlcli[parquet]'") from None
    number = 0
    with os.fdopen(os.dup(descriptor), "rb") as file:
        try:
            parts = parquet.ParquetFile(file)
            kinds = {field.name: str(field.type) for field in parts.schema_arrow}
            texts = [column for column, kind in kinds.items() if _TEXT_KIND.match(kind)]
            require_columns(text_fields, texts, parts.schema_arrow.names, name)
            columns = [column for column, kind in kinds.items() if "binary" not in kind]
            schema = pyarrow.schema([_in_microseconds(parts.schema_arrow.field(column)) for column in columns])
            for batch in parts.iter_batches(batch_size=PARQUET_ROWS, columns=columns):
                for row in batch.cast(schema, safe=False).to_pylist():
                    number += 1
                    yield Place("row", number), row
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{name} is a damaged Parquet file: {error}.", "Copy or download it again.") from None
        except (ValueError, OverflowError) as error:  # Python has no such date
            problem = f"row {number + 1:,} of {name}, or one of the next, has a value that cannot be read: {error}."
            raise DataError(problem, "Leave its column out.") from None


def _in_microseconds(field: pyarrow.Field) -> pyarrow.Field:
    """Returns the column with dates and times that Python can hold: it knows no nanoseconds."""
    from pyarrow import duration, time64, timestamp

    shorter = {"time64[ns]": time64("us"), "duration[ns]": duration("us")}
    kind = str(field.type)
    if kind.startswith("timestamp[ns"):
        return field.with_type(timestamp("us", field.type.tz))
    return field.with_type(shorter.get(kind, field.type))
