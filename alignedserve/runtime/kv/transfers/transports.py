"""Names of the transports for blocks, as engine.kv_transport has them."""

AUTO, SHM = "auto", "shm"
FASTEST_FIRST = ("cuda_ipc", "shm", "nccl", "tcp", "gloo")
TRANSPORTS = (AUTO, *FASTEST_FIRST)
OF_DEVICES = (AUTO, "cuda_ipc", "nccl")  # choices by which a candidate buffer is in the memory of its lender's GPU
