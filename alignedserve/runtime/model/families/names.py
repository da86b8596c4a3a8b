"""The names of tensors in the files of each family of decoders, and in GGUF files: rows of names.json."""

from pathlib import Path

from alignedserve.runtime.model.weight_names import ParameterNames, read_names

NAMES = read_names(Path(__file__).with_name("names.json"), ParameterNames)
