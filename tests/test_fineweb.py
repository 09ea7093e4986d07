"""Text to shards: the same bytes from every source, encoder and interrupted run."""

import hashlib
import os
import random
import re
import sys
from pathlib import Path

import fineweb_runs
import pytest
from conftest import ROOT
from fineweb_runs import contents, fineweb_in, reference, texts_of, tokens_of, write_texts

import fineweb
from corpus import sources
from corpus.shards import Manifest, open_shards, verify_shards
from fineweb import FineWebConfig
from runtime.errors import UserError
from runtime.files import lock_folder, read_json, write_json
from tokenizer import gpt2_encoding

make, drive, hub = fineweb_runs.make, fineweb_runs.drive, fineweb_runs.hub
TEXTS = texts_of(200)
SIZE = "--shard-size=1000"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of `a.jsonl` and `a.txt`, and in `jsonl` and `txt` what fineweb.py makes of them."""
    folder = tmp_path_factory.mktemp("made")
    with fineweb_in(folder) as make:
        for kind in ("jsonl", "txt"):
            write_texts(folder / f"a.{kind}", TEXTS)
            make("--source", f"a.{kind}", SIZE, "--data-dir", kind)
    return folder


def times(folder):
    """When each shard was written."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("*.npy")}


# Shards


def test_main_writes_the_tokens_of_every_document_and_proposes_a_training(make, tmp_path):
    write_texts(tmp_path / "a1.jsonl", TEXTS[:80])
    write_texts(tmp_path / "a2.jsonl", TEXTS[80:])
    printed = make("--source", "a*.jsonl", "--data-dir", "d", "--shard-size", 1500)
    assert tokens_of(Path("d")) == reference(TEXTS)
    manifest = Manifest.load(Path("d"))
    assert manifest.documents == 199  # and an empty one
    for name, file in zip(("a1.jsonl", "a2.jsonl"), manifest.source["files"], strict=True):
        digest = hashlib.sha256(2 * Path(name).read_bytes()).hexdigest()  # head and tail are all
        size = os.path.getsize(name)
        assert file == {"name": name, "bytes": size, "sha256 of head and tail": digest}
    sizes = [shard.tokens for shard in manifest.shards]
    assert sizes[:-1] == [300] + [1500] * (len(sizes) - 2)  # a tenth of two shards
    assert 0 < sizes[-1] <= 1500
    assert [shard.split for shard in manifest.shards] == ["val"] + ["train"] * (len(sizes) - 1)
    assert str(tmp_path) not in Path("d/manifest.json").read_text()
    note, first, baseline, proposal = printed.splitlines()
    assert "times <|endoftext|> is in the texts, as text" in note
    counts = f"{sum(sizes):,} tokens, 300 of them for validation, {len(sizes)} shards"
    assert first == f"d: 199 documents, {counts}"
    assert re.fullmatch(r"unigram .*: loss [\d.]+ nats per token, [\d.]+ bits per byte", baseline)
    recipe = f"{ROOT}/recipes/gpt2-4m.json"
    command = f"next: python {ROOT}/train_gpt2.py --config {recipe} --data-dir d --run-name d "
    assert proposal.startswith(command)


def test_main_proposes_the_published_recipe_for_much_text_and_names_the_other(make, tmp_path):
    flags = ["--source", write_texts(tmp_path / "a.jsonl", TEXTS[:20]), "--data-dir", "d"]
    assert "fast.json" not in make(*flags)
    manifest = read_json(Path("d/manifest.json"))
    for shard, tokens in zip(manifest["shards"], (100_000_000, 9_853_000_000), strict=True):
        shard["tokens"] = tokens  # as of the default source
    write_json(Path("d/manifest.json"), manifest)
    *_, proposal, other = make(*flags).splitlines()
    assert proposal.endswith(f" --config {ROOT}/recipes/gpt2-124m.json --data-dir d --run-name d")
    assert other.startswith("or, on 35 % of the tokens: --config recipes/gpt2-124m-fast.json --max")
    assert "measured on small models only" in other


@pytest.mark.parametrize("kind", ["jsonl.gz", "json.zst", "parquet"])
def test_main_makes_the_same_shards_of_every_kind_of_file(made, make, tmp_path, kind):
    """A null is an empty document."""
    source = write_texts(tmp_path / f"b.{kind}", [*TEXTS[:40], None, *TEXTS[40:]], "content")
    make("--source", source, SIZE, "--text-field=content", "--workers=3")
    assert contents(Path("data/b"), "*.npy") == contents(made / "jsonl", "*.npy")
    with pytest.raises(ValueError, match=r"another dataset \(text field content instead of id\)"):
        make("--source", source, SIZE, "--text-field=id")


