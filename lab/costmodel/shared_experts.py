"""Experts of a mixture that the processes of a worker share: memory of each, what their links cost, what is gained.

gain     = share of an iteration that experts take * (1 - share of them that the busiest process has)
exchange = layers of experts * round trip + rows of chosen experts elsewhere, there and back / bytes per second

The first process has all but experts as well. Decodes wait for weights: of each those are read that any of a batch has
chosen. Prompts wait for products: each of a token's chosen experts is multiplied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.hardware import LinkModel
from alignedserve.costmodel.linear import LinearCoefficients
from alignedserve.costmodel.model_shapes import ModelShape

BATCH = 16  # decodes for which the experts that an iteration reads are counted
PROCESS_LINK = LinkModel(60e-6, 1.5e9)  # a round trip between two processes of one host (docs/tensor-parallelism.md)
_PROMPT_TOKENS = 512  # of a chunk: all experts have rows


@dataclass(frozen=True, slots=True)
class ExpertSharing:
    """A model with experts shared by several processes of a worker."""

    shape: ModelShape
    size: int
    link: LinkModel = PROCESS_LINK

    def check(self, num_threads: int | None = None, num_cores: int | None = None) -> None:
        """Raise ConfigError where a layer has not as many experts, or none, or their host too few cores.

        `num_threads`: of each process; None: that is not known, as of the next. `num_cores`: of the host.
        """
        if not self.shape.num_expert_layers:
            raise ConfigError(f"{self.shape.name} has no experts that {self.size} processes could share")
        if self.size > self.shape.num_experts:
            raise ConfigError(
                f"a layer of {self.shape.name} has {self.shape.num_experts} experts, whole in one process each, not "
                f"enough for {self.size}"
            )
        if num_threads is not None and num_cores is not None and self.size * num_threads > num_cores:
            raise ConfigError(
                f"{self.size} processes of {num_threads} threads that share experts are on one host, and that measured "
                f"has {num_cores} cores"
            )

    @property
    def memory_bytes(self) -> Sequence[int]:
        """Return the weights of each process; the first has all but experts too."""
        all_bytes = self.shape.weight_bytes
        expert_bytes = self.shape.expert_parameters * self.shape.dtype_bytes
        ends = [self.shape.num_experts * index // self.size for index in range(self.size + 1)]
        parts = [expert_bytes * (end - start) // self.shape.num_experts for start, end in pairwise(ends)]
        return [all_bytes - expert_bytes + parts[0], *parts[1:]]

    def layer_s(self, num_tokens: int) -> float:
        """Return the seconds that one layer's exchange takes."""
        return self.link.transfer_s(num_tokens * self._token_bytes)

    def exchange_s(self, num_tokens: int) -> float:
        """Return the seconds that the exchanges of an iteration take."""
        return self.shape.num_expert_layers * self.layer_s(num_tokens)

    def shared(self, costs: LinearCoefficients) -> LinearCoefficients:
        """Convert the costs of one process to the costs of all processes together."""
        layers, shape = self.shape.num_expert_layers, self.shape
        read = shape.read_parameters(BATCH)
        read_share = (read - shape.dense_parameters) / (read + shape.head_parameters)
        multiplied = (shape.token_parameters - shape.dense_parameters) / shape.token_parameters
        decodes = 1.0 - read_share * (1.0 - self.busiest_share(BATCH))
        prompts = 1.0 - multiplied * (1.0 - self.busiest_share(_PROMPT_TOKENS))
        token_s = layers * self._token_bytes / self.link.bytes_per_s
        return replace(
            costs,
            base_s=decodes * costs.base_s + layers * self.link.latency_s,
            decode_s=decodes * costs.decode_s + token_s,
            chunk_s=decodes * costs.chunk_s,
            prompt_token_s=prompts * costs.prompt_token_s + token_s,
            beyond_token_s=prompts * costs.beyond_token_s,
        )

    def busiest_share(self, num_tokens: int) -> float:
        """Return the share of a layer's read experts that the busiest process has, on average over random choices.

        Example: 16 tokens read 82 of 128 experts; of two processes the busiest has 43, where each has 41 on average.
        """
        num_experts, shape = self.shape.num_experts, self.shape
        read = num_experts * (1.0 - (1.0 - shape.num_chosen_experts / num_experts) ** num_tokens)
        mean = 1.0 / self.size
        spread = sqrt(mean * (1.0 - mean) * (num_experts - read) / max(num_experts - 1, 1) / read)
        return min(mean + _MOST_DEVIATIONS * sqrt((self.size - 1).bit_length()) * spread, 1.0)

    @property
    def _token_bytes(self) -> float:
        elsewhere = self.shape.num_chosen_experts * (1.0 - 1.0 / self.size)
        return 2 * elsewhere * self.shape.hidden_size * self.shape.dtype_bytes


_MOST_DEVIATIONS = (
    0.8  # by which the larger of two halves of a random choice exceeds the mean; of 2 ** n n ** 0.5 times
)
