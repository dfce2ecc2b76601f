"""The corpus: what is read and what is refused. The batches: an order that no layout and no resume can change."""

import os
import sysconfig
import time
from pathlib import Path

import pytest
import torch

from minititan.data import ByteCorpus, batches, decode


@pytest.fixture(scope="module")
def library():
    return ByteCorpus()


@pytest.fixture
def text(tmp_path):
    """10,000 bytes that count from 1 to 120 again and again: each value tells the next."""
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(1 + i % 120 for i in range(10_000)))
    return file


# --- what is read --------------------------------------------------------------------------------------------------


def test_the_default_is_the_standard_library_without_tests(library):
    assert 500 < library.n_files < 2000 and library.n_skipped == 0
    assert 8e6 < len(library) + len(library.held_back) < 3e7
    root = Path(sysconfig.get_path("stdlib"))
    first = (root / "__future__.py").read_bytes()
    assert bytes(library.tokens[: len(first)].tolist()) == first
    everything = decode(torch.cat([library.tokens, library.held_back.tokens]))
    for file in ("json/decoder.py", "heapq.py", "email/mime/text.py"):
        assert (root / file).read_text("utf-8") in everything, file
    for tested in ("test/test_grammar.py", "site-packages/torch/__init__.py", "unittest/test/test_case.py"):
        if (file := root / tested).exists():
            assert file.read_text("utf-8") not in everything, tested


def test_it_loads_at_once_into_a_byte_a_token(library):
    start = time.process_time()
    again = ByteCorpus()
    assert time.process_time() - start < 1.0  # measured: 0.1 s
    assert again.tokens.dtype == torch.uint8
    assert torch.equal(again.tokens, library.tokens)
    storage = again.tokens.untyped_storage()
    assert storage.nbytes() == len(again) + len(again.held_back)
    assert storage.data_ptr() == again.held_back.tokens.untyped_storage().data_ptr()


def test_a_file_is_read_byte_for_byte(tmp_path):
    file = tmp_path / "verse.txt"
    file.write_bytes("Grüße, 世界 ☃\r\n".encode() * 50)
    corpus = ByteCorpus(file, held_back=0)
    assert bytes(corpus.tokens.tolist()) == file.read_bytes()
    assert decode(corpus.tokens[:4]) == "Grü" and decode(corpus.tokens[:3]) == "Gr�"
    assert torch.equal(ByteCorpus(str(file), held_back=0).tokens, corpus.tokens)


def test_the_last_part_is_held_back(text):
    corpus = ByteCorpus(text)
    assert (len(corpus), len(corpus.held_back)) == (9500, 500)
    both = torch.cat([corpus.tokens, corpus.held_back.tokens])
    assert bytes(both.tolist()) == text.read_bytes()
    assert corpus.held_back.held_back is None and "held back" in repr(corpus.held_back)
    assert (len(ByteCorpus(text, held_back=0.5)), len(ByteCorpus(text, held_back=0).held_back)) == (5000, 0)
    with pytest.raises(ValueError, match="held_back is a fraction of the text, from 0 to below 1; got 5"):
        ByteCorpus(text, held_back=5)


def test_a_folder_is_read_in_the_order_of_its_paths_and_what_is_no_text_is_counted(tmp_path):
    for path, content in {
        "b.txt": b"second ",
        "a/z/deep.md": b"first ",
        "c.txt": "drei: ß".encode(),
        "binary.bin": b"PNG\0\1\2",
        "latin.txt": "caf\xe9".encode("latin1"),
        "cut.txt": "ß".encode()[:1],
        "empty.txt": b"",
        ".hidden/secret.txt": b"no",
        ".hidden.txt": b"no",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    os.mkfifo(tmp_path / "pipe.txt")  # opening it would wait for ever
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path)
    corpus = ByteCorpus(tmp_path, held_back=0)
    assert decode(corpus.tokens) == "first second drei: ß"
    assert (corpus.n_files, corpus.n_skipped) == (4, 3)
    assert "21 bytes; 4 files, 3 skipped" in repr(corpus)


# --- what is refused -----------------------------------------------------------------------------------------------


def test_a_path_without_text_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere' does not exist: name a file or folder of text"):
        ByteCorpus(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="'' does not exist"):
        ByteCorpus("")
    with pytest.raises(ValueError, match="'/dev/null' is neither a file nor a folder"):
        ByteCorpus("/dev/null")
    with pytest.raises(ValueError, match=r"holds no text \(files read: 0, skipped as not UTF-8 text: 0\)"):
        ByteCorpus(tmp_path)
    (tmp_path / "one.bin").write_bytes(b"\0")
    with pytest.raises(ValueError, match=r"holds no text \(files read: 0, skipped as not UTF-8 text: 1\)"):
        ByteCorpus(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"empty.txt holds no text \(files read: 1"):
        ByteCorpus(tmp_path / "empty.txt")


@pytest.mark.parametrize(
    "content, told",
    [
        (b"GIF89a\0\1", r"is binary \(or UTF-16\): byte 6 of 8 is 0; name a file of UTF-8 text"),
        ("text".encode("utf-16"), r"is binary \(or UTF-16\): byte 3 of 10 is 0"),
        (
            "caf\xe9 au lait".encode("latin1"),
            r"not UTF-8 text \(invalid continuation byte, near byte 3 of 12\).*iconv",
        ),
        (
            b"x" * (3 << 20) + b"\xff",
            r"not UTF-8 text \(invalid start byte, near byte 3,145,728 of 3,145,729\)",
        ),
        ("end ß".encode()[:-1], r"not UTF-8 text \(unexpected end of data, near byte 4 of 5\)"),
    ],
    ids=["binary", "utf-16", "latin-1", "far behind", "cut"],
)
def test_a_named_file_that_is_no_text_is_told(tmp_path, content, told):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=told):
        ByteCorpus(tmp_path / "file")


