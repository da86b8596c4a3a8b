"""The native kernels. Everything else about the package stands in pyproject.toml.

They are optional: without a C++ compiler the installation succeeds, and plain PyTorch computes. So it does on systems
other than Linux, whose compilers lack OpenMP, and with ALIGNEDSERVE_PLAIN=1, for a wheel that every system takes.
With ALIGNEDSERVE_HERE=1 they lack what is for other processors than this machine's, half of the compiler's work.
With ALIGNEDSERVE_SANITIZE=1 they check every access while they run (tests/sanitized.py).
"""

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    import nanobind
except ImportError:
    nanobind = None

SOURCES = (
    "module",
    "attention_module",
    "attention_plain",
    "attention_avx2",
    "amx",
    "attention_amx",
    "attention_avx512",
    "rows_module",
    "level_plain",
    "level_avx2",
    "level_avx512",
    "products_module",
    "products_amx",
    "expert_products",
    "block_products/module",
    "block_products/packing",
    "block_products/plain",
    "block_products/avx2",
    "block_products/avxvnni",
    "block_products/avx512vnni",
    "block_copies/module",
    "block_copies/plain",
    "block_copies/avx2",
    "block_copies/avx512",
    "decode_pass/module",
    "rank_exchange/module",
    "lora/module",
    "states/module",
    "length_prediction",
    "request_table",
    "iteration_costs",
    "decode_plan",
    "token_masks",
    "nanobind",
)
HEADERS = (
    "amx",
    "amx_tiles",
    "attention",
    "attention_ahead",
    "attention_by_tiles",
    "attention_by_tiles_decode",
    "attention_division",
    "attention_int8",
    "attention_int8_chunks",
    "attention_int8_decode",
    "attention_int8_words",
    "attention_level",
    "attention_order",
    "attention_packing",
    "attention_products",
    "attention_tiles",
    "attention_types",
    "buffers",
    "elements",
    "levels",
    "rows",
    "rows_level",
    "products",
    "products_level",
    "products_tiles",
    "results_level",
    "targets/amx",
    "targets/avx2",
    "targets/avx512",
    "targets/plain",
    "token_masks",
    "vectors",
    "weight_level",
    "weight_rows",
    "work",
    "block_products/block_products",
    "block_products/level",
    "block_products/packing",
    "block_products/round_four",
    "block_copies/block_copies",
    "block_copies/level",
    "decode_pass/highest",
    "decode_pass/layers",
    "decode_pass/parts",
    "decode_pass/stage_parts",
    "decode_pass/step_run",
    "rank_exchange/exchange",
    "lora/level",
    "lora/lora",
    "states/ends_level",
    "states/level",
    "states/states",
)

# Flags of a processor, without which it cannot run the sources that end so.
NEEDED_FLAGS = {"avx2": "avx2", "avxvnni": "avx_vnni", "_amx": "amx_tile"} | {
    f"avx512{part}": "avx512f" for part in ("", "bf16", "vnni")
}

MOST_AT_A_TIME = 16  # 0.3 GB each

IS_SANITIZED = os.environ.get("ALIGNEDSERVE_SANITIZE") == "1"
SANITIZERS = "-fsanitize=address,undefined,float-cast-overflow"
COMPILED = ["-O1", "-g1", "-fno-omit-frame-pointer", "-fno-wrapv", SANITIZERS] if IS_SANITIZED else ["-O3", "-g0"]
LINKED = [SANITIZERS] if IS_SANITIZED else ["-s"]


IS_HERE = os.environ.get("ALIGNEDSERVE_HERE") == "1"
FLAGS = set(Path("/proc/cpuinfo").read_text().split()) if IS_HERE else set()
# Nobody waits for the plain level on a processor with a better one: a third of the compiler's time for it.
QUICKLY = ["-O1"] if "avx2" in FLAGS else []


def sources() -> list[str]:
    """Return the names of the sources to compile."""
    if not IS_HERE:
        return list(SOURCES)
    lacking = tuple(end for end, flag in NEEDED_FLAGS.items() if flag not in FLAGS)
    return [name for name in SOURCES if not name.endswith(lacking)]


def native() -> Extension:
    """One module for all processors: each level is compiled for its instructions and chosen when it is loaded."""
    nanobind_dir = Path(nanobind.source_dir()).parent
    return Extension(
        "kernels._native",
        sources=[f"kernels/csrc/{name}.cpp" for name in sources()],
        depends=["setup.py", *(f"kernels/csrc/{name}.h" for name in HEADERS)],
        include_dirs=[
            "kernels/csrc",
            nanobind.include_dir(),
            str(nanobind_dir / "src"),
            str(nanobind_dir / "ext" / "robin_map" / "include"),
        ],
        extra_compile_args=[
            "-std=c++17",
            *COMPILED,
            "-fopenmp",
            "-fvisibility=hidden",
            "-fno-math-errno",
            "-fno-strict-aliasing",
            # A caller may keep a vector in a register that a callee does not use, but whose upper half its vzeroupper
            # clears.
            "-fno-ipa-ra",
        ],
        extra_link_args=["-fopenmp", *LINKED],
        optional=True,
    )


class ParallelBuild(build_ext):
    """Compiles as many sources at a time as there are cores; setuptools takes one after the other."""

    def build_extensions(self) -> None:
        """Build all extensions. Raises CompileError for the first source that does not compile."""
        compile_serially = self.compiler.compile

        def compile_all(sources: Sequence[str], *, extra_postargs: Sequence[str], **options: Any) -> list[str]:
            def compiled(source: str) -> list[str]:
                flags = [*extra_postargs, *(QUICKLY if source.endswith("plain.cpp") else ())]
                made: list[str] = compile_serially([source], extra_postargs=flags, **options)
                return made

            with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_AT_A_TIME)) as pool:
                made = pool.map(compiled, sources)
                return [path for paths in made for path in paths]

        self.compiler.compile = compile_all
        super().build_extensions()


has_kernels = nanobind is not None and sys.platform == "linux" and os.environ.get("ALIGNEDSERVE_PLAIN") != "1"
setup(cmdclass={"build_ext": ParallelBuild}, ext_modules=[native()] if has_kernels else [])
