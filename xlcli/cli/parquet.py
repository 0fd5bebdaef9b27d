"""Lists in Parquet, by pyarrow (the extra `parquet`)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from xlcli.cli.objects import to_json
from xlcli.cli.outputs import write_output
from xlcli.files import cache_folder

N_ROWS = 2**14  # of a group of rows, which are in RAM together


@contextmanager
def parquet_file(path: Path) -> Iterator[Callable[[bytes], object]]:
    """Function that takes JSON lines, one object a row; at the end, unless there was an exception, the file is written.

    The lines wait in a file, because the type of a column is known only once all of its values are: whole numbers,
    numbers, truth values or texts. Mixed and nested values are texts in JSON, as in a table.
    """
    import pyarrow
    from pyarrow import parquet

    with tempfile.TemporaryFile(dir=cache_folder()) as lines, tempfile.TemporaryFile(dir=cache_folder()) as packed:
        yield lines.write
        lines.seek(0)
        types_of_values: dict[str, set[str]] = {}
        for line in lines:
            for name, value in json.loads(line).items():
                types_of_values.setdefault(name, set()).add(_type_of(value))
        types = {name: _common_type(of_column) for name, of_column in types_of_values.items()}
        lines.seek(0)
        with parquet.ParquetWriter(packed, pyarrow.schema(types.items())) as writer:
            while True:
                rows = [json.loads(line) for line in islice(lines, N_ROWS)]
                if not rows:
                    break
                columns = []
                for name, kind in types.items():
                    values = [row.get(name) for row in rows]
                    if kind == "string":
                        values = [value if isinstance(value, str | None) else to_json(value) for value in values]
                    columns.append(pyarrow.array(values, kind))
                writer.write(pyarrow.table(columns, [*types]))
        packed.seek(0)
        write_output(path, iter(partial(packed.read, 2**20), b""))


def _type_of(value: Any) -> str:
    """Type of Arrow for a value of JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int) and abs(value) < 2**63:
        return "int64"
    return "double" if isinstance(value, float) else "string"


def _common_type(types: set[str]) -> str:
    """Type of a column that has values of these types."""
    types = types - {"null"}
    if types == {"int64", "double"}:
        return "double"
    return types.pop() if len(types) == 1 else "string"
