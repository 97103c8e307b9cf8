"""The pages that are made from data are up to date."""

import re
from pathlib import Path

import pytest

import gradscale
from docs import measured, render
from gradscale.judge.catalogue import CATALOGUE

DOCS = Path(render.__file__).parent
SOURCE = Path(gradscale.__file__).parent


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Where the page is written instead of docs/codes.md."""
    path = tmp_path / "codes.md"
    monkeypatch.setattr(render, "CODES", path)
    copies = []
    for page in render.MEASURED:
        copy = tmp_path / page.name
        copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
        copies.append(copy)
    monkeypatch.setattr(render, "MEASURED", tuple(copies))
    return path


def test_every_page_is_up_to_date(capsys):
    assert render.main(["--check"]) == 0, capsys.readouterr().out


def test_a_marked_table_is_made_anew():
    begin = measured.BEGIN.format(name="defects-short")
    page = f"before\n{begin}\nleft over\n{measured.END}\nafter\n"
    text = measured.filled(page)
    assert "left over" not in text
    assert "| weights survive a scale that falls to 0 | no | yes |" in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")


def test_a_page_without_marks_stays_as_it_is():
    assert measured.filled("nothing to see\n") == "nothing to see\n"


def test_the_page_of_codes_is_up_to_date():
    text = (DOCS / "codes.md").read_text(encoding="utf-8")
    assert text == render.codes_page(), "Run python -m docs.render."


def test_check_accepts_a_page_that_was_just_written(elsewhere):
    assert render.main([]) == 0
    assert render.main(["--check"]) == 0


@pytest.mark.parametrize("old", ["", "# Codes\n"])
def test_check_refuses_a_page_that_is_out_of_date(elsewhere, old, capsys):
    elsewhere.write_text(old, encoding="utf-8")
    assert render.main(["--check"]) == 1
    assert capsys.readouterr().out == (
        "codes.md is out of date. Run python -m docs.render.\n"
    )


def test_check_refuses_a_missing_page(elsewhere, capsys):
    assert render.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().out


def test_check_writes_nothing(elsewhere, capsys):
    render.main(["--check"])
    assert not elsewhere.exists()


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.code)
def test_a_code_has_a_heading_that_the_table_links_to(entry):
    page = render.codes_page()
    assert f"(#{render.anchor(entry)})" in page
    anchor = f'<a id="{render.anchor(entry)}"></a>'
    assert f"\n{anchor}\n\n## {entry.code} {entry.name}\n" in page


ROOMS = "core|judge|runfile|recording|torch|apex|jax|keras|mxnet|diagnosis|report|cli"


def test_files_named_on_the_page_of_the_architecture_exist():
    text = (DOCS / "how-it-is-built.md").read_text(encoding="utf-8")
    named = set(re.findall(rf"`((?:{ROOMS})/[\w/]+\.py)`", text))
    missing = {file for file in named if not (SOURCE / file).exists()}
    assert len(named) > 30
    assert missing == set()


def test_the_page_of_the_architecture_names_every_part_of_the_torch_room():
    text = (DOCS / "how-it-is-built.md").read_text(encoding="utf-8")
    table = text.partition("### Inside `torch/`")[2].partition("###")[0]
    parts = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in (SOURCE / "torch").iterdir()
        if not path.name.startswith("__")
    }
    assert {part for part in parts if f"`{part}`" not in table} == set()


PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]


def headings(path):
    """Return the anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.replace(" ", "-") for title in plain}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_to_files_and_headings_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    for file, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", text):
        target = path.parent / file if file else path
        assert target.exists(), file
        if anchor and target.name != "codes.md":
            assert anchor in headings(target), f"{file}#{anchor}"


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_links_to_codes_lead_somewhere(path):
    links = re.findall(r"\]\(([\w.]*)#([\w-]+)\)", path.read_text(encoding="utf-8"))
    anchors = {render.anchor(entry) for entry in CATALOGUE}
    to_codes = {anchor for page, anchor in links if (page or path.name) == "codes.md"}
    assert to_codes <= anchors
