"""LoRA adapters: their folders, their matrices in memory, and which are kept there."""
