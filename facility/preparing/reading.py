"""The documents of all sources, assigned to their splits and gathered into batches."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Protocol

from facility.dataset import SPLITS, DatasetError
from facility.preparing.duplicates_on_disk import NearDuplicatesOnDisk
from facility.preparing.encoding import Batch
from facility.preparing.lines import PACKED
from facility.preparing.mixing import input_shares, is_chosen
from facility.preparing.near_duplicates import NearDuplicates
from facility.preparing.overlap import ContentDigests, digest_of
from facility.preparing.shared_signatures import read_salt, read_signatures
from facility.preparing.sources import Document, Fields, Source, class_names_of, read_documents

BATCH_DOCUMENTS, BATCH_CHARACTERS = 512, 2_000_000
LARGE_BYTES = 100_000_000
"""Of files, from which on near duplicates are found on disk: in memory a document takes 2.5 kB."""
Progress = Callable[[str, float, int], None]
log = logging.getLogger(__name__)


class Caps(Protocol):
    """What of a request decides which documents are read."""

    @property
    def fields(self) -> Fields: ...
    @property
    def validation(self) -> list[str]: ...
    @property
    def validation_share(self) -> float: ...
    @property
    def apart(self) -> bool: ...
    @property
    def train_samples(self) -> int: ...
    @property
    def validation_samples(self) -> int: ...
    @property
    def near_duplicates(self) -> float: ...
    @property
    def salt(self) -> Path | None: ...
    @property
    def share_signatures(self) -> Path | None: ...
    @property
    def drop_signatures(self) -> list[Path]: ...
    @property
    def weights(self) -> list[float]: ...
    @property
    def temperature(self) -> float: ...


class Reading:
    """The documents of all sources as batches of one split each, up to the caps; counts as it goes."""

    def __init__(
        self, request: Caps, sources: dict[str, list[Source]], progress: Progress, scratch: Path | None = None
    ) -> None:
        """`scratch`: a directory for temporary files: 8 bytes a document, and signatures of large corpora."""
        self.request, self.sources, self.progress = request, sources, progress
        self.documents = dict.fromkeys(SPLITS, 0)
        self.empty = dict.fromkeys(SPLITS, 0)
        self.duplicates = dict.fromkeys(SPLITS, 0)
        """Documents left out since they repeat an earlier one."""
        self.elsewhere = dict.fromkeys(SPLITS, 0)
        """Documents left out since another facility has them, by its signatures."""
        self.digests = ContentDigests(scratch)
        self._scratch = scratch
        self.earlier = self._earlier()
        self.shares = self._shares()
        """Of each input for training, the share of its documents that is read."""

    def close(self) -> None:
        """No temporary file is open: NFS keeps the folder of one that is, under a name of its own."""
        self.digests.close()
        if isinstance(self.earlier, NearDuplicatesOnDisk):
            self.earlier.close()

    @property
    def declared(self) -> list[str]:
        """Names of the classes, where all sources declare the same ones in the same order."""
        found = [class_names_of(one, self.request.fields) for split in SPLITS for one in self.sources[split]]
        return found[0] if all(names == found[0] for names in found) else []

    def _earlier(self) -> NearDuplicates | NearDuplicatesOnDisk | None:
        similarity, key = self.request.near_duplicates, b""
        if not similarity:
            return None
        if self.request.salt is not None:
            key = read_salt(self.request.salt)
        others = (one for path in self.request.drop_signatures for one in read_signatures(path, key))
        if self._is_large():
            return NearDuplicatesOnDisk(similarity, self._scratch, key=key, elsewhere=others)
        return NearDuplicates(similarity, key=key, elsewhere=others)

    def _is_large(self) -> bool:
        """Whether all is read that there is of large files, so that it can be read a first time for signatures."""
        request, sources = self.request, [one for split in SPLITS for one in self.sources[split]]
        if request.train_samples or request.validation_samples:
            return False
        files = all(one.path is not None for one in sources)
        return files and sum(one.size for one in sources) >= LARGE_BYTES

    def _shares(self) -> list[Fraction]:
        sources = self.sources["train"]
        sizes = [0] * (1 + max((source.argument for source in sources), default=0))
        for source in sources:
            sizes[source.argument] += source.size
        if self.request.weights or self.request.temperature != 1:
            check_sizes(sources)
        return input_shares(sizes, weights=self.request.weights, temperature=self.request.temperature)

    def batches(self) -> Iterator[Batch]:
        held: dict[str, list[Document]] = {split: [] for split in SPLITS}
        characters = dict.fromkeys(SPLITS, 0)
        for split, document in self._assigned():
            held[split].append(document)
            characters[split] += len(document.text) + len(document.pair)
            if len(held[split]) >= BATCH_DOCUMENTS or characters[split] >= BATCH_CHARACTERS:
                yield self._batch(split, held[split])
                held[split], characters[split] = [], 0
        for split in SPLITS:
            if held[split]:
                yield self._batch(split, held[split])

    def _batch(self, split: str, documents: list[Document]) -> Batch:
        self.digests.add(split, documents)
        return Batch(split=split, documents=documents)

    def _assigned(self) -> Iterator[tuple[str, Document]]:
        caps = {"train": self.request.train_samples, "validation": self.request.validation_samples}
        shared = not self.request.validation
        seen = 0
        read_of = dict.fromkeys(range(len(self.shares)), 0)
        begun = self._look_ahead()
        pending = self._pending()
        for number, (origin, source) in enumerate(pending):
            for document in read_documents(source, self.request.fields):
                share = (number + document.done) / len(pending)
                self.progress(source.name, begun + (1 - begun) * share, seen)
                if not self._is_chosen(origin, source, read_of):
                    continue
                split = origin
                if shared and self._held_out(seen, document):
                    split = "validation"
                if not document.text.strip():
                    self.empty[split] += 1
                    continue
                full = [name for name, cap in caps.items() if cap and self.documents[name] >= cap]
                if place := self._place_of(document, kept=split not in full):
                    (self.duplicates if place == "here" else self.elsewhere)[split] += 1
                    continue
                seen += 1
                if self._enough(origin, full, shared):
                    break
                if split not in full:
                    self.documents[split] += 1
                    yield split, document
        self.progress("", 1.0, seen)

    def _pending(self) -> list[tuple[str, Source]]:
        return [(split, source) for split in SPLITS for source in self.sources[split]]

    def _is_chosen(self, origin: str, source: Source, read_of: dict[int, int]) -> bool:
        """Whether the next document of the source is in the share that is read; `read_of`: documents of each input."""
        if origin != "train":
            return True
        read_of[source.argument] += 1
        return is_chosen(read_of[source.argument] - 1, self.shares[source.argument])

    def _look_ahead(self) -> float:
        """Read all text once for its signatures where these lie on disk; the share of the work that this is."""
        if not isinstance(self.earlier, NearDuplicatesOnDisk):
            return 0.0
        pending, read_of = self._pending(), dict.fromkeys(range(len(self.shares)), 0)
        for number, (origin, source) in enumerate(pending):
            for document in read_documents(source, self.request.fields):
                self.progress(source.name, (number + document.done) / len(pending) / 2, 0)
                if self._is_chosen(origin, source, read_of) and document.text.strip():
                    self.earlier.add(_content(document))
        self.earlier.decide()
        return 0.5

    def _place_of(self, document: Document, *, kept: bool) -> str | None:
        """Where the document's text is already; None where it is new, or where that is not asked.

        `kept`: it has room in its split. One that has none is no earlier document of another, here or at a facility.
        """
        if isinstance(self.earlier, NearDuplicatesOnDisk):
            return self.earlier.earlier()
        return self.earlier.earlier(_content(document), remember=kept) if self.earlier is not None else None

    def _enough(self, origin: str, full: list[str], shared: bool) -> bool:
        """Whether reading on would add nothing that was asked for."""
        if not shared:
            return origin in full
        return "train" in full and ("validation" in full or not self.request.validation_samples)

    def _held_out(self, index: int, document: Document) -> bool:
        """Whether the document, with `index` before it, is among the share for validation.

        Of documents that are kept apart each one's content decides, whatever others there are: with differential
        privacy a document less must not move others from split to split. Else the share is exact and evenly spread.
        """
        share = self.request.validation_share
        if self.request.apart:
            return digest_of(document) < share * 2**64
        return math.floor((index + 1) * share) > math.floor(index * share)


def check_sizes(sources: Sequence[Source]) -> None:
    """Raise `DatasetError` where sizes of inputs cannot be compared; packed files beside plain ones are logged."""
    rows = [source for source in sources if source.path is None]
    files = [source for source in sources if source.path is not None]
    if rows and files:
        raise DatasetError(
            f"{rows[0].name} is counted in rows and {files[0].name} in bytes, so --weights and --temperature cannot "
            "compare them: give inputs of one kind"
        )
    packed = [one for one in files if one.kind == "parquet" or one.name.lower().endswith(PACKED)]
    if packed and len(packed) < len(files):
        plain = next(one for one in files if one not in packed)
        log.warning(
            "%s is packed and %s is not: --weights and --temperature compare bytes of files, so more is read of it",
            packed[0].name,
            plain.name,
        )


def _content(document: Document) -> str:
    """What of a document decides whether it repeats another."""
    return f"{document.text}\n{document.pair}"
