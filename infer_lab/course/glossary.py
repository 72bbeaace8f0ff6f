"""The glossary: every term that a chapter explains, in one page for all tracks.

    - **argmax**: The token with the highest logit. [beginner 1](beginner/01_x/01_x.ipynb)

The page itself is the source. A new entry is a line `term: What it means.` anywhere below the text
at its top; `infer-lab index` makes an entry of it, sorts the page, and links the first chapter that
explains the term, that is, has it in bold (`lesson.terms`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from infer_lab.course import lesson
from infer_lab.course.discovery import Chapter

PAGE = "GLOSSARY.md"
MAX_LENGTH = 300  # characters of a definition
HEAD = """\
# Glossary

The course's words. One word means one thing in every chapter; the link leads to the chapter that
explains it first, where the word stands in bold.
"""
_ENTRY = re.compile(r"- \*\*(?P<term>[^*]+)\*\*: (?P<text>.+?)(?: \[\w+ \d+\]\([^)]*\))?")
_NEW = re.compile(r"(?P<term>[^:*#|\[\]]+): +(?P<text>.+)")


@dataclass(frozen=True)
class Entry:
    """A term and what it means."""

    term: str
    text: str

    def explains(self, term: str) -> bool:
        """Whether the entry is that of `term`, in whatever case, or of its singular."""
        own, other = self.term.casefold(), term.casefold()
        return other in (own, f"{own}s", f"{own}es")


def parse(text: str) -> list[Entry]:
    """The entries of a page, in its order. ValueError names a line that is none."""
    ours = set(HEAD.splitlines())
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line in ours or line.startswith("#"):
            continue
        if not (found := _ENTRY.fullmatch(line) or _NEW.fullmatch(line)):
            raise ValueError(
                f"{PAGE}, line {number}, must be `term: What it means.` on one line, got {line!r}"
            )
        entries.append(Entry(found["term"].strip(), found["text"].strip()))
    return entries


def page(text: str, chapters: Iterable[Chapter]) -> str:
    """The page with `text`'s entries as it must be: sorted, under letters, with links."""
    explained = terms_of(chapters)
    lines = [HEAD]
    by_letter = groupby(sorted(parse(text), key=_order), key=lambda entry: _order(entry)[0][:1])
    for letter, entries in by_letter:
        lines.append(f"## {letter.upper()}\n")
        for entry in entries:
            chapter = _first(entry, explained)
            link = f" [{label(chapter)}]({chapter}/{chapter.name}.ipynb)" if chapter else ""
            lines.append(f"- **{entry.term}**: {entry.text}{link}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def term_faults(root: Path, chapters: Iterable[Chapter]) -> Iterator[str]:
    """Terms that these chapters explain and the page doesn't define."""
    entries = parse(read(root))
    for terms in terms_of(chapters).values():
        for term in terms:
            if not any(entry.explains(term) for entry in entries):
                yield (
                    f"explains **{term}**, which {PAGE} lacks; add a line `{term}: What it"
                    " means.` there and run `infer-lab index`, or make a word *italic* that is"
                    " only stressed"
                )


def page_faults(root: Path, chapters: list[Chapter]) -> Iterator[str]:
    """What is wrong with the page itself; chapters: all there are, in the order of teaching."""
    text = read(root)
    entries = parse(text)
    explained = terms_of(chapters)
    for one, two in pairwise(sorted(entries, key=_order)):
        if one.term.casefold() == two.term.casefold():
            yield f"{PAGE}: defines {one.term} twice; keep one entry"
    for entry in entries:
        if not _first(entry, explained):
            yield (
                f"{PAGE}: no chapter explains {entry.term}; put it in bold where it is explained,"
                " or drop the entry"
            )
        yield from _text_faults(entry)
    if text != page(text, chapters):
        yield f"{PAGE}: isn't sorted and linked; run `infer-lab index`"


def _text_faults(entry: Entry) -> Iterator[str]:
    sentences = len(re.findall(r"[.?!](?=\s+[A-Z“\"]|$)", entry.text))
    if not entry.text.endswith(".") or not 1 <= sentences <= 2 or len(entry.text) > MAX_LENGTH:
        yield (
            f"{PAGE}: {entry.term} must be defined in one or two sentences of at most"
            f" {MAX_LENGTH} characters, the last one with a full stop"
        )


def terms_of(chapters: Iterable[Chapter]) -> dict[Chapter, list[str]]:
    """The terms that each chapter explains; chapters without a notebook are left out."""
    return {c: list(lesson.terms(lesson.read(c))) for c in chapters if c.notebook.is_file()}


def read(root: Path) -> str:
    """The page's text, its head alone where there is no page yet."""
    path = root / PAGE
    return path.read_text(encoding="utf-8") if path.is_file() else HEAD


def label(chapter: Chapter) -> str:
    """ "beginner 2", as the glossary and the text name a chapter."""
    return f"{chapter.track} {int(chapter.name[:2])}"


def _order(entry: Entry) -> tuple[str, str]:
    return re.sub(r"[^a-z0-9]+", " ", entry.term.casefold()).strip(), entry.text


def _first(entry: Entry, explained: dict[Chapter, list[str]]) -> Chapter | None:
    return next((c for c, terms in explained.items() if any(map(entry.explains, terms))), None)
