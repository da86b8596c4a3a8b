"""What is not in the wheel is used in one direction: experiments over measurements, both over the product."""

import re
from pathlib import Path

from tests.support.marks import each

ROOT = Path(__file__).parents[3]
PRODUCT = ("alignedserve", "router", "kvpool", "prefill_worker", "decode_worker", "kernels")
_IMPORT = re.compile(r"^\s*(?:from|import) ((?:benchmarks|experiments|tests)(?:\.\w+)*)", re.MULTILINE)

# By folder, what its files may import of the others: a prefix.
ALLOWED = {
    **dict.fromkeys(PRODUCT, ("-",)),
    "experiments": ("experiments", "benchmarks.measuring"),
    "benchmarks": ("benchmarks", "tests.harnesses", "tests.support"),
    "tests/harnesses": ("tests.harnesses", "tests.support"),
    "tests/support": ("tests.support", "tests.harnesses"),
}


@each("folder", ALLOWED)
def test_imports_point_one_way(folder: str) -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in (ROOT / folder).rglob("*.py")
        for name in _IMPORT.findall(path.read_text())
    }
    assert {one for one in found if not one[1].startswith(ALLOWED[folder])} == set()


def test_the_library_of_measurements_imports_no_script() -> None:
    found = {
        (path.name, name)
        for path in (ROOT / "benchmarks/measuring").rglob("*.py")
        for name in _IMPORT.findall(path.read_text())
    }
    assert {one for one in found if not one[1].startswith("benchmarks.measuring")} == set()
