"""Text in every form becomes the same numbered sequences, and bad text is refused before any work."""

import gzip
import itertools
import json
import lzma
import socket
import time

import numpy as np
import pytest
import torch
from tiny_models import tiny_tokenizer

from sparselens.data import batches as data_module, documents as documents_module
from sparselens.data.batches import TextBatches, TokenCache, separator_id
from sparselens.data.documents import find_files, read_documents
from sparselens.training.sparsify import say_passes


def documents(n=60, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{i}" for i in rng.integers(0, 62, rng.integers(5, 40))) for _ in range(n)]


def write(folder, form: str, texts=None) -> str:
    """The same documents as .txt, .jsonl or .parquet, possibly compressed."""
    texts = texts or documents()
    kind, _, compression = form.partition("+")
    path = folder / f"text.{kind}{'.' + compression if compression else ''}"
    if kind == "txt":
        content = "\n<|endoftext|>\n".join(texts).encode()
    elif kind == "jsonl":
        content = "".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(texts)).encode()
    else:
        import io

        import pyarrow as pa
        import pyarrow.parquet as pq

        buffer = io.BytesIO()
        pq.write_table(pa.table({"text": texts, "n": list(range(len(texts)))}), buffer)
        content = buffer.getvalue()
    if compression == "zst":
        import zstandard

        content = zstandard.ZstdCompressor().compress(content)
    elif compression:
        content = {"gz": gzip, "xz": lzma}[compression].compress(content)
    path.write_bytes(content)
    return str(path)


def batches(path, tmp_path, **options):
    options = {"cache": tmp_path / "cache", "need": 10**6, "heldout_tokens": 40, "progress": False} | options
    return TextBatches([path] if isinstance(path, str) else path, tiny_tokenizer(), 16, **options)


FORMS = [f"{kind}{c}" for kind in ("txt", "jsonl", "parquet") for c in ("", "+gz", "+xz", "+zst")]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_documents(tmp_path, form):
    from pathlib import Path

    found = [text.strip() for text, fresh in read_documents(Path(write(tmp_path, form))) if fresh]
    assert found == documents()


def test_sequences_cover_the_training_tokens_and_half_of_them_start_bare(tmp_path):
    b = batches(write(tmp_path, "txt"), tmp_path)
    tokens = np.concatenate(b.cache.shards("train"))
    n = len(tokens) // 16
    batch = b.train(0, n)
    inputs, labels = batch["input_ids"], batch["labels"]
    bare = inputs[:, 0] != b.separator
    assert bare.sum() == (tokens[16 : len(tokens) - 16 : 32] != b.separator).sum() and b.describe()["half_start_bare"]
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    # Without the separator in front, every sequence is a stretch of the text, and together they are all of it.
    starts = [row.tolist() for row in tokens[: n * 16].reshape(n, 16)]
    found = [row if row in starts else after for row, after in zip(inputs.tolist(), labels.tolist(), strict=True)]
    assert sorted(found) == sorted(starts)


def test_a_tokenizer_that_adds_bos_never_sees_a_sequence_without(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    first = tokenizer.convert_ids_to_tokens(0)
    tokenizer._tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 0)])
    options = dict(cache=tmp_path / "other", need=1 << 12, heldout_tokens=200, progress=False)
    b = TextBatches([str(write(tmp_path, "txt"))], tokenizer, 16, **options)
    batch = b.train(0, 20)
    assert (batch["input_ids"][:, 0] == b.separator).all()
    assert not b.describe()["half_start_bare"]


def test_positions_start_again_at_every_document(tmp_path):
    batch = batches(write(tmp_path, "txt"), tmp_path).train(0, 8)
    starts = batch["input_ids"] == separator_id(tiny_tokenizer())
    starts[:, 0] = True
    assert torch.equal(batch["position_ids"] == 0, starts)
    steps = batch["position_ids"][:, 1:] - batch["position_ids"][:, :-1]
    assert ((steps == 1) | starts[:, 1:]).all()