def test_main_reads_each_text_file_of_a_folder_once(make, tmp_path):
    texts = {"b.py": "one two", "a/c.xml": "<x>y</x>", "a/README": "état", "z.jsonl": "three"}
    for name, text in texts.items():
        write_texts(tmp_path / "mine" / name, [text])
    others = {"a/a.png": b"\x89PNG", "a/.d": b"d", ".e/f.txt": b"f", "latin.txt": b"caf\xe9"}
    others["late.txt"] = b"text\n" * 500 + b"\xff"  # beyond the first block
    others |= {"package.json": b'{\n  "name": "x"\n}\n', "t.csv": b"id,body\n1,x\n"}
    others["p.pdf"] = others["a/c.pdf"] = b"%PDF-1.4"
    for name, content in others.items():
        (tmp_path / "mine" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "mine" / name).write_bytes(content)
    printed = make("--source", "mine")
    skipped, *_ = printed.splitlines()
    assert skipped.startswith("--source mine: 7 of 11 files skipped, for example mine/a/")
    for one_of_its_kind in ("is not UTF-8", "a PDF; use", "line 1: not JSON", "found id, body"):
        assert skipped.count(one_of_its_kind) == 1
    by_hash = sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert by_hash != sorted(texts)
    assert tokens_of(Path("data/mine")) == reference([texts[name] for name in by_hash])
    assert "finished earlier" in make("--source", "mine")
    (tmp_path / "mine/a/up").symlink_to(tmp_path / "mine")
    make("--source", "mine", "mine/b.*", "--data-dir=d")
    assert sorted(tokens_of(Path("d"))) == sorted(tokens_of(Path("data/mine")))


def test_find_source_names_the_folder_after_the_source(make, tmp_path):
    for file in ("a/b.py", "a/README", "c/d.txt"):
        write_texts(tmp_path / file, ["one two three"])
    for source, name, folder in [
        (("a/b.py",), None, "b"),
        (("a/*",), None, "a"),
        (("c", "a/b.py"), None, "c"),
        (("fineweb-edu",), None, "fineweb-edu-10BT"),
        (("fineweb-edu",), "sample-100BT", "fineweb-edu-100BT"),
        (("stdlib",), None, "stdlib"),
    ]:
        assert fineweb.find_source(FineWebConfig(source=source, name=name))[0] == folder


def test_main_touches_no_file_that_it_did_not_make(make, tmp_path):
    flags = ["--source", write_texts(tmp_path / "a.jsonl", ["text"]), "--data-dir", "."]
    for name, content, message in [
        ("train.npy", "", r"\.npy files of other programs: choose"),
        ("manifest.json", "{}", "not a shard manifest"),
    ]:
        (tmp_path / name).write_text(content)
        (tmp_path / ".mine.tmp").touch()
        with pytest.raises(ValueError, match=message):
            make(*flags)
    assert contents(tmp_path).keys() == {"train.npy", "manifest.json", "a.jsonl"}
    assert (tmp_path / ".mine.tmp").exists()


# Folders of datasets


def write_folder(names):
    """Write a folder `ds` of files that contain their names."""
    for name in names:
        write_texts(Path("ds", name), [f"This is {name}."])
    return {name: f"This is {name}." for name in names}


def split_texts(folder):
    """Return the documents of both splits."""
    for split in ("train", "val"):
        shards = open_shards(folder, split)
        text = gpt2_encoding().decode(shards.read(0, shards.total_tokens).tolist())
        yield {*text.split("<|endoftext|>")} - {""}


@pytest.mark.parametrize("has_card", [True, False])
@pytest.mark.parametrize(
    ("train", "val", "left"),
    [
        (["data/train-0.parquet"], ["data/validation-0.parquet"], ["data/test-0.parquet"]),
        (["en/train.jsonl.gz", "training_2.json"], ["en/test.jsonl.gz"], []),
        (["train/0.jsonl", "test_of_time/train.jsonl"], ["train/dev/0.jsonl"], ["eval/0.jsonl"]),
        (["my-train.txt"], ["my-valid.txt"], ["my_evaluation.txt"]),
        (["wiki.train.raw"], ["wiki.valid.tokens"], ["wiki.test.raw"]),
    ],
)
def test_dataset_folder_has_its_splits(make, train, val, left, has_card):
    left = ["LICENSE", *left]
    texts = write_folder([*train, *val, *left])
    Path("ds/README.md").write_text("---\nlicense: mit\n---\n" if has_card else "# My texts\n")
    if has_card:
        left = [*left, *write_folder(["test_loading.py", "constrained.jsonl"])]
    left = ["README.md", *left]
    printed = make("--source", "ds").splitlines()[0]
    training = f"files for training: {len(train)}, such as ds/"
    assert printed.startswith(f"--source ds is a dataset; {training}")
    assert f"; for validation by default: {len(val)}, such as ds/{val[0]}; skipped: " in printed
    assert f"; skipped: {len(left)}, such as ds/{min(left)}" in printed
    assert [*split_texts("data/ds")] == [{texts[n] for n in names} for names in (train, val)]


