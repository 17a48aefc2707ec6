"""The text that the demo model is trained on: public-domain prose and PSF-licensed Python.

    apt-get download r-cran-janeaustenr sword-text-web sword-comm-mhcc sword-comm-tdavid \
        dict-devil python3.11-doc
    for package in *.deb; do dpkg -x "$package" packages; done
    python scripts/demo_model/corpus.py --packages packages --out corpus.jsonl

(``--packages /`` after an ordinary ``apt-get install``.) The Python sources are the standard
library of the interpreter that runs this, 3.11 for the shipped model; files that name another
copyright holder than the Python Software Foundation are left out. Whole documents are held out,
never parts of one. Output: one JSON object a line with ``id, kind`` (prose, code or mixed),
``heldout, text``.

``--texts simlab/capture/demo_texts.jsonl`` also writes the passages that come with simlab: up to
eight of each kind, from held-out documents.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import re
import struct
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: Characters of a passage that comes with simlab.
PASSAGE = 3000


class Document(NamedTuple):
    """One text and what it is."""

    id: str
    kind: str
    text: str


def novels(root: Path) -> Iterator[Document]:
    """Jane Austen's six novels (1811-1818), from R's lazy-load database of zlib blocks."""
    path = root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    raw = path.read_bytes()
    at = 0
    while at < len(raw):
        # a block: 4 bytes big-endian (its size when unpacked), zlib data
        unpack = zlib.decompressobj()
        data = unpack.decompress(raw[at + 4 :])
        at = len(raw) - len(unpack.unused_data)
        lines = _r_strings(data)
        title = next((line for line in lines if line.strip()), "")
        if len(lines) > 1000:
            yield Document(f"austen/{title.strip().lower()}", "prose", unwrap("\n".join(lines)))


def _r_strings(data: bytes) -> list[str]:
    """The strings of a serialised R character vector (XDR form, R internals 1.8)."""
    at = data.index(b"X\n") + 2 + 12
    if struct.unpack_from(">i", data, at - 12)[0] == 3:
        at += 4 + struct.unpack_from(">i", data, at)[0]
    flags, count = struct.unpack_from(">ii", data, at)
    at += 8
    found: list[str] = []
    while flags & 255 == 16 and len(found) < count:
        _, size = struct.unpack_from(">ii", data, at)
        at += 8
        found.append(data[at : at + max(size, 0)].decode("utf-8", "replace"))
        at += max(size, 0)
    return found


def sword(root: Path, folder: str, letter: str, name: str) -> Iterator[Document]:
    """A SWORD module: zlib blocks (one a book or chapter) and their index of three uint32."""
    for half in ("ot", "nt"):
        base = root / "usr/share/sword/modules" / folder / half
        index = base.with_suffix(f".{letter}zs").read_bytes()
        blocks = base.with_suffix(f".{letter}zz").read_bytes()
        for number, (start, size, _) in enumerate(struct.iter_unpack("<III", index)):
            text = zlib.decompress(blocks[start : start + size]).decode("utf-8", "replace")
            yield Document(f"{name}/{half}{number:03}", "prose", unmark(text))


def unmark(text: str) -> str:
    """OSIS markup to plain paragraphs; footnotes dropped."""
    text = re.sub(r"<note\b.*?</note>", "", text, flags=re.S)
    text = re.sub(r"<(p|lg|div|title|chapter|lb|/p|/title|/div)\b[^>]*>", "\n\n", text)
    text = re.sub(r"<(l|/l)\b[^>]*>", "\n", text)
    text = html.unescape(re.sub(r"<[^>]*>", " ", text))
    text = re.sub(r"[ \t\x00\r]+", " ", text)
    return re.sub(r" ?\n ?", "\n", text)


def unwrap(text: str) -> str:
    """Paragraphs whose lines were broken at 70 characters, as one line each."""
    return re.sub(r"(?<=[^\n])\n(?=[^\n])", " ", text)


def devil(root: Path) -> Iterator[Document]:
    """Ambrose Bierce, The Devil's Dictionary (1911)."""
    path = root / "usr/share/dictd/devil.dict.dz"
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    yield Document("bierce/devils-dictionary", "prose", re.sub(r"\n[ \t]+", "\n", text))


