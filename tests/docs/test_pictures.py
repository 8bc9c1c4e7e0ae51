"""The pictures of the README: made from what happened, readable by everybody, whole in one file."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tools.pictures import hero
from tools.pictures.drawn_terminal import Pane, draw
from tools.pictures.recording import Cell, Shell, Shot

from tests.docs.pages import DOCS, ROOT

PICTURES = DOCS / "pictures"
OURS = [PICTURES / "terminal.svg", PICTURES / "hero.svg"]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_a_picture_is_whole_and_says_what_it_shows(path: Path):
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.findtext(f"{SVG}title")
    assert root.findtext(f"{SVG}desc")
    assert not re.search(r"(href|src|url)\s*[=(]", text), "it asks for something else"
    assert "<script" not in text


def test_the_figure_is_that_of_the_results():
    results = json.loads((ROOT / "bench" / "results" / "2-cores-x86_64.json").read_text())
    assert (PICTURES / "hero.svg").read_text(encoding="utf-8") == hero.draw(results)


def test_what_the_readme_says_of_the_figure_is_in_the_results():
    results = json.loads((ROOT / "bench" / "results" / "2-cores-x86_64.json").read_text())
    described = ElementTree.fromstring(hero.draw(results)).findtext(f"{SVG}desc") or ""
    alternative = re.search(
        r"!\[([^\]]*)\]\(docs/pictures/hero.svg\)", (ROOT / "README.md").read_text()
    )
    assert alternative is not None
    stalls, durables, sizes = (
        [float(figure.replace(",", "")) for figure in re.findall(pattern, described)]
        for pattern in (r"stands still for ([\d,]+) ms", r"durable ([\d,]+) ms", r"([\d.]+) GB")
    )
    assert described.startswith("holdfast: ")
    told = [float(figure) for figure in re.findall(r"[\d.]+(?= (?:ms|GB|to))", alternative[1])]
    assert told == [
        *(stalls[0], durables[0]),
        *(min(stalls[1:]), max(stalls[1:]), min(durables[1:]), max(durables[1:])),
        *(round(sizes[0], 1), min(sizes[1:]), round(max(sizes[1:]), 1)),
    ]


def test_the_terminal_ends_with_the_same_weights_twice():
    root = ElementTree.parse(PICTURES / "terminal.svg").getroot()
    story = root.findtext(f"{SVG}desc") or ""
    hashes = re.findall(r"sha256 of the weights: ([0-9a-f]{24})", story)
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]
    assert "kill -9" in story
    assert "resumed at step" in story


def test_the_terminal_stands_still_for_who_wants_no_motion():
    text = (PICTURES / "terminal.svg").read_text(encoding="utf-8")
    still, _, moving = text.partition("@media (prefers-reduced-motion:no-preference){")
    assert "animation" not in still
    assert "animation" in moving
    assert "infinite" not in moving


def test_a_shell_is_recorded_as_a_person_would_see_it(tmp_path: Path):
    shell = Shell(tmp_path, 60, 6, time.monotonic())
    try:
        shell.type("echo $((6 * 7))")
        shell.wait_for_prompt()
    finally:
        shell.close()
    assert shell.text() == "$ echo $((6 * 7))\n42\n$"
    assert len(shell.shots) > 5  # key by key
    assert "exit" not in shell.text()


def test_a_screen_is_drawn_as_it_was():
    def screen(*lines: str) -> tuple[tuple[Cell, ...], ...]:
        return tuple((Cell(0, line, "default", False),) if line else () for line in lines)

    shots = [Shot(0.0, screen("$", "")), Shot(1.0, screen("$ a <b> & c", "")),
             Shot(60.0, screen("$ a <b> & c", "done"))]  # fmt: skip
    root = ElementTree.fromstring(draw([Pane("a title", shots, "done")]))
    drawn = ["".join(text.itertext()) for text in root.findall(f"{SVG}text")]
    assert drawn == ["a title", "$", "$ a <b> & c", "done"]
    style = root.findtext(f"{SVG}style") or ""
    seconds = {float(found) for found in re.findall(r"animation:\w+ ([0-9.]+)s", style)}
    assert len(seconds) == 1
    assert max(seconds) < 5  # a minute of waiting is no part of the story