def test_validation_flags_replace_the_split_of_a_dataset_folder(make):
    texts = write_folder(["train.jsonl", "test.jsonl"])
    Path("other.txt").write_text("mine")
    make("--source", "ds", "--val-source=other.txt", "--data-dir=other")
    assert [*split_texts("other")] == [{texts["train.jsonl"]}, {"mine"}]
    make("--source", "ds", "--val-share=0.5", "--data-dir=share")
    assert sorted(tokens_of(Path("share"))) == sorted(reference([texts["train.jsonl"]]))


@pytest.mark.parametrize(
    ("names", "readme", "left_out"),
    [
        (["test.py", "train_notes.txt", "a.txt", "val/b.py"], "# Mine", []),
        (["train.py", "test.py"], "", []),
        (["test_1.txt", "test_2.txt"], "# Mine", []),
        (["posts/1.md", "posts/test.md"], "---\ntitle: A blog\n---", ["README.md"]),
        (["1.jsonl", "2.jsonl"], "---\nlicense: mit\n---", ["README.md"]),
        (["data/test-0.parquet"], "---\nlicense: mit\n---", ["README.md"]),
    ],
)
def test_folder_without_splits_is_read_completely(make, names, readme, left_out):
    texts = {*write_folder(names).values()}
    Path("ds/README.md").write_text(readme)
    printed = make("--source", "ds")
    assert ("such as ds/README.md" in printed) == ("README.md" in left_out)
    expected = texts if left_out else texts.union({readme} - {""})
    text = gpt2_encoding().decode(tokens_of(Path("data/ds")))
    assert {*text.split("<|endoftext|>")} - {""} == expected


# Repeated text


def words_of(seed, count=300):
    return " ".join(str(n) for n in random.Random(seed).choices(range(10_000), k=count))


def repeated_texts(tmp_path):
    """Validation text of which one document is in the training text, and another one for 40 %."""
    val, train = [words_of(seed) for seed in range(5)], [words_of(seed) for seed in range(9, 40)]
    train[3] = val[1]
    train[5] = words_of(99) + val[2][: int(0.4 * len(val[2]))] + words_of(98)
    train[20] = train[7]
    write_texts(tmp_path / "val.jsonl", val)
    write_texts(tmp_path / "train.jsonl", train)
    return val, train, ["--source", "train.jsonl", "--val-source", "val.jsonl", "--no-propose"]


def test_main_warns_of_validation_text_in_the_training_text(make, tmp_path):
    val, _, flags = repeated_texts(tmp_path)
    printed = make(*flags, "--data-dir", "d").splitlines()[1]
    overlap = read_json(Path("d/manifest.json"))["overlap"]
    assert overlap == pytest.approx(1.4 / 5, abs=0.01)
    number = f"{100 * overlap:.1f} % of the validation tokens are in passages of 32 tokens or more"
    assert printed.startswith(f"warning: {number} that the training text also has, so the val")
    n_tokens = len(gpt2_encoding().encode_ordinary(val[1]))
    expected = (
        rf"longest one has ({n_tokens + 1}|{n_tokens + 2}) tokens and begins '<\|endoftext\|>"
    )
    assert re.search(expected + val[1][:40], printed)  # with the next document's mark
    assert printed.endswith(
        "use --drop-repeated or --val-source with another text, and another --data-dir"
    )
    manifest = read_json(Path("d/manifest.json"))
    before, again = times(Path("d")), make(*flags, "--data-dir", "d")
    assert "; finished earlier" in again
    assert printed in again
    assert (times(Path("d")), read_json(Path("d/manifest.json"))) == (before, manifest)


