"""What the ranks of a worker do together within one pass of their decoder."""

import torch
from torch import Tensor

from alignedserve.runtime.device.collectives import Collectives
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.sharding.tensor_shard import TensorShard
from alignedserve.runtime.model.weights.weight_source import RowLookup
from kernels.cpu.decode_pass import HighestLogits
from kernels.cpu.rank_exchange import RankExchange


class DecoderRanks:
    """One rank's end of a decoder whose heads, inner columns and vocabulary are divided among several."""

    def __init__(self, collectives: Collectives, config: ModelConfig) -> None:
        self.rank = collectives.rank
        self._collectives = collectives
        shards = [TensorShard(rank, collectives.size) for rank in range(collectives.size)]
        self._tokens = [shard.tokens(config) for shard in shards]
        self._own = self._tokens[self.rank]
        self._widest = max(span.size for span in self._tokens)
        self._nothing = torch.zeros(1, dtype=torch.uint8)
        self.local_config = shards[self.rank].local(config)

    @property
    def num_own_tokens(self) -> int:
        return self._own.size

    @property
    def exchange(self) -> RankExchange | None:
        """Return the shared memory that a native pass adds up through; None: it cannot."""
        return self._collectives.exchange

    def embed(self, embedding: RowLookup, token_ids: Tensor) -> Tensor:
        """Look up token_ids [tokens] among all ranks' rows -> [tokens, width]; `embedding`: this rank's."""
        places = token_ids - self._own.start
        is_own = (places >= 0) & (places < self._own.size)
        rows = embedding.index_select(0, places.clamp_(0, self._own.size - 1))
        return self.add_up(rows.mul_(is_own[:, None]))

    def add_up(self, part: Tensor) -> Tensor:
        """Add up the ranks' parts of a product [tokens, width], which may be overwritten."""
        return self._collectives.all_reduce_(part.contiguous())

    def wait_for_all(self) -> None:
        self._collectives.gather(self._nothing)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Join logits [rows, own tokens] -> [rows, vocab_size]; on ranks but the first: [rows, 0]."""
        num_rows, count = logits.shape
        padded = logits.contiguous()
        if count < self._widest:
            padded = torch.nn.functional.pad(padded, (0, self._widest - count))
        parts = self._collectives.gather(padded)
        if parts is None:
            return logits[:, :0]
        spans = zip(parts, self._tokens, strict=True)
        return torch.cat([part[:, : span.size] for part, span in spans], dim=1).view(num_rows, -1)

    def gather_highest(self, highest: HighestLogits) -> HighestLogits:
        """Find the highest logits of all tokens among those of each rank's own; on ranks but the first meaningless."""
        packed = torch.stack((highest.token_ids, highest.values.view(torch.int32).to(torch.int64)), dim=1)
        parts = self._collectives.gather(packed)
        if parts is None:
            return highest
        values = parts[:, :, 1].to(torch.int32).view(torch.float32)  # [ranks, rows]
        best = values.max(dim=0)
        # Of equal ones the first rank's: its tokens come first. A NaN of any rank is the highest.
        is_best = (values == best.values) | (values.isnan() & best.values.isnan())
        first = is_best.to(torch.int8).argmax(dim=0)
        starts = torch.tensor([span.start for span in self._tokens])
        token_ids = parts[:, :, 0].gather(0, first[None])[0] + starts[first]
        return HighestLogits(token_ids.masked_fill(best.values.isnan(), 0), best.values.contiguous())