def test_a_character_across_two_pieces_is_text(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * ((1 << 20) - 1) + "ß☃".encode() * 10)
    assert len(ByteCorpus(tmp_path / "file", held_back=0)) == (1 << 20) - 1 + 50


@pytest.mark.parametrize(
    "change, told",
    [
        (
            {"global_batch": 10, "dp_size": 4},
            r"global_batch 10 .*dp_size 4 ranks \(remainder 2\): take 12 rows",
        ),
        ({"global_batch": 2, "dp_size": 4}, r"global_batch 2 .*\(remainder 2\): take 4 rows"),
        ({"dp_rank": 4, "dp_size": 4}, r"dp_rank 4 is outside 0 to 3 \(dp_size 4\)"),
        ({"dp_rank": -1, "dp_size": 4}, "dp_rank must be a whole number of at least 0, got -1"),
        ({"global_batch": 0}, "global_batch must be a whole number of at least 1, got 0"),
        ({"global_batch": 8.0}, "global_batch must be a whole number of at least 1, got 8.0"),
        ({"seq_len": 0}, "seq_len must be a whole number of at least 1, got 0"),
        ({"step": -1}, "step must be a whole number of at least 0, got -1"),
        ({"dp_size": 0}, "dp_size must be a whole number of at least 1, got 0"),
        (
            {"seq_len": 9500},
            r"text.txt has 9,500 bytes, but seq_len 9,500 needs 9,501 .* smaller seq_len, or more text",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_told(text, change, told):
    with pytest.raises(ValueError, match=told):
        batches(ByteCorpus(text), **{"global_batch": 8, "seq_len": 16, "step": 0, **change})


def test_a_held_back_part_that_is_too_short_is_told_by_name(text):
    with pytest.raises(ValueError, match=r"text.txt, held back has 500 bytes, but seq_len 512 needs 513"):
        batches(ByteCorpus(text).held_back, 1, 512, 0)


# --- the order -----------------------------------------------------------------------------------------------------


def test_targets_are_the_next_tokens_of_the_text(text):
    corpus = ByteCorpus(text)
    for step in range(20):
        tokens_BT, targets_BT = batches(corpus, 6, 33, step)
        assert tokens_BT.shape == targets_BT.shape == (6, 33)
        assert tokens_BT.dtype == targets_BT.dtype == torch.int64
        assert tokens_BT.is_contiguous() and targets_BT.is_contiguous()
        assert torch.equal(targets_BT, tokens_BT % 120 + 1)
        assert torch.equal(tokens_BT[:, 1:], targets_BT[:, :-1])


@pytest.mark.parametrize("dp_size", [2, 3, 4, 6, 8, 12, 24])
def test_ranks_together_read_what_one_process_reads(library, dp_size):
    for step, seed in ((0, 0), (7, 0), (7, 1), (10**9, 5)):
        whole = batches(library, 24, 40, step, seed=seed)
        ranks = [batches(library, 24, 40, step, rank, dp_size, seed) for rank in range(dp_size)]
        assert all(len(tokens) == 24 // dp_size for tokens, _ in ranks)
        for i in range(2):
            assert torch.equal(torch.cat([rank[i] for rank in ranks]), whole[i])


def test_a_run_resumed_at_another_size_reads_on_where_it_stopped(library):
    def run(steps, dp_size):
        return [torch.cat([batches(library, 8, 16, s, r, dp_size)[0] for r in range(dp_size)]) for s in steps]

    unbroken = run(range(10), 1)
    resumed = run(range(4), 8) + run(range(4, 7), 2) + run(range(7, 10), 4)
    assert all(torch.equal(a, b) for a, b in zip(unbroken, resumed, strict=True))


def test_the_order_depends_on_step_and_seed_only(library):
    first = batches(library, 4, 64, 3)[0]
    torch.manual_seed(123)
    state = torch.get_rng_state()
    assert torch.equal(batches(library, 4, 64, 3)[0], first)
    assert torch.equal(torch.get_rng_state(), state)  # and the global generator is not touched
    for other in (batches(library, 4, 64, 4), batches(library, 4, 64, 3, seed=1)):
        assert not torch.equal(other[0], first)
    rows = torch.cat([batches(library, 4, 64, step)[0] for step in range(200)])
    assert len(rows.unique(dim=0)) > 790  # 800 rows, hardly one twice


def test_starts_cover_the_text_evenly_to_its_very_end(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(1, 101)))
    corpus = ByteCorpus(tmp_path / "file", held_back=0)
    first = torch.cat([batches(corpus, 100, 9, step)[0][:, 0] for step in range(100)]) - 1
    counts = first.bincount(minlength=91)
    assert len(counts) == 91  # starts 0..90: the last target of start 90 is the last byte
    assert counts.min() > 60 and counts.max() < 170  # 10,000 draws, about 110 each, std 10
    assert torch.equal(batches(corpus, 3, 99, 0)[1][:, -1], torch.full((3,), 100))  # the longest sequence


def test_values_are_pinned(tmp_path):
    """A change of the order makes old runs irreproducible: it must be meant."""
    (tmp_path / "file").write_bytes(bytes(1 + i % 120 for i in range(10_000)))
    tokens_BT, _ = batches(ByteCorpus(tmp_path / "file"), 4, 2, step=5, seed=1)
    assert tokens_BT.tolist() == [[59, 60], [75, 76], [113, 114], [74, 75]]
