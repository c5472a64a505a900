"""Names of classes that a table or a saved dataset declares (`datasets.ClassLabel`), whose column holds numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from facility.dataset import DatasetError
from facility.exchange.json_text import parse_values

END = b"\xff\xff\xff\xff\0\0\0\0"
"""The last bytes of an Arrow stream."""


def label_names(metadata: Mapping[bytes, bytes], label_field: str) -> list[str]:
    """Names of the classes, where `datasets` wrote them into the file; none: labels are taken as they are."""
    try:
        features = parse_values(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        names = features[label_field]["names"]
    except (ValueError, KeyError, TypeError):
        return []
    return [str(name) for name in names] if isinstance(names, list) and all(isinstance(n, str) for n in names) else []


def declared_names(kind: str, path: Path | None, dataset: Any, label_field: str) -> list[str]:
    """Names of the classes of one source; none where it declares none, or cannot be read (reading it says so)."""
    if kind == "dataset":
        names = getattr((dataset.features or {}).get(label_field), "names", None)
        return list(names or [])
    if kind not in ("parquet", "arrow"):
        return []
    import pyarrow
    import pyarrow.parquet

    try:
        if kind == "parquet":
            return label_names(pyarrow.parquet.read_schema(path).metadata or {}, label_field)
        with pyarrow.memory_map(str(path)) as file:
            return label_names(opened_arrow(file)[0].metadata or {}, label_field)
    except (pyarrow.ArrowException, OSError):
        return []


def opened_arrow(file: Any) -> tuple[Any, Any]:
    """Schema and batches of a file as `datasets` keeps it (a stream) or as Feather does (with an index).

    Batches of a stream without an end, or that something follows, end in `ArrowInvalid`: pyarrow's do in silence.
    """
    import pyarrow

    try:
        reader = pyarrow.ipc.open_stream(file)
    except pyarrow.ArrowInvalid:
        file.seek(0)
        found = pyarrow.ipc.open_file(file)
        return found.schema, (found.get_batch(number) for number in range(found.num_record_batches))
    return reader.schema, _to_the_end(reader, file)


def _to_the_end(reader: Any, file: Any) -> Iterator[Any]:
    import pyarrow

    yield from reader
    end, size = file.tell(), file.size()
    file.seek(max(0, end - len(END)))
    if file.read(len(END)) != END:
        raise pyarrow.ArrowInvalid("the stream has no end; it was cut off as it was written")
    if end != size:
        raise pyarrow.ArrowInvalid(f"{size - end} bytes follow the stream's end; give each stream a file of its own")


def check_stream(path: str) -> None:
    """Raise `ArrowInvalid` where the file's batches do not end as `opened_arrow` wants them to."""
    import pyarrow

    try:
        with pyarrow.memory_map(path) as file:
            for _ in opened_arrow(file)[1]:
                pass
    except pyarrow.ArrowInvalid as error:
        raise pyarrow.ArrowInvalid(f"{Path(path).name}: {error}") from None


def class_name(label: str, names: Sequence[str], place: str) -> str:
    """The name of the class with the number `label`. Raises `DatasetError` for a number without one."""
    number = int(label) if label.removeprefix("-").isdecimal() and len(label) <= len(str(len(names))) + 1 else -1
    if not 0 <= number < len(names):
        raise DatasetError(
            f"{place}: the label is {label:.60}, expected 0 to {len(names) - 1}, the numbers of the classes that its "
            f"table declares ({', '.join(names[:10])}); -1 stands for no label: leave such rows out"
        )
    return names[number]
