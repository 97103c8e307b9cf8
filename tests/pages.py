"""Runs the examples of a page under docs/. Needs no framework: tests/mxnet has none."""

import doctest
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


class FencedParser(doctest.DocTestParser):
    """Reads Markdown: the fence that ends a block is not expected output."""

    def parse(self, string, name="<string>"):
        return super().parse(re.sub(r"(?m)^```.*$", "", string), name)


def run_page(path):
    return doctest.testfile(str(path), module_relative=False, parser=FencedParser())