def test_main_searches_large_texts_only_with_a_flag(make, tmp_path, monkeypatch):
    _, _, flags = repeated_texts(tmp_path)
    monkeypatch.setattr(fineweb, "MAX_SEARCHED_TOKENS", 10_000)
    assert "warning" not in make(*flags, "--data-dir", "d")
    assert read_json(Path("d/manifest.json"))["overlap"] is None
    assert "warning: 2" in make(*flags, "--data-dir", "d", "--overlap")  # of the same dataset
    write_texts(tmp_path / "other.jsonl", [words_of(1000)])
    flags += ["--val-source", "other.jsonl", "--data-dir", "e", "--overlap"]
    assert "\n0.0 % of the validation tokens" in make("--source", "train.jsonl", *flags[4:])


def test_main_drops_repeated_documents_also_after_a_kill(make, drive, tmp_path):
    """The first of equal ones is kept; the validation text comes first."""
    _, train, flags = repeated_texts(tmp_path)
    flags += ["--shard-size=5000", "--drop-repeated"]
    printed = make(*flags, "--data-dir", "d")
    assert printed.startswith("left out 2 documents equal to an earlier one\n")
    overlap = read_json(Path("d/manifest.json"))["overlap"]
    assert overlap == pytest.approx(0.4 / 5, abs=0.01)
    assert "begins" in printed
    assert "with another text" in printed
    assert "--drop-repeated or" not in printed
    kept = [text for i, text in enumerate(train) if i not in (3, 20)]
    shards = open_shards("d", "train")
    assert shards.read(0, shards.total_tokens).tolist() == reference(kept)
    for kill_at in (5, 7):
        drive(*flags, "--data-dir", "killed", kill_at=kill_at)
    assert make(*flags, "--data-dir", "killed") == printed.replace("\nd: ", "\nkilled: ")
    assert contents(Path("killed")) == contents(Path("d"))
    with pytest.raises(UserError, match=r"another dataset \(drop repeated True instead of None\)"):
        make(*flags[:-1], "--data-dir", "d")
    with pytest.raises(UserError, match="--drop-repeated cannot be combined with --part"):
        make(*flags, "--part=0/2")


def test_main_drops_repeated_blocks_of_plain_texts(make, tmp_path):
    """Blocks have 1,000 characters here. The end of an edited copy is a document."""
    text = words_of(1, 1000)
    write_texts(tmp_path / "mine/a.txt", [text])
    write_texts(tmp_path / "mine/b.txt", [text])
    write_texts(tmp_path / "mine/c.txt", [text + " the end"])
    printed = make("--source", "mine", "--drop-repeated")
    decoded = gpt2_encoding().decode(tokens_of(Path("data/mine")))
    first, second = decoded.removeprefix("<|endoftext|>").split("<|endoftext|>")
    assert {len(first) > len(text) - 9, len(second) > len(text) - 9} == {True, False}
    assert text in (first, second) or text + " the end" in (first, second)
    assert "left out" in printed


# Interrupted runs


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_main_killed_at_any_moment_resumes_to_the_same_bytes(made, make, drive, kind):
    flags = ["--source", made / f"a.{kind}", SIZE, "--data-dir", "d"]
    # Before the first manifest, the first two shards and their manifest; then further on.
    for kill_at in (1, 2, 4, 9) if kind == "jsonl" else (9,):
        drive(*flags, kill_at=kill_at)
        assert list(Path("d").glob(".*.tmp"))
    finished = times(Path("d"))
    assert len(finished) > 2
    with pytest.raises(ValueError, match="is incomplete"):
        open_shards("d", "train")
    manifest = read_json(Path("d/manifest.json")) | {"skipped": 1}  # as an earlier version wrote it
    manifest["progress"]["skipped"] = 1
    write_json(Path("d/manifest.json"), manifest)
    make(*flags)
    assert contents(Path("d")) == contents(made / kind)
    assert not list(Path("d").glob(".*.tmp"))
    assert finished.items() <= times(Path("d")).items()  # not made again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "code", "line"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
        ("os.kill(os.getpid(), signal.SIGINT)", 130, "interrupted"),
        ("resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))", 2, "error: [Errno 27] File too"),
    ],
    ids=["SIGTERM", "SIGINT", "full disk"],
)
def test_main_that_is_stopped_leaves_no_bad_shard_and_resumes(made, make, drive, stop, code, line):
    flags = ["--source", made / "a.jsonl", SIZE, "--data-dir", "d"]
    done = drive(*flags, kill_at=6, INSTEAD=f"import resource; {stop}")
    assert done.code == code, done
    assert (done.stderr.splitlines() or [""])[-1].startswith(line)
    assert "Traceback" not in done.stderr
    assert code == -15 or not list(Path("d").glob(".*.tmp"))
    verify_shards(Path("d"), Manifest.load(Path("d")).shards)
    assert contents(Path("d"), "*.npy").items() <= contents(made / "jsonl").items()
    make(*flags)
    assert contents(Path("d")) == contents(made / "jsonl")