def test_the_answer_depends_on_the_number_alone(tmp_path):
    """Any way of asking for sequences 5 ... 40, over several epochs, gives the same ones."""
    b = batches(write(tmp_path, "txt"), tmp_path)
    whole = b.train(0, 200)["input_ids"]
    again = batches(write(tmp_path, "txt"), tmp_path)
    pieces = torch.cat([again.train(start, 3)["input_ids"] for start in range(5, 41, 3)])
    assert torch.equal(pieces, whole[5:41])
    n = len(b._train)
    assert n < 100, "the case needs several epochs"
    assert not torch.equal(whole[:n], whole[n : 2 * n]), "each epoch has its own order"
    assert sorted(whole[:n].tolist()) == sorted(whole[n : 2 * n].tolist())


def test_another_seed_is_another_order(tmp_path):
    path = write(tmp_path, "txt")
    a, b = (batches(path, tmp_path, seed=seed).train(0, 20)["input_ids"] for seed in (0, 1))
    assert not torch.equal(a, b)


def test_held_out_documents_are_not_trained_on(tmp_path):
    b = batches(write(tmp_path, "txt"), tmp_path)
    train = {tuple(d) for d in _split(np.concatenate(b.cache.shards("train")), b.separator)}
    heldout = {tuple(d) for d in _split(np.concatenate(b.cache.shards("heldout")), b.separator)}
    assert heldout and not train & heldout


def _split(tokens, separator):
    return [part.tolist() for part in np.split(tokens, np.flatnonzero(tokens == separator)) if len(part)]


def test_held_out_text_can_come_from_elsewhere(tmp_path):
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other", "jsonl", documents(10, seed=9))
    b = batches(write(tmp_path, "txt"), tmp_path, heldout_patterns=[other])
    assert b.n_heldout > 0 and not b.cache.index["heldout"]


def test_one_long_document_still_leaves_something_held_out(tmp_path):
    b = batches(write(tmp_path, "txt", [" ".join(documents())]), tmp_path)
    assert b.n_heldout >= 1


def test_tokens_are_cached_and_the_cache_follows_the_file(tmp_path, monkeypatch):
    path = write(tmp_path, "txt")
    first = batches(path, tmp_path)
    calls = []
    original = data_module._tokenise
    monkeypatch.setattr(data_module, "_tokenise", lambda *a: calls.append(1) or original(*a))
    batches(path, tmp_path)
    assert not calls, "unchanged text is not tokenised again"
    write(tmp_path, "txt", documents(30, seed=4))
    assert len(batches(path, tmp_path)._train) != len(first._train)
    assert calls


@pytest.mark.parametrize("files", [1, 3])
def test_interrupted_tokenisation_goes_on(tmp_path, monkeypatch, files):
    """Killed after any number of pieces, the cache ends up the same as without interruption."""
    monkeypatch.setattr(data_module, "SHARD", 100)
    for i in range(files):
        (tmp_path / str(i)).mkdir()
        write(tmp_path / str(i), "txt", documents(60 - 20 * i, seed=i))
    path = str(tmp_path / "[0-9]" / "*.txt")
    expected = batches(path, tmp_path, cache=tmp_path / "whole").cache.shards("train")
    original = data_module.read_documents

    def failing(limit):
        def read(*args):
            for number, item in enumerate(original(*args)):
                if number == limit:
                    raise KeyboardInterrupt
                yield item

        return read

    for limit in (7, 20, 45):
        monkeypatch.setattr(data_module, "read_documents", failing(limit))
        with pytest.raises(KeyboardInterrupt):
            batches(path, tmp_path)
    monkeypatch.setattr(data_module, "read_documents", original)
    resumed = batches(path, tmp_path).cache
    assert np.array_equal(np.concatenate(resumed.shards("train")), np.concatenate(expected))
    assert not list(resumed.folder.glob(".*")), "no temporary files are left"


