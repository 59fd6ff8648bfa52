"""English novels of 1840 to 1920, held-out authors apart from the others, for runs on text that is no code.

    git clone https://github.com/COST-ELTeC/ELTeC-eng
    python -m lab.books ELTeC-eng                   writes data/eltec and data/eltec-heldout
    python train.py --pe expe --on k --data data/eltec
    python -m lab.measure RUN --data data/eltec-heldout --protocol same-targets

The text is the level-1 encoding of ELTeC-eng (ed. L. Burnard, COST Action CA16204, doi 10.5281/zenodo.4662490): novels
in the public domain, markup CC BY 4.0. An author is held out by a hash of the name, with all of the author's books.
"""

import hashlib
from pathlib import Path
from xml.etree import ElementTree

from common import CommandLine, holds_files, output_folder
from config import InputError

TEI = "{http://www.tei-c.org/ns/1.0}"
LARGEST = 5 * 2**19                     # bytes of a file: one novel is longer than any other, and left out
EXCERPTS = 8                            # of a held-out novel, evenly spaced: a document each
SIZE = 2**15                            # characters of an excerpt
HELD_OUT = 5                             # one author in so many

def novel(path):
    """(author, paragraphs) of a TEI file: the body's headings, paragraphs and lines of verse, each on one line."""
    try:
        root = ElementTree.parse(path).getroot()
        author = root.find(f".//{TEI}titleStmt/{TEI}author").text
        body = root.find(f".//{TEI}body")
        whole = [element for element in body.iter() if element.tag in (f"{TEI}p", f"{TEI}l", f"{TEI}head")]
    except (ElementTree.ParseError, AttributeError) as error:
        raise InputError(f"{path} is not a novel in TEI: {error}") from None
    inner = {id(part) for element in whole for part in element.iter() if part is not element}      # a line of a p
    texts = [" ".join("".join(element.itertext()).split()) for element in whole if id(element) not in inner]
    return author, [text for text in texts if text]

def excerpts(text):
    """EXCERPTS pieces of a text of about SIZE characters, evenly spaced, that begin and end with a paragraph."""
    for i in range(EXCERPTS):
        begin = i * len(text) // EXCERPTS
        begin = text.find("\n", begin) + 1 if begin else 0
        yield text[begin : text.find("\n", begin + SIZE) + 1 or None]

def held_out(author):
    return hashlib.sha256(author.encode()).digest()[0] % HELD_OUT == 0

def main(argv=None):
    parser = CommandLine(prog="python -m lab.books", description=__doc__)
    parser.add_argument("source", help="the collection's folder, which has level1/*.xml")
    parser.add_argument("--out", default="data/eltec", metavar="DIR", help="default: %(default)s, and DIR-heldout")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        paths = sorted(path for path in Path(args.source).glob("level1/*.xml") if path.stat().st_size <= LARGEST)
        if not paths:
            raise InputError(f"{args.source} has no level1/*.xml: give a clone of github.com/COST-ELTeC/ELTeC-eng")
        novels = {path.stem: novel(path) for path in paths}
        out = output_folder(args.out)
        folders = {out: False, out.with_name(f"{out.name}-heldout"): True}
        for folder in folders:
            if output_folder(folder) and holds_files(folder):
                raise InputError(f"{folder} exists: use it with --data {folder}, or choose another --out")
        for folder, held in folders.items():
            mine = {name: "\n".join(text) + "\n" for name, (author, text) in novels.items() if held_out(author) == held}
            texts = {f"{name}.txt": text for name, text in mine.items()} if not held else {
                f"{name}-{i}.txt": piece for name, text in mine.items() for i, piece in enumerate(excerpts(text), 1)}
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
            authors = len({novels[name][0] for name in mine})
            print(f"{folder}: {len(mine)} novels by {authors} authors, {len(texts)} documents, "
                  f"{sum(map(len, texts.values())):,} characters")

if __name__ == "__main__":
    main()