def test_main_verifies_a_finished_data_set(make, tmp_path):
    flags = ["--source", write_texts(tmp_path / "a.jsonl", TEXTS)]
    make(*flags)
    before = times(Path("data/a"))
    assert "finished earlier" in make(*flags)
    assert times(Path("data/a")) == before
    shard = Path("data/a/train_000001.npy")
    shard.write_bytes(shard.read_bytes()[:-2] + b"\1\1")
    with pytest.raises(ValueError, match=r"train_000001\.npy is missing or"):
        make(*flags)


def test_main_refuses_other_data_in_the_same_folder(make, drive, tmp_path):
    """Also the same file after an edit, which does not change its size."""
    source = write_texts(tmp_path / "a.jsonl", TEXTS)
    edited = write_texts(tmp_path / "b/a.jsonl", [])
    edited.write_text(source.read_text().replace('"id": 1', '"id": 2', 1))
    same = ["--source", source, SIZE, "--data-dir", "d"]
    drive(*same, kill_at=9)
    for _ in ("resume", "rerun"):
        before = contents(Path("d"))
        for flags, difference in [
            (["--source", source, SIZE + "1"], "shard size 1000 instead of 10001"),
            (["--source", edited, SIZE], "other files"),
            (["--source", "stdlib", SIZE], "kind files instead of stdlib"),
        ]:
            with pytest.raises(ValueError, match=rf"another dataset \({difference}\): use the fl"):
                make(*flags, "--data-dir", "d")
        assert contents(Path("d")) == before
        make(*same)


@pytest.fixture
def opened():
    """Names of the files that were opened, in order, since the list was cleared."""
    names, is_on = [], True
    sys.addaudithook(lambda event, args: is_on and event == "open" and names.append(args[0]))
    yield names
    is_on = False


def test_rerun_opens_only_files_whose_times_changed(make, tmp_path, opened, monkeypatch):
    """A change between the hashed ends of a file is noticed, also if its time is set back."""
    monkeypatch.setattr(sources, "HASHED_BYTES", 9)
    for name in ("a.jsonl", "b.txt", "c.jsonl"):
        write_texts(tmp_path / "mine" / name, TEXTS[:20])
    write_texts(tmp_path / "val.txt", TEXTS[:9])
    flags = ["--source", "mine", "--val-source", "val.txt", "--data-dir", "d"]

    def names():
        texts = {"a.jsonl", "b.txt", "c.jsonl", "val.txt"}
        found = [name for path in opened if (name := os.path.basename(str(path))) in texts]
        opened.clear()
        return found

    make(*flags, "--max-tokens=1000")
    from_the_start = len(names())
    make(*flags)  # resumes; neither checks nor hashes the files again
    assert len(names()) < from_the_start / 2
    assert "; finished earlier, and unchanged" in make(*flags)
    assert names() == []
    (tmp_path / "mine/b.txt").touch()
    assert "; finished earlier, and unchanged" in make(*flags)
    assert {*names()} == {"b.txt"}
    for path in (tmp_path / "mine/a.jsonl", tmp_path / "val.txt"):
        before, times = path.read_text(), path.stat()
        path.write_text(before.replace("fox", "dog"))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(
            UserError, match=r"another dataset \(other contents of files\): use the"
        ):
            make(*flags)
        path.write_text(before)


# What fineweb.py wrote before it recorded the contents and times of files.
OLD_SHARDS = {
    "val_000000": (10, "5f7b6096cae7ad57c535d1b4401cbdff920952a875371539365af84dd5838db6"),
    "train_000001": (12, "4f48e28534ebe4c698bb72fc53986c86d2d283c5a214a45f39d937740db97e52"),
    "train_000002": (12, "5807b545ebad7c85981927f0e714e4a1b6a1df73a7e61d293390236cb67c0ec6"),
    "train_000003": (2, "5a4c1a3411ee6b84de60e873fe6699759a00df9e4947cbf7f6efce2ff5af16fe"),
}
OLD_FILES = {
    "files": ("a.csv", 103, "dde90898fb97bbe99332fb9410dbbf607589c9fa929f1f76a068f4fd03980be3"),
    "val files": ("b.txt", 44, "930667f8dfeff6907165b3fca1aa587795bd19dd01f9207134d4881669fb01ee"),
}
OLD_MANIFEST = {
    "source": {"kind": "files"}
    | {
        kind: [dict(zip(("name", "bytes", "sha256 of head and tail"), file, strict=True))]
        for kind, file in OLD_FILES.items()
    },
    "tokenizer_sha256": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "shard_size": 12,
    "shards": [
        {"file": f"{n}.npy", "split": n.partition("_")[0], "tokens": tokens, "sha256": sha256}
        for n, (tokens, sha256) in OLD_SHARDS.items()
    ],
    "documents": 2,
    "complete": True,
    "max_tokens": None,
    "progress": {"cursor": {"file": 0, "text": 0}, "tokens": 10, "documents": 0},
    "val_span": 0,
    "format": 1,
}


