"""Text as bytes, read in an order that depends on nothing but (seed, step).

Every file of text is a sequence of numbers 0..255, so a corpus needs no tokenizer, no download and no vocabulary
file: it is one uint8 tensor, one byte of memory a token. The default corpus is the source of Python's standard
library, which is wherever Python is: about 13 MB in 870 files (it differs a little between Python versions, and a
loss curve with it).

Order without state. Step s of a run with global batch G draws G start positions from a generator seeded by
(seed, s). Data-parallel rank r of P takes rows r·G/P to (r+1)·G/P of them:

    seed, step ──sha256──> generator ──> starts of rows 0 .. G-1          (the same on every rank, nothing sent)
                                         [ rank 0 | rank 1 | rank 2 | rank 3 ]      P = 4
                                         [      rank 0     |      rank 1     ]      P = 2: the same rows

So no sampler has to be checkpointed, a run resumes at step s on any number of ranks, and two layouts are comparable
loss by loss. What it does not do: epochs (starts are drawn with replacement, so after n_bytes / (G·T) steps about
63 % of the text has been seen), documents' borders, files larger than memory.

Shape suffixes: B rows of this rank, T tokens of a sequence.
"""

import codecs
import hashlib
import operator
import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def _read_text(path: Path) -> bytes:
    """The file's bytes. Raises ValueError, saying where and what, when they are not UTF-8 text."""
    data = path.read_bytes()
    if (at := data.find(0)) >= 0:
        raise ValueError(f"{path} is binary: byte {at:,} of {len(data):,} is 0; name a file of plain text")
    try:
        decoder = codecs.getincrementaldecoder("utf-8")()
        for start in range(0, len(data), 1 << 20):  # in pieces: the decoded text is up to four times as large
            decoder.decode(data[start : start + (1 << 20)])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text ({error.reason} near byte {start:,}); convert it first, "
            f"for example `iconv -f latin1 -t utf-8 {path.name} > utf8.txt`"
        ) from None
    return data


class ByteCorpus:
    """All the text of a file or of a folder, as bytes.

    path: a file of UTF-8 text; a folder (read recursively, in the order of the relative paths, without what is
    hidden or is not text); or None for the standard library's source without its tests.

    tokens: uint8 tensor, the training part; held_back: the last 5 %, a ByteCorpus of its own.
    n_files, n_skipped: how many files were read, and passed over because they were not text.
    Raises ValueError for a path that is missing, empty, or not text.
    """

    vocab_size = 256

    def __init__(self, path: str | os.PathLike | None = None, held_back: float = 0.05) -> None:
        if not 0 <= held_back < 1:
            raise ValueError(
                f"held_back is the fraction kept for evaluation, from 0 to below 1; got {held_back}"
            )
        self.name = "standard library" if path is None else str(path)
        root = Path(sysconfig.get_path("stdlib") if path is None else path)
        data = bytearray()
        self.n_files = self.n_skipped = 0
        if root.is_file():
            data += _read_text(root)
            self.n_files = 1
        elif root.is_dir():
            for file in _files(root, standard_library=path is None):
                try:
                    data += _read_text(file)
                    self.n_files += 1
                except ValueError:
                    self.n_skipped += 1
        else:
            raise ValueError(
                f"{root} is neither a file nor a folder; leave path out to read the standard library"
            )
        if not data:
            raise ValueError(
                f"{root} holds no text: {self.n_files} files read, {self.n_skipped} skipped as not UTF-8 text, 0 bytes; "
                f"name a file or folder of plain text, or leave path out to read the standard library"
            )
        tokens = torch.frombuffer(data, dtype=torch.uint8)
        n_train = len(tokens) - int(len(tokens) * held_back)
        self.tokens = tokens[:n_train]
        self.held_back: ByteCorpus | None = ByteCorpus.__new__(ByteCorpus)
        self.held_back.__dict__.update(
            self.__dict__, name=f"{self.name}, held back", tokens=tokens[n_train:], held_back=None
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"ByteCorpus({self.name}: {len(self):,} bytes, {self.n_files} files, {self.n_skipped} skipped)"


def _files(root: Path, standard_library: bool) -> list[Path]:
    """Regular files under root in the order of their relative paths."""
    found = []
    for folder, subfolders, names in os.walk(root):
        skipped = _NOT_LIBRARY if standard_library else ()
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    if standard_library:
        found = [file for file in found if file.suffix == ".py"]
    return sorted((f for f in found if f.is_file()), key=lambda file: file.relative_to(root).as_posix())


def batches(
    corpus: ByteCorpus,
    global_batch: int,
    seq_len: int,
    step: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """What rank `dp_rank` of `dp_size` reads at `step`: (tokens_BT, targets_BT), int64, B = global_batch / dp_size.

    targets are the tokens one place later. A pure function of its arguments: the ranks' rows, one below the other,
    are the rows of dp_size 1. Raises ValueError when the numbers do not fit together or the text is too short.
    """
    at_least = {
        "global_batch": (global_batch, 1),
        "seq_len": (seq_len, 1),
        "step": (step, 0),
        "dp_size": (dp_size, 1),
    }
    for name, (value, least) in at_least.items():
        if operator.index(value) < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank {dp_rank} is outside 0..{dp_size - 1} (dp_size {dp_size})")
    if global_batch % dp_size:
        raise ValueError(
            f"global_batch {global_batch} does not divide over dp_size {dp_size} ranks (remainder "
            f"{global_batch % dp_size}): take {-(-global_batch // dp_size) * dp_size} rows, or another dp_size"
        )
    if len(corpus) < seq_len + 1:
        raise ValueError(
            f"{corpus.name} has {len(corpus):,} bytes, but one sequence of seq_len {seq_len:,} needs {seq_len + 1:,} "
            f"(the last target is one further): take seq_len {max(len(corpus) - 1, 0):,} or less, or more text"
        )
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    starts = torch.randint(len(corpus) - seq_len, (global_batch,), generator=generator)
    rows_BT = starts.view(dp_size, -1)[dp_rank][:, None] + torch.arange(seq_len + 1)
    window_BT = corpus.tokens[rows_BT].long()
    return window_BT[:, :-1].contiguous(), window_BT[:, 1:].contiguous()


def decode(tokens: Tensor) -> str:
    """The text of a 1-D tensor of bytes; a character cut at an end becomes U+FFFD."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")


def demo() -> None:
    """Reads the default corpus and shows that the order does not depend on the number of ranks."""
    say = print if os.environ.get("RANK", "0") == "0" else (lambda *_: None)
    corpus = ByteCorpus()
    say(corpus)
    say(corpus.held_back)
    for step in (0, 1000):
        whole = batches(corpus, 8, 64, step)[0]
        for dp_size in (1, 2, 4, 8):
            parts = [batches(corpus, 8, 64, step, rank, dp_size)[0] for rank in range(dp_size)]
            different = (torch.cat(parts) != whole).sum().item()
            say(
                f"step {step}, {dp_size} ranks: {different} of {whole.numel()} tokens differ from one process"
            )
            assert different == 0
    say(f"row 0 reads: {decode(whole[0])!r}")


if __name__ == "__main__":
    demo()