def test_several_files_are_read_in_proportion(tmp_path, monkeypatch):
    """Ten documents of one file to each of another a tenth its size, in any prefix, and so when few are tokenised."""
    monkeypatch.setattr(documents_module, "PIECE", 40)  # documents in several pieces stay whole
    for name, word, count in (("large", "w1", 200), ("small", "w2", 20)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "txt", [f"{word} {i} " + "w3 w4 w5 " * 10 for i in range(count)])
    paths = [str(tmp_path / name / "*.txt") for name in ("large", "small")]
    sources = [[str(path), *data_module._stamp(path)] for path in find_files(paths)]
    whole, order = [], []
    for text, fresh in data_module._documents(sources, "text"):
        if fresh:
            whole.append("")
            order.append(text.split()[0])
        whole[-1] += text
    assert len(whole) == len(set(whole)) == 220 and all(text.count("w3 w4 w5") == 10 for text in whole)
    for prefix in (22, 55, 110, 198):
        assert order[:prefix].count("w2") == pytest.approx(prefix / 11, abs=1.5)
    read = TokenCache.build(paths, tiny_tokenizer(), tmp_path / "cache", need=1000, heldout=0, progress=False)
    words = tiny_tokenizer().decode(np.concatenate(read.shards("train"))).split()
    assert words.count("w2") == pytest.approx(words.count("w1") / 10, abs=1.5) and words.count("w2") > 1


@pytest.mark.parametrize("files", [2, 4, 5])
def test_held_out_text_comes_from_all_files(tmp_path, files):
    """Also when documents of one length make the files take strict turns."""
    for i in range(files):
        (tmp_path / f"{i}.jsonl").write_text((json.dumps({"text": f"w{i} w40 w41"}) + "\n") * 400)
    cache = TokenCache.build(
        [str(tmp_path / "*.jsonl")], tiny_tokenizer(), tmp_path / "cache", need=10**6, heldout=10**6, progress=False
    )
    words = tiny_tokenizer().decode(np.concatenate(cache.shards("heldout"))).split()
    counts = [words.count(f"w{i}") for i in range(files)]
    assert sum(counts) == files * 20 and min(counts) >= 8


def test_of_many_files_few_are_open(tmp_path, monkeypatch):
    for i in range(50):
        (tmp_path / f"{i:02d}.jsonl").write_text("".join(json.dumps({"text": f"{i} {j}"}) + "\n" for j in range(3)))
    sources = [[str(path), *data_module._stamp(path)] for path in find_files([str(tmp_path)])]
    original, now, most = data_module.read_documents, 0, 0

    def counted(*args):
        nonlocal now, most
        now += 1
        most = max(most, now)
        yield from original(*args)
        now -= 1

    monkeypatch.setattr(data_module, "read_documents", counted)
    found = [text for text, _ in data_module._documents(sources, "text")]
    assert sorted(found) == sorted(f"{i} {j}" for i in range(50) for j in range(3)) and most == data_module.LANES
    early = [int(text.split()[0]) for text in found[:32]]
    assert sum(i < 25 for i in early) == 16, "the first files are not read before the last ones"


def test_only_as_much_text_as_needed_is_tokenised(tmp_path):
    cache = TokenCache.build(
        [write(tmp_path, "txt")], tiny_tokenizer(), tmp_path / "cache", need=100, heldout=0, progress=False
    )
    assert 100 <= cache.index["tokens"]["train"] < 150


def test_memory_is_bounded_by_the_piece_not_by_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "PIECE", 200)
    path = write(tmp_path, "txt", [" ".join(documents())])  # one line, one document
    from pathlib import Path

    pieces = list(read_documents(Path(path)))
    assert max(len(text) for text, _ in pieces) <= 400
    assert [fresh for _, fresh in pieces] == [True] + [False] * (len(pieces) - 1)


def test_globs_and_folders(tmp_path):
    write(tmp_path, "txt")
    write(tmp_path, "jsonl+gz")
    assert len(find_files([str(tmp_path / "*.txt"), str(tmp_path / "*.gz")])) == 2
    assert len(find_files([str(tmp_path)])) == 2


