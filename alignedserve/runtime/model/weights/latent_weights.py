"""Assembles the products around latent attention; see `kernels.latent_attention`."""

from torch import Tensor

from alignedserve.runtime.model.decoder.latent_config import LatentConfig
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.weight_names import ParameterNames, query_modules
from alignedserve.runtime.model.weights.head_order import rotated_first
from alignedserve.runtime.model.weights.packed_products import Rows
from alignedserve.runtime.model.weights.product_reader import ProductReader
from kernels.latent_attention import HeadProducts, LatentOutput, LatentQueries
from kernels.linear import Projection
from kernels.norm import Norm, RmsNorm

_EPS = 1e-6  # of the norms of short rows, whatever config.json has for the others


def latent_queries(
    read: ProductReader, config: ModelConfig, latent: LatentConfig, names: ParameterNames, prefix: str
) -> LatentQueries:
    def turned(rows: Rows, num_heads: int) -> Rows:
        return rows.changed(
            lambda part: rotated_first(part, latent.rope_dim, num_heads, is_paired=names.interleaves_pairs)
        )

    *first, last = [prefix + name for name in query_modules(names, latent)]
    queries: list[Projection | Norm] = []
    in_width = config.hidden_size
    if latent.query_rank is not None:
        queries.append(read.linear(first, [latent.query_rank], in_width, has_bias=False))
        queries.append(_norm(read, prefix + names.query_row_norm, latent.query_rank))
        in_width = latent.query_rank
    heads = read.rows(last, config.num_heads * latent.query_dim, in_width)
    queries.append(read.product([last], [turned(heads, config.num_heads)], None))
    row = read.rows(prefix + names.latent, latent.row_width, config.hidden_size)
    keys, _ = _heads_of_latent(read, config, latent, prefix + names.heads_of_latent)
    return LatentQueries(
        queries,
        read.product([prefix + names.latent], [turned(row, 1)], None),
        _norm(read, prefix + names.latent_norm, latent.rank),
        HeadProducts(keys.mT),
    )


def latent_output(
    read: ProductReader, config: ModelConfig, latent: LatentConfig, names: ParameterNames, prefix: str
) -> LatentOutput:
    _, values = _heads_of_latent(read, config, latent, prefix + names.heads_of_latent)
    width = config.num_heads * latent.value_dim
    output = read.linear([prefix + names.output], [config.hidden_size], width, has_bias=False)
    return LatentOutput(HeadProducts(values), output, latent.row_width)


def _heads_of_latent(
    read: ProductReader, config: ModelConfig, latent: LatentConfig, module: str
) -> tuple[Tensor, Tensor]:
    width = latent.nope_dim + latent.value_dim
    weight = read.tensor(f"{module}.weight", config.num_heads * width, latent.rank)
    heads = weight.view(config.num_heads, width, latent.rank)
    return heads[:, : latent.nope_dim], heads[:, latent.nope_dim :]


def _norm(read: ProductReader, module: str, width: int) -> RmsNorm:
    return RmsNorm(read.tensor(f"{module}.weight", width), _EPS, read.dtype)
