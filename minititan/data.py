"""Text as bytes, read in an order that depends on nothing but (seed, step).

Every file of text is a sequence of numbers 0..255, so a corpus needs no tokenizer, no download and no vocabulary
file: it is one uint8 tensor, one byte of memory a token. The default corpus is the source of Python's standard
library without its tests, which is wherever Python is: about 12 MB in 730 files (it differs a little between Python
versions, and a loss curve with it).

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
import copy
import hashlib
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
        raise ValueError(f"{path} is binary (or UTF-16): byte {at:,} of {len(data):,} is 0; name a file of UTF-8 text")
    decoder, piece = (
        codecs.getincrementaldecoder("utf-8")(),
        1 << 20,
    )  # all at once takes up to 4 bytes a character
    try:
        for start in range(0, len(data), piece):
            decoder.decode(data[start : start + piece], final=start + piece >= len(data))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text ({error.reason}, near byte {start + error.start:,} of {len(data):,}): convert it, "
            f"for example with `iconv -f latin1 -t utf-8`"
        ) from None
    return data


def _files(root: Path, standard_library: bool) -> list[Path]:
    """The regular files under root, in the order of their relative paths; nothing hidden, no linked folders."""
    found = []
    for folder, subfolders, names in os.walk(root):
        skipped = _NOT_LIBRARY if standard_library else ()
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    if standard_library:
        found = [file for file in found if file.suffix == ".py"]
    return sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(root).as_posix())


class ByteCorpus:
    """All the text of a file or of a folder, as bytes.

    path: a file of UTF-8 text; a folder (read with its subfolders, in the order of the relative paths, without what is
    hidden or no text); or None for the standard library.
    tokens: uint8 tensor, the training part. held_back: a ByteCorpus of the last part, by default 5 %.
    n_files, n_skipped: how many files of a folder were read, and passed over because they were not readable text.

    Raises ValueError for a path that is missing, empty, or, if it names one file, not text.
    """

    vocab_size = 256

    def __init__(self, path: str | os.PathLike | None = None, held_back: float = 0.05) -> None:
        if not 0 <= held_back < 1:
            raise ValueError(f"held_back is a fraction of the text, from 0 to below 1; got {held_back}")
        self.name = "standard library" if path is None else str(path)
        root = Path(sysconfig.get_path("stdlib") if path is None else path)
        data = bytearray()
        self.n_files = self.n_skipped = 0
        if self.name and root.is_file():
            data += _read_text(root)
            self.n_files = 1
        elif self.name and root.is_dir():
            for file in _files(root, standard_library=path is None):
                try:
                    data += _read_text(file)
                    self.n_files += 1
                except (ValueError, OSError):
                    self.n_skipped += 1
        else:
            what = "is neither a file nor a folder" if self.name and root.exists() else "does not exist"
            raise ValueError(
                f"{self.name!r} {what}: name a file or folder of text, or no path for the standard library"
            )
        if not data:
            raise ValueError(
                f"{root} holds no text (files read: {self.n_files}, skipped as not UTF-8 text: {self.n_skipped}): name a "
                f"file or folder of text, or no path for the standard library"
            )
        text = torch.frombuffer(data, dtype=torch.uint8)
        n_train = len(text) - int(len(text) * held_back)
        self.held_back: ByteCorpus | None = None
        end = copy.copy(self)
        end.name, end.tokens = f"{self.name}, held back", text[n_train:]
        self.tokens, self.held_back = text[:n_train], end

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        skipped = f", {self.n_skipped} skipped" if self.n_skipped else ""
        return f"ByteCorpus({self.name}: {len(self):,} bytes; {self.n_files} files{skipped})"


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
    numbers = {
        "global_batch": global_batch,
        "seq_len": seq_len,
        "step": step,
        "dp_rank": dp_rank,
        "dp_size": dp_size,
    }
    for name, value in numbers.items():
        least = 0 if name in ("step", "dp_rank") else 1
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if dp_rank >= dp_size:
        raise ValueError(f"dp_rank {dp_rank} is outside 0 to {dp_size - 1} (dp_size {dp_size})")
    if global_batch % dp_size:
        raise ValueError(
            f"global_batch {global_batch} does not divide over dp_size {dp_size} ranks (remainder "
            f"{global_batch % dp_size}): take {-(-global_batch // dp_size) * dp_size} rows, or another dp_size"
        )
    if len(corpus) < seq_len + 1:
        raise ValueError(
            f"{corpus.name} has {len(corpus):,} bytes, but seq_len {seq_len:,} needs {seq_len + 1:,} (the last target is "
            f"one further): take a smaller seq_len, or more text"
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
            say(f"step {step}, {dp_size} ranks: {different} of {whole.numel()} tokens differ from one process")
            assert different == 0
    say(f"row 0 reads: {decode(whole[0])!r}")


if __name__ == "__main__":
    demo()
