"""Novels in TEI as text, and authors held out with all that they wrote."""

import pytest
from conftest import command, refused

from lab import books

HEAD = ('<TEI xmlns="http://www.tei-c.org/ns/1.0"><teiHeader><titleStmt><author>{}</author></titleStmt>'
        "<p>of the header</p></teiHeader><text><front><p>front</p></front><body>{}</body></text></TEI>")  # fmt: skip


@pytest.fixture
def collection(tmp_path):
    """Two novels each by eleven authors; a novel is 400 paragraphs that name its author."""
    (tmp_path / "level1").mkdir()
    for i in range(22):
        author = f"Author {i // 2}"
        body = "".join(f"<p>{author} wrote\n   sentence {n} of {i}.</p>" for n in range(400))
        (tmp_path / "level1" / f"ENG{i:02}.xml").write_text(HEAD.format(author, body))
    return tmp_path


def test_a_novel_is_its_bodys_paragraphs_each_once(tmp_path):
    body = "<div><head>I</head><p>One <hi>two</hi>\n  three<pb n='3'/></p><p/><p>A song:<l>la</l></p><l>verse</l></div>"
    (tmp_path / "a.xml").write_text(HEAD.format("A", body))
    assert books.novel(tmp_path / "a.xml") == ("A", ["I", "One two three", "A song:la", "verse"])


def test_no_author_is_on_both_sides_and_no_novel_is_lost(collection):
    done = command("lab.books", ".", "--out", "text", cwd=collection)
    assert done.returncode == 0, done.stderr
    inside = {path.stem: path.read_text() for path in (collection / "text").iterdir()}
    held = {path.stem: path.read_text() for path in (collection / "text-heldout").iterdir()}
    authors = [{text.partition(" wrote")[0] for text in texts.values()} for texts in (inside, held)]
    assert not authors[0] & authors[1] and sorted(authors[0] | authors[1]) == sorted(f"Author {i}" for i in range(11))
    assert authors[1] and len(inside) == 2 * len(authors[0]) and len(held) == 2 * books.EXCERPTS * len(authors[1])
    for name, text in inside.items():
        i = int(name.removeprefix("ENG"))
        assert text == "".join(f"Author {i // 2} wrote sentence {n} of {i}.\n" for n in range(400))
    assert f"{len(inside)} novels by {len(authors[0])} authors" in done.stdout


def test_excerpts_are_evenly_spaced_pieces_of_whole_paragraphs(monkeypatch):
    monkeypatch.setattr(books, "SIZE", 100)
    text = "".join(f"paragraph {n:04}\n" for n in range(800))  # 15 characters each
    found = list(books.excerpts(text))
    assert len(found) == books.EXCERPTS and all(piece in text and piece.endswith("\n") for piece in found)
    assert all(piece.startswith("paragraph") and 100 <= len(piece) <= 130 for piece in found)
    assert [text.index(piece) for piece in found] == [15 * 100 * i + 15 * (i > 0) for i in range(8)]


def test_what_is_no_collection_is_named(tmp_path, collection):
    assert "has no level1/*.xml" in refused(command("lab.books", "nowhere", cwd=tmp_path))
    (collection / "level1/ENG05.xml").write_text("<TEI>")
    assert "ENG05.xml is not a novel in TEI" in refused(command("lab.books", ".", cwd=collection))
    assert not (collection / "data").exists()
