"""The table of what each part of the product costs in lines."""

from __future__ import annotations

import pytest

from scripts import feature_lines as lines


def shown() -> dict[str, list[int]]:
    text = lines.PAGE.read_text().partition(lines.BEGIN)[2].partition(lines.END)[0]
    rows = [line.strip("| ").split(" | ") for line in text.strip().splitlines()[2:]]
    return {part: [int(number.replace(",", "")) for number in numbers] for part, *numbers in rows}


@pytest.fixture(scope="module")
def counted() -> dict[str, tuple[int, int]]:
    return lines.counted()


def test_each_file_of_the_product_belongs_to_a_part(counted: dict[str, tuple[int, int]]) -> None:
    assert counted.keys() == {*lines.PARTS, lines.COMMAND_LINE, lines.SHARED}


def test_the_page_shows_the_parts_as_they_are(counted: dict[str, tuple[int, int]]) -> None:
    page = shown()
    assert page.keys() == {*counted, "**all**"}
    for part, numbers in counted.items():
        for number, on_page in zip(numbers, page[part], strict=True):
            assert abs(number - on_page) <= 500 + number // 10, (
                f"{part}: python scripts/feature_lines.py --write"
            )


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("provisioners/aws/images.py", "AWS"),
        ("provisioners/machine.py", "what all clouds share"),
        ("lb/core/queue.py", "load balancer: queue, limits, keys, models"),
        ("lb/__main__.py", "load balancer: process"),
        ("policies_old/x.py", None),
    ],
)
def test_the_longest_path_decides(path: str, part: str | None) -> None:
    assert lines.part_of(path) == part


def test_a_test_belongs_to_what_few_others_import() -> None:
    every = "from policies import model\n"
    found = lines.tested_by(
        {
            "tests/unit/a.py": every + "import provisioners.aws.images\n",
            "tests/unit/b.py": every + "import policies.plan\n",
            "tests/unit/c.py": every,
            "tests/kit/d.py": "import os\n",
            "tests/e2e/e.py": every,
        }
    )
    assert list(found.values()) == [
        "AWS",
        "other policies",
        "other policies",
        lines.SHARED,
        lines.COMMAND_LINE,
    ]