def test_dataset_of_an_earlier_version_is_finished(make):
    rows = [
        "To be, or not to be: that is the question.",
        "Whether it is nobler in the mind to suffer.",
    ]
    table = "id,text\n" + "".join(f'{i},"{row}"\n' for i, row in enumerate(rows, 1))
    Path("a.csv").write_text(table)
    Path("b.txt").write_text("The slings and arrows of outrageous fortune.")
    flags = ["--source=a.csv", "--val-source=b.txt", "--shard-size=12", "--data-dir=d"]
    make(*flags)
    write_json(Path("d/manifest.json"), OLD_MANIFEST)
    before = contents(Path("d"))
    assert "2 documents, 36 tokens, 10 of them for validation, 4 shards; finished" in make(*flags)
    assert contents(Path("d"), "*.npy").items() <= before.items()
    assert read_json(Path("d/manifest.json")) == OLD_MANIFEST | {"overlap": 0.0}
    Path("a.csv").write_text(table.replace("suffer", "endure"))
    with pytest.raises(UserError, match=r"another dataset \(other files\)"):
        make(*flags)
    Path("a.csv").write_text(table)
    write_json(Path("d/manifest.json"), OLD_MANIFEST | {"complete": False})
    assert "; finished" not in make(*flags)  # resumed
    assert contents(Path("d"), "*.npy").items() <= before.items()


def test_main_refuses_a_second_writer(made, make):
    flags = ["--source", made / "a.jsonl", "--data-dir=d"]
    said = "another process is at work in d: wait for the other process to end, or use another --d"
    with lock_folder(Path("d"), ".manifest.json.lock"), pytest.raises(ValueError, match=said):
        make(*flags)


# The first tokens of a source


MANIFEST = {  # of deaa4f8
    "source": {
        "kind": "files",
        "files": [
            {
                **{"name": "a.txt", "bytes": 991},
                "sha256 of head and tail": "7f0e8fdc0bec4eb5987e77f7f4a1180a"
                "a49c742cbb30aea47a1070a90d7bc8ac",
            },
            {
                **{"name": "b.jsonl", "bytes": 48},
                "sha256 of head and tail": "a9294e84bddd51980153fabad6497b38"
                "519b1cd500641ff8bc3846481cc1d97b",
            },
        ],
    },
    "tokenizer_sha256": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "shard_size": 100000000,
    "shards": [
        {
            **{"file": "val_000000.npy", "split": "val", "tokens": 33},
            "sha256": "17e32a8b4ac46ad38b06e0316972bbab45ee9bb0a4e6db159339c5ac9ffa4c93",
        },
        {
            **{"file": "train_000001.npy", "split": "train", "tokens": 295},
            "sha256": "78f2a5a8f5ddd198fddb96c3859d37529f6c93c278a07da8a6cc0ef488e3ece5",
        },
    ],
    **{"documents": 3, "complete": True, "max_tokens": None, "progress": None},
    **{"val_span": 328, "format": 1},
}


def test_a_dataset_of_an_earlier_version_is_finished(make, tmp_path):
    (tmp_path / "a.txt").write_bytes(
        b"".join(b"Line %d of a small text.\n" % n for n in range(1, 41))
    )
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "one two three"}\n{"text": "four five"}\n')
    flags = ["--source", "a.txt", "b.jsonl", "--data-dir", "d"]
    make(*flags)
    before = times(Path("d"))
    write_json(Path("d/manifest.json"), MANIFEST)
    assert "; finished earlier, and unchanged\n" in make(*flags)
    assert times(Path("d")) == before


