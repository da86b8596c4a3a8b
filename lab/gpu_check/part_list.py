"""The parts of the check, in the order in which an unknown GPU is met; loads nothing heavy."""

from typing import NamedTuple


class CheckPart(NamedTuple):
    """One part, in a process of its own."""

    name: str
    weight: float  # its share of the time
    what: str


SELF_CHECK, SANITIZER, NO_CACHING = "self-check", "stream-sanitizer", "no-caching"
KERNELS, KINDS, ANSWERS, SPEED, LINKS = "kernels", "kinds", "answers", "speed", "links"
PARTS = (
    CheckPart(KERNELS, 1.0, "each kernel against float64"),
    CheckPart(SELF_CHECK, 1.0, "a small model on the GPU and on the CPU: chunks, recorded decodes, drawn tokens"),
    CheckPart(SANITIZER, 0.7, "the same under PyTorch's sanitizer of streams (TORCH_CUDA_SANITIZER=1)"),
    CheckPart(NO_CACHING, 0.7, "the same with memory that is never kept (PYTORCH_NO_CUDA_MEMORY_CACHING=1)"),
    CheckPart(KINDS, 1.5, "small models with latents, sinks, caps, states and more, likewise"),
    CheckPart(ANSWERS, 0.8, "ten answers of a small Llama, which transformers must give as well"),
    CheckPart(SPEED, 2.0, "prompts and decodes of an 8B or 1B Llama with random weights"),
    CheckPart(LINKS, 0.5, "copies of blocks: device, page-locked memory, a registered arena, another GPU"),
)
