"""Numeric functions on tensors; nothing here knows requests, schedulers or configuration.

A module of this folder is called by the runtime and chooses the fastest implementation here: `cpu` calls the native
kernels, whose C++ source is `csrc`; `gpu` holds Triton kernels, chosen by `gpu_dispatch`. Plain PyTorch versions stand
in the modules themselves (`plain_...`), float64 references for tests in `reference`. This file imports nothing."""