def test_datasets_are_streamed(tmp_path):
    """A dataset by name: a local folder is the only one without a network, through the same call."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder, "jsonl")
    from sparselens.data.documents import dataset_documents

    found = [text for text, _ in dataset_documents(str(folder), "text")]
    assert found == documents()


def test_a_dataset_on_a_hub_that_does_not_answer_costs_seconds(monkeypatch):
    """Left to itself, datasets tries again for half a minute."""
    from sparselens.data.documents import dataset_documents

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # and never listens
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("datasets.load_dataset", lambda *a, **o: pytest.fail("asked all the same"))
        began = time.perf_counter()
        with pytest.raises(ValueError, match=r"'nobody/nothing' names no file, .* does not answer"):
            next(dataset_documents("nobody/nothing", "text"))
        assert time.perf_counter() - began < 10


@pytest.mark.parametrize(
    ("pattern", "local"),
    [("a.txt", True), ("b/*.jsonl", True), ("./folder", True), ("/data", True), ("owner/name", False),
     ("owner/name-2.0:config:split", False), ("x.parquet.zst", True)],
)  # fmt: skip
def test_files_and_datasets_are_told_apart(pattern, local):
    assert documents_module.is_local(pattern) == local


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"\xff\xfe\x00bad", "is not UTF-8"),
        ("a.txt", b"<|endoftext|>\n<|endoftext|>\n", "no text found"),
        ("a.jsonl", b'{"text": "w1 w2"}\nnot json\n', "line 2: not JSON"),
        ("a.jsonl", b'{"body": "w1"}\n', "no text in field 'text'; found body"),
        ("a.jsonl", b"[1, 2]\n", "no text in field"),
        ("a.txt.gz", b"not gzip", "cannot be decompressed"),
        ("a.txt.xz", b"not xz", "cannot be decompressed"),
        ("a.txt.zst", b"not zstd", "cannot be decompressed"),
        ("a.parquet", b"not parquet", "not a readable parquet"),
        ("a.csv", b"text\nw1", "cannot read"),
        ("a.txt", b"w1 w2 w3", "shorter than one sequence"),
    ],
)
def test_bad_text_is_refused_in_a_sentence(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=complaint):
        batches(str(tmp_path / name), tmp_path)


@pytest.mark.parametrize("pattern", ["missing.txt", "missing/*.jsonl", "no-such-dataset"])
def test_no_text_found(tmp_path, pattern, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no text found"):
        batches(pattern, tmp_path)


def test_separator_prefers_endoftext():
    assert separator_id(tiny_tokenizer()) == 0


def test_held_out_text_is_not_trained_on(tmp_path):
    """A glob that catches the held-out file as well, by another spelling of its path."""
    for name in ("a", "val"):
        (tmp_path / name).mkdir()
    path, val = write(tmp_path / "a", "jsonl"), write(tmp_path / "val", "jsonl", documents(seed=1))
    with pytest.raises(ValueError, match=r"val.*--data and by --heldout"):
        batches(f"{tmp_path}/*/*.jsonl", tmp_path, heldout_patterns=[f"{tmp_path}/a/../val/text.jsonl"])
    assert batches(path, tmp_path, heldout_patterns=[val]).n_heldout
    # To `evaluate`, nothing is training text.
    assert batches(path, tmp_path, heldout_patterns=[path]).n_heldout


def test_tokenizers_of_the_same_words_have_their_own_cache(tmp_path):
    from tokenizers import normalizers

    path = write(tmp_path, "txt", [text.upper() for text in documents()])
    plain, lower = tiny_tokenizer(), tiny_tokenizer()
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert plain.get_vocab() == lower.get_vocab()
    options = {"cache": tmp_path / "cache", "need": 10**6, "heldout_tokens": 40, "progress": False}
    unknown = plain.convert_tokens_to_ids(plain.unk_token)
    for tokenizer, share in ((plain, 1.0), (lower, 0.0)):
        ids = TextBatches([path], tokenizer, 16, **options).train(0, 4)["input_ids"]
        words = ids[ids != separator_id(tokenizer)]
        assert (words == unknown).float().mean() == share


def test_a_trial_of_few_tokens_holds_something_out(tmp_path):
    found = batches(write(tmp_path, "txt", documents(400)), tmp_path, need=64, heldout_tokens=1 << 18)
    assert found.n_heldout and found.train(0, 4)["input_ids"].shape == (4, 16)


@pytest.mark.parametrize("separated", [True, False])
def test_a_short_trial_on_long_text_holds_out_what_was_asked_for(tmp_path, separated, monkeypatch):
    """Whole documents where there are enough, then text that follows what is trained on, which stays as it was."""
    monkeypatch.setattr(documents_module, "PIECE", 200)
    path = tmp_path / "text.txt"
    path.write_text(("\n<|endoftext|>\n" if separated else "\n").join(documents(600)))
    trial = batches(str(path), tmp_path, need=64, heldout_tokens=800)
    assert trial.n_heldout == 50 and trial.heldout_note() is None
    before = batches(str(path), tmp_path, need=64, heldout_tokens=800, read_on=False)
    n = len(before._train)
    assert before.n_heldout < 10 and torch.equal(trial.train(0, n)["input_ids"], before.train(0, n)["input_ids"])
    same = before.n_heldout
    assert torch.equal(trial.heldout(0, same)["input_ids"], before.heldout(0, same)["input_ids"])
    starts = {(shard.tobytes(), first) for shard, first in trial._train}
    assert not starts & {(shard.tobytes(), first) for shard, first in trial._heldout}


def test_less_held_out_text_than_asked_for_is_said(tmp_path):
    few = batches(write(tmp_path, "txt"), tmp_path, heldout_tokens=4000)
    note = few.heldout_note()
    assert note and f"{few.n_heldout * 16:,} tokens" in note and "4,000" in note and "--heldout" in note
    assert "later" not in few.describe()["tokens"], "as runs of before said it"


def test_text_read_many_times_is_said(tmp_path):
    few, said = batches(write(tmp_path, "txt"), tmp_path), []
    say_passes(few, 3 * few.n_train, said.append)
    assert not said and len(few._train) == few.n_train
    say_passes(few, 10 * few.n_train, said.append)
    assert f"{few.n_train * 16:,} tokens" in said[0] and "read 10.0 times" in said[0]


def starts_of(batch):
    """Positions at which a text begins, sequence by sequence."""
    return [(row == 0).nonzero().flatten().tolist() for row in batch["position_ids"]]


def test_every_second_training_sequence_is_cut_into_shorter_texts(tmp_path):
    path = write(tmp_path, "txt", [" ".join(f"w{i}" for i in range(60))] * 400)  # documents longer than a sequence
    whole, cut = batches(path, tmp_path), batches(path, tmp_path, shortest=3)
    plain, shorter = whole.train(0, 200), cut.train(0, 200)
    assert torch.equal(plain["labels"], shorter["labels"]), "what is asked for stays"
    assert torch.equal(plain["input_ids"][::2], shorter["input_ids"][::2])
    assert torch.equal(plain["position_ids"][::2], shorter["position_ids"][::2])
    lengths, bare = [], []
    for row, before, after in zip(
        shorter["input_ids"][1::2], starts_of(plain)[1::2], starts_of(shorter)[1::2], strict=True
    ):
        cuts = sorted(set(after) - set(before))
        assert set(before) <= set(after)
        bare += [bool(row[at] != whole.separator) for at in cuts]
        if before == [0]:  # one document: nothing but cuts ends a text; the last one ends with the sequence
            lengths += [end - start for start, end in itertools.pairwise([0, *cuts])]
    assert min(lengths) >= 3 and max(lengths) > 8 and len(set(lengths)) > 6
    assert 0.3 < sum(bare) / len(bare) < 0.7, "as half of all sequences do"
    changed = plain["input_ids"] != shorter["input_ids"]
    assert (shorter["input_ids"][changed] == whole.separator).all()
    assert shorter["position_ids"].max() < 16 and cut.describe()["shortest"] == 3 and "shortest" not in whole.describe()
    assert torch.equal(cut.train(7, 5)["position_ids"], shorter["position_ids"][7:12]), "the number alone decides"
    assert torch.equal(whole.heldout(0, 4)["position_ids"], cut.heldout(0, 4)["position_ids"])


def test_positions_count_on_from_each_cut(tmp_path):
    batch = batches(write(tmp_path, "txt"), tmp_path, shortest=2).train(0, 100)
    for row in batch["position_ids"].tolist():
        assert all(now == 0 or now == before + 1 for before, now in itertools.pairwise(row)) and row[0] == 0