def test_finished_dataset_on_a_read_only_disk_is_verified(make, tmp_path, monkeypatch):
    write_texts(tmp_path / "a.txt", TEXTS[:20])
    flags = ["--source", "a.txt", SIZE, "--data-dir", "d"]
    make(*flags)
    (tmp_path / "d/.manifest.json.lock").unlink(missing_ok=True)
    (tmp_path / "d/.manifest.json.lock").mkdir()  # so that no file of this name can be created
    with pytest.raises(UserError, match="cannot be written and locked"):
        make(*flags)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "; finished earlier, and unchanged\n" in make(*flags)
    manifest = tmp_path / "d/manifest.json"
    manifest.write_text(manifest.read_text().replace('"complete": true', '"complete": false'))
    with pytest.raises(UserError, match="cannot be written and locked"):
        make(*flags)


@pytest.mark.parametrize(("kind", "limit"), [("jsonl", 200), ("txt", 2000), ("txt", 2100)])
def test_max_tokens_are_the_first_of_a_full_run_and_more_can_be_added(made, make, kind, limit):
    """Of less than two shards, of exactly two, of a few more; then of many. Validation stays."""
    everything = tokens_of(made / kind)
    assert everything == reference(TEXTS if kind == "jsonl" else ["\n".join(TEXTS)])
    flags, val = ["--source", made / f"a.{kind}", SIZE, "--data-dir", "d"], b""
    for more in (limit, limit + 2507):
        make(*flags, "--max-tokens", more)
        assert tokens_of(Path("d")) == everything[:more]
        assert Manifest.load(Path("d")).documents == everything[:more].count(50256)
        before = contents(Path("d"))
        for same_or_less in (more, 2):
            assert "finished earlier" in make(*flags, "--max-tokens", same_or_less)
        assert contents(Path("d")) == before
        val = val if more > limit else Path("d/val_000000.npy").read_bytes()
        assert Path("d/val_000000.npy").read_bytes() == val
    for every in (len(everything), len(everything) + 1):  # the source ends with it, or before it
        make(*flags, "--max-tokens", every)
        assert tokens_of(Path("d")) == everything
        assert Path("d/val_000000.npy").read_bytes() == val
        assert limit < 2000 or contents(Path("d")) == contents(made / kind)
        assert "finished earlier" in make(*flags)


def test_max_tokens_killed_at_any_moment_goes_on_to_the_same_bytes(made, make, drive):
    flags = ["--source", made / "a.jsonl", SIZE]
    make(*flags, "--data-dir", "some", "--max-tokens", 3500)
    flags += ["--data-dir", "killed"]
    drive(*flags, "--max-tokens=3500", kill_at=3)
    make(*flags, "--max-tokens", 3500)
    assert contents(Path("killed")) == contents(Path("some"))
    for kill_at in (1, 2, 8):  # while it goes on, before and after its last shard is replaced
        drive(*flags, kill_at=kill_at)
        if kill_at == 1:
            assert contents(Path("killed")) == contents(Path("some"))
            assert open_shards("killed", "train")  # still whole
    kept = len(times(Path("killed")))
    make(*flags, "--max-tokens", 1500)  # less than what it has
    assert open_shards("killed", "train").total_tokens == 1000 * (kept - 1)
    make(*flags)
    assert contents(Path("killed")) == contents(made / "jsonl")


# Separators and validation texts


def test_separator_splits_documents_and_is_noted_without_it(make, tmp_path):
    text = "One two.\n<|endoftext|>\nThree\r\nfour." + " five" * 500 + "<|endoftext|>six"
    (tmp_path / "a.txt").write_bytes(text.encode())
    printed = make("--source", "a.txt")
    assert "note: 2 times <|endoftext|> is in the texts" in printed
    assert "note: 1 times a line ends with CRLF" in printed
    for separator, real in (("<|endoftext|>", "<|endoftext|>"), ("\\n", "\n")):
        make("--source", "a.txt", "--separator", separator, "--data-dir", separator[-1])
        assert tokens_of(Path(separator[-1])) == reference(text.split(real))


def test_validation_from_a_separate_text_or_a_chosen_fraction(make, tmp_path):
    write_texts(tmp_path / "a.jsonl", TEXTS)
    write_texts(tmp_path / "v.jsonl", TEXTS[:9])
    flags = ["--source", "a.jsonl", SIZE]
    for more in (3000, 10**9):  # tokens are added
        make(*flags, "--val-source=v.jsonl", "--data-dir=v", f"--max-tokens={more}")
        val = open_shards("v", "val").read(0, 10**6).tolist()
        assert val == reference(TEXTS[:9])
        train = open_shards("v", "train").read(0, 10**6).tolist()
        assert train == reference(TEXTS)[: more - len(val)]
    for share, n_val in ((0.1, 200), (0.05, 100)):  # of two shards; the first is the default
        make(*flags, f"--data-dir={n_val}", *([f"--val-share={share}"] if share != 0.1 else []))
        assert open_shards(str(n_val), "val").total_tokens == n_val
    with pytest.raises(ValueError, match="have a file in common"):
        make(*flags, "--val-source=a.jsonl", "--data-dir=t")