def library() -> Iterator[Document]:
    """Python sources of this interpreter's standard library and its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "__pycache__", "encodings", "ensurepip", "idlelib", "lib2to3"}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if skip & set(name.parts) or path.stat().st_size > 400_000:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        owners = re.findall(r"copyright.{0,80}|licen[cs]ed? under.{0,80}", text, re.I)
        if all("python software foundation" in owner.lower() for owner in owners):
            yield Document(f"python/{name.as_posix()}", "code", text)


def manual(root: Path) -> Iterator[Document]:
    """The Python documentation's sources: prose about code, with code in it."""
    base = root / "usr/share/doc/python3.11/html/_sources"
    for part in ("tutorial", "howto", "library", "reference", "faq", "whatsnew"):
        for path in sorted((base / part).rglob("*.rst.txt")):
            name = path.relative_to(base).as_posix().removesuffix(".rst.txt")
            yield Document(f"pydoc/{name}", "mixed", path.read_text(encoding="utf-8"))


def clean(text: str) -> str:
    """One form for what the sources write in several."""
    for old, new in (("“", '"'), ("”", '"'), ("‘", "'"), ("’", "'"), ("—", "--"), ("\t", "    ")):
        text = text.replace(old, new)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def heldout(document: Document) -> bool:
    """Whole documents: one novel, and of the others about one in twenty by a hash of the name."""
    if document.id.startswith("austen/"):
        return "northanger" in document.id
    return int(hashlib.sha256(document.id.encode()).hexdigest(), 16) % 20 == 0


def documents(root: Path) -> Iterator[Document]:
    """All documents, in a fixed order."""
    yield from novels(root)
    yield from sword(root, "texts/ztext/engWEB2015eb", "b", "web")
    yield from sword(root, "comments/zcom/mhcc", "b", "henry")
    yield from sword(root, "comments/zcom/tdavid", "c", "spurgeon")
    yield from devil(root)
    yield from library()
    yield from manual(root)


def passages(held: list[Document]) -> Iterator[Document]:
    """Up to eight passages of PASSAGE characters of each kind, from held-out documents."""
    for kind in ("prose", "code", "mixed"):
        long = [d for d in held if d.kind == kind and len(d.text) > 2 * PASSAGE]
        novel = [d for d in long if d.id.startswith("austen/")]
        rest = [d for d in long if d not in novel]
        # as a hash orders them: not the alphabet's first
        rest.sort(key=lambda d: hashlib.sha256(d.id.encode()).hexdigest())
        chosen = 4 * novel + rest
        for number, document in enumerate(chosen[:8]):
            text = document.text
            start = text.index("\n", len(text) * (number % 4 + 1) // 10) + 1
            cut = text[start : start + PASSAGE]
            yield Document(
                f"{document.id}@{start}", kind, cut[: cut.rindex(" ")].strip("\n") + "\n"
            )


def main() -> None:
    """Write the corpus and print what is in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--packages", type=Path, default=Path("/"), help="where they are unpacked")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=Path, help="also write the passages that come with simlab")
    options = parser.parse_args()
    sizes: dict[tuple[str, str, bool], list[int]] = {}
    seen: set[str] = set()
    kept: list[Document] = []
    with options.out.open("w", encoding="utf-8") as out:
        for document in documents(options.packages):
            text = clean(document.text)
            if len(text) < 500 or text in seen:
                continue
            seen.add(text)
            held = heldout(document)
            row = {"id": document.id, "kind": document.kind, "heldout": held, "text": text}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
            if held:
                kept.append(document._replace(text=text))
            key = (document.kind, document.id.split("/")[0], held)
            sizes.setdefault(key, []).append(len(text.encode()))
    if options.texts:
        with options.texts.open("w", encoding="utf-8") as out:
            for part in passages(kept):
                row = {"id": part.id, "tag": part.kind, "text": part.text}
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
    for (kind, source, held), found in sorted(sizes.items()):
        split = "held out" if held else "training"
        print(f"{kind:6} {source:9} {split:9} {len(found):5} documents {sum(found):11,} bytes")
    print("sha256", hashlib.sha256(options.out.read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