# Bad input


def test_main_ends_at_a_bad_row_in_one_line(drive, tmp_path):
    source = write_texts(tmp_path / "a.jsonl", TEXTS)
    source.write_bytes(source.read_bytes() + b'{"text": 3}\n')
    for _ in range(2):  # a resumed run finds the same line
        done = drive("--source", source, SIZE, "--data-dir", "d")
        # No progress bar is drawn into a pipe.
        message = f"error: {source}, line 201: `text` is int, not a string\n"
        assert (done.code, done.stderr) == (2, message)
    assert len(Manifest.load(tmp_path / "d").shards) > 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--source", "none*.txt"], r"none\*.txt: no such file or folder"),
        (["--source", "finewebedu"], "finewebedu is not fineweb-edu, fineweb, stdlib"),
        (["--source", "empty"], "--source empty and its subfolders have no text files"),
        (["--source", "empty.txt"], r"too small for two splits \(0 tokens\)"),
        (["--source", "stdlib", "fineweb"], "pass a single name, or only files"),
        (["--source", ""], "--source needs a value"),
        (["--shard-size", "0"], "--shard-size must be above 0, not 0"),
    ],
)
def test_main_explains_flags_that_cannot_be(make, flags, message):
    Path("empty.txt").touch()
    Path("empty").mkdir()
    with pytest.raises(UserError, match=message):
        make(*flags)
    assert not list(Path("data").glob("*/[!.]*"))


def test_main_without_network_says_what_works(drive, tmp_path):
    done = drive(HF_ENDPOINT="http://127.0.0.1:1", HF_HUB_OFFLINE="0")
    assert done.code == 2
    assert done.stderr.startswith("error: could not look up ")
    assert re.search(r"--source stdlib .*\(text, \.jsonl, \.parquet\)\n$", done.stderr)
    assert not list(tmp_path.glob("data/*/[!.]*"))


# The hub


@pytest.mark.slow
def test_main_streams_the_hub_and_resumes_at_the_same_revision(hub, drive, tmp_path):
    flags = ["--source", "o/n", "--name", "sample-10BT", SIZE, "--text-field", "content"]
    environment = hub.environment(tmp_path / "hf")
    drive(*flags, kill_at=8, **environment)
    folder = tmp_path / "data" / "n-10BT"
    assert len(Manifest.load(folder).shards) > 2
    hub.head = "b" * 40  # the data set has moved on, the rerun has not
    hub.asked.clear()
    done = drive(*flags, **environment)
    assert done.code == 0, done.stderr
    assert tokens_of(folder) == reference(hub.texts)
    assert Manifest.load(folder).source["revision"] == "a" * 40
    assert not any("b" * 40 in path for _, path in hub.asked)
    done = drive(*flags, **environment | {"HF_ENDPOINT": "http://127.0.0.1:1"})
    assert "finished earlier" in done.stdout  # and that needs no network
    done = drive(*flags, "--revision", "main", **environment)
    assert done.code == 2
    assert f"revision {'a' * 40} instead of {'b' * 40}" in done.stderr


@pytest.mark.slow
def test_max_tokens_of_the_hub_downloads_no_further_file(hub, drive, tmp_path):
    flags = ["--source=o/n", "--name=sample-10BT", "--text-field=content", SIZE]
    environment = hub.environment(tmp_path / "hf")
    done = drive(*flags, "--max-tokens=2.5k", **environment)
    assert " 2,500 tokens, 1,000 of them for validation, 3 shards\n" in done.stdout, done
    assert hub.requests("GET", "000.parquet")
    assert not hub.requests("GET", "001.parquet")


@pytest.mark.slow
def test_main_names_the_configurations_of_a_hub_dataset(hub, drive, tmp_path):
    card = "".join(f"- config_name: {name}\n  data_files: sample/10BT/*\n" for name in "bc")
    files = {"README.md": f"---\nconfigs:\n{card}---\n".encode(), "sample/10BT/0.txt": b"a"}
    hub.add("dataset", "o/m", files)
    for flags in (["--name=other"], []):
        done = drive("--source=o/m", *flags, **hub.environment(tmp_path / "hf"))
        assert done.code == 2
        assert "choose one with --name: b, c" in done.stderr
